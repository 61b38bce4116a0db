"""Reports of an evaluation: a table for people, a summary for programs."""

from typing import Any

from rich.console import Console
from rich.table import Table

from mars_ray.core.frontier import FrontierPoint
from mars_ray.evaluate.files_report import REPORT_FILE, files_table
from mars_ray.evaluate.run import Evaluation

# No tokens/s: masks are forced here, also those that do not pay.
_COLUMNS = ("mode", "accuracy", "95%", "against exact", "p", "identical", "T/F")
# Columns for prompts without reference answers; "without loops" omits answers that end in a loop.
_OWN_COLUMNS = ("mode", "identical", "own tokens", "nll", "T/F", "without loops")


def print_table(evaluation: Evaluation, console: Console) -> None:
    """Print one line for each mode."""
    frontier = evaluation.frontier
    if frontier.task["type"] == "files":
        console.print(files_table(frontier))
        console.print(f"report: {evaluation.directory / REPORT_FILE}", soft_wrap=True)
        return
    table = Table(title=f"{frontier.checkpoint}: {frontier.points[0].problems} problems")
    without_references = frontier.points[0].agreement is not None
    for index, column in enumerate(_OWN_COLUMNS if without_references else _COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right")
    for point in frontier.points:
        table.add_row(*(_own_cells(point) if without_references else _cells(point)))
    console.print(table)
    console.print(f"plot: {evaluation.plot}", soft_wrap=True)


def _cells(point: FrontierPoint) -> tuple[str, ...]:
    return (
        point.label,
        f"{point.accuracy:.1%}",
        f"{point.accuracy_low:.1%} .. {point.accuracy_high:.1%}",
        f"{point.difference:+.1%}",
        f"{point.p_value:.2f}",
        f"{point.identical:.1%}",
        f"{point.tokens_per_forward:.2f}",
    )


def _own_cells(point: FrontierPoint) -> tuple[str, ...]:
    return (
        point.label,
        f"{point.identical:.1%}",
        f"{point.agreement:.2%}",
        "-" if point.nll is None else f"{point.nll:.3f}",
        f"{point.tokens_per_forward:.2f}",
        "-" if point.without_loops is None else f"{point.without_loops:.2f}",
    )


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """The last line that the command prints."""
    frontier = evaluation.frontier
    told = {"checkpoint": frontier.checkpoint, "plot": str(evaluation.plot)}
    if frontier.task["type"] == "files":
        told |= {"report": str(evaluation.directory / REPORT_FILE)}
        told |= {"reference_nll": frontier.reference_nll}
    return told | {"points": {point.label: _told(point) for point in frontier.points}}


def _told(point: FrontierPoint) -> dict[str, Any]:
    told: dict[str, Any] = {
        "accuracy": point.accuracy,
        "tokens_per_forward": point.tokens_per_forward,
        "identical": point.identical,
    }
    if point.graded is not None:
        told["accuracy"] = point.accuracy if point.has_references else None
        told |= {"graded": point.graded, "nll": point.nll, "own_tokens": point.agreement}
        told |= {"first_difference": point.first_difference}
    return told
