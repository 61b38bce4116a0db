"""Advice on the traffic of a service: step size, fleets by the hour, and what pays.

The traffic is a trace, or one drawn from what a Prometheus server knows (`traffic.py`). At each
objective fleets are found by simulation in each way of decoding: by the hour,
of one size, and as our policy scales them. The page at the end tells all of it.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from mars_ray.advise.traffic import ASSUMED, Measured, Prometheus, draw, measure
from mars_ray.autoscale.service_model import (
    Level,
    Mix,
    ServiceModel,
    load_service_model,
    step_rows,
)
from mars_ray.config.scaling import AdviseJob, ScalingConfig, Slo, ThresholdBounds
from mars_ray.files import ResultCache
from mars_ray.page import BLUE, GREEN, GREY, ORANGE, Cell, Part, Table, page, plain, svg
from mars_ray.provenance import provenance
from mars_ray.simulator.cases import Case, Fixed, run_parts
from mars_ray.simulator.config import Cluster, FileTrace
from mars_ray.simulator.engine.run import EXACT, Deciding, simulate, summarise
from mars_ray.simulator.traces.load import load_trace
from mars_ray.simulator.traces.trace import Trace

_SEED = 0
# Of Prometheus, where nobody says how many.
_HOURS = 24.0
# Times what a token takes a lone sequence in plain decoding: where masks pay most, a usual pace,
# and one that leaves room for large batches.
_PACES = (1.25, 2.5, 5.0)
# A first token may take as long as so many of the others, which makes it some seconds, and so many
# times what the 99th percentile of the prompts takes alone.
_TOKENS, _ALONE = 250, 4
HOUR_S = 3600.0
# A fixed fleet's decisions do not change, so it needs few ticks; our policy's are a second apart,
# and more over a long trace, but not more than its metrics may be old.
_FIXED_TICK_S, _TICK_S, _LONG_TICK_S, _TICKS = 60.0, 1.0, 5.0, 3600
# Points of a timeline on the page.
_POINTS = 300
# Less is within the error of a service model.
_LEAST = 5.0  # percent of replica-hours
_LEAST_KEPT = 0.1  # percent of requests
# By the order of the ways: plain, verified, a lower threshold.
_COLOURS = (GREY, BLUE, ORANGE)
# Lines that lie on each other are all seen.
_WIDTHS = (5.0, 3.0, 1.2)
# The curve of capacities goes from a lone sequence's pace to so many times it.
_CURVE = np.geomspace(1.02, 10, 40)


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding: `levels` are those that our policy may use, and the last one is that of a
    fixed fleet."""

    name: str
    levels: tuple[Level, ...]

    @property
    def level(self) -> Level:
        """The level at which a fixed fleet decodes."""
        return self.levels[-1]

    @property
    def lossless(self) -> bool:
        return not self.level.points_lost


@dataclass(frozen=True, slots=True)
class Scaled:
    """What our policy did over the whole trace."""

    mean_replicas: float
    peak_replicas: int
    replica_hours: float
    attainment: float
    points_lost: float
    below_set_point_s: float
    at_s: list[float]
    ready: list[float]  # replicas, means over equal spans


