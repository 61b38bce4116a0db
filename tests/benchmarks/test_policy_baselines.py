"""The baselines' arithmetic, by hand and against the installed Ray."""

import math
from dataclasses import replace
from typing import Any

import pytest
from policies.clairvoyant import Clairvoyant, clairvoyant
from policies.contenders import (
    FIXED,
    KNOWING,
    Knob,
    Setting,
    grid,
    knob_of,
    needs_of,
    run,
    shipped,
)
from policies.job import ALL_POLICIES
from policies.keda import Keda
from policies.knative import Knative
from policies.llm_d import LlmD, LlmDTokens
from policies.pod_autoscaler import Behaviour, PodAutoscaler, average_value
from ray.serve._private.constants import (
    SERVE_AUTOSCALING_DECISION_COUNTERS_KEY,
    SERVE_AUTOSCALING_DECISION_TIMESTAMP_KEY,
)
from ray.serve.autoscaling_policy import _apply_delay_logic
from ray.serve.config import AutoscalingConfig
from simulator.simulated import MODEL, poisson, trace

from mars_ray.autoscale.sample import ReplicaLoad
from mars_ray.config.scaling import ScalingConfig, Slo
from mars_ray.simulator.cases import TARGET_ONGOING, Case, Delays, RayDefault
from mars_ray.simulator.config import Cluster
from mars_ray.simulator.engine.observe import Observed
from mars_ray.simulator.engine.run import Policy


def sample(running: int, busy: int = 0, target: int | None = None, **more) -> Observed:
    """`busy` requests run, spread as they may be."""
    loads = (ReplicaLoad(running=busy), *[ReplicaLoad()] * (running - 1)) if running else ()
    wanted = running if target is None else target
    given: dict[str, Any] = {"waiting": 0} | more
    return Observed(running=running, target=wanted, loads=loads, **given)


def ticks(policy: Policy, seen: Observed, start: int, end: int) -> list[int]:
    """Decisions of each second; the target follows them, and nothing else changes."""
    decided = []
    for now in range(start, end):
        decided.append(policy(seen, float(now)).replicas)
        seen = replace(seen, target=decided[-1])
    return decided


def test_ray_scales_up_after_its_delay():
    """20 ongoing at 2 a replica want 10, after 30 s; 600 s to come down again."""
    policy = RayDefault(2.0, 1, 100)
    assert set(ticks(policy, sample(4, 20), 0, 30)) == {4}
    assert ticks(policy, sample(4, 20), 30, 31) == [10]
    idle = ticks(policy, sample(10, 2), 31, 700)
    assert idle[0] == 10
    # Its mean and its pushes take up to 40 s before the delay begins.
    assert 600 <= idle.index(1) <= 645


def test_delays_are_those_of_the_installed_ray():
    """Side by side on wishes that go up and down, to the second; and the target that it ships."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=50)
    assert config.get_target_ongoing_requests() == TARGET_ONGOING
    ours, state, target = Delays(1, 50), {}, 5
    theirs = target
    for now in range(2000):
        wish = 5 + round(4 * math.sin(now / 97)) + (now % 211 == 0)
        theirs, state = _apply_delay_logic(wish, theirs, config, state, float(now))
        target = ours.apply(wish, target, float(now))
        assert target == theirs, now
    assert SERVE_AUTOSCALING_DECISION_COUNTERS_KEY in state
    assert SERVE_AUTOSCALING_DECISION_TIMESTAMP_KEY in state


def test_knative_panics_and_does_not_scale_down_in_panic():
    """Six seconds at twice what is ready are a panic; a stable window later it is over."""
    policy = Knative(10.0, 1, 100)
    assert ticks(policy, sample(2, 20), 0, 60)[-1] == 2
    assert ticks(policy, sample(2, 80), 60, 70)[-1] == 8
    calm = ticks(policy, sample(8, 10), 70, 200)
    assert calm[30] == 8
    # At most half at once.
    assert calm[-1] == 4


@pytest.mark.parametrize(
    ("value", "replicas", "wish"),
    [(19, 4, 4), (21.9, 4, 4), (22.1, 4, 5), (18.1, 4, 4), (10, 4, 2)],
)
def test_a_pod_autoscaler_tolerates_a_tenth(value, replicas, wish):
    """5 a replica: 18 to 22 are what four replicas should have, whatever the quotient rounds to."""
    assert average_value(value, 5, replicas) == wish


def test_a_pod_autoscaler_grows_at_once_and_shrinks_after_five_minutes():
    """Kubernetes' defaults: doubled, or four more, in 15 s; down to the highest wish of 300 s."""
    autoscaler = PodAutoscaler(Behaviour(), 1, 100)
    target, targets = 1, []
    for now in range(0, 60, 15):
        target = autoscaler.scaled(40, target, now)
        targets.append(target)
    assert targets == [5, 10, 20, 40]
    for now in range(60, 390, 15):
        target = autoscaler.scaled(2, target, now)
        targets.append(target)
    # The last wish for 40 was 45 s after the beginning.
    assert targets[4:].index(2) == (345 - 60) // 15
    assert set(targets[4:]) == {40, 2}


