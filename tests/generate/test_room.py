"""How many engines a cluster holds."""

from mars_ray.generate.on_ray import room

NODES = [{"CPU": 8.0, "memory": 40.0}, {"CPU": 3.0, "memory": 100.0, "GPU": 2.0}, {"memory": 5.0}]


def test_room_is_counted_by_node():
    """Guards engines that wait for ever: what is left on two nodes does not add up to one place."""
    assert room(NODES, {"CPU": 2, "GPU": 0}) == 4 + 1
    assert room(NODES, {"CPU": 0.5}) == 16 + 6
    assert room(NODES, {"CPU": 1, "memory": 10.0}) == 4 + 3
    assert room(NODES, {"CPU": 1, "GPU": 0.5}) == 3
    assert room(NODES, {"CPU": 1, "GPU": 1}) == 2
    assert room(NODES, {"CPU": 16}) == 0
