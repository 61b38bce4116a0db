"""The report of an adaptation: one HTML page that needs no other file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from mars_ray.core.frontier import FrontierPoint
from mars_ray.page import BLUE, GREY, html, plain, svg


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
    """Write the page to a file."""
    path.write_text(page(result), encoding="utf-8")


def page(result: Adaptation) -> str:
    """The page's HTML."""
    title = f"{result.name}: a draft adapter for {result.base}"
    parts = [f"<h1>{escape(title)}</h1>", _head(result), _numbers(result)]
    parts += ["<h2>Tokens per forward, by kind of prompt</h2>", _modes(result.modes)]
    if result.speeds:
        parts += ["<h2>Tokens a second beside exact</h2>", _speeds(result.speeds)]
    if result.curve:
        parts += ["<h2>Training</h2>", _curve(result.curve)]
    commands = "\n".join(result.next_commands)
    parts += [f"<h2>What to type next</h2><pre>{escape(commands)}</pre>", _foot(result)]
    return html(title, "".join(parts))


def _head(result: Adaptation) -> str:
    return (
        f"<p>The weights of {escape(result.base)} are untouched. The adapter "
        f"<code>{escape(result.adapter)}</code> ({result.adapter_bytes / 1e6:.1f} MB) adds rows "
        "that draft the tokens to come; every draft is checked by the model itself. Measured "
        f"on {result.prompts} prompts on which nothing was trained, greedy.</p>"
    )


def _numbers(result: Adaptation) -> str:
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
    cells = "".join(f"<div><b>{number}</b>{escape(text)}</div>" for number, text in shown)
    return f"<div class=numbers>{cells}</div>"


def _modes(modes: Sequence[FrontierPoint]) -> str:
    kinds = list(modes[0].by_kind or ()) if modes else []
    head = "".join(f"<th>{escape(kind)}" for kind in kinds)
    rows = "".join(_mode(mode, kinds) for mode in modes)
    return (
        "<div class=wide><table><tr><th>mode<th>all<th>without loops<th>answers identical"
        f"<th>tokens the model's own{head}{rows}</table></div>"
    )


def _mode(point: FrontierPoint, kinds: Sequence[str]) -> str:
    """A row of the table; speeds by kind leave out answers that end in a loop."""
    assert point.agreement is not None
    assert point.by_kind is not None
    parts = [point.by_kind[kind].tokens_per_forward for kind in kinds]
    return (
        f"<tr><td>{escape(point.label)}<td>{point.tokens_per_forward:.2f}"
        f"<td>{_number(point.without_loops)}<td>{point.identical:.1%}<td>{point.agreement:.2%}"
        + "".join(f"<td>{_number(part)}" for part in parts)
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _speeds(speeds: Sequence[Speed]) -> str:
    rows = "".join(f"<tr><td>{speed.batch}{_speed(speed)}" for speed in speeds)
    return (
        "<p>Median of the rounds, least and most of them.</p><div class=wide><table><tr><th>batch"
        "<th>exact<th>with drafts<th>ratio<th>tokens per forward"
        f"{rows}</table></div>"
    )


def _speed(speed: Speed) -> str:
    if speed.fault:
        return f"<td colspan=4>not measured: {escape(speed.fault)}"
    return (
        f"<td>{spread(speed.exact, '.0f')}<td>{spread(speed.drafts, '.0f')}"
        f"<td>{spread(speed.ratios, '.2f')}<td>{speed.tokens_per_forward:.2f}"
    )


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


def _foot(result: Adaptation) -> str:
    facts = result.provenance
    trained = escape(json.dumps(result.trained_on, indent=1))
    return (
        f"<p class=facts>mars-ray {facts['mars_ray']}, commit {facts['commit']}, "
        f"{escape(str(facts['cpu']))}, {facts['cores']} cores"
        f"{', ' + escape(facts['gpu']) if facts['gpu'] else ''}. Answers that end in a loop draft "
        "easily: the second column leaves them out.</p>"
        f"<details class=facts><summary>How it was trained</summary><pre>{trained}</pre></details>"
    )
