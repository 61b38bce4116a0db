"""What the policy learns about its engines."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from autoscale.fleets import WATCHED, config, sample
from simulator.simulated import MODEL, poisson, run, trace

from mars_ray.autoscale.policy import Decision, State, decide
from mars_ray.autoscale.sample import PINNED, ReplicaLoad, Sample, Traffic, observe_traffic
from mars_ray.simulator.engine.run import Deciding

# 20 rows take 10 ms, and 320, which half of the steps have, 230 ms.
MIXED = ReplicaLoad(
    running=4, step_s=0.120, decode_rows=20, prompt_rows=300, prompt_share=0.5, positions=5
)


def learnt(load: ReplicaLoad, seconds: float, traffic: Traffic | None = None) -> Traffic:
    """After so long, with a look every half second."""
    traffic = traffic or Traffic()
    for _ in range(int(2 * seconds)):
        seen = sample(1, 2.0, loads=(load,))
        traffic = observe_traffic(traffic, seen, MODEL, 0.5)
    return traffic


def test_steps_with_prompts_do_not_look_slow():
    """Guards a price paid twice: at the mean of all rows a step would take 80 ms, not 120."""
    assert learnt(MIXED, 600).slowness == pytest.approx(1.0, abs=1e-6)


def test_slow_engines_are_known_within_a_minute_and_stay_known():
    """Guards minutes of too few replicas when a service model was measured on another machine."""
    slow = replace(MIXED, step_s=2 * MIXED.step_s)
    assert learnt(slow, 10).slowness == pytest.approx(1.5, abs=0.05)
    assert learnt(slow, 60).slowness > 1.8
    known = learnt(slow, 900)
    assert known.slowness == pytest.approx(2.0, abs=0.02)
    assert learnt(replace(slow, step_s=0.960), 5, known).slowness < 2.1, "a moment is no news"


def test_an_idle_fleet_teaches_nothing():
    """Guards a slowness forgotten over night, and a first minute that outweighs all before."""
    known = learnt(replace(MIXED, step_s=0.240), 300)
    for _ in range(3600):
        known = observe_traffic(known, Sample(running=1, target=1, arrivals_per_s=0.0), MODEL, 1.0)
    assert known.slowness > 1.9
    assert learnt(replace(MIXED, step_s=0.960), 5, known).slowness < 2.1


def test_what_masks_bring_is_learnt_from_the_first_drafts_on():
    """Guards minutes of wrong rungs when a busy fleet, which had no masks, begins to draft."""
    busy = learnt(replace(MIXED, positions=1.0), 600)
    assert busy.gains == ()
    for _ in range(60):
        seen = sample(1, 2.0, loads=(replace(MIXED, positions=2.0),), tokens_per_forward={1.0: 1.5})
        busy = observe_traffic(busy, seen, MODEL, 0.5)
    assert dict(busy.gains)[1.0] == pytest.approx(0.625, abs=0.03), (
        "0.5 is true, and 1 was believed"
    )


def test_a_report_without_steps_of_prompts_teaches_nothing():
    """Guards a fleet three times too large while replicas of an older release still report."""
    old = replace(MIXED, prompt_rows=None, prompt_share=None)
    assert learnt(old, 60).slowness == 1.0


def test_rare_answers_are_learnt_as_they_end():
    """Guards a quiet fleet that plans with answers a third as long: hardly one of them ends in the
    half second in which another request comes."""
    traffic = Traffic()
    for tick in range(2400):
        seen = Sample(
            running=1,
            target=1,
            arrivals_per_s=2.0 * (tick % 10 == 0),
            answers_per_s=2.0 * (tick % 10 == 5),
            prompts_per_s=2.0 * (tick % 10 == 1),
            output_tokens=1000.0 if tick % 10 == 5 else None,
            prompt_tokens=4000.0 if tick % 10 == 1 else None,
        )
        traffic = observe_traffic(traffic, seen, MODEL, 0.5)
    assert traffic.output_tokens == pytest.approx(1000.0, rel=0.02)
    assert traffic.prompt_tokens == pytest.approx(4000.0, rel=0.02)


def test_a_class_that_comes_late_is_learnt_on_a_busy_fleet():
    """Guards a new share that is dropped in each of a thousand ticks, as too small to keep."""
    traffic = Traffic()
    for shares in ({"standard": 1.0}, {"standard": 0.8, PINNED: 0.2}):
        seen = Sample(running=1, target=1, arrivals_per_s=100.0, class_shares=shares)
        for _ in range(3600):
            traffic = observe_traffic(traffic, seen, MODEL, 0.5)
    assert dict(traffic.class_shares) == pytest.approx({"standard": 0.8, PINNED: 0.2}, abs=0.01)


@pytest.mark.parametrize("slowness", [0.5, 1.0, 2.0])
def test_replicas_follow_the_engines_and_not_the_model(slowness):
    """With a service model that is wrong by two, requests are in time once that is known.

    By the model a replica carries 40 requests/s: 20 tokens in 10 steps of 10 ms, four at once.
    """
    policy = Deciding(
        config(
            slo={"ttft_s": 0.5, "time_per_token_s": 0.05},
            cold_start_s=10,
            max_replicas=12,
        ),
        replace(MODEL, step_rows=100),
        WATCHED,
    )
    given = poisson(60, 9000, 50, 20)
    outcome = run(given, policy, replicas=2, most=12, cold_start_s=10.0, slowness=slowness)
    late = given.arrival_s > 90
    in_time = outcome.ttft_s[late] <= 0.5
    assert np.mean(in_time) > 0.99
    fewest = 60 * slowness / 40
    assert fewest <= outcome.timeline.ready[-1] <= 2 * fewest + 1


@dataclass
class Remembering:
    """A policy that shows what it was told and what it has learnt."""

    state: State = field(default_factory=State)
    samples: list[Sample] = field(default_factory=list)

    def __call__(self, seen: Sample, now: float) -> Decision:
        self.samples.append(seen)
        wants = config(min_replicas=2, max_replicas=2, threshold={"floor": 1.0})
        decision = decide(seen, self.state, wants, replace(MODEL, step_rows=400), now)
        self.state = decision.state
        return decision


@pytest.mark.parametrize("slowness", [0.5, 1.0, 2.0])
def test_simulated_engines_report_what_real_ones_do(slowness):
    """Prompts of 300 rows take 210 ms where decoding takes 10: what is learnt is the truth."""
    policy = Remembering()
    run(poisson(4, 800, 300, 20), policy, replicas=2, step_tokens=400, slowness=slowness)
    assert policy.state.traffic.slowness == pytest.approx(slowness, rel=0.1)


def test_a_simulated_report_by_hand():
    """150 prompt tokens in steps of 100 and 50 rows, then 20 tokens in 10 steps of two rows."""
    policy = Remembering()
    run(trace((0.0, 150, 21)), policy, replicas=2, step_tokens=100)
    (load,) = (load for load in policy.samples[1].loads if load.step_s)
    assert load.step_s == pytest.approx(0.010)
    assert (load.prompt_rows, load.prompt_share) == (75, pytest.approx(2 / 12))
    assert load.decode_rows == pytest.approx(20 / 12)


def test_before_any_request_lengths_are_within_the_limits():
    """Guards a fleet that holds its replicas for slow, since their answers may be short only."""
    usual = Traffic()
    assert Traffic.within(48, 256) == replace(usual, prompt_tokens=208, output_tokens=48)
    assert Traffic.within(10_000, None) == usual
    assert Traffic.within(10, 8).prompt_tokens == 1
