"""A replica's capacity: seconds of a step, and tokens per forward by quality level.

A step of n rows over C tokens of cached context takes

    t(n, C) = table(n) + cache_token_s * C

where the table is measured (`core/step_cost.py`: linear between its points and beyond), or is
max(a, b n) + c by a device's data sheet: a reads the weights, b is a row's arithmetic, c launches.
A prompt's row also takes prompt_attention_s for every token before it, for P / 2 in the mean.

Let m sequences decode at a level with p rows and f committed tokens per forward, and let a request
have P prompt and D output tokens. Each step then completes m f / D requests, so a step has to
forward q = m f P / D rows of prompts on average. A prompt is forwarded in one step, with others
that happen to have come (Poisson's law), or in chunks that fill steps up to S rows. So a share s of
the steps has c rows of prompts, and the others only decode:

    c = min(S - m p, q / (1 - exp(-q / P))),   s = q / c,   C = m (P + D / 2),
    mean step = (1 - s) t(m p, C) + s t(m p + c, C)

or s t(m p + c, C) from s = 1 on, where prompts alone set the limit. With t for the mean step,

    time per token = t / f,   tokens/s = m f / t,   requests/s = m f / (D t)

Where t does not depend on n (memory traffic), tokens/s grows with f. Where t = b n (arithmetic),

    requests/s = 1 / (b (D p / f + P))

so only p / f matters, the rows spent per token. A row commits at most one token, so p / f >= 1 at
any threshold. Plain decoding has p / f = 1, so no level beats it there. The engine's window control
picks the shape with the most tokens/s at its batch, and so does `at`.

A model is made of measured step costs and acceptance (`benchmarks/service_models.py`), or, before
anything is measured, of a checkpoint's own files (`prior_model`).

How many rows a full step should have (`step_rows`): an answer waits for every step that it shares
with prompts, and while prompts wait every step is full. In a burst that lasts as long as an answer,
its time per token is therefore the seconds of a full step, whatever the size of the fleet. Larger
steps forward prompts faster, since a step's fixed part is shared by more rows, but beyond the rows
that are free anyway only by little. So

    rows = the most whose step takes at most 85% of the time per token,

and at least

- the rows that are as good as free: while a step waits for the weights, fewer save no time;
- what one sequence may take, with all of its drafts and masks.

The remaining 15% are for reading the cached context of the batch. In simulations of a 7B model
(flash crowd, Azure's code, Mooncake's conversations; 6, 15 and 30 ms a token; plain and `verified`)
shares of 70 to 90% take the smallest fixed fleet, or one replica more; beyond 100% plain decoding
needs up to twice as many.

Masks commit several tokens a step, so `verified` tolerates longer steps. It does not gain by them:
where there are so many sequences that replicas are short, few masks pay.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any, Literal, TypeVar

from mars_ray.config.base import found
from mars_ray.config.decode import PROMPTS_SHARE, EngineConfig
from mars_ray.config.serve import ServeJob
from mars_ray.config.vllm import ServedEngine, VllmConfig
from mars_ray.core.frontier import Frontier, FrontierPoint
from mars_ray.core.step_cost import StepCost
from mars_ray.errors import ConfigError

_MOST_ROWS = 512  # of one sequence in a step
# Acceptance rate of a draft where nothing is known; live measurements correct it.
_RATE = 0.7
# Step costs of the first replica until it has measured its own: half is fixed, the rest by row.
_STEPS = ((1, 0.02), (64, 0.04))
# Of the time per token.
_SHARE = 0.85
# A step this much longer than that of one row counts as free.
_FREE = 1.05
# Most rows of a step that are chosen. Each row more saves little by then, and its activations need
# memory.
_MOST_STEP_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """A window, with a sequence's mean rows and mean committed tokens in a step."""

    window: int
    positions: float
    tokens_per_forward: float


