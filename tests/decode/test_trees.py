"""Trees of drafts in the engine: what is seen, what is kept, and nothing of it in what is said."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from decode import reference
from decode.adapters import good_adapter, random_adapter
from decode.cases import SAMPLING_NAMES, SAMPLINGS, SIZE
from decode.models import CARD, STOP, pattern, request, trained_model

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode, VerifiedMode
from mars_ray.core.step_cost import StepCost
from mars_ray.core.thresholds import Elastic
from mars_ray.core.tree import fan
from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.drafts import DraftControl
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.scheduler import Work
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies import MaskGroup, Plan, Rows, Verified
from mars_ray.errors import RequestError
from mars_ray.model.directory import PLAIN

TREES = [
    VerifiedMode(branches=3),
    VerifiedMode(branches=2, groups=3),
    VerifiedMode(branches=4, groups=17),
    VerifiedMode(branches=8, groups=9, window=3),
]


@pytest.fixture(scope="module")
def unsure():
    """Hardly trained: its second choice is often right."""
    return trained_model(steps=25)


def items(modes, sampling: Sampling | None = None, new: int = 24) -> list:
    return [
        request(
            f"{i}-{j}",
            pattern(j * 3, 1 + j % 4, 2 + j),
            mode,
            sampling=sampling,
            max_new_tokens=new,
        )
        for i, mode in enumerate(modes)
        for j in range(4)
    ]


def speed(done) -> float:
    return sum(len(c.tokens) for c in done) / sum(c.forwards for c in done)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        pytest.param(kind, sampling, id=f"{kind}-{name}")
        for kind in ("good", "random", "no head", "none")
        for sampling, name in zip(SAMPLINGS, SAMPLING_NAMES, strict=True)
        if kind == "good" or name in ("greedy", "sampled")
    ],
)
def test_trees_say_what_exact_says(unsure, sampling, kind):
    """And take as many forwards as the oracle, whoever makes the drafts."""
    adapter, card = None, PLAIN
    if kind == "none":
        card = CARD
    elif kind == "random":
        adapter = random_adapter(unsure)
    else:
        adapter = good_adapter(unsure, head=kind == "good")
    exact = generate_all(Engine(unsure, PLAIN, SIZE), items([ExactMode()], sampling))
    requests = items(TREES, sampling)
    got = generate_all(Engine(unsure, card, SIZE, adapter=adapter), requests)
    if kind != "none":  # whose mask is a token that `exact` may say
        assert [c.tokens for c in got] == [c.tokens for c in exact] * len(TREES)
    assert got == [reference.generate(unsure, card, each, adapter=adapter) for each in requests]


def test_alternatives_bring_tokens(unsure):
    """Otherwise the test above would hold with none ever followed."""
    engine = Engine(unsure, PLAIN, SIZE, adapter=good_adapter(unsure))
    wide = [VerifiedMode(groups=5), VerifiedMode(branches=4, groups=17)]
    plain, tree = (speed(generate_all(engine, items([mode], new=40))) for mode in wide)
    assert tree > 1.1 * plain


def test_what_was_moved_is_found_by_others(unsure):
    """Keys and values of accepted drafts, in pages that other requests share afterwards."""
    config = EngineConfig(max_batch=2, max_context=96, page_size=2)
    engine = Engine(unsure, PLAIN, config, adapter=good_adapter(unsure))
    for each in items([TREES[2]], new=40):
        (done,) = generate_all(engine, [each])
        longer = request("longer", [*each.prompt, *done.tokens], ExactMode(), max_new_tokens=12)
        hits = engine.snapshot().prefix_hits
        (again,) = generate_all(engine, [longer])
        assert engine.snapshot().prefix_hits > hits + len(each.prompt)
        assert again.tokens == reference.generate(unsure, PLAIN, longer).tokens


def plan_rows(plan: Plan) -> tuple[Tables, np.ndarray]:
    prompt = request("a", [0] * 10, ExactMode())
    sequence = Sequence(prompt, 0, [0] * 10, cached=9, pages=list(range(20)))
    tables = Tables.of([Work(sequence, 1, plan)], 4)
    clean, begin, bits = tables.sight()
    places = np.arange(9, 9 + len(clean))
    sees = [
        {
            int(place)
            for place in places
            if place < clean[row]
            or begin[row] <= place <= tables.index_N[row]
            or (place >= clean[row] and bits[row] >> (place - clean[row]) & 1)
        }
        for row in range(len(clean))
    ]
    return tables, np.array(sees)


def test_rows_see_their_ancestors():
    """The last token lies at place 9, and drafts 1 to 4 at 10 to 13; masks behind nodes 2, 4, 0."""
    groups = (MaskGroup(2, 2), MaskGroup(4, 1), MaskGroup(0, 1))
    tables, sees = plan_rows(Plan([5, 6, 7, 8], groups, parents=fan(2, 2)))
    assert tables.positions().tolist() == [9, 10, 11, 10, 11, 12, 13, 12, 10]
    path = {9, 10, 11}
    assert sees.tolist() == [
        {9}, {9, 10}, path, {9, 12}, {9, 12, 13},
        path | {14}, path | {14, 15}, {9, 12, 13, 16}, {9, 17},
    ]  # fmt: skip


def test_a_chain_needs_no_bits():
    """Nor does it with several groups, or as the first branch of a tree."""
    for plan in (
        Plan([1, 2, 3], (MaskGroup(3, 2),)),
        Plan([1, 2, 3], (MaskGroup(1, 2), MaskGroup(3, 2))),
        Plan([1] * 90),
    ):
        tables, _ = plan_rows(plan)
        assert not tables.sight()[2].any()
    assert Plan([1, 2], (MaskGroup(2, 1),), parents=[0, 1]).is_causal
    assert not Plan([1, 2], (MaskGroup(2, 1),), parents=[0, 0]).is_causal


@pytest.mark.parametrize(
    ("threshold", "best", "ratios", "outcome"),
    [
        (1.0, [7, 0, 0, 8, 0], [0.9, 1.0, 1.0, 1.0], 4),
        (1.0, [9, 0, 0, 8, 0], [0.9, 1.0, 0.8, 1.0], 0),
        (0.5, [7, 0, 0, 9, 0], [0.9, 1.0, 1.0, 0.4], 3),
        (0.5, [9, 6, 0, 8, 0], [0.9, 1.0, 0.8, 1.0], 2),
        (0.5, [9, 0, 0, 8, 0], [0.6, 1.0, 0.8, 0.7], 4),
    ],
)
def test_who_is_followed(threshold, best, ratios, outcome):
    """Two chains, 5 6 and 7 8: an equal draft before all, then the best that is good enough."""
    item = request("a", [1, 2], VerifiedMode(threshold=threshold))
    plan = Plan([5, 6, 7, 8], parents=fan(2, 2))
    rows = Rows(best, {"ratio": ratios})
    assert Verified().outcome(Sequence(item, 4, [1, 2]), plan, rows) == outcome


class Told(StepCost):
    """Stays what it was told."""

    def observe(self, *step: float, **counts: float) -> None:
        pass


FREE, BY_ROW = Told({1: 1.0, 1000: 1.0}), Told({1: 1.0, 1000: 1000.0})


@pytest.mark.parametrize("cost", [FREE, Told({1: 1.0, 12: 1.0, 120: 9.0}), BY_ROW])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=SAMPLING_NAMES)
def test_control_of_trees_changes_no_text(unsure, cost, sampling):
    """Trees of any size, bounded or not, cut at stop tokens and at the limit."""
    modes = [VerifiedMode(), VerifiedMode(branches=2), VerifiedMode(branches=3, groups=2)]
    exact = generate_all(Engine(unsure, PLAIN, SIZE), items([ExactMode()], sampling))
    engine = Engine(unsure, PLAIN, SIZE, adapter=good_adapter(unsure))
    engine.control = DraftControl(cost, 4, SIZE.step_tokens)
    for _ in range(2):
        got = generate_all(engine, items(modes, sampling))
        assert [c.tokens for c in got] == [c.tokens for c in exact] * len(modes)


def test_control_chooses_trees_where_rows_are_free(unsure):
    """And chains where they are not, or where the request says so."""
    engine = Engine(unsure, PLAIN, SIZE, adapter=good_adapter(unsure))
    speeds, branches = {}, {}
    for name, cost, mode in (
        ("tree", FREE, VerifiedMode()),
        ("chain", FREE, VerifiedMode(branches=1)),
        ("dear", BY_ROW, VerifiedMode()),
    ):
        engine.control = DraftControl(cost, 4, SIZE.step_tokens)
        requests = items([mode], new=40)
        seen = set()
        for each in requests:
            engine.submit(each)
        done = []
        while engine.has_work:
            done += [event.completion for event in engine.step() if event.completion]
            seen |= {sequence.branches for sequence in engine._scheduler.all()}
        speeds[name], branches[name] = speed(done), seen
    assert speeds["tree"] > 1.1 * speeds["chain"] > speeds["dear"]
    assert branches["chain"] == branches["dear"] == {1}
    assert max(branches["tree"]) == 4


def test_below_threshold_one_trees_are_followed_too(unsure):
    """The service's set-point is in force; a fixed threshold without branches is a chain."""
    engine = Engine(unsure, PLAIN, SIZE, adapter=good_adapter(unsure))
    engine.control = DraftControl(FREE, 4, SIZE.step_tokens)
    engine.thresholds.set_point = 0.3
    open_ones = [replace(each, quality=Elastic(0.3)) for each in items([VerifiedMode()], new=40)]
    fixed = items([VerifiedMode(threshold=0.3)], new=40)
    done = generate_all(engine, open_ones)
    assert speed(done) > speed(generate_all(engine, fixed))
    assert engine.measures.by_mode["verified"].disagreed > 0
    assert generate_all(engine, fixed) == [
        replace(reference.generate(unsure, PLAIN, each, adapter=good_adapter(unsure)))
        for each in fixed
    ]


