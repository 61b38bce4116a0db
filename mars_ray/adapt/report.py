"""The report of an adaptation: one HTML page that needs no other file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from mars_ray.core.frontier import FrontierPoint
from mars_ray.page import BLUE, GREY, Cell, Part, Table, page, plain, svg


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of `exact` and `verified` at one batch size, in turn, round by round."""

    batch: int
    exact: Sequence[float]
    drafts: Sequence[float]  # in `verified`
    tokens_per_forward: float  # of `verified`
    same: float  # share of the answers that are those of `exact`, token for token
    fault: str | None  # why the rounds tell no ratio

    @property
    def ratios(self) -> list[float]:
        """`verified` over `exact` in each round."""
        return [own / plain for own, plain in zip(self.drafts, self.exact, strict=True)]

    @property
    def line(self) -> str:
        """All of it in a line; no speeds if the rounds tell no ratio."""
        name = "one at a time" if self.batch == 1 else f"{self.batch} at once"
        if self.fault:
            return f"{name}: not measured: {self.fault}"
        text = "" if self.same == 1 else f", {self.same:.1%} of the answers the same"
        return (
            f"{name}: exact {spread(self.exact, '.0f')} tokens/s, verified "
            f"{spread(self.drafts, '.0f')}: {spread(self.ratios, '.2f')} times exact in "
            f"{len(self.ratios)} rounds, {self.tokens_per_forward:.2f} tokens per forward{text}"
        )


def spread(values: Sequence[float], form: str) -> str:
    """The median of the rounds, and the least and the most of them."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Everything that the page shows."""

    name: str
    base: str
    adapter: str  # its directory
    adapter_bytes: int
    prompts: int  # held out
    trained_on: dict[str, Any]
    curve: Sequence[tuple[float, float]]  # mask tokens, teacher-forced tokens per forward
    modes: Sequence[FrontierPoint]
    speeds: Sequence[Speed]
    next_commands: Sequence[str]
    provenance: dict[str, Any]


def write_report(result: Adaptation, path: Path) -> None:
    facts = result.provenance
    gpu = f", {facts['gpu']}" if facts["gpu"] else ""
    parts: list[Part] = [
        (
            "text",
            f"The weights of {result.base} are untouched. The adapter `{result.adapter}` "
            f"({result.adapter_bytes / 1e6:.1f} MB) adds rows that draft the tokens to come; every "
            f"draft is checked by the model itself. Measured on {result.prompts} prompts on which "
            "nothing was trained, greedy.",
        ),
        ("numbers", _numbers(result)),
        ("heading", "Tokens per forward, by kind of prompt"),
        (
            "text",
            "`verified 1 W=0` has drafts from the text alone, `verified 1` those of the adapter "
            "alone, all masks made; a service has both. Below threshold 1 words change; nothing "
            "does so unless it is asked.",
        ),
        ("table", _modes(result.modes)),
    ]
    if result.speeds:
        parts.append(("heading", "Tokens a second beside exact"))
        parts.append(("text", "Median of the rounds, least and most of them."))
        parts.append(("table", _speeds(result.speeds)))
    if result.curve:
        parts += [("heading", "Training"), ("svg", _curve(result.curve))]
    parts += [
        ("heading", "What to type next"),
        ("pre", "\n".join(result.next_commands)),
        (
            "facts",
            f"mars-ray {facts['mars_ray']}, commit {facts['commit']}, {facts['cpu']}, "
            f"{facts['cores']} cores{gpu}. Answers that end in a loop draft easily: the second "
            "column leaves them out.",
        ),
        ("details", ("How it was trained", json.dumps(result.trained_on, indent=1))),
    ]
    html = page(f"{result.name}: a draft adapter for {result.base}", parts)
    path.write_text(html, encoding="utf-8")


def _numbers(result: Adaptation) -> list[tuple[str, str]]:
    best = max(
        (mode for mode in result.modes if mode.identical == 1 and mode.tokens_per_forward > 1),
        key=lambda mode: mode.tokens_per_forward,
        default=None,
    )
    shown = []
    if best:
        shown.append((f"{best.tokens_per_forward:.2f}", "tokens per forward, text unchanged"))
    shown += [
        (f"{median(speed.ratios):.2f}x", f"tokens a second of exact, batch {speed.batch}")
        for speed in result.speeds[:1]
        if not speed.fault
    ]
    if best:
        shown.append((f"{best.identical:.0%}", f"of {result.prompts} answers identical"))
    return shown


def _modes(modes: Sequence[FrontierPoint]) -> Table:
    """Speeds by kind leave out answers that end in a loop."""
    kinds = list(modes[0].by_kind or ()) if modes else []
    heads = ["mode", "all", "without loops", "answers identical", "tokens the model's own", *kinds]
    rows = []
    for point in modes:
        assert point.agreement is not None
        assert point.by_kind is not None
        row = [point.label, f"{point.tokens_per_forward:.2f}", _number(point.without_loops)]
        row += [f"{point.identical:.1%}", f"{point.agreement:.2%}"]
        rows.append(row + [_number(point.by_kind[kind].tokens_per_forward) for kind in kinds])
    return Table([heads], rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _speeds(speeds: Sequence[Speed]) -> Table:
    rows: list[list[Cell]] = []
    for speed in speeds:
        row: list[Cell] = [str(speed.batch)]
        if speed.fault:
            row.append((f"not measured: {speed.fault}", "colspan=4"))
        else:
            row += [spread(speed.exact, ".0f"), spread(speed.drafts, ".0f")]
            row += [spread(speed.ratios, ".2f"), f"{speed.tokens_per_forward:.2f}"]
        rows.append(row)
    return Table([["batch", "exact", "with drafts", "ratio", "tokens per forward"]], rows)


def _curve(curve: Sequence[tuple[float, float]]) -> str:
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    tokens, values = zip(*curve, strict=True)
    axes.plot([count / 1000 for count in tokens], values, color=BLUE, marker="o", ms=4)
    axes.axhline(1, color=GREY, lw=0.8, ls=":")
    axes.set_xlabel("mask tokens trained on, thousands")
    axes.set_ylabel("tokens per forward,\nteacher-forced")
    plain(axes)
    return svg(figure)
