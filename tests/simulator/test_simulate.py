"""The simulator: hand-worked runs, conservation, equality with stepping one by one."""

from dataclasses import replace

import numpy as np
import pytest
from simulator.simulated import MODEL, poisson, run, trace

from mars_ray.autoscale.policy import Decision, State
from mars_ray.config.scaling import ScalingConfig, Slo
from mars_ray.simulator.engine.arrays import DONE, FAILED, SHED
from mars_ray.simulator.engine.run import Deciding, summarise


class Script:
    """Replicas and threshold by time: the last entry that is not in the future."""

    def __init__(self, *steps: tuple[float, int, float], shed: float = 0.0) -> None:
        self.steps, self.shed = steps, shed

    def __call__(self, sample, now: float) -> Decision:
        _, replicas, threshold = [step for step in self.steps if step[0] <= now][-1]
        return Decision(replicas, threshold, self.shed, "script", State())


def test_one_request_by_hand():
    """80 prompt tokens in one step of 10 ms give the first token; 8 more at 2 a step."""
    outcome = run(trace((1.0, 80, 9)))
    assert outcome.requests["first_s"][0] == pytest.approx(1.010)
    assert outcome.requests["end_s"][0] == pytest.approx(1.050)


def test_two_requests_by_hand():
    """The second waits for the step that runs, and its long prompt takes the rows that are left.

    First: prompt done at 10 ms. Second arrives at 12 ms, joins at 20 ms with 98 rows a step beside
    the first one's 2: prompt of 150 done at 40 ms, when the first has 7 of its 9 tokens.
    """
    outcome = run(trace((0.0, 50, 9), (0.012, 150, 3)))
    firsts, ends = outcome.requests["first_s"], outcome.requests["end_s"]
    assert firsts.tolist() == pytest.approx([0.010, 0.040])
    assert ends.tolist() == pytest.approx([0.050, 0.050])


def test_machines_that_become_slower():
    """Twice as slow from 25 ms on, as before from 55 ms on; a step that runs goes on as it began.

    Prompt done at 10 ms, steps to 20, 30, 50, 70 and 80 ms: eleven tokens. No step, no change.
    """
    slowdowns = ({"at_s": 0.025, "slowness": 2.0}, {"at_s": 0.055, "slowness": 1.0})
    given = trace((0.0, 80, 11), (0.100, 80, 3))
    outcome = run(given, slowdowns=slowdowns, tick_s=0.5)
    assert outcome.requests["first_s"].tolist() == pytest.approx([0.010, 0.110])
    assert outcome.requests["end_s"].tolist() == pytest.approx([0.080, 0.120])


def test_all_of_a_step_is_slower():
    """From second 0 on, what cached tokens cost included: times twice those of the normal run."""
    given = trace((0.0, 100, 25), (0.0, 60, 9))
    model = replace(MODEL, cache_token_s=1e-4)
    slow = run(given, model=model, slowdowns=({"at_s": 0.0, "slowness": 2.0},))
    normal = run(given, model=model)
    for name in ("first_s", "end_s"):
        np.testing.assert_allclose(slow.requests[name], 2 * normal.requests[name])


def test_a_cached_token_costs_in_every_step():
    """A prompt of 100 costs its reading from the second step on, and each new token too."""
    model = replace(MODEL, cache_token_s=1e-4)
    outcome = run(trace((0.0, 100, 5)), model=model)
    assert outcome.requests["first_s"][0] == pytest.approx(0.010)
    # Two steps of 10 ms: with 101 and with 103 tokens cached.
    assert outcome.requests["end_s"][0] == pytest.approx(0.030 + 0.0101 + 0.0103)


def test_the_batch_and_the_cache_are_limits():
    """Four places: the fifth starts when one leaves. A cache of 200 tokens holds two of 90."""
    five = trace(*[(0.0, 10, 21)] * 5)
    ends = run(five).requests["end_s"]
    assert sorted(ends)[3] < ends[4]
    crowded = run(trace(*[(0.0, 60, 30)] * 3), model=replace(MODEL, cache_tokens=200))
    firsts = np.sort(crowded.requests["first_s"])
    assert firsts[2] > np.sort(crowded.requests["end_s"])[0]


def test_one_request_at_a_time_is_a_queue_with_constant_service():
    """M/D/1 (Pollaczek-Khinchine): at load 0.7 the mean wait is 0.7 / (2 * 0.3) services."""
    model = replace(MODEL, max_batch=1)
    service = 0.010 + 0.010 * 10
    outcome = run(
        poisson(0.7 / service, 30_000, 10, 21), model=model, waiting_requests=10_000, tick_s=60
    )
    waits = outcome.ttft_s - 0.010
    assert waits.mean() / service == pytest.approx(0.7 / 0.6, rel=0.06)


def test_littles_law():
    """Requests in the system = rate * time in it, on a busy fleet."""
    outcome = run(poisson(40, 8000, 30, 40), replicas=3)
    spent = (outcome.requests["end_s"] - outcome.requests["arrival_s"]).mean()
    rate = 8000 / outcome.trace.duration_s
    assert outcome.timeline.outstanding.mean() == pytest.approx(rate * spent, rel=0.05)


