"""What one simulated engine does in its steps: hand-worked effects, equality with stepping."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.reference import reference
from simulator.simulated import MODEL, fixture, run, trace

from mars_ray.autoscale.service_model import Level, Mix, ServiceModel, Shape
from mars_ray.config.scaling import Slo
from mars_ray.errors import DataError
from mars_ray.serve.ingress import router
from mars_ray.simulator.config import Cluster
from mars_ray.simulator.engine import core
from mars_ray.simulator.engine.arrays import DONE, Tables, make_tables, make_world
from mars_ray.simulator.engine.core import advance, set_levels, start
from mars_ray.simulator.engine.run import summarise
from mars_ray.simulator.traces.trace import Trace

PLAIN = replace(MODEL, levels=(Level(1.0, 0.0, ()),))


@st.composite
def conversations(draw) -> Trace:
    """Up to 25 requests, some of which continue an earlier one.

    Times are no multiples of a step: what arrives in the very moment of a step's end may join the
    next one or the one after it.
    """
    count = draw(st.integers(1, 25))
    times = draw(st.lists(st.integers(1, 2000), min_size=count, max_size=count, unique=True))
    sizes = st.tuples(st.integers(1, 400), st.integers(1, 40))
    rows = [(0.001 * np.pi / 3 * at, *draw(sizes)) for at in sorted(times)]
    parent = [draw(st.integers(-1, number - 1)) for number in range(count)]
    shared = [
        draw(st.integers(1, row[1])) if other >= 0 else 0
        for row, other in zip(rows, parent, strict=True)
    ]
    return trace(*rows, parent=parent, shared_tokens=shared)


@settings(deadline=None, max_examples=60)
@given(
    conversations(),
    st.floats(0.0005, 2.1),
    st.sampled_from([8, 30, 100]),
    st.sampled_from([None, 500, 1500]),
    st.sampled_from([(), (0.2, 1.0, 1.8)]),
)
def test_segments_equal_single_steps(load, changed_s, step_tokens, cache_tokens, spread):
    """The closed form against the slow loop, with all that makes a step longer or shorter and a
    change of level in between: to 1e-9."""
    model = replace(
        MODEL,
        cache_token_s=3e-6,
        prompt_attention_s=2e-7,
        cache_tokens=cache_tokens,
        page_tokens=4,
        spread=spread,
    )
    made = fixture(load, model=model)
    tables = _tables(model, step_tokens)
    world = make_world(
        made.trace, [1.0, 0.5], places=1, batch=4, retries=0, seed=0, spread=model.spread
    )
    start(world, 1, 0.0, 0.0, 0)
    advance(world, tables, changed_s, 0.0)
    set_levels(world, 1, changed_s)
    advance(world, tables, 1e9, 0.0)
    gains = world.requests["gain"].tolist()
    served = reference(made.trace, tables, 4, lambda now: int(now > changed_s), gains)
    assert [each.found for each in served] == world.requests["found"].tolist()
    for name in ("first_s", "end_s"):
        expected = [getattr(each, name) for each in served]
        np.testing.assert_allclose(world.requests[name], expected, rtol=1e-9)


@settings(deadline=None, max_examples=40)
@given(conversations(), st.sampled_from([8, 30, 100]), st.sampled_from([(), (0.5, 1.5)]))
def test_no_step_has_more_rows_than_it_may(load, step_tokens, spread):
    """Looked at every 7 ms; with 8 rows, four sequences with drafts have no room in one step."""
    model = replace(MODEL, spread=spread, max_batch=10)
    made = fixture(load, model=model)
    tables = _tables(model, step_tokens)
    world = make_world(made.trace, [1.0, 0.5], 1, model.max_batch, 0, 0, spread)
    start(world, 1, 0.0, 0.0, 0)
    for tick in range(1000):
        advance(world, tables, 0.007 * tick, 0.0)
        replica = world.replicas[0]
        if replica["steps"]:
            rows = replica["decoding"] * replica["rows"]
            assert rows <= step_tokens - step_tokens // 8 + 1e-9
            assert rows + replica["chunk"] <= step_tokens + 1e-9
            assert replica["chunk"] or rows


def _tables(model: ServiceModel, step_tokens: int) -> Tables:
    cluster = Cluster(step_tokens=step_tokens, waiting_requests=1000, retries=0)
    return make_tables(model, model.levels, Mix(50, 20), cluster)


def test_more_sequences_than_rows_take_turns():
    """Of 8 rows 7 are for decoding: ten sequences get 0.7 tokens a step, none is forgotten."""
    model = replace(PLAIN, max_batch=10)
    outcome = run(trace(*[(0.0, 1, 71)] * 10), model=model, step_tokens=8)
    # 700 tokens beyond the first ones at 7 a step, and three steps that have prompts.
    assert outcome.requests["end_s"].max() == pytest.approx(0.010 * (3 + 100), abs=0.021)
    assert outcome.requests["end_s"].min() > 0.95


def test_a_long_prompt_is_dearer_the_deeper_it_is():
    """300 tokens in three steps of 10 ms, and 300 * 150 pairs at 1 us."""
    model = replace(PLAIN, prompt_attention_s=1e-6)
    outcome = run(trace((0.0, 300, 1)), model=model)
    assert outcome.requests["first_s"][0] == pytest.approx(0.030 + 1e-6 * 300 * 150)


def test_a_shared_beginning_is_not_computed_again():
    """Of 250 tokens 200 are shared, 192 in whole pages of 16: a step instead of three."""
    rows = [(0.0, 250, 2), (1.0, 250, 2)]
    own = run(trace(*rows), model=PLAIN)
    shared = run(trace(*rows, parent=[-1, 0], shared_tokens=[0, 200]), model=PLAIN)
    assert own.requests["first_s"].tolist() == pytest.approx([0.030, 1.030])
    assert shared.requests["first_s"].tolist() == pytest.approx([0.030, 1.010])
    assert shared.requests["found"].tolist() == [0, 192]


def test_the_last_token_of_a_prompt_is_always_computed():
    """Its row gives the first token, also if the whole prompt is in the cache."""
    rows = trace((0.0, 32, 2), (1.0, 32, 2), parent=[-1, 0], shared_tokens=[0, 32])
    assert run(rows, model=PLAIN).requests["found"].tolist() == [0, 16]


@pytest.mark.parametrize(("cache_tokens", "found"), [(400, 96), (300, 0)])
def test_what_is_unused_for_longest_gives_way(cache_tokens, found):
    """Between the two, 200 tokens of another went through a cache beside the first one's 102."""
    rows = [(0.0, 100, 2), (1.0, 198, 2), (2.0, 100, 2)]
    given = trace(*rows, parent=[-1, -1, 0], shared_tokens=[0, 0, 100])
    outcome = run(given, model=replace(PLAIN, cache_tokens=cache_tokens))
    assert outcome.requests["found"].tolist() == [0, 0, found]