@pytest.mark.parametrize("groups", [1, 17])
def test_adapters_are_swapped_with_a_tree_under_way(unsure, groups):
    """Only the first chain of the old drafts is kept, as far as the new adapter goes, and a deeper
    one has fewer branches: guards more drafts than bits, and more rows than there is room for."""
    engine = Engine(unsure, PLAIN, SIZE, adapter=good_adapter(unsure))
    exact = generate_all(engine, items([ExactMode()], new=30))
    for each in items([VerifiedMode(branches=8, groups=groups)], new=30):
        engine.submit(each)
    done = {}
    for adapter in (good_adapter(unsure, depths=2), random_adapter(unsure, depths=8), None):
        for _ in range(3):
            done |= {e.request_id: e.completion for e in engine.step() if e.completion}
        engine.set_adapter(adapter and engine.fitting(adapter))
        depth = adapter.card.depths if adapter else 0
        for sequence in engine._scheduler.all():
            assert len(sequence.drafts) <= depth
            assert sequence.branches * depth <= 63
            assert 1 + (sequence.branches + sequence.groups) * depth <= engine._spare
    while engine.has_work:
        done |= {e.request_id: e.completion for e in engine.step() if e.completion}
        engine.check_integrity()
    assert [done[c.request_id].tokens for c in exact] == [c.tokens for c in exact]


