"""The advice as one HTML page that needs no other file."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mars_ray.advise.draw import ASSUMED
from mars_ray.advise.fleets import HOUR_S, Fleets, Way, capacity, case
from mars_ray.advise.run import Advice, Objective, objective, recommendation
from mars_ray.advise.verdict import best
from mars_ray.files import write_whole
from mars_ray.page import BLUE, GREEN, GREY, ORANGE, Cell, Part, Table, page, plain, svg
from mars_ray.provenance import provenance

# By the order of the ways: plain, verified, a lower threshold.
_COLOURS = (GREY, BLUE, ORANGE)
# Lines that lie on each other are all seen.
_WIDTHS = (5.0, 3.0, 1.2)
# The curve of capacities goes from a lone sequence's pace to so many times it.
_PACES = np.geomspace(1.02, 10, 40)


def write_page(advice: Advice, path: Path) -> None:
    """Write the page to a file."""
    write_whole(path, report(advice))


def report(advice: Advice) -> str:
    """The page's HTML."""
    facts = provenance()
    parts: list[Part] = [("text", _head(advice))]
    if told := _latencies(advice):
        parts.append(("facts", f"Measured by the service itself: {told}."))
    parts.append(("svg", _load(advice)))
    for each in advice.objectives:
        parts += [("heading", objective(each.case).capitalize()), *_section(each)]
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


def _latencies(advice: Advice) -> str:
    """What the service itself has measured."""
    found = advice.measured.latencies if advice.measured else {}
    names = {"ttft_s": "first token", "time_per_token_s": "time per token"}
    return "; ".join(
        f"{names[metric]} {', '.join(f'{q} {_seconds(value)}' for q, value in values.items())}"
        for metric, values in found.items()
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


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


def _section(each: Objective) -> Iterator[Part]:
    yield "text", f"**{recommendation(each)}**"
    yield "table", _table(each)
    yield (
        "items",
        [f"**{v.question} {'Yes' if v.pays else 'No'}**: {v.why}." for v in each.verdicts],
    )
    yield "svg", _fleets(each)


def _table(each: Objective) -> Table:
    first = ("decoding", "rowspan=2"), ("a replica carries", "rowspan=2")
    spans = ("by the hour", 2), ("a fleet that stays", 3), ("scaled by our policy", 4)
    groups: list[Cell] = [*first, *((name, f"colspan={count}") for name, count in spans)]
    columns = "replicas", "hours", "replicas", "hours", "in time"
    more = "replicas", "hours", "in time", "points lost"
    rows = [_row(way, found) for way, found in each.found.items()]
    return Table([groups, [*columns, *more]], rows)


def _row(way: Way, found: Fleets) -> list[str]:
    span = "none" if None in found.by_hour else _span(found.by_hour)
    cells = [way.name, f"{found.capacity_rps:.2f}/s", span, _number(found.replica_hours)]
    cells += [str(found.fixed or "none"), _number(found.fixed_hours)]
    cells.append("" if found.fixed_attainment is None else f"{found.fixed_attainment:.2%}")
    if scaled := found.scaled:
        cells += [f"{scaled.mean_replicas:.2f}", f"{scaled.replica_hours:.1f}"]
        return [*cells, f"{scaled.attainment:.2%}", f"{scaled.points_lost:.2f}"]
    return cells + [""] * 4


def _span(sizes: Sequence[int | None]) -> str:
    known = sorted({n for n in sizes if n})
    return "-".join(str(n) for n in dict.fromkeys((known[0], known[-1])))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


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
    paces_s = advice.model.step_s(1, context) * _PACES
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
        "Replicas are simulated (docs/simulator.md). A fleet by the hour is the smallest that "
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
