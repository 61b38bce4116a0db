"""The report's plots, as SVG for embedding in a page."""

import io
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Okabe and Ito's colours for the policies drawn over time; the rest are grey.
COLOURS = {
    "mars": "#D55E00",
    "lossless": "#0072B2",
    "ray": "#009E73",
    "ray-verified": "#56B4E9",
    "clairvoyant": "#000000",
    "static-peak": "#CC79A7",
    "llm-d": "#E69F00",
}
_GREY = "#888888"
_OVER_TIME = ("mars", "lossless", "ray", "clairvoyant")
Part = dict[str, Any]


def pareto(policies: dict[str, Part], attainment: float) -> str:
    """Replica-seconds against effective accuracy; hollow marks miss the attainment."""
    figure = Figure(figsize=(8.5, 4.6), layout="constrained")
    axes = figure.add_subplot()
    placed: list[tuple[float, float]] = []
    for name, row in policies.items():
        mean, half = row["mean"], row["half_width"]
        colour = COLOURS.get(name, _GREY)
        x, y = mean["replica_s"] / 3600, mean["effective_accuracy"]
        axes.errorbar(
            x,
            y,
            xerr=None if half["replica_s"] is None else half["replica_s"] / 3600,
            yerr=half["effective_accuracy"],
            marker="o",
            ms=8,
            color=colour,
            mfc=colour if mean["attainment"] >= attainment else "white",
            capsize=2,
            lw=1,
        )
        placed.append((x, y))
        axes.annotate(name, (x, y), xytext=_offset(placed), textcoords="offset points", fontsize=9)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    shown = [row for row in policies.values() if _near(row)] or policies.values()
    accuracies = [row["mean"]["effective_accuracy"] for row in shown]
    low, high = min(accuracies), max(accuracies)
    axes.set_ylim(low - 0.15 * (high - low + 0.1), high + 0.15 * (high - low + 0.1))
    axes.set_xlabel("replica-hours (log scale)")
    axes.set_ylabel("effective accuracy, %")
    _plain(axes)
    return _svg(figure)


def _near(row: Part) -> bool:
    """Whether a policy is good enough to be worth its room in the plot."""
    return row["mean"]["attainment"] >= 0.9


def _offset(placed: list[tuple[float, float]]) -> tuple[float, float]:
    """Offset of a label: above its mark, or below if another mark is close by."""
    x, y = placed[-1]
    close = [p for p in placed[:-1] if 0.8 < p[0] / x < 1.25 and abs(p[1] - y) < 0.15]
    return (6, 6 - 16 * (len(close) % 3))


def timelines(policies: dict[str, Part]) -> str:
    """Load, replicas and threshold over time, for the first seed."""
    shown = [name for name in _OVER_TIME if name in policies] or list(policies)[:4]
    figure = Figure(figsize=(8.5, 6.2), layout="constrained")
    load, replicas, threshold = figure.subplots(3, 1, sharex=True, height_ratios=(1, 2, 1))
    first = policies[shown[0]]["timeline"]
    minutes = [at / 60 for at in first["at_s"]]
    load.fill_between(minutes, first["arrivals_per_s"], color=_GREY, alpha=0.4, lw=0)
    load.set_ylabel("requests/s")
    for name in shown:
        line = policies[name]["timeline"]
        at = [second / 60 for second in line["at_s"]]
        style: dict[str, Any] = {"color": COLOURS.get(name, _GREY), "lw": 1.4, "label": name}
        replicas.plot(at, line["ready"], drawstyle="steps-post", **style)
        if name == "mars":
            threshold.plot(at, line["threshold"], drawstyle="steps-post", **style)
    replicas.set_ylabel("replicas ready")
    replicas.legend(frameon=False, ncols=4, loc="upper left", fontsize=9)
    replicas.set_ylim(0, 1.25 * replicas.get_ylim()[1])
    threshold.set_ylabel("threshold")
    threshold.set_xlabel("minutes")
    for axes in (load, replicas, threshold):
        axes.set_xlim(0, minutes[-1])
        _plain(axes)
    return _svg(figure)


def sensitivity(cold_starts: dict[str, Any], trace: str) -> str:
    """Mean replicas and attainment of each policy by cold start."""
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    replicas, attained = figure.subplots(1, 2)
    colds = sorted(cold_starts, key=float)
    names = list(cold_starts[colds[0]][trace]["policies"])
    for name in names:
        rows = [cold_starts[cold][trace]["policies"][name] for cold in colds]
        style: dict[str, Any] = {
            "color": COLOURS.get(name, _GREY),
            "marker": "o",
            "ms": 4,
            "lw": 1.4 if name in COLOURS else 0.8,
            "label": name,
        }
        seconds = [float(cold) for cold in colds]
        replicas.plot(seconds, [row["mean"]["mean_replicas"] for row in rows], **style)
        attained.plot(seconds, [100 * row["mean"]["attainment"] for row in rows], **style)
    replicas.set_ylabel("mean replicas")
    replicas.set_yscale("log")
    attained.set_ylabel("requests in time, %")
    attained.legend(frameon=False, fontsize=8, bbox_to_anchor=(1, 1), loc="upper left")
    for axes in (replicas, attained):
        axes.set_xscale("log")
        axes.set_xticks([float(cold) for cold in colds], colds)
        axes.set_xlabel("cold start, s")
        axes.minorticks_off()
        _plain(axes)
    return _svg(figure)


def _plain(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _svg(figure: Figure) -> str:
    """The figure as SVG, without the XML header, which may not stand inside a page."""
    FigureCanvasSVG(figure)
    text = io.StringIO()
    # The same plot always gets the same internal names, and its text stays text.
    with rc_context({"svg.hashsalt": "mars-ray", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
