"""What the policy keeps from the past: the floor, the utilisation, the error budget."""

from dataclasses import replace

import pytest
from autoscale.fleets import CONFIG, WATCHED, Fleet, config
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.autoscale.policy import (
    Counts,
    Feedback,
    Floor,
    State,
    floor_replicas,
    learn,
    quantile,
    watch_floor,
)
from mars_ray.autoscale.policy import observe_latencies as counted
from mars_ray.autoscale.threshold import (
    KEPT,
    WINDOW_S,
    Demand,
    burst_index,
    observe_arrivals,
    present_demand,
)
from mars_ray.errors import DataError

WEEK_S = 7 * 86_400.0


def watched(hours: int, needed, floor: Floor | None = None, start: int = 0) -> tuple[Floor, Demand]:
    """The floor after these hours, in which an hour needs so many replicas."""
    floor, demand = floor or Floor(), Demand()
    for window in range(hours * KEPT):
        wall_s = (start * KEPT + window) * WINDOW_S
        rate = float(needed(int(wall_s // 3600)))
        demand = observe_arrivals(demand, rate, WINDOW_S, 4.0, capacity=1.0)
        floor = watch_floor(floor, demand, True, WINDOW_S, wall_s, 0.99)
    return floor, demand


@given(st.lists(st.floats(0, 100), min_size=1, max_size=KEPT), st.floats(0.5, 0.999))
def test_the_quantile_counts_requests_and_not_windows(windows, q):
    """What needs more than the quantile holds at most 1 - q of the demand."""
    kept = quantile(tuple(windows), q)
    above = sum(window for window in windows if window > kept)
    assert above <= (1 - q) * sum(windows) + 1e-6
    assert kept in (*windows, 0.0)


@pytest.mark.parametrize(("usual", "kept"), [(0.5, 1.75), (1.0, 3.5), (4.0, 11.0)])
def test_a_new_service_has_room_for_what_nobody_has_seen(usual, kept):
    """Three and a half times a small demand, less of a large one; after hours the record alone
    counts."""
    demand = Demand(windows=(usual,), rates=(2.0,))
    assert floor_replicas(Floor(), demand, 60, 0.0, 0.99) == pytest.approx(kept)
    floor, demand = watched(4, lambda hour: 2)
    assert floor_replicas(floor, demand, 60, 0.0, 0.99) == pytest.approx(2.0, rel=0.01)


def test_the_same_hour_of_the_week_is_remembered():
    """Before Tuesday's peak replicas are ordered as Monday's needed them, and a week later as
    that Tuesday did."""

    def load(hour: int) -> int:
        return 8 if hour % 24 == 9 else 1

    floor, demand = watched(34, load)
    nine = 33 * 3600.0
    quiet = replace(demand, windows=(1.0,) * KEPT)
    assert floor_replicas(floor, quiet, 60, nine, 0.99) == pytest.approx(8.0)
    assert floor_replicas(floor, quiet, 60, nine - 3 * 3600, 0.99) == pytest.approx(1.0, rel=0.01)
    ahead = floor_replicas(floor, quiet, 60, nine - 80, 0.99)
    assert ahead == pytest.approx(8.0), "a cold start before the hour begins"
    assert floor_replicas(floor, quiet, 60, nine + WEEK_S, 0.99) == pytest.approx(8.0)


def test_seconds_count_only_beyond_their_noise():
    """Four requests in four seconds are no load; a hundred a second are at once."""
    calm = Demand(fast_per_s=1.0, fast_span_s=4.0, windows=(0.1,) * 5, rates=(1.0,) * 5)
    assert present_demand(calm, 10.0) == pytest.approx(0.1)
    assert present_demand(replace(calm, fast_per_s=100.0), 10.0) == pytest.approx(9.0, abs=0.1)
    assert burst_index([1.0, 5.0] * 5) > burst_index([2.9, 3.0] * 5) == 1


def window(feedback: Feedback, load: float, late: float, slow: float = 0.0) -> Feedback:
    """A window of 100 requests on one replica."""
    counts = {"open": Counts(100.0, 100 * max(slow, late), 100 * late)}
    return learn(counted(feedback, counts, 1, WINDOW_S), load, 0.99)


def test_lateness_at_a_load_that_was_believed_lowers_the_belief():
    """And a load above it explains lateness by itself."""
    before = Feedback(utilisation=0.8)
    assert window(before, 0.6, late=0.5).utilisation == pytest.approx(0.8 * 0.85)
    assert window(before, 0.6, late=0.02).utilisation == pytest.approx(0.8 * 0.97)
    assert window(before, 1.5, late=0.5).utilisation == 0.8
    assert window(before, 0.6, late=0.009).utilisation >= 0.8


def test_belief_rises_slowly_where_requests_are_near_their_limits():
    """Guards trying the cliff at full speed."""
    before = Feedback(utilisation=0.6)
    free, near = window(before, 0.6, 0.0), window(before, 0.6, 0.0, slow=0.5)
    assert free.utilisation == pytest.approx(0.6 * 1.014)
    assert near.utilisation == pytest.approx(0.6 * 1.002)


def test_empty_replicas_teach_nothing():
    """Guards a belief that grew while the fleet was nearly idle, and orders too few at a jump."""
    before = Feedback(utilisation=0.6)
    assert window(before, 0.29, late=0.0).utilisation == 0.6
    assert window(before, 0.31, late=0.0).utilisation > 0.6


def test_the_class_that_is_late_counts():
    """Guards a few gold requests that are always late among many others in time."""
    counts = {"open": Counts(1000.0), "gold": Counts(10.0, 10.0, 10.0)}
    late = learn(counted(Feedback(), counts, 1, WINDOW_S), 0.5, 0.99)
    assert late.utilisation < Feedback().utilisation


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1), st.floats(0, 1)), max_size=60))
def test_belief_stays_within_its_bounds(windows):
    """Whatever comes."""
    feedback = Feedback()
    for load, late, slow in windows:
        feedback = window(feedback, load, late, slow)
        assert 0.2 <= feedback.utilisation <= 1.0


