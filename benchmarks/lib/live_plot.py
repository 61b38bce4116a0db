"""Timelines of live autoscaled runs, for figures.py: beside a simulation, and beside each other."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_LIVE, _SIMULATED, _GREY = "#D55E00", "#0072B2", "#888888"


def plot(result: dict[str, Any]) -> Figure:
    """Plot load, replicas and threshold of the live run and of the simulated one."""
    lines = [("live", _LIVE, "-", result["timeline"])]
    lines.append(("simulated", _SIMULATED, "--", result["simulated_timeline"]))
    return _timelines(result, lines)


def plot_trade(result: dict[str, Any]) -> Figure:
    """Plot the arms of trade.py, of the first seed."""
    styles = {"ours": (_LIVE, "-"), "pinned": (_SIMULATED, "--"), "two replicas": (_GREY, ":")}
    runs = [run for run in result["runs"] if run["seed"] == result["runs"][0]["seed"]]
    return _timelines(runs[0], [(r["arm"], *styles[r["arm"]], r["timeline"]) for r in runs])


def _timelines(result: dict[str, Any], lines: list[tuple[str, str, str, dict[str, Any]]]) -> Figure:
    """Lines with their names, colours and styles; rates and a kill are the result's."""
    figure = Figure(figsize=(8.5, 6.2), layout="constrained")
    load, replicas, threshold = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1, 1))
    for name, colour, style, line in lines:
        look: dict[str, Any] = {"color": colour, "ls": style, "lw": 1.4, "label": name}
        load.plot(line["at_s"], line["outstanding"], **look)
        replicas.plot(line["at_s"], line["ready"], drawstyle="steps-post", **look)
        threshold.plot(line["at_s"], line["threshold"], drawstyle="steps-post", **look)
    if "rates" in result:
        _stages(load, result)
    load.set_ylabel("requests in the system")
    # Above the axes, because rates are written inside.
    load.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=len(lines), frameon=False, fontsize=9
    )
    replicas.set_ylabel("replicas ready")
    replicas.set_ylim(bottom=0)
    replicas.yaxis.set_major_locator(MaxNLocator(integer=True))
    threshold.set_ylim(0, 1.05)
    threshold.set_ylabel("threshold")
    threshold.set_xlabel("seconds")
    for axes in (load, replicas, threshold):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if result.get("kill_at_s"):
            axes.axvline(result["kill_at_s"], color=_GREY, lw=1)
    if result.get("kill_at_s"):
        replicas.annotate("one dies", (result["kill_at_s"], 0.1), fontsize=9, color=_GREY)
    return figure


def _stages(axes: Axes, result: dict[str, Any]) -> None:
    """Write the offered rate above each stage."""
    begin = 0.0
    for rate, seconds in zip(result["rates"], result["stage_s"], strict=True):
        axes.axvline(begin, color=_GREY, lw=0.5, alpha=0.6)
        where = (begin + seconds / 2, 0.97)
        axes.annotate(
            f"{rate:g}/s", where, xycoords=("data", "axes fraction"), ha="center", va="top"
        )
        begin += seconds