def test_logprobs_are_those_of_the_path(unsure):
    """The row before each token, wherever in the tree that was."""
    engine = Engine(unsure, PLAIN, SIZE, adapter=good_adapter(unsure))
    found = {}
    for mode in (ExactMode(), TREES[2]):
        item = replace(request("a", [1, 2, 3], mode, max_new_tokens=24, stop=STOP), logprobs=2)
        engine.submit(item)
        found[mode.type] = []
        while engine.has_work:
            for event in engine.step():
                found[mode.type] += zip(event.tokens, event.logprobs, strict=True)
    for (token, own), (other_token, other) in zip(found["verified"], found["exact"], strict=True):
        assert token == other_token
        assert own.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_more_rows_than_there_is_room_for_are_refused(unsure):
    """By name, before anything is forwarded."""
    engine = Engine(unsure, CARD, SIZE)
    with pytest.raises(RequestError, match="need forwards of 165 rows, more than the 153"):
        engine.submit(request("a", [1, 2], VerifiedMode(branches=8, groups=65)))


def test_a_deep_tree_has_as_many_branches_as_bits(unsure):
    """63 drafts: 16 deep three branches of eight."""
    item = request("a", [1, 2], VerifiedMode(branches=8, groups=1))
    assert Sequence(item, 16, [1, 2]).branches == 3
    assert Sequence(item, 64, [1, 2]).branches == 1
    assert torch.iinfo(torch.int64).bits - 1 == 63