def test_keda_by_hand():
    """20 waiting requests at 5 a replica want four, at the next look; an empty queue one, later."""
    policy = Keda(5, 1, 100)
    assert ticks(policy, sample(1, 3, waiting=20), 0, 16)[-1] == 4
    quiet = ticks(policy, sample(4, 3), 16, 400)
    assert quiet[250] == 4
    assert quiet[-1] == 1


def test_llm_d_by_hand():
    """A p90 at the objective saturates, at once: 4 + ceil(4 (1 / 0.55 - 1)), after 30 s."""
    slo = Slo(ttft_s=3, time_per_token_s=0.1)
    policy = LlmD(slo, 1.0, 1, 20)
    hot = sample(4, 10, ttft_p90_s=3.0, time_per_token_p90_s=0.01)
    grown = ticks(policy, hot, 0, 46)
    assert grown[29] == 4
    # Ready ones alone count while others start: 8 + ceil(8 (1 * 4 / 8 / 0.55 - 1)) is not more.
    assert grown[45] == 8
    assert "1.00" in policy(hot, 46.0).reason
    # At a tightness of 2 the same is half of the objective, in the band where nothing changes.
    assert set(ticks(LlmD(slo, 2.0, 1, 20), hot, 0, 200)) == {4}
    downs = ticks(LlmD(slo, 1.0, 1, 20), sample(4), 0, 400)
    # Only what has been wanted for three minutes, and one pod in two minutes.
    assert downs[179] == 4
    assert (downs[200], downs[310]) == (3, 2)


def test_llm_d_counts_tokens_that_wait():
    """Full steps forward 100 rows in 10 ms: 60,000 tokens are 6 s of prompts, at 1.5 s four times.

    One pod in three minutes more, one in five fewer.
    """
    model = replace(MODEL, step_rows=100)
    policy = LlmDTokens(model, 1.5, 1, 20)
    grown = ticks(policy, sample(1, 2, backlog_tokens=60_000), 0, 400)
    assert (grown[20], grown[200], grown[399]) == (2, 3, 4)
    assert ticks(policy, sample(4, 2, backlog_tokens=0), 400, 760)[-1] == 3


def test_llm_d_counts_full_caches():
    """80 sequences of 1,000 tokens fill a cache of 10,000 eight times: ten replicas of 0.8."""
    model = replace(MODEL, cache_tokens=10_000)
    policy = LlmDTokens(model, 1.5, 1, 20)
    seen = sample(4, 80, backlog_tokens=0, prompt_tokens=900.0, output_tokens=200.0)
    grown = ticks(policy, seen, 0, 1000)
    assert (grown[0], grown[-1]) == (5, 10)


def test_the_clairvoyant_one_orders_ahead():
    """What 100 s from now needs is ordered now, and kept until it is over."""
    policy = Clairvoyant([1, 1, 1, 1, 5, 1], 30.0, cold_start_s=60.0)
    wanted = {now: policy(sample(1), float(now)).replicas for now in (0, 29, 30, 149, 150)}
    assert wanted == {0: 1, 29: 1, 30: 5, 149: 5, 150: 1}


