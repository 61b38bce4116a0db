"""A service model from what is known of a checkpoint and a device.

It uses measured step costs (`mars-ray bench decode`) and acceptance from a frontier (`mars-ray
evaluate`); before anything is measured, a checkpoint's own files (`prior_model`).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median
from typing import Any, Literal

from mars_ray.autoscale.service_model import PLAIN, Level, ServiceModel, Shape
from mars_ray.core.frontier import Frontier, FrontierPoint
from mars_ray.errors import ConfigError

_MOST_ROWS = 512  # of one sequence in a step
# Acceptance rate of a draft where nothing is known; live measurements correct it.
_RATE = 0.7
# Tokens of the shortest reply whose T/F counts for the spread, and quantiles of it.
_LEAST_REPLY, _QUANTILES = 16, 20
# Step costs of the first replica until it has measured its own: half is fixed, the rest by row.
_STEPS = ((1, 0.02), (64, 0.04))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Number of masks per group, and of groups, of every sequence in each step of `verified`.

    An engine chooses for each sequence by the confidences of its drafts (`core.draft_choice`) and
    does a little better.
    """

    window: int
    groups: int


@dataclass(frozen=True, slots=True)
class Yield:
    """Tokens that a sequence commits and rows that it costs per forward in the long run."""

    tokens: float
    rows: float


def expected(uniform: Uniform, rates: Sequence[float]) -> Yield:
    """Tokens and rows per forward, for the rates at which drafts of each depth are accepted.

    After an outcome without masks, a step has no drafts: it commits a token and drafts anew.

    With c the probability that an outcome has masks, a share f of the forwards has drafts:
    f = f * c + (1 - f), since a forward without drafts has a single outcome, which has masks.
    """
    survival = list(accumulate(rates[: uniform.window], mul))
    if not survival:
        return Yield(1.0, 1.0)
    reached = [1.0, *survival]
    outcomes = [a - b for a, b in zip(reached, [*survival, 0.0], strict=True)]
    covered = (
        survival[-1]
        if uniform.groups == 1
        else sum(sorted(outcomes, reverse=True)[: uniform.groups])
    )
    drafted = 1 / (2 - covered)
    rows = 1 + drafted * uniform.window * (1 + uniform.groups) + (1 - drafted) * uniform.window
    return Yield(1 + drafted * sum(survival), rows)


def all_uniform(window: int, most_rows: int) -> list[Uniform]:
    """All candidates that fit: first no masks, then every window with one, two, four ... and all
    outcomes."""
    options = [Uniform(0, 1)]
    for masks in range(1, window + 1):
        counts = {1, 2, 4, 8, 16, 32, masks + 1}
        options += [
            Uniform(masks, count)
            for count in sorted(counts)
            if count <= masks + 1 and 1 + masks + count * masks <= most_rows
        ]
    return options


def measured_steps(bench: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) of steps in a `mars-ray bench decode` result, the engine's own work included.

    They are the result's `steps` if it has any, else the mean steps of mars-ray's own decoders.
    Raises ConfigError when it has neither at two numbers of rows.
    """
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for step in bench["steps"]:
        seconds[step["batch"] * step["positions"]].append(step["seconds"])
    if not bench["steps"]:
        for case in bench["cases"]:
            if case["label"].startswith("mars-ray "):
                step_s = case["ms_per_step"] / 1e3
                rows = case["tokens_per_s"] * step_s * case["positions_per_token"]
                seconds[max(1, round(rows))].append(step_s)
    if len(seconds) < 2:
        raise ConfigError("the benchmark has no steps; run it with step_positions")
    return tuple((rows, median(seconds[rows])) for rows in sorted(seconds))


def data_sheet_steps(
    read_s: float, row_s: float, launch_s: float = 0.0
) -> tuple[tuple[int, float], ...]:
    """max(read_s, row_s * rows) + launch_s as a table: reading the weights, a row's arithmetic."""
    corner = max(2, round(read_s / row_s))
    return tuple((n, max(read_s, row_s * n) + launch_s) for n in (1, corner, 8 * corner))


def verified_level(threshold: float, points_lost: float, rates: Sequence[float]) -> Level:
    """A level of `verified`, from how often drafts of each depth are accepted if those before are.

    It has every window and number of groups that no other beats in both rows and tokens.
    """
    shapes = []
    for uniform in all_uniform(len(rates), _MOST_ROWS):
        each = expected(uniform, rates)
        shapes.append(Shape(uniform.window, each.rows, each.tokens))
    return Level(threshold, points_lost, _undominated(shapes))


def confidence_level(threshold: float, points_lost: float, rates: Sequence[float]) -> Level:
    """A level of `confidence`: W masks make W + 1 rows, and commit the first token and those that
    pass."""
    reached = list(accumulate(rates, mul))
    shapes = [Shape(w, 1.0 + w, 1 + sum(reached[:w])) for w in range(1, len(rates) + 1)]
    return Level(threshold, points_lost, _undominated(shapes))


