"""The next event of a fleet: a tournament among the places, [2P] with P a power of two.

The winner of the subtree under i stands at tree[i]; place r enters at tree[P + r].
"""

from mars_ray.simulator.engine.arrays import Floats
from mars_ray.simulator.engine.compiled import compiled


@compiled
def set_event(tree: Floats, place: int, at_s: float) -> None:
    """The place's next event; infinite for none."""
    node = len(tree) // 2 + place
    tree[node] = at_s
    node //= 2
    while node >= 1:
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
        node //= 2


@compiled
def first_place(tree: Floats) -> int:
    """The place whose event comes first; of equals the lowest."""
    leaves = len(tree) // 2
    node = 1
    while node < leaves:
        node = 2 * node if tree[2 * node] <= tree[2 * node + 1] else 2 * node + 1
    return node - leaves