def case(**changes) -> Case:
    return Case(
        config=ScalingConfig(
            max_replicas=6, slo=Slo(ttft_s=1.0, time_per_token_s=0.02), cold_start_s=5
        ),
        model=replace(MODEL, step_rows=100),
        cluster=Cluster.model_validate({"cold_start_s": 5, "step_tokens": 100} | changes),
        trace=poisson(40, 3000, 30, 20),
        accuracy=90,
        seed=0,
    )


@pytest.mark.parametrize("policy", [name for name in ALL_POLICIES if name != KNOWING])
def test_every_policy_runs_within_its_bounds(policy):
    """Guards a policy that the simulator cannot run, one that forgets requests, and a smallest
    fleet that is none: with the first and the last of its settings."""
    given = case()
    needs = needs_of(given)
    settings = [*shipped(policy).values(), *grid(policy)]
    for setting in (settings[0], settings[-1]):
        knob = knob_of(policy, setting, needs, 1, 6)
        outcome = run(given, policy, knob)
        assert outcome.timeline.target.min() >= knob.replicas
        assert outcome.timeline.target.max() <= 6
        assert (outcome.requests["outcome"] > 0).all()
        if policy != "mars":
            assert not outcome.requests["points"].any()


@pytest.mark.parametrize("policy", [name for name in ALL_POLICIES if len(grid(name)) > 1])
def test_all_are_tuned_among_the_same_smallest_fleets(policy):
    """Guards a freedom that only one of them has, and a grid without what the project ships."""
    settings = grid(policy)
    assert set(shipped(policy).values()) <= set(settings)
    if policy not in FIXED:
        shares = {setting.smallest for setting in grid("mars")}
        assert {setting.smallest for setting in settings} == shares
        assert policy == "mars" or len({setting.target for setting in settings}) > 1


def test_a_setting_is_a_share_of_what_its_decoding_needs():
    """Lossless masks need fewer replicas than plain decoding for the same share."""
    needs = replace(needs_of(case()), plain=3.2, lossless=1.9)
    setting = Setting(0.5, 1.5)
    assert knob_of("ray", setting, needs, 1, 40) == Knob(0.5, 5)
    assert knob_of("ray-verified", setting, needs, 1, 40) == Knob(0.5, 3)
    assert knob_of("mars", setting, needs, 1, 2) == Knob(0.5, 2)


def test_the_same_replicas_without_lower_thresholds():
    """Tick by tick what `mars` ordered, and no point lost."""
    given = case()
    knob = Knob(None, 1)
    lowered, unlowered = (run(given, policy, knob) for policy in ("mars", "mars-lossless"))
    count = min(len(lowered.timeline.target), len(unlowered.timeline.target))
    assert (lowered.timeline.target[:count] == unlowered.timeline.target[:count]).all()
    assert not unlowered.requests["points"].any()


def test_a_fixed_fleet_needs_no_ticks():
    """Guards other results by looking less often at what never changes."""
    given = case()
    seldom, often = given.unwatched(), case()
    assert (seldom.cluster.tick_s, often.cluster.tick_s) == (5, 1)
    knob = Knob(None, 3)
    for policy in ("fixed", "fixed-verified"):
        ends = run(given, policy, knob).requests["end_s"]
        watched = replace(given, cluster=given.cluster.model_copy(update={"tick_s": 5.0}))
        assert (run(watched, policy, knob).requests["end_s"] == ends).all()
    dying = case(kills=[{"at_s": 9}])
    assert dying.unwatched() is dying


def test_the_clairvoyant_one_attains_for_less_than_the_fixed_fleet():
    """On a load that is high for a fifth of the time."""
    quiet, busy = poisson(5, 1500, 30, 20), poisson(150, 3000, 30, 20)
    arrivals = sorted([*quiet.arrival_s, *(200 + busy.arrival_s)])
    given = replace(case(), trace=trace(*[(at, 30, 20) for at in arrivals]))
    known = clairvoyant(given)
    assert known.within(given.slo).mean() >= given.slo.attainment
    sizes = [
        outcome.replica_s
        for size in range(1, 7)
        if (outcome := run(given, "fixed-verified", Knob(None, size))).within(given.slo).mean()
        >= given.slo.attainment
    ]
    assert known.replica_s < 0.8 * min(sizes)