def test_a_conversation_goes_on_where_its_beginning_is():
    """Twenty conversations of ten turns on four replicas: by prefix nearly all is found, at random
    about a quarter; the first turns are new everywhere."""
    turns, rows = 10, []
    for number in range(20 * turns):
        turn = number // 20
        rows.append((0.1 * number, 64 * (turn + 1), 8))
    parent = [number - 20 if number >= 20 else -1 for number in range(len(rows))]
    shared = [row[1] - 16 if other >= 0 else 0 for row, other in zip(rows, parent, strict=True)]
    given = trace(*rows, parent=parent, shared_tokens=shared)
    by_prefix, at_random = (
        requests["found"].sum() / requests["prompt"].sum()
        for routing in ("prefix", "two-choices")
        for requests in [run(given, replicas=4, routing=routing, model=PLAIN).requests]
    )
    assert by_prefix > 0.75
    assert 0.05 < at_random < by_prefix - 0.2


def test_a_new_replica_in_an_old_place_knows_nothing():
    """The only replica dies after the first turn; the next one computes the whole prompt."""
    rows = trace((0.0, 96, 4), (30.0, 96, 4), parent=[-1, 0], shared_tokens=[0, 80])
    outcome = run(rows, kills=[{"at_s": 10.0}], cold_start_s=5, model=PLAIN)
    assert outcome.requests["found"].tolist() == [0, 0]
    assert set(outcome.requests["outcome"]) == {DONE}


def test_the_router_is_the_services():
    """Its table's size, and what it takes for an overload."""
    assert router._TABLE_BLOCKS * router.BLOCK_TOKENS == core.TABLE_TOKENS
    assert router.MAX_BLOCKS * router.BLOCK_TOKENS == core.TABLE_PROMPT_TOKENS
    assert router.MAX_IMBALANCE == core.MAX_IMBALANCE


def test_requests_differ_in_what_masks_bring_them():
    """Half of them 0.5 of it, half twice as much; tokens over forwards stay what they were.

    Of 2 tokens a forward that is 1.5 and 3: 667 and 333 forwards of 10 ms for 1,000 tokens, 500 in
    the mean.
    """
    model = replace(MODEL, levels=(Level(1.0, 0.0, (Shape(7, 8.0, 2.0),)),), max_batch=1)
    spread = (*[0.5] * 20, *[2.0] * 20)
    load = trace(*[(0.0, 1, 1001)] * 400)
    ends = run(load, model=replace(model, spread=spread), waiting_requests=1000, tick_s=60)
    took_s = np.diff(np.sort(np.array(ends.requests["end_s"], float)))
    assert np.quantile(took_s, [0.1, 0.9]).tolist() == pytest.approx([3.34, 6.67], rel=0.01)
    assert took_s.mean() == pytest.approx(5.0, rel=0.05)


def test_a_context_is_a_limit():
    """A prompt without room for a token is left out, a longer answer ends there; who loses the
    parent shares nothing."""
    rows = trace(
        (0.0, 99, 20), (1.0, 100, 5), (2.0, 90, 5), parent=[-1, 0, 1], shared_tokens=[0, 90, 80]
    )
    outcome = run(rows, model=replace(PLAIN, max_model_len=100))
    assert len(outcome.trace) == 2
    assert outcome.requests["output"].tolist() == [1, 5]
    assert outcome.requests["parent"].tolist() == [-1, -1]
    assert summarise(outcome, Slo(), 100)["requests"] == 2
    with pytest.raises(DataError, match="no prompt fits"):
        run(rows, model=replace(PLAIN, max_model_len=50))


@settings(deadline=None, max_examples=60)
@given(conversations(), st.sampled_from([30, 100]))
def test_a_faster_replica_is_never_later(load, step_tokens):
    """Twice as fast: nobody waits longer for the end, but for the step that runs on arrival."""
    slow, fast = (
        run(load, model=MODEL, step_tokens=step_tokens, slowness=slowness, tick_s=60)
        for slowness in (1.0, 0.5)
    )
    longest_s = MODEL.step_s(step_tokens)
    assert (fast.requests["end_s"] <= slow.requests["end_s"] + longest_s).all()
    assert fast.requests["end_s"].max() <= slow.requests["end_s"].max() + 1e-9
