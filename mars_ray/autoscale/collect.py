"""From what replicas count to what the policy sees.

A replica reports sums since its start, as plain numbers by name (`serve/replica/stats.py` writes
them, the names are here). Rates and means are differences between two looks at the same replica, so
a lost or late report costs resolution and nothing else, and a replica that has just come or gone
does not look like a burst.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mars_ray.autoscale.sample import ReplicaLoad, Sample

ARRIVED, REFUSED, FINISHED = "arrived", "refused", "finished"
OUTPUT_TOKENS, PROMPT_ROWS, PROMPT_STEPS = "output_tokens", "prompt_rows", "prompt_steps"
# Of prompts that are done, their number and tokens: rows of a step may be of others.
PROMPTS, PROMPT_TOKENS = "prompts", "prompt_tokens"
STEPS, STEP_S, SEQUENCES, DECODE_ROWS = "steps", "step_s", "sequences", "decode_rows"
RUNNING, WAITING = "running", "waiting"
# No sum: the threshold in force.
THRESHOLD = "threshold"
VERIFIED_FORWARDS = "verified_forwards"
# With a threshold or the name of a class behind it.
TOKENS_AT, OF_CLASS = "tokens_at:", "class:"
# No sum: seconds of a step as measured at the start, with its rows behind it.
STEP_COST = "step_cost:"
# Reports closer than this are one, the first: of few requests they would make a rate without end.
_LEAST_S = 0.05


@dataclass(frozen=True, slots=True)
class Report:
    """The newest sums of one replica, and when they were taken, in seconds of a wall clock."""

    at_s: float
    sums: Mapping[str, float]


# A replica that has been starting for so many cold starts finds no machine: it tells of the
# cluster's room, not of how long a start takes.
NO_ROOM = 3.0

_Pairs = Sequence[tuple[Report, Report]]


def step_costs(reports: Mapping[str, Report]) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) as the replicas have measured them at their start; medians over replicas."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for report in reports.values():
        for name, value in report.sums.items():
            if name.startswith(STEP_COST):
                seconds[int(name.removeprefix(STEP_COST))].append(value)
    return tuple((rows, median(seconds[rows])) for rows in sorted(seconds))


@dataclass(slots=True)
class Collector:
    """Remembers the last two reports of every replica. One per fleet."""

    usual_s: float = 0.0  # of a cold start, before one was measured
    _seen: dict[str, tuple[Report, ...]] = field(default_factory=dict)
    _ordered_s: list[float] = field(default_factory=list)
    _running: int = 0
    _cold_start_s: float | None = None

    def sample(
        self, reports: Mapping[str, Report], running: int, target: int, now: float, wall_s: float
    ) -> Sample:
        """Of all replicas that run, by their newest reports; `now` is a clock that is never set.

        A replica that has nothing new counts with what it did before. The clock of its node may be
        ahead of the wall clock here: a report from the future is a new one.
        """
        self._note_starts(running, target, now)
        self._seen = {
            name: _with(self._seen.get(name, ()), report) for name, report in reports.items()
        }
        newest = [seen[-1] for seen in self._seen.values()]
        pairs = [(seen[0], seen[1]) for seen in self._seen.values() if len(seen) > 1]
        return Sample(
            running=running,
            target=target,
            starting_ages_s=tuple(now - ordered for ordered in self._ordered_s),
            **(_flows(pairs) if pairs else {}),
            waiting=int(sum(report.sums[WAITING] for report in newest)) if newest else None,
            loads=tuple(_load(seen) for seen in self._seen.values()),
            cold_start_s=self._cold_start_s,
            age_s=max((max(0.0, wall_s - report.at_s) for report in newest), default=None),
        )

    def _note_starts(self, running: int, target: int, now: float) -> None:
        """Which replicas are on their way since when; how long the last one took."""
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


def _with(seen: tuple[Report, ...], report: Report) -> tuple[Report, ...]:
    if not seen or report.at_s < seen[-1].at_s:
        # The first one, or a clock was set back, and no difference of times means anything.
        return (report,)
    return (seen[-1], report) if report.at_s >= seen[-1].at_s + _LEAST_S else seen


def _flows(pairs: _Pairs) -> dict[str, Any]:
    """Rates are sums over replicas of their own rates; means are ratios of sums."""
    return {
        "arrivals_per_s": _rate(pairs, ARRIVED),
        "refused_per_s": _rate(pairs, REFUSED),
        "prompts_per_s": _rate(pairs, PROMPTS),
        "answers_per_s": _rate(pairs, FINISHED),
        "prompt_tokens": _mean(pairs, PROMPT_TOKENS, PROMPTS),
        "output_tokens": _mean(pairs, OUTPUT_TOKENS, FINISHED),
        "tokens_per_forward": {
            float(threshold): mean
            for threshold, mean in _shares(pairs, TOKENS_AT, VERIFIED_FORWARDS).items()
        },
        "class_shares": _shares(pairs, OF_CLASS, ARRIVED, REFUSED),
    }


def _mean(pairs: _Pairs, name: str, of: str) -> float | None:
    count = _sum(pairs, of)
    return _sum(pairs, name) / count if count else None


def _shares(pairs: _Pairs, prefix: str, *of: str) -> dict[str, float]:
    """All sums whose name begins so, by the rest of the name, over those it is shares of."""
    total = sum(_sum(pairs, name) for name in of)
    names = {name for _, report in pairs for name in report.sums if name.startswith(prefix)}
    return {name.removeprefix(prefix): _sum(pairs, name) / total for name in names if total}


def _sum(pairs: _Pairs, name: str) -> float:
    return sum(_rise(before, report, name) for before, report in pairs)


def _rate(pairs: _Pairs, name: str) -> float:
    return sum(
        _rise(before, report, name) / (report.at_s - before.at_s) for before, report in pairs
    )


def _rise(before: Report, report: Report, name: str) -> float:
    return max(0.0, report.sums.get(name, 0.0) - before.sums.get(name, 0.0))


def _load(seen: tuple[Report, ...]) -> ReplicaLoad:
    before, newest = seen[0], seen[-1]
    names = (STEPS, SEQUENCES, DECODE_ROWS, PROMPT_STEPS, PROMPT_ROWS)
    steps, sequences, decode_rows, prompt_steps, prompt_rows = (
        _rise(before, newest, name) for name in names
    )
    return ReplicaLoad(
        running=int(newest.sums[RUNNING]),
        waiting=int(newest.sums[WAITING]),
        step_s=_rise(before, newest, STEP_S) / steps if steps else None,
        decode_rows=decode_rows / steps if steps else None,
        prompt_rows=prompt_rows / prompt_steps if prompt_steps else None,
        prompt_share=prompt_steps / steps if steps and PROMPT_STEPS in newest.sums else None,
        positions=decode_rows / sequences if sequences else None,
        threshold=newest.sums.get(THRESHOLD),
    )
