"""Surges: what is ordered for the first one, and for the tenth of its kind."""

from autoscale.fleets import CONFIG, Fleet, config
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.autoscale.forecast import Surge, noted, passed

RATES = st.floats(0, 1e6)


def bursts(seconds: float):
    """Ten times the load for so long, once in ten minutes."""
    return lambda now: 80.0 if now % 600 >= 600 - seconds else 8.0


def most(log) -> int:
    """Replicas asked for at the same time."""
    return max(decision.replicas for decision in log)


def test_bursts_that_are_over_before_a_replica_is_ready_are_not_ordered_for():
    """Guards paying for replicas that come when the burst has gone: the threshold carries it."""
    fleet = Fleet(config(max_replicas=40))
    first = most(fleet.run(600, bursts(10)))
    fleet.run(6000, bursts(10))
    later = most(fleet.run(600, bursts(10)))
    assert first >= 6
    # What is left is for the backlog.
    assert later <= 0.75 * first
    assert fleet.state.surge.kept < 0.3


def test_bursts_that_stay_are_ordered_for_each_time():
    """Guards forgetting the first test's opposite: a load that stays is met by replicas."""
    fleet = Fleet(config(max_replicas=40))
    for _ in range(5):
        begin = len(fleet.log)
        fleet.run(600, bursts(300))
        # Within a quarter of a cold start.
        soon = fleet.log[begin : begin + 300 + int(CONFIG.cold_start_s) // 4]
        assert most(soon) >= 7
    assert fleet.state.surge.kept > 0.6


@given(st.lists(st.tuples(RATES, RATES, RATES, st.floats(0, 1000)), max_size=30))
def test_expects_between_the_usual_and_the_surge(events):
    """Whatever came before, a share is a share."""
    surge = Surge()
    for rate, usual, level, dt in events:
        if rate > max(usual, surge.rate if surge.left_s else 0):
            surge = noted(surge, rate, usual, lasts_s=100.0)
        surge = passed(surge, level, dt)
        assert 0 <= surge.kept <= 1
        if surge.left_s:
            assert surge.usual <= surge.expected <= surge.rate * (1 + 1e-9)
