"""Whatever comes in, what goes out is bounded; and three bugs that Ray's autoscaler had."""

import json
import math
from dataclasses import asdict
from itertools import pairwise

from autoscale.fleets import ARITHMETIC_BOUND, CONFIG, MEMORY_BOUND, Fleet, config, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.autoscale.policy import State, decide
from mars_ray.autoscale.sample import ReplicaLoad, Sample
from mars_ray.config.scaling import ScalingConfig

NUMBERS = st.floats(0, 1e9)
ANY = st.one_of(st.none(), NUMBERS, st.sampled_from([0.0, 5e-324]))
COUNTS = st.integers(0, 5000)
SHARES = st.one_of(st.none(), st.floats(0, 1))
CLASSES = st.sampled_from(["gold", "pinned", "?"])
# Any clock.
TIMES = st.floats(allow_nan=True, allow_infinity=True)
LOADS = st.lists(
    st.builds(
        ReplicaLoad,
        running=COUNTS,
        step_s=ANY,
        decode_rows=ANY,
        prompt_rows=ANY,
        prompt_share=SHARES,
        positions=ANY,
        threshold=SHARES,
    ),
    max_size=4,
)
SAMPLES = st.builds(
    Sample,
    running=COUNTS,
    target=COUNTS,
    starting_ages_s=st.lists(NUMBERS, max_size=4).map(tuple),
    arrivals_per_s=ANY,
    refused_per_s=NUMBERS,
    prompt_tokens=ANY,
    output_tokens=ANY,
    waiting=COUNTS,
    loads=LOADS.map(tuple),
    started=st.dictionaries(CLASSES, NUMBERS),
    slow=st.dictionaries(CLASSES, NUMBERS),
    late=st.dictionaries(CLASSES, NUMBERS),
    wall_s=NUMBERS,
    tokens_per_forward=st.dictionaries(st.floats(0, 1), st.floats(1, 1e9), max_size=4),
    class_shares=st.dictionaries(CLASSES, st.floats(0, 1 / 3)),
    cold_start_s=ANY,
    age_s=st.one_of(ANY, st.just(1.0)),
)
CONFIGS = st.builds(
    lambda least, more, zero, floor, budget: config(
        min_replicas=least,
        max_replicas=least + more,
        scale_to_zero=zero,
        threshold={"floor": floor},
        quality_budget_points=budget,
        quality_classes={"gold": 0.5},
    ),
    st.integers(1, 3),
    st.integers(0, 3000),
    st.booleans(),
    st.floats(0, 1),
    st.one_of(st.none(), st.floats(0, 3)),
)
MODELS = st.sampled_from([MEMORY_BOUND, ARITHMETIC_BOUND])