def acceptance_rate(mode: str, tokens_per_forward: float, window: int, groups: int = 1) -> float:
    """The acceptance rate, the same for all depths, that gives this T/F at this window; `groups`
    applies to `verified` only."""

    def tokens(rate: float) -> float:
        if mode == "verified":
            return expected(Uniform(window, groups), [rate] * window).tokens
        return 1 + sum(accumulate([rate] * window, mul))

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens(middle) < tokens_per_forward else (low, middle)
    return high


def spread_of(tokens: Sequence[int], forwards: Sequence[int]) -> tuple[float, ...]:
    """Quantiles, over tokens, of what masks bring single replies: tokens beyond one a forward, as
    multiples of what all forwards together have. The mean over forwards is 1.

    Short replies are left out: their T/F is mostly chance.
    """
    pairs = [(t, f) for t, f in zip(tokens, forwards, strict=True) if t >= _LEAST_REPLY]
    more = sum(t for t, _ in pairs) / sum(f for _, f in pairs) - 1
    gains = sorted(((t / f - 1) / more, t) for t, f in pairs)
    reached = list(accumulate(t for _, t in gains))
    marks = [(i + 0.5) / _QUANTILES * reached[-1] for i in range(_QUANTILES)]
    return tuple(round(gains[bisect_left(reached, mark)][0], 3) for mark in marks)


def levels_of(frontier: Frontier, mode: str, depth: int) -> tuple[Level, ...]:
    """A level for each threshold that the frontier has in this mode, by falling threshold.

    If a threshold has several points, one at the whole trained depth counts first, then the
    fastest. A point loses its accuracy's distance to `exact`, but never less than at a higher
    threshold: a better accuracy there is noise. Raises ConfigError without a lossless level.
    """
    points = [p for p in frontier.points if p.mode["type"] == mode and p.threshold is not None]
    if mode == "confidence":
        points = [p for p in points if p.threshold != 1 and p.mode["measure"] == "probability"]
        first = [Level(1.0, 0.0, ())]
    else:
        first = []
        if all(p.threshold != 1 for p in points):
            raise ConfigError(f"the frontier has no point {mode} 1; evaluate that too")
    points = _one_each(points, depth)
    lost = accumulate((max(0.0, -100 * point.difference) for point in points), max)
    pairs = zip(points, lost, strict=True)
    return (*first, *(_level(mode, point, points_lost, depth) for point, points_lost in pairs))


def _one_each(points: Iterable[FrontierPoint], depth: int) -> list[FrontierPoint]:
    """One point for each threshold, by falling threshold."""

    def standing(point: FrontierPoint) -> tuple[bool, float]:
        return point.mode.get("window") in (None, depth), point.tokens_per_forward

    best = {point.threshold or 0.0: point for point in sorted(points, key=standing)}
    return [best[threshold] for threshold in sorted(best, reverse=True)]


def _level(mode: str, point: FrontierPoint, points_lost: float, depth: int) -> Level:
    window = point.mode.get("window") or depth
    # As in the engine: one group where none is set, and no more groups than a step has outcomes.
    groups = min(point.mode.get("groups") or 1, window + 1)
    rates = [acceptance_rate(mode, point.tokens_per_forward, window, groups)] * window
    make = verified_level if mode == "verified" else confidence_level
    threshold = point.threshold
    assert threshold is not None
    return make(threshold, 0.0 if threshold == 1 else points_lost, rates)


def _undominated(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """The shapes with more tokens than any with fewer rows, by rising rows."""
    kept: list[Shape] = []
    best = PLAIN.tokens_per_forward
    for shape in sorted(shapes, key=lambda s: (s.positions, -s.tokens_per_forward)):
        if shape.window and shape.tokens_per_forward > best:
            kept.append(shape)
            best = shape.tokens_per_forward
    return tuple(kept)


def prior_model(
    name: str,
    frontier: Frontier | None,
    depth: int,
    max_batch: int,
    mode: Literal["verified", "confidence"] = "verified",
) -> ServiceModel:
    """A model for the first replica, which will measure its own; `depth` masks were trained.

    Without a frontier with points of the mode it offers only lossless decoding, because the cost of
    a lower threshold is not known.
    """
    lossless = Level(1.0, 0.0, ())
    if depth and mode == "verified":
        lossless = verified_level(1.0, 0.0, [_RATE] * depth)
    levels: tuple[Level, ...] = (lossless,)
    if frontier and depth:
        try:
            levels = levels_of(frontier, mode, depth)
        except ConfigError:
            levels = (lossless,)
    return ServiceModel(name, _STEPS, levels, max_batch, mode)
