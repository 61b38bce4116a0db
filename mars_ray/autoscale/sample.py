"""What the policy sees of a fleet at one tick, and how it is computed from the replicas' reports.

    replica      ReplicaCounts, from its engine's snapshot (`serve/replica/stats.py`)
                 to_metrics      numbers by name, which is all that Ray Serve carries
    autoscaler   from_metrics    of each replica the newest
                 Collector       remembers the last two of each
    policy       Sample          rates and means

A replica reports sums since its start. Rates and means are differences between two reports of the
same replica. So a lost or late report only costs resolution, and a replica that has just come or
gone does not look like a burst. Nothing is smoothed here: the policy does that. None means "not
known".

`Traffic` holds slow means of what samples say of the requests, and of the engines' speed beside the
service model's.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any, TypeVar

from mars_ray.autoscale.service_model import ServiceModel

# Name of the class share of requests that pin their own mode or threshold.
PINNED = "pinned"
# Share of a limit of the SLO above which a request is slow.
SLOW = 0.75
# Of reports closer than this only the first counts: few requests would look like a huge rate.
_LEAST_S = 0.05
# A replica that has been starting for this many cold starts finds no machine: its time says that
# the cluster is full, not how long a start takes.
NO_ROOM = 3.0
# Means forget with this time constant, and are believed only after this many requests.
_FORGET_S = 300.0
# Requests that the lengths to begin with are worth.
_PRIOR = 10.0
# The service model counts as much as a measurement of this length.
_TRUST_S = 10.0
# A measurement further from the model than this means that one of them is wrong.
_LEAST_SLOW, _MOST_SLOW = 0.25, 4.0
_LEAST_GAIN, _MOST_GAIN = 0.2, 3.0
# Below this number of rows, a sequence's drafts tell nothing.
_DRAFTING = 1.5
# A class with a smaller share of the requests is forgotten.
_LEAST_SHARE = 1e-6
# Digits that count: finer changes would only cause ladders to be built again.
_DIGITS = 3

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """A replica's present state, and its counts since its start.

    Ray Serve carries each number under its field's name. `running` and `waiting` are required; a
    replica of another release may lack other fields, or have more.
    """

    running: float  # sequences in the batch
    waiting: float
    threshold: float | None = None  # in force for requests that pin none
    step_cost: Mapping[int, float] = field(default_factory=dict)  # seconds of a step by its rows
    # Since the start, requests:
    arrived: float = 0.0
    refused: float = 0.0
    finished: float = 0.0
    output_tokens: float = 0.0
    quality_class: Mapping[str, float] = field(default_factory=dict)  # including refused ones
    # By quality class (or PINNED): requests whose first token has come, and those that were found
    # slow (above SLOW of a limit of the SLO) or late (above it), each once: by its first token, or
    # else at its end by its mean time per token.
    started: Mapping[str, float] = field(default_factory=dict)
    slow: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)
    # Finished prompts only: the rows of a step may belong to unfinished ones.
    prompts: float = 0.0
    prompt_tokens: float = 0.0
    # Steps.
    steps: float = 0.0
    step_s: float = 0.0
    sequences: float = 0.0  # decoding ones, counted at every step
    decode_rows: float = 0.0
    prompt_steps: float | None = None  # steps with rows of prompts
    prompt_rows: float = 0.0
    # Forwards in the service's mode, `verified` or `confidence`, that say something of other
    # thresholds, and the tokens that each would have given in them.
    measured_forwards: float = 0.0
    tokens_at: Mapping[float, float] = field(default_factory=dict)

    def to_metrics(self) -> dict[str, float]:
        """The known numbers by name."""
        metrics: dict[str, float] = {}
        for name, value in asdict(self).items():
            if name in _KEYS:
                metrics |= {f"{name}:{key}": number for key, number in value.items()}
            elif value is not None:
                metrics[name] = value
        return metrics

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> "ReplicaCounts":
        """The counts that `to_metrics` has written. Raises TypeError if a required number is
        missing."""
        values: dict[str, Any] = {name: {} for name in _KEYS}
        for metric, number in metrics.items():
            name, colon, key = metric.partition(":")
            if colon and name in _KEYS:
                values[name][_KEYS[name](key)] = number
            elif name in _NOW or name in _SUMS:
                values[name] = number
        return cls(**values)

    def since(self, before: "ReplicaCounts") -> "ReplicaCounts":
        """Growth of the sums since an earlier report; 0 where they fell, as after a restart of the
        process."""
        now, then = asdict(self), asdict(before)
        sums = {name: now[name] for name in _SUMS if now[name] is not None}
        tables = {name: _grown(now[name], then[name]) for name in _TABLES}
        return replace(self, **_grown(sums, then), **tables)


# The fields with a number for each of several keys, and how a key is read.
_KEYS: dict[str, Callable[[str], Any]] = {
    "step_cost": int,
    "quality_class": str,
    "tokens_at": float,
    "started": str,
    "slow": str,
    "late": str,
}
# Those of them that are sums since the start.
_TABLES = tuple(name for name in _KEYS if name != "step_cost")
_NOW = ("running", "waiting", "threshold")
_SUMS = tuple(each.name for each in fields(ReplicaCounts) if each.name not in {*_KEYS, *_NOW})


def _grown(now: Mapping[_Key, float], before: Mapping[_Key, float | None]) -> dict[_Key, float]:
    return {key: max(0.0, value - (before.get(key) or 0.0)) for key, value in now.items()}


@dataclass(frozen=True, slots=True)
class Report:
    """The newest counts of a replica, and when they were taken, in seconds of a wall clock."""

    at_s: float
    counts: ReplicaCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of a replica that has reported, over its newest steps."""

    running: int = 0  # sequences in the batch
    # Means over its newest steps: seconds, and rows of decoding sequences.
    step_s: float | None = None
    decode_rows: float | None = None
    # Mean rows of prompts in steps that have any, and the share of such steps.
    prompt_rows: float | None = None
    prompt_share: float | None = None
    positions: float | None = None  # rows of a decoding sequence
    threshold: float | None = None  # in force here; None: the policy's


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The fleet at one tick. Refused requests (429) are not counted as arrivals but in
    `refused_per_s`."""

    running: int  # replicas that take requests
    target: int  # replicas that were last asked for
    starting_ages_s: tuple[float, ...] = ()  # of each starting replica
    arrivals_per_s: float | None = None
    refused_per_s: float = 0.0
    prompt_tokens: float | None = None  # mean of a request, without prefix cache hits
    output_tokens: float | None = None  # mean of a request
    # Requests per second behind these means; None: all that arrived.
    prompts_per_s: float | None = None
    answers_per_s: float | None = None
    waiting: int = 0  # requests without a token yet and in no batch
    loads: tuple[ReplicaLoad, ...] = ()
    # By quality class, per second: requests whose first token has come, and those that were found
    # slow or late (`ReplicaCounts`).
    started: Mapping[str, float] = field(default_factory=dict)
    slow: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, float] = field(default_factory=dict)
    wall_s: float = 0.0  # wall clock, by which hours of the day and week are told
    # T/F that each threshold would have given on the same steps (decode/stats.py).
    tokens_per_forward: Mapping[float, float] = field(default_factory=dict)
    # Share of the requests by quality class, and of those that pin their own mode or threshold
    # (`PINNED`); the rest follows the set-point.
    class_shares: Mapping[str, float] = field(default_factory=dict)
    cold_start_s: float | None = None  # newest measured
    age_s: float | None = None  # age of the oldest metric in here; None: there are no metrics


def step_costs(reports: Iterable[Report]) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) that replicas measured at their start; medians over replicas."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for report in reports:
        for rows, step_s in report.counts.step_cost.items():
            seconds[rows].append(step_s)
    return tuple((rows, median(seconds[rows])) for rows in sorted(seconds))


@dataclass(slots=True)
class Collector:
    """Remembers the last two reports of every replica of one fleet."""

    usual_s: float = 0.0  # a cold start's seconds until one has been measured
    _seen: dict[str, tuple[Report, ...]] = field(default_factory=dict)
    _ordered_s: list[float] = field(default_factory=list)
    _running: int = 0
    _cold_start_s: float | None = None

    def sample(
        self, reports: Mapping[str, Report], running: int, target: int, now: float, wall_s: float
    ) -> Sample:
        """The sample of this tick, from the newest report of every replica that runs.

        A replica without a new report counts with its last one. `now` is a clock that is never set.
        The clock of a replica's node may be ahead of `wall_s`: a report from the future is a new
        one.
        """
        self._note_starts(running, target, now)
        before, self._seen = self._seen, {}
        for name, report in reports.items():
            seen = before.get(name, ())
            if not seen or report.at_s < seen[-1].at_s:
                # The first one, or a clock was set back: differences of times mean nothing.
                seen = (report,)
            elif report.at_s >= seen[-1].at_s + _LEAST_S:
                seen = (seen[-1], report)
            self._seen[name] = seen
        newest = [seen[-1] for seen in self._seen.values()]
        pairs = [seen for seen in self._seen.values() if len(seen) > 1]
        grown = [(new.at_s - old.at_s, new.counts.since(old.counts)) for old, new in pairs]
        return Sample(
            running=running,
            target=target,
            starting_ages_s=tuple(now - ordered for ordered in self._ordered_s),
            **(_flows(grown) if grown else {}),
            waiting=int(sum(report.counts.waiting for report in newest)),
            loads=tuple(_load(seen[-1].counts, seen[0].counts) for seen in self._seen.values()),
            cold_start_s=self._cold_start_s,
            wall_s=wall_s,
            age_s=max((max(0.0, wall_s - report.at_s) for report in newest), default=None),
        )

    def _note_starts(self, running: int, target: int, now: float) -> None:
        """Remember since when replicas have been starting, and how long the last one took."""
        for _ in range(running - self._running):
            if self._ordered_s:
                took_s = now - self._ordered_s.pop(0)
                if usual_s := max(self._cold_start_s or 0.0, self.usual_s):
                    took_s = min(took_s, NO_ROOM * usual_s)
                self._cold_start_s = took_s
        self._running = running
        missing = max(0, target - running)
        self._ordered_s = self._ordered_s[:missing]
        self._ordered_s += [now] * (missing - len(self._ordered_s))


def _flows(grown: list[tuple[float, ReplicaCounts]]) -> dict[str, Any]:
    """Rates and means of a fleet, from each replica's seconds and the counts made in them.

    Rates are sums of the replicas' own rates; means are ratios of sums.
    """
    counts = [each for _, each in grown]
    answers, prompts = (sum(each.finished for each in counts), sum(each.prompts for each in counts))
    offered = sum(each.arrived for each in counts) + sum(each.refused for each in counts)
    forwards = sum(each.measured_forwards for each in counts)
    return {
        "arrivals_per_s": sum(each.arrived / seconds for seconds, each in grown),
        "refused_per_s": sum(each.refused / seconds for seconds, each in grown),
        "prompts_per_s": sum(each.prompts / seconds for seconds, each in grown),
        "answers_per_s": sum(each.finished / seconds for seconds, each in grown),
        "prompt_tokens": _ratio(sum(each.prompt_tokens for each in counts), prompts),
        "output_tokens": _ratio(sum(each.output_tokens for each in counts), answers),
        "tokens_per_forward": _summed([each.tokens_at for each in counts], forwards),
        "class_shares": _summed([each.quality_class for each in counts], offered),
        **{
            name: _summed(
                {key: count / seconds for key, count in getattr(each, name).items()}
                for seconds, each in grown
            )
            for name in ("started", "slow", "late")
        },
    }


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def _summed(tables: Iterable[Mapping[_Key, float]], whole: float = 1.0) -> dict[_Key, float]:
    """Each key's sum over the tables, as a share of `whole`; empty without it."""
    sums: defaultdict[_Key, float] = defaultdict(float)
    for table in tables:
        for key, number in table.items():
            sums[key] += number
    return {key: number / whole for key, number in sums.items()} if whole else {}


