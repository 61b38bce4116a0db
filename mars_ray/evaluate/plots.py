"""The plots of an evaluation, accuracy against tokens per forward, and of a sweep's trials."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mars_ray.core.frontier import Frontier, FrontierPoint

_STOPPED, _FINISHED, _BEST = "#999999", "#0072B2", "#D55E00"
# Colours of Okabe and Ito's palette, which colour-blind readers can tell apart.
_STYLE = {
    "exact": ("#000000", "s"),
    "verified": ("#0072B2", "o"),
    "confidence": ("#D55E00", "^"),
    "block_cached": ("#009E73", "v"),
    "jacobi": ("#CC79A7", "D"),
}


def plot_frontier(frontier: Frontier, path: Path) -> None:
    """Draw one curve per mode, thresholds as labels, 95% intervals as bars; 1200 x 800 pixels."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    exact = frontier.points[0]
    axes.axhspan(exact.accuracy_low, exact.accuracy_high, color="#000000", alpha=0.06, lw=0)
    axes.axhline(exact.accuracy, color="#000000", lw=0.8, ls=":")
    ordered = sorted(frontier.points, key=lambda point: point.mode["type"])
    for mode, points in groupby(ordered, key=lambda point: point.mode["type"]):
        _draw_curve(axes, mode, sorted(points, key=lambda point: -(point.threshold or 0)))
    axes.set_xlabel("tokens per forward pass")
    axes.set_ylabel("accuracy" if exact.has_references else "answers identical to exact's")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(f"Speed and quality of {frontier.checkpoint}, {exact.problems} problems")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=1200 / 9)


def _draw_curve(axes: Axes, mode: str, points: list[FrontierPoint]) -> None:
    colour, marker = _STYLE[mode]
    x = [point.tokens_per_forward for point in points]
    y = [point.accuracy for point in points]
    below = [point.accuracy - point.accuracy_low for point in points]
    above = [point.accuracy_high - point.accuracy for point in points]
    axes.errorbar(
        x,
        y,
        yerr=[below, above],
        label=mode,
        color=colour,
        marker=marker,
        ms=6,
        lw=1.5,
        elinewidth=0.8,
        capsize=2,
    )
    for point in points:
        if point.threshold is not None:
            axes.annotate(
                f"{point.threshold:g}",
                (point.tokens_per_forward, point.accuracy),
                xytext=(5, 6),
                textcoords="offset points",
                fontsize=9,
                color=colour,
            )


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """The data of a trial that the plot shows."""

    label: str
    finished: bool
    expected_tokens_per_forward: float
    clean_ce: float
    exact: FrontierPoint | None  # None unless it survived
    fastest: FrontierPoint | None  # None unless it survived
    best: bool


def plot_sweep(trials: Sequence[TrialPoint], start: FrontierPoint, path: Path) -> None:
    """Draw two panels. Left, teacher-forced: clean loss against expected T/F. Right, generated:
    accuracy in `exact` against T/F, with 95% intervals; the line is the common starting model."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    cheap, generated = figure.subplots(1, 2)
    _draw_cheap(cheap, trials)
    _draw_generated(generated, [trial for trial in trials if trial.exact], start)
    for axes in (cheap, generated):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best", fontsize=9)
    figure.savefig(path, dpi=120)


def _draw_cheap(axes: Axes, trials: Sequence[TrialPoint]) -> None:
    groups = (
        ("stopped early", _STOPPED, [t for t in trials if not t.finished]),
        ("finished", _FINISHED, [t for t in trials if t.finished and not t.best]),
        ("best", _BEST, [t for t in trials if t.best]),
    )
    for label, colour, group in groups:
        x = [trial.expected_tokens_per_forward for trial in group]
        y = [trial.clean_ce for trial in group]
        axes.scatter(x, y, s=36, color=colour, label=f"{label} ({len(group)})")
    for trial in trials:
        if trial.exact:
            here = (trial.expected_tokens_per_forward, trial.clean_ce)
            axes.annotate(trial.label, here, xytext=(5, 4), textcoords="offset points", fontsize=9)
    axes.set_yscale("log")
    axes.invert_yaxis()
    axes.set_xlabel("expected tokens per forward (teacher-forced)")
    axes.set_ylabel("held-out loss of the clean stream, nats (less is up)")
    axes.set_title("All trials, at their last evaluation")


def _draw_generated(axes: Axes, trials: Sequence[TrialPoint], start: FrontierPoint) -> None:
    axes.axhspan(start.accuracy_low, start.accuracy_high, color="#000000", alpha=0.06, lw=0)
    axes.axhline(start.accuracy, color="#000000", lw=0.8, ls=":", label="before the stage")
    for trial in trials:
        exact, fastest = trial.exact, trial.fastest
        assert exact is not None
        assert fastest is not None
        colour = _BEST if trial.best else _FINISHED
        below, above = exact.accuracy - exact.accuracy_low, exact.accuracy_high - exact.accuracy
        here = (fastest.tokens_per_forward, exact.accuracy)
        axes.errorbar(*here, yerr=[[below], [above]], color=colour, marker="o", capsize=2)
        label = f"{trial.label} ({fastest.label})"
        axes.annotate(label, here, xytext=(5, 4), textcoords="offset points", fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("tokens per forward, generated, at the threshold that keeps quality")
    axes.set_ylabel("accuracy in mode exact")
    axes.set_title(f"Survivors, {start.problems} problems")
