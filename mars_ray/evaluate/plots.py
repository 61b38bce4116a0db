"""Accuracy against tokens per forward."""

from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mars_ray.core.frontier import Frontier, FrontierPoint

# Colours of Okabe and Ito's palette, which colour-blind readers can tell apart.
_STYLE = {
    "exact": ("#000000", "s"),
    "verified": ("#0072B2", "o"),
    "confidence": ("#D55E00", "^"),
    "block_cached": ("#009E73", "v"),
    "jacobi": ("#CC79A7", "D"),
    "speculative": ("#E69F00", "P"),
}


def plot_frontier(frontier: Frontier, path: Path) -> None:
    """One curve per mode, thresholds as labels, 95% intervals as bars; 1200 x 800 pixels."""
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
    axes.set_ylabel("accuracy" if exact.agreement is None else "answers identical to exact's")
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
