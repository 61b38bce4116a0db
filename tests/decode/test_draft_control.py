"""Window control: arithmetic against simulation, extremes of cost, and texts that do not change."""

from dataclasses import replace

import pytest
from decode import reference
from decode.models import CARD, pattern, request
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.core.step_cost import StepCost, row_counts
from mars_ray.core.thresholds import Elastic
from mars_ray.core.tree import Choice, Prospects
from mars_ray.decode.drafts import DraftControl, DraftStats
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.stats import prompt_pairs
from mars_ray.decode.strategies import MaskGroup, Plan
from mars_ray.decode.warm_up import StepTimer


class Told(StepCost):
    """Stays what it was told, whatever steps really take."""

    def observe(self, *step: float, **counts: float) -> None:
        pass


FREE = Told({1: 1.0, 1000: 1.0})
BY_ROW = Told({1: 1.0, 1000: 1000.0})
DEAR_FIRST_MASK = Told({1: 1.0, 1000: 1.0}, first_mask_s=9.0)
DEAR_MASKS = Told({1: 1.0, 1000: 1.0}, mask_s=2.0)


def test_cost_is_linear_between_measurements_and_monotone():
    """A step that was disturbed must not make those of more rows look free."""
    cost = StepCost({1: 1.0, 4: 9.0, 8: 2.0, 12: 6.0})
    assert cost.table() == {1: 1.0, 4: 2.0, 8: 2.0, 12: 6.0}
    assert [cost.seconds(n) for n in (1, 2.5, 6, 8, 10)] == [1.0, 1.5, 2.0, 2.0, 4.0]


def test_beyond_the_measurements_noise_does_not_decide():
    """Guards groups for every outcome because 9 rows once took no longer than 8."""
    assert StepCost({1: 1.0, 8: 8.0, 9: 8.0}).seconds(18) == 15.0
    assert StepCost({1: 1.0, 4: 1.0, 8: 3.0}).seconds(12) == 5.0


def test_a_sequence_has_a_cost_of_its_own():
    """A row more of one that is there is cheaper; for others each row is a sequence, up to some."""
    cost = StepCost({1: 1.0, 8: 8.0, 16: 16.0}, sequence_s=2.0)
    assert [cost.seconds(8), cost.seconds(8, 1), cost.seconds(8, 8)] == [8.0, 10.0, 24.0]
    assert cost.table(4) == {1: 3.0, 8: 16.0, 16: 24.0}
    for _ in range(300):
        cost.observe(8, 24.0, 8)  # as expected
        cost.observe(16, 40.0, 4)
    assert [cost.seconds(n) for n in (8, 16)] == pytest.approx([8.0, 32.0], rel=0.01)
    assert cost.seconds(8, 9) - cost.seconds(8, 8) == 2.0


def test_rows_never_come_to_cost_nothing():
    """Guards masks for all whatever the load, after a start at which a sequence seemed dear."""
    cost = StepCost({1: 1.0, 8: 2.0, 64: 8.0}, sequence_s=3.0)
    for _ in range(5000):
        cost.observe(60, 10.0, 10)
    assert cost.seconds(60) == pytest.approx(0.1 * 7.6, rel=0.1)


def test_cost_follows_the_steps_that_are_made():
    """What the start measured wrong is put right, and one long step changes little."""
    cost = StepCost({1: 1.0, 8: 1.0, 16: 1.0, 32: 3.0})
    for _ in range(200):
        cost.observe(8, 1.5)
        cost.observe(12, 2.0)
        cost.observe(16, 2.5)
    assert [cost.seconds(n) for n in (1, 8, 16, 32)] == pytest.approx([1, 1.5, 2.5, 3], rel=0.02)
    cost.observe(8, 1000.0)
    assert cost.seconds(8) < 1.6
    for _ in range(200):
        cost.observe(32, 0.5)
    assert cost.table()[32] == pytest.approx(0.5, rel=0.02)
    assert list(cost.table().values()) == sorted(cost.table().values())