def _load(now: ReplicaCounts, before: ReplicaCounts) -> ReplicaLoad:
    grown = now.since(before)
    prompt_steps = grown.prompt_steps
    return ReplicaLoad(
        running=int(now.running),
        step_s=_ratio(grown.step_s, grown.steps),
        decode_rows=_ratio(grown.decode_rows, grown.steps),
        prompt_rows=_ratio(grown.prompt_rows, prompt_steps),
        prompt_share=None if prompt_steps is None else _ratio(prompt_steps, grown.steps),
        positions=_ratio(grown.decode_rows, grown.sequences),
        threshold=now.threshold,
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Means of requests, which of them may be lowered, and how the service model is wrong."""

    # Number of requests behind the means; old ones are slowly forgotten. The first ones count
    # beside as many as the beginning is worth.
    requests: float = 0.0
    prompts: float = _PRIOR
    answers: float = _PRIOR
    prompt_tokens: float = 512.0
    output_tokens: float = 128.0
    # (class or PINNED, share), sorted by name.
    class_shares: tuple[tuple[str, float], ...] = ()
    # Measured seconds of a step over the model's, and for how long that was measured.
    slowness: float = 1.0
    stepped_s: float = 0.0
    # (threshold, measured over modelled tokens of masks beyond the first), and for how long.
    drafted_s: float = 0.0
    gains: tuple[tuple[float, float], ...] = ()

    @classmethod
    def within(cls, new_tokens: int, context: int | None) -> "Traffic":
        """What is assumed before any request: the usual lengths, within a service's limits on an
        answer and on a whole context, where there is one."""
        usual = cls()
        output = min(usual.output_tokens, new_tokens)
        most = math.inf if context is None else max(1, context - output)
        return replace(usual, prompt_tokens=min(usual.prompt_tokens, most), output_tokens=output)

    def rounded(self) -> "Traffic":
        """The same to few digits, so that ladders of nearly equal traffic are equal."""
        return Traffic(
            prompt_tokens=_digits(self.prompt_tokens),
            output_tokens=_digits(self.output_tokens),
            class_shares=tuple((name, round(share, 2)) for name, share in self.class_shares),
            slowness=round(self.slowness, 2),
            gains=tuple((threshold, round(gain, 1)) for threshold, gain in self.gains),
        )


def observe_traffic(traffic: Traffic, sample: Sample, model: ServiceModel, dt: float) -> Traffic:
    """The traffic after a tick of `dt` seconds with this sample."""
    arrived = sample.arrivals_per_s or 0.0
    requests, weight = _counted(traffic.requests, arrived, dt)
    prompts, prompt_weight = _counted(
        traffic.prompts, arrived if sample.prompts_per_s is None else sample.prompts_per_s, dt
    )
    answers, answer_weight = _counted(
        traffic.answers, arrived if sample.answers_per_s is None else sample.answers_per_s, dt
    )
    old, new = dict(traffic.class_shares), sample.class_shares
    shares = {
        name: _towards(old.get(name, 0.0), new.get(name, 0.0), weight)
        for name in sorted({*old, *new})
    }
    slowness = _slowness(sample, traffic, model)
    decoding = [load for load in sample.loads if load.running and load.positions]
    rows = sum(load.running * (load.positions or 0.0) for load in decoding)
    positions = rows / sum(load.running for load in decoding) if decoding else 0.0
    drafted = positions >= _DRAFTING and bool(sample.tokens_per_forward)
    return replace(
        traffic,
        requests=requests,
        prompts=prompts,
        answers=answers,
        prompt_tokens=_towards(traffic.prompt_tokens, sample.prompt_tokens, prompt_weight),
        output_tokens=_towards(traffic.output_tokens, sample.output_tokens, answer_weight),
        # A new share moves by a ten-thousandth in a tick of a busy fleet.
        class_shares=tuple((name, s) for name, s in shares.items() if s > _LEAST_SHARE),
        slowness=_towards(traffic.slowness, slowness, _news(traffic.stepped_s, dt)),
        stepped_s=_longer(traffic.stepped_s, dt) if slowness is not None else traffic.stepped_s,
        gains=_gains(traffic, sample, model, positions, dt) if drafted else traffic.gains,
        drafted_s=_longer(traffic.drafted_s, dt) if drafted else traffic.drafted_s,
    )


def _counted(before: float, per_s: float, dt: float) -> tuple[float, float]:
    """The number of requests now, and the weight of the new ones among them."""
    new = per_s * dt
    count = before * math.exp(-dt / _FORGET_S) + new
    return count, new / count if new > 0 else 0.0


def _towards(old: float, new: float | None, weight: float) -> float:
    return old if new is None else old + weight * (new - old)


def _news(measured_s: float, dt: float) -> float:
    """Weight of the next `dt` seconds of measuring, against `measured_s` and the model's weight.

    Time without anything to measure forgets nothing.
    """
    return dt / (_TRUST_S + measured_s + dt)


def _longer(measured_s: float, dt: float) -> float:
    return min(_FORGET_S, measured_s + dt)


def _slowness(sample: Sample, traffic: Traffic, model: ServiceModel) -> float | None:
    """Ratio of measured to expected step seconds over all busy replicas; None if there are none.

    What is expected of a mean step is the mean of steps with and without prompts, each at its own
    rows: wherever the cost curve bends, the cost at the mean rows would be less.
    """
    measured = expected = 0.0
    for load in sample.loads:
        rows, share = load.decode_rows, load.prompt_share
        if not load.running or not load.step_s or rows is None or share is None:
            continue
        context = load.running * (traffic.prompt_tokens + traffic.output_tokens / 2)
        measured += load.step_s
        expected += (1 - share) * model.step_s(rows, context)
        if share:
            expected += share * model.step_s(rows + (load.prompt_rows or 0.0), context)
    return min(_MOST_SLOW, max(_LEAST_SLOW, measured / expected)) if expected else None


def _gains(
    traffic: Traffic, sample: Sample, model: ServiceModel, positions: float, dt: float
) -> tuple[tuple[float, float], ...]:
    """The gains after the replicas' reports; their decoding sequences had `positions` rows."""
    weight = _news(traffic.drafted_s, dt)
    old = dict(traffic.gains)
    gains = dict(old)
    for level in model.levels:
        live = sample.tokens_per_forward.get(level.threshold)
        if live is not None:
            said = level.tokens_per_forward(positions) - 1
            gain = min(_MOST_GAIN, max(_LEAST_GAIN, (live - 1) / said)) if said > 0.01 else 1.0
            gains[level.threshold] = _towards(old.get(level.threshold, 1.0), gain, weight)
    return tuple(sorted(gains.items()))


def _digits(value: float) -> float:
    return float(f"{min(1e6, max(1.0, value)):.{_DIGITS}g}")
