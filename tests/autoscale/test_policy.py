"""The policy in a closed loop with a fluid fleet."""

from dataclasses import replace
from itertools import pairwise

import pytest
from autoscale.fleets import ARITHMETIC_BOUND, CONFIG, MEMORY_BOUND, Fleet, config, sample

from mars_ray.autoscale.policy import Decision, State, decide
from mars_ray.autoscale.sample import ReplicaLoad, Traffic
from mars_ray.autoscale.threshold import RAISE_DWELL_S, ladder


def changes(log: list[Decision]) -> int:
    """How often replicas or threshold moved."""
    return sum(
        (a.replicas, a.threshold_setpoint) != (b.replicas, b.threshold_setpoint)
        for a, b in pairwise(log)
    )


@pytest.mark.parametrize("rate", [0.0, 9.9, 10.1, 75.0, 140.0, 1000.0])
def test_constant_load_moves_nothing(rate):
    """Guards hunting: once the load is known, half an hour of it changes nothing."""
    fleet = Fleet(CONFIG, running=1 + min(19, int(rate / 10)))
    fleet.run(4500, lambda _: rate)
    assert changes(fleet.run(1800, lambda _: rate)) == 0
    assert fleet.log[-1].replicas >= min(20, rate / 10)


def test_a_step_is_absorbed_by_quality_until_replicas_come():
    """The whole story once: lower within two seconds, replicas, set-point again, fewer replicas."""
    fleet = Fleet(CONFIG, running=3)
    fleet.run(300, lambda _: 20.0)
    before = len(fleet.log)
    fleet.run(300, lambda _: 33.0)
    burst = fleet.log[before:]
    lowered = next(i for i, d in enumerate(burst) if d.threshold_setpoint != 1)
    assert lowered <= 10
    ordered = next(i for i, d in enumerate(burst) if d.replicas >= 4)
    back = max(i for i, d in enumerate(burst) if d.threshold_setpoint != 1)
    assert back < ordered + 40 + RAISE_DWELL_S + 5
    fleet.run(900, lambda _: 5.0)
    assert fleet.log[-1].replicas >= 4, "the record of an hour is kept"
    fleet.run(3600, lambda _: 5.0)
    assert fleet.log[-1].replicas == 1
    assert fleet.log[-1].threshold_setpoint == 1


def test_quality_is_not_touched_where_it_buys_nothing():
    """Guards losing quality for nothing: where every row costs, masks pay at no threshold."""
    fleet = Fleet(CONFIG, ARITHMETIC_BOUND)
    log = fleet.run(600, lambda now: 200.0 if now > 100 else 5.0)
    assert {d.threshold_setpoint for d in log} == {1.0}
    assert any("carries no more" in d.reason for d in log)


def test_at_the_maximum_quality_goes_first_and_then_load():
    """Guards refusing requests that a lower threshold would have carried."""
    fleet = Fleet(config(max_replicas=4), running=4)
    fleet.run(300, lambda _: 45.0)
    assert fleet.log[-1].threshold_setpoint == 0.3
    assert not any(d.shed for d in fleet.log)
    fleet.run(300, lambda _: 80.0)
    last = fleet.log[-1]
    assert last.threshold_setpoint == 0.1
    assert last.shed == pytest.approx(1 - 56 / 80, abs=0.05)
    # What is let in is not late: less waits than the floor serves within the deadline.
    assert fleet.in_system < 64 + 56 * fleet.config.slo.ttft_s
    assert "refusing" in last.reason


def test_what_is_refused_is_told_as_a_share_of_all():
    """Pinned requests are let in, so more of the others are refused."""
    fleet = Fleet(config(max_replicas=2), running=2, pinned=0.5)
    last = fleet.run(400, lambda _: 80.0)[-1]
    assert f"refusing {last.shed / 2:.0%} of the new" in last.reason


def test_below_the_maximum_nothing_is_refused():
    """Guards 429s while replicas could be had."""
    fleet = Fleet(config(max_replicas=40))
    assert not any(d.shed for d in fleet.run(600, lambda now: 100.0 if now > 60 else 1.0))


def test_quality_returns_at_once_after_a_long_overload():
    """Anti-windup: a long time at the floor does not delay the return beyond two dwell times."""
    fleet = Fleet(config(max_replicas=4), running=4)
    fleet.run(1200, lambda _: 80.0)
    log = fleet.run(60, lambda _: 10.0)
    first = next(i for i, d in enumerate(log) if d.threshold_setpoint == 1)
    assert first <= 2 * RAISE_DWELL_S + 5


def test_thresholds_do_not_flutter():
    """Dwell: a load that swings around a rung's edge each second moves the threshold rarely."""
    fleet = Fleet(config(max_replicas=4), running=4)
    log = fleet.run(600, lambda now: 52.0 if now % 2 else 36.0)
    thresholds = [decision.threshold_setpoint or 0 for decision in log]
    raised = sum(later > earlier for earlier, later in pairwise(thresholds))
    assert raised <= 600 / RAISE_DWELL_S / 2