@dataclass(frozen=True, slots=True)
class Fleets:
    """Fleets in one way of decoding. None: no fleet up to the largest one is enough."""

    capacity_rps: float  # of a replica, by the model
    by_hour: list[int | None]
    fixed: int | None  # the smallest that stays
    fixed_attainment: float | None
    hours: float
    points_lost: float  # by all answers of a fixed fleet
    scaled: Scaled | None

    @property
    def replica_hours(self) -> float | None:
        """Of the fleet by hour; the last hour counts as far as it goes."""
        sizes = [n for n in self.by_hour if n is not None]
        if len(sizes) < len(self.by_hour):
            return None
        return sum(n * min(1.0, self.hours - hour) for hour, n in enumerate(sizes))

    @property
    def fixed_hours(self) -> float | None:
        return None if self.fixed is None else self.fixed * self.hours


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer to one question, with its numbers."""

    question: str
    pays: bool
    why: str

    @property
    def answer(self) -> str:
        return "Yes" if self.pays else "No"


Found = dict[Way, Fleets]


@dataclass(frozen=True, slots=True)
class Objective:
    """What was found for one objective."""

    case: Case
    found: Found
    verdicts: list[Verdict]


@dataclass(frozen=True, slots=True)
class Advice:
    job: AdviseJob
    trace: Trace
    model: ServiceModel
    measured: Measured | None  # None for a trace
    objectives: list[Objective]


def advise(
    job: AdviseJob, console: Console, token: str | None = None, workers: int | None = None
) -> Advice:
    """Simulate all fleets. The token is Prometheus's. Raises ConfigError or DataError."""
    model = load_service_model(job.service_model)
    measured = None
    if job.source.startswith(("http://", "https://")):
        server = Prometheus(job.source, token)
        measured = measure(server, job.hours or _HOURS, job.model_name, time.time())
        trace = draw(measured, _SEED)
    else:
        span_s = job.hours and job.hours * HOUR_S
        trace = load_trace(FileTrace(path=job.source, duration_s=span_s), _SEED)
    cases = [
        case(trace, model, slo, job.cold_start_s, job.max_replicas)
        for slo in job.slos or objectives(model, trace)
    ]
    several = ways(model, job.threshold)
    calls = {
        f"{objective(given)}, {way.name}": partial(fleets, given, way)
        for given in cases
        for way in several
    }
    made = iter(run_parts(calls, ResultCache(None, ""), workers, console).values())
    judged = []
    for given in cases:
        found: Found = {way: next(made) for way in several}
        judged.append(Objective(given, found, verdicts(found, given)))
    return Advice(job, trace, model, measured, judged)


def objectives(model: ServiceModel, trace: Trace) -> tuple[Slo, ...]:
    """Three objectives, rounded to two digits, the strictest first."""
    mix = Mix(float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean()))
    prompt = float(np.quantile(trace.prompt_tokens, 0.99))
    found = []
    for pace in _PACES:
        token_s = pace * model.step_s(1, mix.context_tokens)
        rows = step_rows(model, token_s)
        prompt_s = math.ceil(prompt / rows) * model.step_s(rows, prompt / 2)
        first_s = max(_TOKENS * token_s, _ALONE * prompt_s)
        first_s, token_s = (float(f"{seconds:.2g}") for seconds in (first_s, token_s))
        found.append(Slo(ttft_s=first_s, time_per_token_s=token_s))
    return tuple(found)


def ways(model: ServiceModel, threshold: float | None) -> list[Way]:
    """Plain decoding, the model's lossless level if it has masks, and a threshold below.

    That is the lowest level at or above the named threshold; without one, above the default floor,
    or the highest below 1 if there is none.
    """
    found = [Way("plain", EXACT)]
    if len(model.levels[0].all_shapes) > 1:
        found.append(Way(model.mode, model.levels[:1]))
    floor = ThresholdBounds().floor if threshold is None else threshold
    below = [n for n, level in enumerate(model.levels) if n and level.threshold >= floor]
    if threshold is None and not below and len(model.levels) > 1:
        below = [1]
    if below:
        last = below[-1]
        name = f"{model.mode} at {model.levels[last].threshold:g}"
        found.append(Way(name, model.levels[: last + 1]))
    return found


def case(trace: Trace, model: ServiceModel, slo: Slo, cold_start_s: float, most: int) -> Case:
    """The case of an objective, with the step size that suits it."""
    rows = step_rows(model, slo.time_per_token_s)
    return Case(
        config=ScalingConfig(slo=slo, max_replicas=most, cold_start_s=max(1e-3, cold_start_s)),
        model=replace(model, step_rows=rows),
        cluster=Cluster(cold_start_s=cold_start_s, step_tokens=rows),
        trace=trace,
        accuracy=100.0,
        seed=0,
    )


def capacity(given: Case, way: Way) -> float:
    """Requests per second that a replica carries, by the model; 0 if even a lone sequence takes
    longer than its time per token."""
    slo_s, mix = given.slo.time_per_token_s, given.mix()
    if not given.model.largest_batch(way.level, mix, slo_s):
        return 0.0
    return given.model.capacity(way.level, mix, slo_s).requests_per_s


