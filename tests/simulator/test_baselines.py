"""The baselines' arithmetic, by hand and against the installed Ray."""

import math
from dataclasses import replace

import pytest
from ray.serve._private.constants import (
    SERVE_AUTOSCALING_DECISION_COUNTERS_KEY,
    SERVE_AUTOSCALING_DECISION_TIMESTAMP_KEY,
)
from ray.serve.autoscaling_policy import _apply_delay_logic
from ray.serve.config import AutoscalingConfig
from simulator.simulated import MODEL, poisson

from mars_ray.autoscale.sample import ReplicaLoad
from mars_ray.config.scaling import Prices, Slo
from mars_ray.simulator.baselines import tuning
from mars_ray.simulator.baselines.contenders import Knob, Setting, contender, run
from mars_ray.simulator.baselines.fixed import Clairvoyant
from mars_ray.simulator.baselines.knative import Knative
from mars_ray.simulator.baselines.llm_d import LlmD
from mars_ray.simulator.baselines.ray_serve import Delays, RayDefault, RayTtft
from mars_ray.simulator.baselines.tuning import tuned
from mars_ray.simulator.config import ALL_POLICIES, PolicyName, SimulateJob
from mars_ray.simulator.engine.observe import Observed
from mars_ray.simulator.engine.result import summarise
from mars_ray.simulator.engine.run import Policy


def sample(running: int, busy: int = 0, target: int | None = None, **more) -> Observed:
    """`busy` requests run, spread as they may be."""
    loads = (ReplicaLoad(running=busy), *[ReplicaLoad()] * (running - 1)) if running else ()
    wanted = running if target is None else target
    return Observed(running=running, target=wanted, loads=loads, waiting=0, **more)


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
    """Side by side on wishes that go up and down, to the second."""
    config = AutoscalingConfig(min_replicas=1, max_replicas=50)
    ours, state, target = Delays(1, 50), {}, 5
    theirs = target
    for now in range(2000):
        wish = 5 + round(4 * math.sin(now / 97)) + (now % 211 == 0)
        theirs, state = _apply_delay_logic(wish, theirs, config, state, float(now))
        target = ours.apply(wish, target, float(now))
        assert target == theirs, now
    assert SERVE_AUTOSCALING_DECISION_COUNTERS_KEY in state
    assert SERVE_AUTOSCALING_DECISION_TIMESTAMP_KEY in state


def test_rays_ttft_policy_steps_by_one():
    """Above the target one more; below it one fewer only if nearly idle; no metric, no change."""
    slow = sample(3, 30, ttft_p99_s=5.0)
    assert ticks(RayTtft(2.0, 1, 9), slow, 0, 31)[-1] == 4
    quiet, busy = sample(3, 1, ttft_p99_s=0.1), sample(3, 30, ttft_p99_s=0.1)
    assert ticks(RayTtft(2.0, 1, 9), quiet, 0, 601)[-1] == 2
    assert ticks(RayTtft(2.0, 1, 9), busy, 0, 601)[-1] == 3
    assert ticks(RayTtft(2.0, 1, 9), sample(3), 0, 601)[-1] == 3


def test_knative_panics_and_does_not_scale_down_in_panic():
    """Six seconds at twice what is ready are a panic; a stable window later it is over."""
    policy = Knative(10.0, 1, 100)
    assert ticks(policy, sample(2, 20), 0, 60)[-1] == 2
    assert ticks(policy, sample(2, 80), 60, 70)[-1] == 8
    calm = ticks(policy, sample(8, 10), 70, 200)
    assert calm[30] == 8
    # At most half at once.
    assert calm[-1] == 4


def test_llm_d_by_hand():
    """A p90 at the objective saturates: 0.6 after one cycle, so 4 + ceil(4 (0.6 / 0.55 - 1))."""
    slo = Slo(ttft_s=3, time_per_token_s=0.1)
    policy = LlmD(slo, 1.0, 1, 20)
    hot = sample(4, 10, ttft_p90_s=3.0, time_per_token_p90_s=0.01)
    grown = ticks(policy, hot, 0, 50)
    # Its pod autoscaler waits for 30 s and looks every 15 s.
    assert grown[30] == 4
    assert grown[-1] == 5
    assert "0.60" in policy(hot, 50.0).reason
    idle = LlmD(slo, 1.0, 1, 20)
    downs = ticks(idle, sample(4), 0, 300)
    # Only what has been wanted for three minutes, and one pod in two minutes.
    assert downs[180] == 4
    assert downs[-1] == 3