def test_a_spent_error_budget_slows_trying():
    """Guards a mean share of late requests that is above the objective for hours."""
    spent = Feedback(utilisation=0.6, hour=Counts(1e6, 2e4, 2e4))
    assert spent.spent(0.99) == pytest.approx(2.0)
    assert window(spent, 0.6, 0.0).utilisation == pytest.approx(0.6 * 1.002)


def test_what_was_learnt_outlives_the_controller():
    """The memory comes back whole, and decisions go on from it."""
    fleet = Fleet(CONFIG, state=State(traffic=WATCHED.traffic))
    fleet.run(900, lambda now: 60.0 if now % 300 > 200 else 5.0)
    again = State.from_json(fleet.state.to_json())
    assert (again.demand, again.floor, again.feedback, again.traffic) == (
        fleet.state.demand,
        fleet.state.floor,
        fleet.state.feedback,
        fleet.state.traffic,
    )
    old, new = Fleet(CONFIG, running=3, state=again), Fleet(CONFIG, running=3)
    assert old.run(30, lambda _: 5.0)[-1].replicas > new.run(30, lambda _: 5.0)[-1].replicas


@pytest.mark.parametrize("text", ["", "{}", '{"demand": 3}', "[1, 2]"])
def test_a_memory_that_is_none_is_an_error(text):
    """Guards half a memory."""
    with pytest.raises(DataError, match="not a memory of the autoscaling policy"):
        State.from_json(text)


def test_a_memory_of_another_layout_is_an_error():
    """Guards figures that a later release means otherwise; what has no mark is of the first."""
    text = State(feedback=Feedback(utilisation=0.51)).to_json()
    other = text.replace('"version":1', '"version":2')
    with pytest.raises(DataError, match="version"):
        State.from_json(other)
    unmarked = text.replace(',"version":1', "")
    assert "version" not in unmarked
    assert State.from_json(unmarked).feedback.utilisation == 0.51


def test_a_floor_of_minutes_is_in_the_reason():
    """The sentence says why replicas are kept."""
    fleet = Fleet(config(max_replicas=20), state=State(traffic=WATCHED.traffic))
    log = fleet.run(500, lambda _: 10.0)
    assert any("kept by the record of 0.1 h, at " in decision.reason for decision in log)