def test_requests_at_second_zero_are_no_rate_without_end():
    """The first look comes at second 0 too: as traces begin there, policies would order all."""
    rates = []

    def policy(sample, now: float) -> Decision:
        rates.append(sample.arrivals_per_s)
        return Decision(1, 1.0, 0.0, "one", State())

    run(trace((0.0, 10, 40), (0.0, 10, 40), (1.5, 10, 40)), policy, tick_s=0.5, metrics_lag_s=0.5)
    known = [rate for rate in rates if rate is not None]
    assert max(known) == pytest.approx(4.0)
    assert sum(known) * 0.5 == pytest.approx(3), "and none is forgotten"


def test_a_cold_start_takes_its_time_and_is_paid_for():
    """The second replica is asked for at 10 s, ready at 40 s, and counts from 10 s on."""
    slow = poisson(2, 100, 10, 5)
    outcome = run(slow, Script((0, 1, 1.0), (10, 2, 1.0)), most=2, cold_start_s=30)
    ready = outcome.timeline.ready[outcome.timeline.at_s.searchsorted([39, 41])]
    assert ready.tolist() == [1, 2]
    assert outcome.replica_s == pytest.approx(outcome.end_s + outcome.end_s - 10)


def test_the_first_cold_starts_may_be_known_each():
    """A run that took place is simulated with its own, and the policy hears of the newest."""
    seen = []
    script = Script((0, 1, 1.0), (10, 3, 1.0), (60, 4, 1.0))

    def policy(sample, now: float) -> Decision:
        seen.append(sample.cold_start_s)
        return script(sample, now)

    slow = poisson(1, 100, 10, 5)
    outcome = run(slow, policy, most=4, first_cold_starts_s=(5, 20), cold_start_s=8)
    at = outcome.timeline.at_s.searchsorted([14, 16, 29, 31, 67, 69])
    assert outcome.timeline.ready[at].tolist() == [1, 2, 2, 3, 3, 4]
    assert [seen[i] for i in at] == [None, 5, 5, 20, 20, 8]


def test_with_no_replica_requests_are_held_until_one_is_ready():
    """Guards losing what comes while all replicas start."""
    late = Script((0, 0, 1.0), (1, 1, 1.0))
    outcome = run(trace((1.0, 10, 3), (2.0, 10, 3)), late, replicas=0, most=1)
    assert outcome.requests["outcome"].tolist() == [DONE, DONE]
    assert outcome.requests["first_s"].min() >= 101


def test_what_a_policy_always_wants_is_there_before_the_first_request():
    """Guards a fleet with a minimum that pays a cold start for it, where a fixed one pays none."""
    wanted = run(poisson(2, 100, 10, 5), Script((0, 3, 1.0)), replicas=1, most=3)
    fixed = run(poisson(2, 100, 10, 5), replicas=3)
    np.testing.assert_array_equal(wanted.requests["first_s"], fixed.requests["first_s"])
    assert wanted.replica_s == fixed.replica_s


def test_a_drained_replica_finishes_what_it_has():
    """Guards dropping requests at scale-down, and charging for a replica that is gone."""
    long = trace(*[(0.0, 10, 20_000)] * 2, (50.0, 10, 5))
    outcome = run(long, Script((0, 2, 1.0), (1, 1, 1.0)), replicas=2)
    assert set(outcome.requests["outcome"]) == {DONE}

    assert outcome.timeline.draining.max() == 1
    assert outcome.replica_s < 2 * outcome.end_s + 1


def test_a_killed_replicas_requests_start_again_once():
    """Retried elsewhere from the start; with no retries left they have failed."""
    load = poisson(30, 3000, 30, 60)
    kills = [{"at_s": 40.0}, {"at_s": 50.0, "replicas": 2}]
    outcome = run(load, replicas=4, kills=kills, cold_start_s=5)
    assert set(outcome.requests["outcome"]) == {DONE}
    assert (outcome.requests["retries"] > 0).sum() >= 3
    assert outcome.timeline.ready.min() <= 2
    lost = run(load, replicas=4, kills=kills, cold_start_s=5, retries=0)
    assert (lost.requests["outcome"] == FAILED).sum() >= 3


def test_all_may_be_over_in_no_time():
    """Guards a division by it."""
    outcome = run(trace((0.0, 10, 50)), kills=[{"at_s": 0.0}], retries=0)
    assert outcome.end_s == 0
    figures = summarise(outcome, Slo(), 100.0)
    assert (figures["failed"], figures["mean_replicas"]) == (1, 0)


def test_a_full_queue_refuses():
    """429 beyond the limit: of ten at once one runs, and two wait for the next step."""
    outcome = run(trace(*[(0.0, 10, 50)] * 10), waiting_requests=2)
    assert outcome.requests["outcome"].tolist() == [DONE] * 3 + [SHED] * 7