def test_the_clairvoyant_one_orders_ahead():
    """What 100 s from now needs is ordered now, and kept until it is over."""
    policy = Clairvoyant([1, 1, 1, 1, 5, 1], 30.0, cold_start_s=60.0)
    wanted = {now: policy(sample(1), float(now)).replicas for now in (0, 29, 30, 149, 150)}
    assert wanted == {0: 1, 29: 1, 30: 5, 149: 5, 150: 1}


def setting(**changes) -> Setting:
    table = {
        "name": "t",
        "service_model": "unused",
        "traces": {"x": {"type": "ramp"}},
        "fixed_threshold": 0.5,
        "scaling": {"max_replicas": 6, "slo": {"ttft_s": 1.0, "time_per_token_s": 0.02}},
        "cluster": {"cold_start_s": 5, "step_tokens": 100, **changes},
    }
    job = SimulateJob.model_validate(table)
    return Setting(job, MODEL, poisson(40, 3000, 30, 20), job.cluster)


@pytest.mark.parametrize("end", [0, -1])
@pytest.mark.parametrize("name", ALL_POLICIES)
def test_every_policy_runs_within_its_bounds(name, end):
    """Guards a policy that the simulator cannot run, and one that forgets requests."""
    given = setting()
    who = contender(name, given)
    outcome = run(given, who, Knob(who.values[end], who.manners[end]), seed=0)
    assert outcome.timeline.target.min() >= 1
    assert outcome.timeline.target.max() <= 6
    assert (outcome.requests["outcome"] > 0).all()
    if name not in ("mars", "fixed-threshold", "threshold-only"):
        assert not outcome.requests["points"].any()


def test_tuning_finds_the_smallest_fleet():
    """By bisection what trying every size finds."""
    given = setting()
    slo = given.job.scaling.slo
    size = tuned([given], "static-peak").value

    def attained(replicas: float) -> float:
        return run(given, contender("static-peak", given), Knob(replicas), 0).within(slo).mean()

    assert attained(size) >= slo.attainment > attained(size - 1)


def paid(settings: list[Setting], name: PolicyName, knob: Knob) -> float | None:
    """In replica-seconds, points by their price; None if it misses the objective."""
    job = settings[0].job
    slo, prices = job.scaling.slo, job.scaling.prices
    total = 0.0
    for seed, given in enumerate(settings):
        outcome = run(given, contender(name, given), knob, seed)
        figures = summarise(outcome, slo, job.accuracy)
        if figures["attainment"] < slo.attainment:
            return None
        points = figures["points_lost"] * prices.point_hour / prices.replica_hour
        total += figures["replica_s"] * (1 + points)
    return total


@pytest.mark.parametrize("name", ["mars", "lossless"])
def test_tuning_tries_every_manner(name):
    """What is chosen attains on both settings, and no manner at the same value costs less."""
    settings = [setting(), setting(cold_start_s=20)]
    knob = tuned(settings, name)
    manners = contender(name, settings[0]).manners
    assert {manner.caution for manner in manners} > {1.0}
    own = paid(settings, name, knob)
    assert own is not None
    others = [paid(settings, name, Knob(knob.value, manner)) for manner in manners]
    assert own == min(other for other in others if other is not None)


def test_tuning_looks_beyond_a_safer_setting_that_missed(monkeypatch):
    """By chance one may, and what is known of it is not what it would have cost."""
    known = {1: (False, 300.0), 2: (True, 1000.0), 3: (False, 480.0), 4: (True, 900.0)}

    def tried(_settings, _others, knob: Knob) -> tuning._Trial:
        reached, cost = known.get(int(knob.value), (True, 2000.0))
        return tuning._Trial(knob, reached, float(reached), cost / 2, cost, 1.0)

    monkeypatch.setattr(tuning, "_tried", tried)
    assert tuned([setting()], "threshold-only").value == 4


def priced(point_hour: float) -> Setting:
    given = setting()
    scaling = given.job.scaling.model_copy(update={"prices": Prices(point_hour=point_hour)})
    return replace(given, job=given.job.model_copy(update={"scaling": scaling}))


def test_tuning_counts_the_points_that_a_small_fleet_loses():
    """Guards a fleet that is cheap for what it takes from its answers."""
    sizes = []
    for point_hour in (0.0, 10.0):
        given = [priced(point_hour)]
        knob = tuned(given, "threshold-only")
        who = contender("threshold-only", given[0])
        every = [Knob(size, manner) for size in who.values for manner in who.manners]
        costs = [paid(given, "threshold-only", other) for other in every]
        least = min(cost for cost in costs if cost is not None)
        assert paid(given, "threshold-only", knob) == least
        sizes.append(knob.value)
    assert sizes[0] < sizes[1]
