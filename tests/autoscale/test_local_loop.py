"""The fast loop inside one replica, on a queue of its own."""

from autoscale.fleets import CONFIG, MEMORY_BOUND
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.autoscale.sample import Traffic
from mars_ray.autoscale.threshold import RAISE_DWELL_S, LocalLoop, SetPoint, ladder

RUNGS = ladder(MEMORY_BOUND, CONFIG, Traffic(output_tokens=100))
# A tenth of a second, as a replica ticks; 10 requests/s are what it carries at the set-point.
TICK_S = 0.1


def test_a_queue_lowers_the_threshold_at_once_and_its_end_raises_it_again():
    """Guards waiting for the policy: one tick down, the dwell time up."""
    loop = LocalLoop(CONFIG, SetPoint(1.0, rungs=RUNGS))
    assert [loop.tick(8, tick * 0.5, tick * TICK_S) for tick in range(100)] == [1.0] * 100
    assert loop.tick(200, 50, 100 * TICK_S) == RUNGS[-1].threshold
    begin = 101
    later = [loop.tick(4, 50, (begin + tick) * TICK_S) for tick in range(400)]
    dwell = RAISE_DWELL_S / TICK_S
    assert dwell <= later.index(1.0) + 1 <= 2 * dwell + 1 / TICK_S


def test_only_what_the_policy_allows():
    """A spent budget, or a fixed number of replicas: nothing is lowered."""
    for rungs in ((), RUNGS[:1]):
        loop = LocalLoop(CONFIG, SetPoint(1.0, rungs=rungs))
        assert {loop.tick(1000, tick * 50, tick * TICK_S) for tick in range(100)} == {1.0}


TICKS = st.lists(
    st.tuples(
        st.floats(0, 1e4),
        st.integers(0, 100),
        st.floats(0, 10),
        st.sampled_from([rung.threshold for rung in RUNGS]),
        st.integers(0, len(RUNGS)),
    ),
    max_size=40,
)


@given(TICKS)
def test_it_stays_within_what_is_allowed(ticks):
    """Whatever the queue does: one of the rungs, or the policy's threshold if that is lower."""
    loop = LocalLoop(CONFIG, SetPoint(1.0))
    now = arrived = 0.0
    for in_system, arrivals, dt, threshold, rungs in ticks:
        loop.set_point = SetPoint(threshold, rungs=RUNGS[:rungs])
        now, arrived = now + dt, arrived + arrivals
        in_force = loop.tick(in_system, arrived, now)
        assert in_force <= threshold
        assert in_force in {threshold, *(rung.threshold for rung in loop.set_point.rungs)}
