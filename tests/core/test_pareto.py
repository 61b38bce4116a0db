"""What no other point beats."""

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.core.frontier import undominated

POINTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


def test_by_hand():
    """Equals stay together; a point that is worse in one and equal in the other goes."""
    points = [(1, 3), (2, 2), (2, 1), (1, 3), (0, 0)]
    assert undominated(points, lambda point: point) == [(1, 3), (2, 2), (1, 3)]


@given(POINTS)
def test_every_point_that_went_is_beaten_by_one_that_stays(points: list[tuple[int, int]]):
    """And none that stays is beaten by any other."""

    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a != b and a[0] >= b[0] and a[1] >= b[1]

    kept = undominated(points, lambda point: point)
    assert all(any(beats(k, p) for k in kept) for p in points if p not in kept)
    assert not any(beats(p, k) for k in kept for p in points)