def bounded(replicas: int, threshold: float | None, shed: float, wanted: ScalingConfig) -> bool:
    """Within what the operator allowed."""
    least = 0 if wanted.scale_to_zero else wanted.min_replicas
    return (
        least <= replicas <= wanted.max_replicas
        and (threshold is None or wanted.threshold.floor <= threshold <= wanted.threshold.set_point)
        and 0 <= shed < 1
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(SAMPLES, TIMES), min_size=1, max_size=6), CONFIGS, MODELS)
def test_answers_are_bounded_whatever_comes_in(ticks, wanted, model):
    """Guards clocks that jump, and replicas without end."""
    state = State()
    for seen, now in ticks:
        decision = decide(seen, state, wanted, model, now)
        assert isinstance(decision.replicas, int)
        assert bounded(decision.replicas, decision.threshold_setpoint, decision.shed, wanted)
        assert decision.reason.endswith(".")
        state = decision.state
        assert json.dumps(asdict(state), allow_nan=False)
    # And it recovers: after sane metrics for a while, sane answers.
    for second in range(10):
        decision = decide(sample(1, 0.0), state, wanted, model, float(second))
        state = decision.state
    assert math.isfinite(state.demand.fast_per_s)
    assert math.isfinite(state.quality.spent_points)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.floats(0, 60), min_size=3, max_size=6),
    st.floats(1.0, 4.0),
    st.sampled_from([0.1, 0.3, 1.0]),
)
def test_more_load_never_means_fewer_replicas(rates, times, floor):
    """Monotone: the same history, so many times as much of it, asks for as many or more."""
    wanted = config(threshold={"floor": floor}, max_replicas=1000)

    def asked(factor: float) -> int:
        state, decision = State(), None
        for second in range(60 * len(rates)):
            seen = sample(2, factor * rates[second // 60])
            decision = decide(seen, state, wanted, MEMORY_BOUND, float(second))
            state = decision.state
        assert decision is not None
        return decision.replicas

    assert asked(times) >= asked(1.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 6), st.lists(st.floats(0, 300), max_size=5), st.booleans())
def test_an_idle_fleet_never_grows(running, ages, zero):
    """ray#61731: replicas that start up must not look like load, nor a policy that restarts."""
    wanted = config(scale_to_zero=zero)
    state, before = State(), max(running + len(ages), 0 if zero else 1)
    for second in range(120):
        seen = sample(
            running,
            0.0,
            target=running + len(ages),
            starting_ages_s=tuple(age + second for age in ages),
            cold_start_s=30.0,
        )
        decision = decide(seen, state, wanted, MEMORY_BOUND, float(second))
        assert decision.replicas <= before
        state, before = decision.state, max(decision.replicas, 0 if zero else 1)


def test_slow_cold_starts_do_not_feed_back():
    """ray#61731: a request to a fleet at zero, and a start ten times as long as it should be."""
    wanted = config(scale_to_zero=True, cold_start_s=10.0)
    state, asked = State(), []
    for second in range(300):
        rate = 0.2 if second < 5 else 0.0
        ages = (float(second),) if second else ()
        seen = sample(0, rate, waiting=1, target=len(ages), starting_ages_s=ages)
        decision = decide(seen, state, wanted, MEMORY_BOUND, float(second))
        state = decision.state
        asked.append(decision.replicas)
    assert max(asked) == 1


def test_replicas_without_a_machine_are_no_cold_start():
    """Guards an hour's scale-down window, and surges taken to last as long, from two replicas that
    the cluster has no room for; nothing of it stays when they are no longer asked for."""
    wanted = config(cold_start_s=10.0)
    state, reason = State(), ""
    for second in range(1000):
        seen = sample(2, 5.0, target=4, starting_ages_s=(float(second),) * 2)
        decision = decide(seen, state, wanted, MEMORY_BOUND, float(second))
        state, reason = decision.state, decision.reason
    assert "a cold start of 30 s" in reason
    decision = decide(sample(2, 5.0), state, wanted, MEMORY_BOUND, 1000.0)
    assert "a cold start of 10 s" in decision.reason
    measured = decide(sample(2, 5.0, cold_start_s=20.0), state, wanted, MEMORY_BOUND, 1000.0)
    later = decide(sample(2, 5.0), measured.state, wanted, MEMORY_BOUND, 1001.0)
    assert "a cold start of 20 s" in later.reason


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 19), st.floats(1.05, 30))
def test_overload_never_shrinks_the_fleet(running, times):
    """ray#64725: smoothing a wish to grow must not make it a wish to shrink."""
    state = State()
    for second in range(30):
        seen = sample(running, 10.0 * running * times, waiting=50 * running, decoding=16 * running)
        decision = decide(seen, state, CONFIG, MEMORY_BOUND, float(second))
        assert decision.replicas >= running
        state = decision.state


def test_short_windows_do_not_thrash():
    """ray#26455: a load that swings faster than replicas start is not followed up and down."""
    fleet = Fleet(CONFIG)
    fleet.run(300, lambda now: 30.0 if now % 20 < 10 else 10.0)
    log = fleet.run(600, lambda now: 30.0 if now % 20 < 10 else 10.0)
    moves = sum(a.replicas != b.replicas for a, b in pairwise(log))
    assert moves <= 6


@settings(max_examples=8, deadline=None)
@given(st.floats(0.2, 5.0), st.floats(5.0, 100.0))
def test_the_rate_of_calls_does_not_matter(tick_s, rate):
    """Ray calls policies at its own pace: what is asked for depends on time passed."""
    asked = []
    for step in (0.5, tick_s):
        state, now, decision = State(), 0.0, None
        while now < 200:
            decision = decide(sample(4, rate), state, CONFIG, MEMORY_BOUND, now)
            state, now = decision.state, now + step
        assert decision is not None
        asked.append(decision.replicas)
    assert abs(asked[0] - asked[1]) <= 1