def fleets(given: Case, way: Way) -> Fleets:
    """The fleets that keep the objective in this way of decoding."""
    trace, carried = given.trace, capacity(given, way)
    by_hour: list[int | None] = []
    hour = (trace.arrival_s // HOUR_S).astype(int)
    for n in range(int(hour[-1]) + 1):
        if not (hour == n).any():
            by_hour.append(1)
        elif not carried:  # no fleet helps where a lone sequence is too slow already
            by_hour.append(None)
        else:
            part = trace.part(n * HOUR_S, HOUR_S)
            guess = math.ceil(len(part) / HOUR_S / carried)
            by_hour.append(_smallest_fleet(given, way, part, guess))
    largest = max((n for n in by_hour if n), default=1)
    fixed = _smallest_fleet(given, way, trace, largest) if carried else None
    return Fleets(
        capacity_rps=carried,
        by_hour=by_hour,
        fixed=fixed,
        fixed_attainment=_attained(given, way, trace, fixed) if fixed else None,
        hours=max(trace.duration_s, 1.0) / HOUR_S,
        points_lost=way.level.points_lost,
        scaled=_scaled(given, way) if carried else None,
    )


def smallest(enough: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The smallest number of replicas from 1 to `most` that is enough, if more are no worse; None
    if not even `most` are. The search begins at the guess."""
    low, high = 0, most + 1  # too few, enough
    size, step = min(max(guess, 1), most), 1
    while high - low > 1:
        if enough(size):
            high = size
        else:
            low = size
        # By steps that double until there is a size on either side, then by halves.
        if low == 0:
            size = max(1, high - step)
        elif high > most:
            size = min(most, low + step)
        else:
            size = (low + high) // 2
        step *= 2
    return high if high <= most else None


def _smallest_fleet(given: Case, way: Way, part: Trace, guess: int) -> int | None:
    wanted = given.slo.attainment
    return smallest(
        lambda n: _attained(given, way, part, n) >= wanted, guess, given.config.max_replicas
    )


def _attained(given: Case, way: Way, part: Trace, replicas: int) -> float:
    """The share of requests that a fixed fleet answers in time."""
    here = replace(_ticking(given, _FIXED_TICK_S), trace=part)
    threshold = way.level.threshold
    fixture = here.fixture((way.level,), threshold, replicas)
    return float(simulate(fixture, Fixed(replicas, threshold)).within(given.slo).mean())


def _scaled(given: Case, way: Way) -> Scaled:
    """Our policy's run; it may lower the threshold to the way's level."""
    bounds = ThresholdBounds(set_point=1.0, floor=way.level.threshold)
    config = given.config.model_copy(update={"threshold": bounds})
    tick_s = min(_LONG_TICK_S, max(_TICK_S, given.trace.duration_s // _TICKS))
    begin = given.begins_with(way.levels[0], config.min_replicas)
    fixture = _ticking(given, tick_s).fixture(way.levels, 1.0, begin)
    outcome = simulate(fixture, Deciding(config, replace(given.model, levels=way.levels)))
    figures = summarise(outcome, given.slo, given.accuracy)
    line = outcome.timeline
    spans = np.array_split(np.arange(len(line.at_s)), min(_POINTS, len(line.at_s)))
    return Scaled(
        mean_replicas=figures["mean_replicas"],
        peak_replicas=figures["peak_replicas"],
        replica_hours=figures["replica_s"] / HOUR_S,
        attainment=figures["attainment"],
        points_lost=figures["points_lost"],
        below_set_point_s=figures["below_set_point_s"],
        at_s=[float(line.at_s[i[0]]) for i in spans],
        ready=[float(line.ready[i].mean()) for i in spans],
    )


def _ticking(given: Case, tick_s: float) -> Case:
    """The case with policies that look so often."""
    return replace(given, cluster=given.cluster.model_copy(update={"tick_s": tick_s}))


def best(found: Found) -> tuple[Way, Fleets] | None:
    """The lossless way with the fewest replica-hours by the hour; None if none keeps the
    objective."""
    kept = [(way, fleets) for way, fleets in found.items() if way.lossless and fleets.replica_hours]
    return min(kept, key=lambda item: item[1].replica_hours or 0.0, default=None)


def verdicts(found: Found, given: Case) -> list[Verdict]:
    """Verdicts on one objective. A way saves if its fleet by the hour takes at least 5% fewer
    replica-hours, and as many percent as its answers lose points of accuracy."""
    plain, *others = found.items()
    lossless = [item for item in others if item[0].lossless]
    lower = [item for item in others if not item[0].lossless]
    said = [_pays(f"Does `{way.name}` pay?", plain, (way, fleets)) for way, fleets in lossless]
    base = (lossless or [plain])[0]
    for item in lower:
        said.append(_pays(f"Does `{item[0].name}` pay for all answers?", base, item))
        said += _valve(base, item, given.slo.attainment)
    return said


def _pays(question: str, base: tuple[Way, Fleets], other: tuple[Way, Fleets]) -> Verdict:
    (way, before), (_, after) = base, other
    points = after.points_lost
    costs = f", for {points:.1f} points" if points else ""
    if after.replica_hours is None:
        return Verdict(question, False, "with it, too, no fleet keeps the objective")
    if before.replica_hours is None:
        why = f"with {way.name} no fleet keeps the objective, with it one does{costs}"
        return Verdict(question, True, why)
    saved = 100 * (1 - after.replica_hours / before.replica_hours)
    carries = after.capacity_rps / before.capacity_rps
    why = (
        f"by the hour {after.replica_hours:.1f} replica-hours instead of "
        f"{before.replica_hours:.1f} with {way.name}{costs}; a replica carries {carries:.2f} times "
        "the requests"
    )
    return Verdict(question, saved >= max(_LEAST, points), why)


def _valve(base: tuple[Way, Fleets], other: tuple[Way, Fleets], wanted: float) -> Iterator[Verdict]:
    """Whether our policy does better if it may lower the threshold for a while: more requests in
    time than points lost where they were too few, else replica-hours."""
    (way, (before, after)) = other[0], (base[1].scaled, other[1].scaled)
    if before is None or after is None:
        return
    saved = 100 * (1 - after.replica_hours / before.replica_hours)
    kept = 100 * (after.attainment - before.attainment)
    if before.attainment < wanted:
        pays = kept > max(_LEAST_KEPT, after.points_lost)
    else:
        pays = after.attainment >= wanted and saved >= max(_LEAST, after.points_lost)
    yield Verdict(
        f"Does `{way.name}` pay as a valve, in overloads alone?",
        pays,
        f"scaled by our policy, {after.attainment:.2%} in time at {after.replica_hours:.1f} "
        f"replica-hours instead of {before.attainment:.2%} at {before.replica_hours:.1f}; the "
        f"threshold is low for {after.below_set_point_s:.0f} s, {after.points_lost:.2f} points",
    )


def objective(given: Case) -> str:
    """A case's objective in words."""
    slo = given.slo
    return f"first token in {slo.ttft_s:g} s, {1e3 * slo.time_per_token_s:g} ms a token"


def recommendation(given: Objective) -> str:
    """One sentence: mode, step size and fleets."""
    rows, most = given.case.model.step_rows, given.case.config.max_replicas
    chosen = best(given.found)
    if chosen is None:
        return f"No lossless fleet of up to {most} replicas keeps every hour."
    way, fleets = chosen
    sizes = [n for n in fleets.by_hour if n]
    span = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
    parts = [
        f"Steps of {rows} rows, `{way.name}`: {span} replicas by the hour "
        f"({fleets.replica_hours:.1f} replica-hours)"
    ]
    if fleets.fixed:
        parts.append(f"{fleets.fixed} that stay ({fleets.fixed_hours:.1f})")
    if scaled := fleets.scaled:
        misses = scaled.attainment < given.case.slo.attainment
        parts.append(
            f"{scaled.mean_replicas:.1f} on average as our policy scales them "
            f"({scaled.replica_hours:.1f}, {'but only ' * misses}{scaled.attainment:.1%} in time)"
        )
    return ", ".join(parts) + "."


def print_advice(advice: Advice, console: Console) -> None:
    for each in advice.objectives:
        console.print(objective(each.case).capitalize(), style="bold")
        lines = [recommendation(each)]
        lines += [f"{v.question} {v.answer}: {v.why}." for v in each.verdicts]
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def summary(advice: Advice, page: Path | None) -> dict[str, Any]:
    """The line that the command prints last."""
    trace = advice.trace

    def short(found: Fleets) -> dict[str, Any]:
        """Without the timeline."""
        table = asdict(found)
        for line in ("at_s", "ready"):
            (table["scaled"] or {}).pop(line, None)
        return table | {"replica_hours": found.replica_hours, "fixed_hours": found.fixed_hours}

    return {
        "job": advice.job.model_dump(mode="json"),
        "service_model": {"name": advice.model.name, "provenance": advice.model.provenance},
        "requests": len(trace),
        "hours": round(trace.duration_s / HOUR_S, 3),
        "prompt_tokens": round(float(trace.prompt_tokens.mean()), 1),
        "output_tokens": round(float(trace.output_tokens.mean()), 1),
        "measured_latencies": advice.measured.latencies if advice.measured else {},
        "objectives": [
            {
                "slo": each.case.slo.model_dump(),
                "step_rows": each.case.model.step_rows,
                "fleets": {way.name: short(found) for way, found in each.found.items()},
                "advice": recommendation(each),
                "verdicts": [asdict(verdict) for verdict in each.verdicts],
            }
            for each in advice.objectives
        ],
        "page": str(page) if page else None,
        "provenance": provenance(),
    }


def report(advice: Advice) -> str:
    facts = provenance()
    parts: list[Part] = [("text", _head(advice))]
    if advice.measured and advice.measured.latencies:
        names = {"ttft_s": "first token", "time_per_token_s": "time per token"}
        told = []
        for metric, values in advice.measured.latencies.items():
            shown = {
                q: f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"
                for q, value in values.items()
            }
            told.append(f"{names[metric]} {', '.join(f'{q} {text}' for q, text in shown.items())}")
        parts.append(("facts", f"Measured by the service itself: {'; '.join(told)}."))
    parts.append(("svg", _load(advice)))
    for each in advice.objectives:
        parts += [
            ("heading", objective(each.case).capitalize()),
            ("text", f"**{recommendation(each)}**"),
            ("table", _table(each)),
            ("items", [f"**{v.question} {v.answer}**: {v.why}." for v in each.verdicts]),
            ("svg", _fleets(each)),
        ]
    parts += [
        ("heading", "What a replica carries"),
        ("svg", _capacities(advice)),
        ("heading", "What is assumed"),
        ("small_items", _assumptions(advice)),
        ("facts", f"mars-ray {facts['mars_ray']}, commit {facts['commit']}."),
    ]
    return page(f"Fleets for {advice.trace.name}", parts)


def _head(advice: Advice) -> str:
    trace, model = advice.trace, advice.model
    hours = trace.duration_s / HOUR_S
    wanted = 100 * advice.objectives[0].case.slo.attainment
    return (
        f"{len(trace):,} requests in {hours:.1f} hours from `{advice.job.source}`, on average "
        f"{trace.prompt_tokens.mean():,.0f} tokens in and {trace.output_tokens.mean():,.0f} out, "
        f"on simulated replicas of {model.name}. An objective is kept if {wanted:g}% of the "
        f"requests are answered within both times. A replica takes {advice.job.cold_start_s:g} s "
        "to start. Hours are replica-hours."
    )


def _load(advice: Advice) -> str:
    minutes = np.bincount((advice.trace.arrival_s // 60).astype(int)) / 60
    figure = Figure(figsize=(8.5, 1.9), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(np.arange(len(minutes)) / 60, minutes, step="post", color=GREY, alpha=0.5)
    axes.set_ylabel("requests/s")
    axes.set_xlabel("hours")
    axes.set_xlim(0, len(minutes) / 60)
    axes.set_ylim(0)
    plain(axes)
    return svg(figure)


def _table(each: Objective) -> Table:
    first = ("decoding", "rowspan=2"), ("a replica carries", "rowspan=2")
    spans = ("by the hour", 2), ("a fleet that stays", 3), ("scaled by our policy", 4)
    groups: list[Cell] = [*first, *((name, f"colspan={count}") for name, count in spans)]
    columns = "replicas", "hours", "replicas", "hours", "in time"
    more = "replicas", "hours", "in time", "points lost"
    rows = []
    for way, found in each.found.items():
        sizes, span = [n for n in found.by_hour if n], "none"
        if len(sizes) == len(found.by_hour):
            span = "-".join(str(n) for n in sorted({min(sizes), max(sizes)}))
        hours, fixed = (
            "" if value is None else f"{value:.1f}"
            for value in (found.replica_hours, found.fixed_hours)
        )
        row = [way.name, f"{found.capacity_rps:.2f}/s", span, hours, f"{found.fixed or 'none'}"]
        attained = found.fixed_attainment
        row += [fixed, "" if attained is None else f"{attained:.2%}"]
        if not (scaled := found.scaled):
            row += [""] * 4
        else:
            row += [f"{scaled.mean_replicas:.2f}", f"{scaled.replica_hours:.1f}"]
            row += [f"{scaled.attainment:.2%}", f"{scaled.points_lost:.2f}"]
        rows.append(row)
    return Table([groups, [*columns, *more]], rows)


def _fleets(each: Objective) -> str:
    """Replicas over time: by the hour in each way, and as our policy scales the best one."""
    figure = Figure(figsize=(8.5, 3.0), layout="constrained")
    axes = figure.add_subplot()
    hours = each.case.trace.duration_s / HOUR_S
    for (way, found), colour, width in zip(each.found.items(), _COLOURS, _WIDTHS, strict=False):
        sizes = [np.nan if n is None else n for n in found.by_hour]
        edges = [*range(len(sizes)), max(hours, len(sizes) - 1)]
        label = f"{way.name}, by the hour"
        axes.stairs(sizes, edges, color=colour, lw=width, baseline=None, label=label)
    chosen = best(each.found)
    if chosen and (scaled := chosen[1].scaled):
        at = [second / HOUR_S for second in scaled.at_s]
        label = f"{chosen[0].name}, scaled"
        axes.plot(at, scaled.ready, color=GREEN, lw=1.2, drawstyle="steps-post", label=label)
    axes.set_ylabel("replicas")
    axes.set_xlabel("hours")
    axes.set_xlim(0, hours)
    axes.set_ylim(0, 1.3 * max(1.0, axes.get_ylim()[1]))
    axes.legend(frameon=False, ncols=4, loc="upper left", fontsize=9)
    plain(axes)
    return svg(figure)


def _capacities(advice: Advice) -> str:
    """Requests a second of one replica by the time per token owed, with the step that suits it."""
    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    axes = figure.add_subplot()
    found = advice.objectives[0].found
    trace = advice.trace
    context = float(trace.prompt_tokens.mean() + trace.output_tokens.mean() / 2)
    paces_s = advice.model.step_s(1, context) * _CURVE
    slo = advice.objectives[0].case.slo
    cases = [
        case(trace, advice.model, slo.model_copy(update={"time_per_token_s": pace}), 0.0, 1)
        for pace in paces_s.tolist()
    ]
    for way, colour, width in zip(found, _COLOURS, _WIDTHS, strict=False):
        values = [capacity(each, way) for each in cases]
        axes.plot(1e3 * paces_s, values, color=colour, lw=width, label=way.name)
    for each in advice.objectives:
        axes.axvline(1e3 * each.case.slo.time_per_token_s, color=GREY, lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("time per token owed, ms (dotted: the objectives)")
    axes.set_ylabel("requests/s")
    axes.set_ylim(0)
    axes.legend(frameon=False, fontsize=9)
    plain(axes)
    return svg(figure)


def _assumptions(advice: Advice) -> list[str]:
    lines = [
        "Replicas are simulated. A fleet by the hour is the smallest that "
        "keeps its hour by itself, from an idle and warm beginning: it knows the hour, as our "
        "policy does not.",
        f"The service model is {advice.model.name}: "
        f"{json.dumps(advice.model.provenance) or 'no provenance'}.",
        "A way of decoding pays if its fleet by the hour takes 5% fewer replica-hours, and at "
        "least as many percent as its answers lose points of accuracy.",
    ]
    if measured := advice.measured:
        lines += ASSUMED
        lines.append(
            f"Prometheus had nothing about {measured.unknown_minutes} of "
            f"{len(measured.requests)} minutes, which count as empty; rates are over "
            f"{measured.window_s:g} s."
        )
    return lines