def test_shedding_spares_pinned_requests():
    """A share of the others is refused, of the pinned ones none; nobody goes below its floor."""
    count = 2000
    load = poisson(20, count, 10, 10)
    pinned = np.where(np.arange(count) % 2 == 0, 1.0, 0.0)
    load = replace(load, pinned_threshold=pinned)
    outcome = run(load, Script((0, 2, 0.5), shed=0.5), replicas=2)
    refused = outcome.requests["outcome"] == SHED
    assert not refused[pinned == 1].any()
    assert refused[pinned == 0].mean() == pytest.approx(0.5, abs=0.05)
    done = ~refused
    assert set(outcome.requests["lowest"][(pinned == 1) & done]) == {0}
    assert not (outcome.requests["lowest"] > outcome.requests["pinned"]).any()


@pytest.mark.parametrize(("pinned", "refused"), [(0.0, 5), (0.1, 0)])
def test_who_pins_the_lowest_level_pins(pinned, refused):
    """Guards requests that are refused by where the ladder ends, not by what they say."""
    given = trace(*[(1.0 + i, 50, 9) for i in range(5)])
    given = replace(given, pinned_threshold=np.full(5, pinned))
    outcome = run(given, Script((0, 1, 1.0), shed=1.0))
    assert (outcome.requests["outcome"] == SHED).sum() == refused


def test_a_lower_threshold_is_faster_and_costs_points():
    """Three tokens a step instead of two; 4 points for all but the first token."""
    high, low = (run(trace((0.5, 10, 31)), Script((0, 1, t))) for t in (1.0, 0.5))
    assert high.requests["end_s"][0] > low.requests["end_s"][0]
    figures = summarise(low, Slo(), 90)
    assert figures["points_lost"] == pytest.approx(4 * 30 / 31)
    assert figures["effective_accuracy"] == pytest.approx(90 - 4 * 30 / 31)
    assert figures["below_set_point_s"] > 0


def test_priorities_pass_in_the_queue():
    """The lower number goes first, equals in order."""
    rows = [(0.0, 10, 100)] * 4 + [(0.1, 10, 5)] * 3
    outcome = run(trace(*rows, priority=[0, 0, 0, 0, 1, 0, 1]), replicas=1)
    first = outcome.requests["first_s"]
    assert first[5] <= first[4] <= first[6]


@pytest.mark.parametrize("routing", ["two-choices", "least-outstanding"])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_once(routing, seed):
    """Conservation under kills, scaling, shedding and full queues."""
    load = poisson(60, 4000, 60, 40, seed)
    script = Script((0, 3, 1.0), (20, 6, 0.5), (40, 1, 1.0), (50, 5, 0.5), shed=0.05)
    changes = {"kills": [{"at_s": 25.0}, {"at_s": 45.5}], "waiting_requests": 30}
    outcome = run(load, script, most=6, cold_start_s=4, routing=routing, seed=seed, **changes)
    figures = summarise(outcome, Slo(), 100)
    assert figures["done"] + figures["shed"] + figures["failed"] == len(load)
    done = outcome.requests[outcome.requests["outcome"] == DONE]
    assert (done["arrival_s"] < done["first_s"]).all()
    assert (done["first_s"] <= done["end_s"]).all()


def test_the_same_seed_gives_the_same_run():
    """To the bit, with the policy that serves; another seed routes otherwise."""
    config = ScalingConfig(max_replicas=6)
    load = poisson(80, 4000, 60, 40)
    first, again, other = (
        run(load, Deciding(config, MODEL), most=6, cold_start_s=5, seed=seed) for seed in (1, 1, 2)
    )
    assert first.replica_s == again.replica_s
    np.testing.assert_array_equal(first.requests["end_s"], again.requests["end_s"])
    assert (first.requests["replica"] != other.requests["replica"]).any()


def test_the_policy_sees_only_what_is_old_enough():
    """Guards a sample from the future: with a lag of 3 s the first ones hold no metrics."""
    seen = []

    def policy(sample, now):
        seen.append(sample)
        return Decision(1, 1.0, 0.0, "", State())

    run(poisson(20, 200, 10, 5), policy, metrics_lag_s=3)
    assert [sample.age_s for sample in seen[:6]] == [None, None, None, None, 3.0, 3.0]
    # Of the first second: nothing can be measured at its beginning.
    assert seen[4].arrivals_per_s == pytest.approx(20, abs=10)
    assert seen[6].arrivals_per_s > 5
    assert seen[6].loads[0].step_s == pytest.approx(0.010)


def test_the_way_of_a_reply_counts_in_its_first_token():
    """Guards a first token in time for the engine only: 40 ms of HTTP make it late."""
    given = poisson(20, 50, 10, 5)
    near, far = run(given), run(given, overhead_s=0.04)
    np.testing.assert_allclose(far.ttft_s, near.ttft_s + 0.04)
    slo = Slo(ttft_s=float(np.median(near.ttft_s)) + 0.02, time_per_token_s=1.0)
    assert near.within(slo).sum() > 25
    np.testing.assert_array_equal(far.within(slo), far.ttft_s <= slo.ttft_s)
    assert far.within(slo).sum() < near.within(slo).sum()