def test_a_spent_budget_keeps_the_set_point():
    """The operator's budget: mean points lost over the window stay within it."""
    fleet = Fleet(config(max_replicas=4, quality_budget_points=0.5), running=4)
    log = fleet.run(1800, lambda _: 50.0)
    assert any("the budget is spent" in d.reason for d in log)
    assert max(d.state.quality.spent_points for d in log) < 0.52


def test_what_the_set_point_loses_spends_nothing():
    """Guards a budget that is gone for good because of what the operator has chosen."""
    below = config(
        max_replicas=4, quality_budget_points=0.5, threshold={"set_point": 0.3, "floor": 0.1}
    )
    calm = Fleet(below, running=4).run(600, lambda _: 10.0)
    assert {d.threshold_setpoint for d in calm[60:]} == {0.3}
    assert calm[-1].state.quality.spent_points == 0
    log = Fleet(below, running=4).run(1800, lambda _: 55.0)
    assert 0 < max(d.state.quality.spent_points for d in log) < 0.52


def test_points_are_spent_where_replicas_lower_their_own_threshold():
    """The budget sees what is in force, not what the policy said."""

    def spent(threshold: float | None) -> float:
        state = State(traffic=Traffic(output_tokens=100))
        for now in range(60):
            loads = (ReplicaLoad(running=5, threshold=threshold), ReplicaLoad(running=5))
            seen = sample(2, 8.0, loads=loads)
            state = decide(seen, state, CONFIG, MEMORY_BOUND, float(now)).state
        return state.quality.spent_points

    assert spent(None) == 0
    assert spent(0.1) == pytest.approx(5 * spent(0.3)) != 0


def test_a_jump_is_ordered_for_within_seconds():
    """Guards waiting for a window to be full: a tenfold load is ordered for at once."""
    fleet = Fleet(CONFIG)
    fleet.run(600, lambda _: 8.0)
    log = fleet.run(8, lambda _: 100.0)
    assert log[-1].replicas >= 8
    assert "for the backlog" in log[-1].reason


def test_replicas_on_their_way_are_credited():
    """Guards ordering again each tick: one step orders about what it needs, once."""
    fleet = Fleet(CONFIG)
    fleet.run(600, lambda _: 8.0)
    log = fleet.run(400, lambda _: 60.0)
    assert max(d.replicas for d in log) <= 14
    assert log[-1].replicas <= 9


def mixed(*shares: tuple[str, float]) -> Traffic:
    return Traffic(prompt_tokens=1.0, output_tokens=100.0, class_shares=shares)


def test_pinned_requests_and_classes_are_not_counted_as_capacity():
    """A fleet whose requests are all pinned gains nothing by a lower threshold."""
    pinned = mixed(("pinned", 1.0))
    assert len(ladder(MEMORY_BOUND, CONFIG, pinned)) == 1
    gold = config(quality_classes={"gold": 0.3})
    half = ladder(MEMORY_BOUND, gold, mixed(("gold", 0.5)))
    free = ladder(MEMORY_BOUND, gold, mixed())
    assert half[1].requests_per_s == free[1].requests_per_s
    assert half[0].requests_per_s < half[2].requests_per_s < free[2].requests_per_s
    assert half[2].points_lost == pytest.approx(0.5 * 1 + 0.5 * 5)
    unknown = ladder(MEMORY_BOUND, gold, mixed(("silver", 1.0)))
    assert len(unknown) == 1


def test_missing_and_stale_metrics_hold():
    """Right after a controller restart the policy is called without data: publish nothing."""
    unknown = replace(sample(3, 5.0), arrivals_per_s=None)
    for seen in (sample(3, 5.0, age_s=None), sample(3, 5.0, age_s=60.0), unknown):
        decision = decide(seen, State(), CONFIG, MEMORY_BOUND, 10.0)
        assert (decision.replicas, decision.threshold_setpoint, decision.shed) == (3, None, 0)
        assert decision.reason.startswith("Holding 3 replicas")
    fleet = Fleet(CONFIG)
    fleet.run(300, lambda _: 55.0)
    asked = fleet.log[-1].replicas
    held = decide(sample(0, 5.0, age_s=None), fleet.state, CONFIG, MEMORY_BOUND, fleet.now)
    assert held.replicas == asked
    assert held.state.quality == fleet.state.quality


def test_idle_fleets_go_to_the_minimum_or_to_zero():
    """And to zero only when allowed, and only after the stated time."""
    fleet = Fleet(config(min_replicas=2), running=6)
    assert fleet.run(900, lambda _: 0.0)[-1].replicas == 2
    fleet = Fleet(config(scale_to_zero=True, idle_to_zero_s=300), running=6)
    fleet.run(200, lambda _: 0.0)
    assert fleet.log[-1].replicas >= 1
    fleet.run(200, lambda _: 0.0)
    assert fleet.log[-1].replicas == 0
    assert fleet.log[-1].reason.startswith("0 replicas")
    fleet.tick(2.0)
    assert fleet.log[-1].replicas >= 1
