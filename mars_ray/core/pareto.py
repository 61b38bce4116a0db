"""What no other point beats. Plain Python."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def undominated(items: Sequence[Item], gains: Callable[[Item], tuple[float, ...]]) -> list[Item]:
    """The items that no other is at least as good as in every gain and better in one.

    `gains` gives an item's coordinates, more is better. The order stays; equals all stay.
    """
    points = [gains(item) for item in items]

    def beaten(mine: tuple[float, ...]) -> bool:
        return any(
            other != mine and all(o >= m for o, m in zip(other, mine, strict=True))
            for other in points
        )

    return [item for item, point in zip(items, points, strict=True) if not beaten(point)]