PLAIN = Shape(0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Level:
    """A threshold with the yield of its windows; every level can also decode plainly."""

    threshold: float
    points_lost: float  # against lossless; percentage points, 0 or more
    shapes: tuple[Shape, ...]

    @property
    def all_shapes(self) -> tuple[Shape, ...]:
        """The shapes, plain decoding first."""
        return (PLAIN, *(shape for shape in self.shapes if shape.window > 0))

    def tokens_per_forward(self, positions: float) -> float:
        """T/F at this number of rows in a step: linear between the shapes, flat beyond them."""
        points = sorted((s.positions, s.tokens_per_forward) for s in self.all_shapes)
        for (low, few), (high, many) in pairwise(points):
            if positions <= high:
                return few + (many - few) * max(0.0, positions - low) / max(1e-9, high - low)
        return points[-1][1]

    def with_gain(self, gain: float) -> "Level":
        """The level if masks bring `gain` times as many tokens beyond the first one."""
        if gain == 1:
            return self
        shapes = [
            replace(s, tokens_per_forward=min(s.positions, 1 + gain * (s.tokens_per_forward - 1)))
            for s in self.shapes
        ]
        return replace(self, shapes=tuple(shapes))


@dataclass(frozen=True, slots=True)
class Mix:
    """The mean request. `prompt_tokens` counts only those that must be computed."""

    prompt_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> float:
        """Context of a sequence half way through its answer."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Operating:
    """A replica that decodes `batch` sequences without pause."""

    batch: int
    shape: Shape
    step_s: float
    output_tokens: float

    @property
    def time_per_token_s(self) -> float:
        """Seconds between two tokens of each sequence."""
        return self.step_s / self.shape.tokens_per_forward

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.time_per_token_s

    @property
    def requests_per_s(self) -> float:
        return self.tokens_per_s / self.output_tokens


@dataclass(frozen=True)
class ServiceModel:
    """One checkpoint on one device, with levels by falling threshold; the first one is lossless.

    `confidence` has no lossless threshold, so its first level is plain decoding.
    """

    name: str
    seconds_at: tuple[tuple[int, float], ...]  # rows of a step, its seconds
    levels: tuple[Level, ...]
    max_batch: int
    mode: Literal["verified", "confidence"] = "verified"
    step_rows: int = 2048  # rows of a full step (`engine.max_step_tokens`)
    cache_token_s: float = 0.0  # cost of reading a cached token in a step
    prompt_attention_s: float = 0.0  # of a prompt's row, by each token before it in the prompt
    cache_tokens: int | None = None  # size of the cache; None: max_batch sequences of any length
    page_tokens: int = 16  # of a page of the cache: what prompts share is whole pages
    max_model_len: int | None = None  # tokens of prompt and answer; None: no limit
    # Quantiles of what masks bring to single requests, as multiples of what they bring to all
    # forwards together: the mean over forwards is 1. Empty: all requests are alike.
    spread: tuple[float, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for problem in self._problems():
            raise ConfigError(f"service model {self.name}: {problem}")

    def _problems(self) -> Iterator[str]:
        if len(dict(self.seconds_at)) < 2 or min(dict(self.seconds_at)) < 1:
            yield "needs step seconds at two or more numbers of rows"
        elif not all(0 < seconds < 3600 for _, seconds in self.seconds_at):
            yield "step seconds must lie between 0 and 3600"
        if not self.levels or self.levels[0].threshold != 1 or self.levels[0].points_lost:
            yield "the first level must have threshold 1 and lose nothing"
        thresholds = [level.threshold for level in self.levels]
        if sorted(set(thresholds), reverse=True) != thresholds or thresholds[-1:] < [0.0]:
            yield "thresholds must fall from level to level"
        if not 0 <= self.cache_token_s < 1 or min(self.max_batch, self.step_rows) < 1:
            yield "max_batch and step_rows must be at least 1, cache_token_s a fraction of a second"
        if min(self.cache_tokens or 1, self.page_tokens, self.max_model_len or 2) < 1:
            yield "cache_tokens, page_tokens and max_model_len must be at least 1"
        if not 0 <= self.prompt_attention_s < 1 or not all(0 <= gain < 1e3 for gain in self.spread):
            yield "prompt_attention_s must be a fraction of a second, spread factors of 0 or more"
        for level in self.levels:
            if not 0 <= level.points_lost <= 100:
                yield f"threshold {level.threshold}: points_lost must lie between 0 and 100"
            if any(not 1 <= s.tokens_per_forward <= s.positions < 1e4 for s in level.shapes):
                yield f"threshold {level.threshold}: needs 1 <= tokens_per_forward <= positions"

    @cached_property
    def _cost(self) -> StepCost:
        return StepCost(dict(self.seconds_at))

    def step_s(self, rows: float, context_tokens: float = 0.0, prompt_pairs: float = 0.0) -> float:
        """Seconds of a step of `rows`, whose sequences have `context_tokens` in the cache.

        `prompt_pairs` sums over the rows of prompts how many tokens are before each in its prompt.
        """
        attention_s = self.cache_token_s * context_tokens + self.prompt_attention_s * prompt_pairs
        return self._cost.seconds(rows) + attention_s

    @property
    def decoding_rows(self) -> int:
        """Rows of a step that decoding sequences may have."""
        return self.step_rows - self.step_rows // PROMPTS_SHARE

    def level(self, threshold: float) -> Level:
        """The lowest level that is not below this threshold."""
        return next(
            level for level in reversed(self.levels) if level.threshold >= min(1, threshold)
        )

    def at(self, level: Level, batch: int, mix: Mix) -> Operating:
        """A batch of this size, in the shape that gives the most tokens per second.

        A step has room for the rows of all sequences. If it has not even without masks, they take
        turns: each has less than a row in the mean.
        """
        plain = min(1.0, self.decoding_rows / batch)
        fit = [s for s in level.shapes if s.window and batch * s.positions <= self.decoding_rows]
        shapes = (Shape(0, plain, plain), *fit)
        candidates = (self._operating(shape, batch, mix) for shape in shapes)
        return max(candidates, key=lambda operating: operating.tokens_per_s)

    def most_sequences(self, mix: Mix) -> int:
        """The most sequences of a batch: limited by its places and by the cache."""
        if self.cache_tokens is None:
            return self.max_batch
        return max(1, min(self.max_batch, int(self.cache_tokens / max(1.0, mix.context_tokens))))

    def largest_batch(self, level: Level, mix: Mix, time_per_token_s: float) -> int:
        """The largest batch within the time per token; 0 if even one sequence takes longer."""
        low, high = 0, self.most_sequences(mix)
        while low < high:
            middle = (low + high + 1) // 2
            if self.at(level, middle, mix).time_per_token_s <= time_per_token_s:
                low = middle
            else:
                high = middle - 1
        return low

    def capacity(self, level: Level, mix: Mix, time_per_token_s: float) -> Operating:
        """The most that a replica carries within the time per token.

        If no batch meets it, the result is the largest batch: all requests are late then, and a
        smaller batch would make even more of them late.
        """
        batch = self.largest_batch(level, mix, time_per_token_s)
        return self.at(level, batch or self.most_sequences(mix), mix)

    def _operating(self, shape: Shape, batch: int, mix: Mix) -> Operating:
        output = max(1.0, mix.output_tokens)
        prompts = batch * shape.tokens_per_forward * mix.prompt_tokens / output
        rows, context = batch * shape.positions, batch * mix.context_tokens
        come = -math.expm1(-prompts / max(1.0, mix.prompt_tokens))
        chunk = max(1.0, min(self.step_rows - rows, prompts / come if come else 1.0))
        share = prompts / chunk
        seconds = share * self.step_s(rows + chunk, context)
        seconds += max(0.0, 1 - share) * self.step_s(rows, context)
        seconds += self.prompt_attention_s * prompts * mix.prompt_tokens / 2
        return Operating(batch, shape, seconds, output)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> "ServiceModel":
        """The model that `to_json` wrote. Raises ConfigError when the text is not one."""
        try:
            table = json.loads(text)
            table["seconds_at"] = tuple((rows, seconds) for rows, seconds in table["seconds_at"])
            table["levels"] = tuple(
                Level(**row | {"shapes": tuple(Shape(**shape) for shape in row["shapes"])})
                for row in table["levels"]
            )
            table["spread"] = tuple(table.get("spread", ()))
            return cls(**table)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{source} is no service model: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())


def load_service_model(path: str | Path) -> ServiceModel:
    """The model in a file, or one that ships with the package. Raises ConfigError."""
    try:
        return ServiceModel.from_json(found(path).read_text(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def expected(window: int, groups: int, rates: Sequence[float]) -> tuple[float, float]:
    """Tokens that a sequence commits and rows that it costs per forward of `verified` in the long
    run, for the rates at which drafts of each depth are accepted.

    Every sequence has `window` masks per group and so many groups in each step. An engine chooses
    for each sequence by the confidences of its drafts (`core.tree`) and does a little better.

    After an outcome without masks, a step has no drafts: it commits a token and drafts anew. With c
    the probability that an outcome has masks, a share f of the forwards has drafts:
    f = f * c + (1 - f), since a forward without drafts has a single outcome, which has masks.
    """
    survival = list(accumulate(rates[:window], mul))
    if not survival:
        return 1.0, 1.0
    covered = survival[-1]
    if groups > 1:
        outcomes = [a - b for a, b in zip([1.0, *survival], [*survival, 0.0], strict=True)]
        covered = sum(sorted(outcomes, reverse=True)[:groups])
    drafted = 1 / (2 - covered)
    rows = 1 + drafted * window * (1 + groups) + (1 - drafted) * window
    return 1 + drafted * sum(survival), rows


def all_uniform(window: int, most_rows: int) -> list[tuple[int, int]]:
    """All candidates (masks of a group, groups) that fit: first no masks, then every window with
    one, two, four ... and all outcomes."""
    options = [(0, 1)]
    for masks in range(1, window + 1):
        counts = {1, 2, 4, 8, 16, 32, masks + 1}
        options += [
            (masks, count)
            for count in sorted(counts)
            if count <= masks + 1 and 1 + masks + count * masks <= most_rows
        ]
    return options


def verified_level(threshold: float, points_lost: float, rates: Sequence[float]) -> Level:
    """A level of `verified`, from how often drafts of each depth are accepted if those before are.

    It has every window and number of groups that no other beats in both rows and tokens.
    """
    shapes = []
    for window, groups in all_uniform(len(rates), _MOST_ROWS):
        tokens, rows = expected(window, groups, rates)
        shapes.append(Shape(window, rows, tokens))
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
            return expected(window, groups, [rate] * window)[0]
        return 1 + sum(accumulate([rate] * window, mul))

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens(middle) < tokens_per_forward else (low, middle)
    return high


def levels_of(frontier: Frontier, mode: str, depth: int) -> tuple[Level, ...]:
    """A level for each threshold that the frontier has in this mode, by falling threshold.

    If a threshold has several points, one at the whole trained depth counts first, then the
    fastest; a point without masks tells nothing of them. A point never loses less than one at a
    higher threshold: a better accuracy there is noise. Raises ConfigError without a lossless level.
    """
    points = [
        p
        for p in frontier.points
        if p.mode["type"] == mode and p.threshold is not None and p.mode.get("window") != 0
    ]
    if mode == "confidence":
        points = [p for p in points if p.threshold != 1 and p.mode["measure"] == "probability"]
        first = [Level(1.0, 0.0, ())]
    elif any(p.threshold == 1 for p in points):
        first = []
    else:
        raise ConfigError(f"the frontier has no point {mode} 1; evaluate that too")

    def standing(point: FrontierPoint) -> tuple[bool, float]:
        return point.mode.get("window") in (None, depth), point.tokens_per_forward

    best = {point.threshold or 0.0: point for point in sorted(points, key=standing)}
    make = verified_level if mode == "verified" else confidence_level
    levels, lost = first, 0.0
    for threshold, point in sorted(best.items(), reverse=True):
        lost = max(lost, point.points_lost)
        window = point.mode.get("window") or depth
        # As in the engine: one group where none is set, no more groups than a step has outcomes.
        groups = min(point.mode.get("groups") or 1, window + 1)
        rate = acceptance_rate(mode, point.tokens_per_forward, window, groups)
        levels.append(make(threshold, 0.0 if threshold == 1 else lost, [rate] * window))
    return tuple(levels)


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
        with suppress(ConfigError):
            levels = levels_of(frontier, mode, depth)
    return ServiceModel(name, _STEPS, levels, max_batch, mode)


def step_rows(model: ServiceModel, time_per_token_s: float) -> int:
    """Rows of a full step for this time per token."""
    budget_s = max(_SHARE * time_per_token_s, _FREE * model.step_s(1))
    least = least_rows(model)
    return least + bisect_right(range(least + 1, _MOST_STEP_ROWS + 1), budget_s, key=model.step_s)


def least_rows(model: ServiceModel) -> int:
    """The fewest rows of a step in which one sequence has room for all of its drafts and masks."""
    shapes = [shape for level in model.levels for shape in level.all_shapes]
    rows = math.ceil(max((shape.positions for shape in shapes), default=1.0))
    return max(8, math.ceil(rows * PROMPTS_SHARE / (PROMPTS_SHARE - 1)))


def contradiction(model: ServiceModel, rows: int, time_per_token_s: float) -> str | None:
    """What is wrong with a step of so many rows where this time per token is owed, and what to set
    instead; None if nothing is."""
    chosen, full_s = step_rows(model, time_per_token_s), model.step_s(rows)
    if rows > chosen and full_s > time_per_token_s:
        return (
            f"a full step of {rows:,} rows takes {1e3 * full_s:.3g} ms, but a token may take "
            f"{1e3 * time_per_token_s:.3g} ms, so answers are late whenever prompts wait: "
            f"set {chosen:,} rows"
        )
    if rows < least_rows(model):
        return (
            f"a step of {rows:,} rows has no room for all drafts and masks of one sequence: "
            f"set {chosen:,} rows"
        )
    return None


Engine = TypeVar("Engine", bound=EngineConfig | VllmConfig)


def with_room(engine: Engine) -> Engine:
    """The configuration of an engine whose steps can have any size that may be chosen."""
    rows = engine.max_step_tokens or _MOST_STEP_ROWS
    return engine.model_copy(update={"max_step_tokens": rows})


def sized(model: ServiceModel, engine: ServedEngine, time_per_token_s: float) -> ServiceModel:
    """The service model for steps and batches of this engine."""
    rows = engine.max_step_tokens
    if rows is None:
        rows = min(step_rows(model, time_per_token_s), with_room(engine).step_tokens)
    return replace(model, max_batch=engine.max_batch, step_rows=rows)


def measured(job: ServeJob, step_cost: Mapping[int, float], depth: int) -> ServiceModel:
    """The service model of a replica whose steps of so many rows take so long, with `depth`
    masks."""
    model = replace(
        prior_model(job.name, None, depth, job.engine.max_batch),
        seconds_at=tuple(step_cost.items()),
    )
    return sized(model, job.engine, job.scaling.slo.time_per_token_s)


def warning(job: ServeJob, model: ServiceModel) -> str | None:
    """What is wrong with the job's own number, if it has one that contradicts its SLO."""
    rows = job.engine.max_step_tokens
    if rows is None:
        return None
    problem = contradiction(model, rows, job.scaling.slo.time_per_token_s)
    if problem is None:
        return None
    # vLLM's steps have their size before any of them is measured.
    remedy = ", or leave the number out to have it chosen" if job.engine.type == "mars" else ""
    return f"engine.max_step_tokens = {rows}: {problem}{remedy}"
