"""The pictures of a sweep: all trials by the cheap measures, survivors by what they generate."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mars_ray.core.frontier import FrontierPoint

_STOPPED, _FINISHED, _BEST = "#999999", "#0072B2", "#D55E00"


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """A trial as it is drawn."""

    label: str
    finished: bool
    expected_tokens_per_forward: float
    clean_ce: float
    exact: FrontierPoint | None  # of survivors
    fastest: FrontierPoint | None  # of survivors
    best: bool


def plot_sweep(trials: Sequence[TrialPoint], start: FrontierPoint, path: Path) -> None:
    """Left, teacher-forced: clean loss against expected T/F. Right, generated: accuracy in `exact`
    against T/F, with 95% intervals; the line is the model that all trials started from."""
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