@given(
    table=st.lists(st.floats(1e-4, 10), min_size=2, max_size=6),
    steps=st.lists(st.tuples(st.integers(1, 3000), st.floats(1e-5, 100)), max_size=60),
)
def test_no_cost_becomes_zero(table, steps):
    """Guards a division by it: prompts are far larger steps than any that were measured."""
    cost = StepCost({4**n: seconds for n, seconds in enumerate(table)})
    for rows, seconds in steps:
        cost.observe(rows, seconds)
    assert min(cost.table().values()) > 0
    assert list(cost.table().values()) == sorted(cost.table().values())


def test_steps_beyond_what_was_measured_change_nothing():
    """The line is a guess there, and a prompt's step must not be what decoding costs."""
    cost = StepCost({1: 1.0, 8: 4.0})
    for _ in range(100):
        cost.observe(800, 5.0)
    assert cost.table() == {1: 1.0, 8: 4.0}


def test_row_counts_reach_the_largest_step():
    """Powers of two and half way between."""
    assert row_counts(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert row_counts(9) == [1, 2, 3, 4, 6, 9]
    assert row_counts(1) == [1, 2]


def test_confidences_become_what_is_observed():
    """Drafts behind the first rejection say nothing; those of other confidences keep theirs."""
    known = DraftStats(3)
    for _ in range(2000):
        known.observe([0.97, 0.85, 0.45], 1, [0, 1, 2])
    assert known.of([0.96, 0.81, 0.45]) == pytest.approx([1.0, 0.0, 0.45], abs=0.01)
    assert known.of([]) == []


def test_masks_are_worth_what_drafts_of_their_depth_were():
    """At any price, though it was another one then; a depth not tried keeps what was thought."""
    known = DraftStats(3)
    prospects = Prospects(known.worth(0.1), 0.1, 1.0, 0.1)
    for accept in ([0.97, 0.15], [0.97, 0.85]) * 1000:
        known.observe_drafts(accept, Choice(2, (0, 0, 1)), prospects, [0, 1], [None] * 2)
    assert known.worth(0.0)[:2] == pytest.approx([0.965, 0.5], abs=0.01)
    assert known.worth(0.0)[2] <= known.worth(0.0)[1]
    # Those that are not worth their rows are not checked: what they are is not subtracted.
    assert known.worth(0.4)[:2] == pytest.approx([0.565, 0.225], abs=0.01)


def test_what_masks_bring_lasts_where_drafts_have_some_behind():
    """And they stay worth having where not."""
    for choice, lasting in ((Choice(1, (0, 0), 0.65), 0.0), (Choice(1, (0, 2), 1.15), 1.0)):
        known = DraftStats(2)
        prospects = Prospects([0.5, 0.5], 0.25, 1.0, 0.25)
        assert prospects.gain == pytest.approx(0.5)
        for _ in range(1000):
            known.observe_drafts([0.9], choice, prospects, [0], [None])
        assert known.lasting == pytest.approx(lasting, abs=0.01)
        assert Prospects([0.5, 0.5], 0.25, known.lasting, 0.25).masks(1.0, 2)[0] == 2


def engine_with(model, cost: StepCost, **size) -> Engine:
    engine = Engine(model, CARD, EngineConfig(max_batch=3, max_context=64, **size))
    engine.control = DraftControl(cost, CARD.block_size, engine.config.step_tokens)
    return engine


@pytest.mark.parametrize("cost", [FREE, BY_ROW, DEAR_FIRST_MASK, Told({1: 1.0, 12: 1.0, 120: 9.0})])
def test_control_changes_no_text(model, cost):
    """Whatever the window does, lossless requests get what `exact` gives; others what they get."""
    modes = [
        ExactMode(),
        VerifiedMode(),
        VerifiedMode(threshold=0.3),
        ConfidenceMode(threshold=0.5),
    ]
    requests = [
        request(
            f"{i}-{j}",
            pattern(j * 3, 1 + j % 4, 2 + j),
            mode,
            sampling=Sampling(temperature=j % 2, seed=j),
            max_new_tokens=30,
        )
        for i, mode in enumerate(modes)
        for j in range(6)
    ]
    done = generate_all(engine_with(model, cost), requests)
    assert [c.tokens for c in done] == [
        reference.generate(model, CARD, item).tokens for item in requests
    ]


def test_control_pays(model):
    """Free rows: more tokens a forward than with one group. Costly rows: one row a forward."""
    requests = [request(str(j), pattern(j, 2, 5), VerifiedMode(), stop=-1) for j in range(6)]
    forwards, rows = {}, {}
    costs = {"free": FREE, "costly": BY_ROW, "first": DEAR_FIRST_MASK, "masks": DEAR_MASKS}
    for name, cost in costs.items():
        engine = engine_with(model, cost)
        for item in requests:
            engine.submit(item)
        forwards[name] = rows[name] = 0
        while engine.has_work:
            forwards[name] += sum(1 for event in engine.step() if event.tokens)
            rows[name] += engine.last_rows
    assert forwards["free"] < forwards["costly"] / 2
    # Prompts, and one row a token but for probes.
    for name in ("costly", "first", "masks"):
        assert rows[name] <= 6 * 5 + 6 * 16 + 3 * 8


def test_context_costs_time_by_itself():
    """By hand: 2 s of rows, 3 sequences of 1 s, 20 tokens of 0.5 s, 10 pairs of 0.25 s. A step of
    just that teaches nothing, though it took nine times what its rows take."""
    cost = StepCost({1: 1.0, 8: 2.0}, 1.0, cache_token_s=0.5, prompt_attention_s=0.25)
    assert cost.seconds(8, 3, 20, 10) == 2 + 3 + 10 + 2.5
    assert cost.table(3, 4) == {1: 1 + 1 + 2, 8: 2 + 3 + 6}
    cost.observe(8, 17.5, 3, 20, 10)
    assert cost.table() == {1: 1.0, 8: 2.0}


def test_masks_cost_time_by_themselves():
    """By hand: any mask 0.5 s, each 0.25 s more. A step without any is priced as one."""
    cost = StepCost({1: 1.0, 8: 2.0}, first_mask_s=0.5, mask_s=0.25)
    assert cost.seconds(8) == 2.0
    assert cost.seconds(8, masks=4) == 2 + 0.5 + 1
    assert cost.seconds(8, masks=0.5) == 2 + 0.25 + 0.125  # the mean of steps with one and none
    assert cost.table(8) == {1: 1.0, 8: 2.0}
    assert cost.table(2) == {1: 1.0, 8: 2 + 0.5 + 1}
    cost.observe(8, 3.5, masks=4)
    assert cost.seconds(8) == 2.0


def test_what_is_measured_is_what_it_says(model):
    """Rows, contexts of that mean, and pages of its own for each sequence."""
    engine = Engine(model, CARD, EngineConfig(max_batch=4, max_context=64, page_size=4))
    timer = StepTimer(engine._backend, CARD, engine.config)
    work = timer.decoding(14, 4, context=16)
    assert sum(item.rows for item in work) == 14
    assert [item.sequence.cached for item in work] == [4, 12, 20, 28]
    pages = [page for item in work for page in item.sequence.pages]
    assert len(pages) == len(set(pages))
    assert sum(item.masks for item in work) == 0
    assert sum(item.masks for item in timer.decoding(14, 4, masks=True)) == 6
    prompts = timer.prompt(100, context=24)
    assert [(item.count, item.sequence.cached) for item in prompts] == [
        (34, 24),
        (33, 24),
        (33, 24),
    ]
    assert prompt_pairs(prompts) == 100 * 24 + 34 * 33 // 2 + 33 * 32


def test_warming_up_measures_steps(model):
    """Up to a batch's rows, and a prompt that fills a step. And leaves the engine as it was."""
    size = EngineConfig(max_batch=4, max_context=32, cache_bytes=200_000)
    engine = Engine(model, CARD, size)
    engine.warm_up()
    assert engine.control
    assert list(engine.control.cost.table()) == [*row_counts(4 * 9), 4 * 32]
    item = request("a", [1, 2, 3], VerifiedMode())
    assert generate_all(engine, [item])[0].tokens == reference.generate(model, CARD, item).tokens


def test_a_sequence_that_comes_in_has_no_more_masks_than_pay(model):
    """Guards a first step with all masks, and a second one with all their drafts."""
    engine = Engine(model, CARD, EngineConfig(max_batch=2, max_context=64, prefix_cache=False))
    engine.control = DraftControl(BY_ROW, CARD.block_size, 100)
    for name in ("a", "b", "c"):
        engine.submit(request(name, [1, 2, 3], VerifiedMode()))
    engine.step()
    assert engine.last_rows == 6


@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_has_room_for_all(model, batch):
    """However free rows are: nobody waits for a step because the others have too many."""
    engine = engine_with(model, FREE, max_step_tokens=30)
    for index in range(batch):
        engine.submit(request(str(index), pattern(index, 2, 5), VerifiedMode(), stop=-1))
    engine.step()
    while engine.has_work:
        running = engine.running
        assert len(engine.step()) == running
        assert engine.last_rows <= 30


def test_load_takes_masks_away():
    """Weights are read for 8 rows as for one; behind that a row costs like a token."""
    rows = []
    for batch in (1, 2, 4, 64):
        control = DraftControl(Told({1: 1.0, 8: 1.0, 800: 100.0}), 4, 512)
        sequences = [
            Sequence(request(str(index), [1, 2], VerifiedMode()), 4, [1, 2])
            for index in range(batch)
        ]
        for _ in range(60):
            control.choose(sequences)
        rows.append(sequences[0].masks)
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > 0 == rows[-1]


@pytest.mark.parametrize(("cost", "pays"), [(FREE, True), (BY_ROW, False)])
def test_confidence_by_the_set_point_has_masks_only_where_they_pay(model, cost, pays):
    """Guards a threshold that was lowered under load and made steps dearer than it saved. A request
    with a fixed threshold has its masks, since its text would change."""
    masks = {}
    for name, quality in (("follows", Elastic(0.0)), ("fixed", None)):
        engine = engine_with(model, cost)
        engine.thresholds.set_point = 0.3
        for index in range(3):
            mode = ConfidenceMode(threshold=0.3)
            own = request(str(index), pattern(index, 2, 4), mode, max_new_tokens=55, stop=-1)
            engine.submit(replace(own, quality=quality))
        counts = []
        while engine.has_work:
            engine.step()
            if engine.running == 3:
                counts.append(engine.snapshot().windows)
        masks[name] = set(counts[8:])
    assert masks["follows"] == ({(4, 4, 4)} if pays else {(0, 0, 0)})
    assert masks["fixed"] == {(4, 4, 4)}


def test_confidence_tries_again_once_the_threshold_has_changed(model):
    """A lower one may pay where the one before did not."""
    control = DraftControl(BY_ROW, CARD.block_size, 100)
    item = replace(request("a", [1, 2], ConfidenceMode()), quality=Elastic(0.0))
    sequence = Sequence(item, 4, [1, 2])
    for threshold in (0.9, 0.5):
        sequence.threshold, masks = threshold, []
        for _ in range(24):
            control.choose([sequence])
            masks.append(sequence.masks)
            control.observe(sequence, Plan([], (MaskGroup(0, 4),)), 0, committed=1)
        assert masks == sorted(masks, reverse=True)
        assert (masks[0], masks[-1]) == (4, 0)


def test_there_are_no_masks_behind_the_end(model):
    """An answer of one token needs none."""
    engine = engine_with(model, FREE)
    engine.submit(request("a", [1, 2, 3], VerifiedMode(), max_new_tokens=1))
    engine.step()
    assert engine.last_rows == 3


def test_control_can_be_switched_off(model):
    """Then every step has all masks, and one group."""
    engine = Engine(model, CARD, EngineConfig(max_batch=2, max_context=32, window_control=False))
    engine.warm_up()
    assert engine.control is None
