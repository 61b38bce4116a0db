"""The frontier: speed and accuracy of each mode and threshold, for one checkpoint on one task.

It lies beside the checkpoint as `frontier.json`; policies and simulators read it without torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mars_ray.errors import CheckpointError

FRONTIER_FILE = "frontier.json"
# How a label shows a mode's settings, where they are set.
_SHOWN = {
    "threshold": " {:g}",
    "measure": " {}",
    "window": " W={}",
    "groups": " G={}",
    "branches": " B={}",
    "cache_block": ", blocks of {}",
    "guesses": ", {} guesses",
}


def mode_label(mode: Mapping[str, Any]) -> str:
    """A mode's label, for example `confidence 0.95`; settings other than the defaults change it."""
    shown = [
        form.format(mode[key])
        for key, form in _SHOWN.items()
        if mode.get(key) is not None and mode[key] != "probability"
    ]
    alone = " without ngram" if mode.get("ngram") is False else ""
    return mode["type"] + "".join(shown) + alone


@dataclass(frozen=True, slots=True)
class PointPart:
    """Counts over some of a point's answers."""

    answers: int
    tokens: int
    forwards: int
    identical: float

    @property
    def tokens_per_forward(self) -> float | None:
        """T/F; None if there are no such answers."""
        return self.tokens / self.forwards if self.forwards else None


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One mode at one setting. Intervals are 95%; differences are against `exact`, paired."""

    mode: dict[str, Any]  # the mode's configuration, with its type
    problems: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    tokens: int
    forwards: int
    tokens_per_s: float
    identical: float  # share of problems with the same tokens as `exact`
    difference: float
    difference_low: float
    difference_high: float
    p_value: float
    # The next two are measured on prompts without reference answers.
    agreement: float | None = None  # share of tokens that the model itself would have chosen
    nll: float | None = None  # mean negative log-probability of a token, by the model itself
    looping: PointPart | None = None  # answers that end in a loop
    by_kind: dict[str, PointPart] | None = None  # answers that do not loop
    # The next two are measured on prompts of files.
    graded: int | None = None  # problems with a reference: if any, accuracy is their share
    first_difference: float | None = None  # tokens up to it; the median of answers that have one

    @property
    def tokens_per_forward(self) -> float:
        """T/F over all problems."""
        return self.tokens / self.forwards

    @property
    def has_references(self) -> bool:
        """Whether accuracy is by reference answers, and not by those of `exact`."""
        return self.agreement is None if self.graded is None else self.graded > 0

    @property
    def points_lost(self) -> float:
        """Percentage points lost against `exact`: of accuracy, or where nothing was graded of the
        tokens that the model itself would have chosen. Below 0 is noise."""
        if self.has_references or self.agreement is None:
            return -100 * self.difference
        return 100 * (1 - self.agreement)

    @property
    def without_loops(self) -> float | None:
        """T/F over answers that do not end in a loop; None where loops were not counted."""
        if self.looping is None or self.forwards == self.looping.forwards:
            return None
        return (self.tokens - self.looping.tokens) / (self.forwards - self.looping.forwards)

    @property
    def threshold(self) -> float | None:
        """The mode's threshold; None if it has none."""
        return self.mode.get("threshold")

    @property
    def label(self) -> str:
        """The mode's label, for example `confidence 0.95`."""
        return mode_label(self.mode)


@dataclass(frozen=True, slots=True)
class Frontier:
    """All points of a checkpoint on a task; the first one is `exact`."""

    checkpoint: str
    task: dict[str, Any]
    points: tuple[FrontierPoint, ...]
    provenance: dict[str, Any]
    reference_nll: float | None = None  # mean per token of the reference answers, if there are any

    def point(self, label: str) -> FrontierPoint:
        for point in self.points:
            if point.label == label:
                return point
        raise KeyError(f"no point {label!r}; there are {[p.label for p in self.points]}")

    def to_json(self) -> str:
        """The fields, and each point's label and T/F for readers without this class."""
        table = asdict(self)
        for point, row in zip(self.points, table["points"], strict=True):
            row |= {"label": point.label, "tokens_per_forward": point.tokens_per_forward}
        return json.dumps(table, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = FRONTIER_FILE) -> "Frontier":
        """Raises CheckpointError when the text is not a frontier."""
        try:
            frontier = _FRONTIER.validate_json(text)
        except ValidationError as error:
            raise CheckpointError(f"{source} is no frontier: {error}") from None
        if not frontier.points or min(point.forwards for point in frontier.points) < 1:
            raise CheckpointError(f"{source} is no frontier: it has a point without forwards")
        return frontier


_FRONTIER = TypeAdapter(Frontier)


def read_frontier(directory: str | Path) -> Frontier:
    """The frontier beside a checkpoint. Raises CheckpointError."""
    path = Path(directory) / FRONTIER_FILE
    try:
        return Frontier.from_json(path.read_text(), str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: run mars-ray evaluate first") from None


Item = TypeVar("Item")


def undominated(items: Sequence[Item], gains: Callable[[Item], tuple[float, ...]]) -> list[Item]:
    """The items not dominated by another: none is as good in every gain and better in one.

    `gains` gives an item's coordinates; more is better. The order is kept, and so are equal items.
    """
    points = [gains(item) for item in items]
    return [
        item
        for item, mine in zip(items, points, strict=True)
        if not any(
            other != mine and all(o >= m for o, m in zip(other, mine, strict=True))
            for other in points
        )
    ]
