"""An evaluation for people and for programs."""

from typing import Any

from rich.console import Console
from rich.table import Table

from mars_ray.evaluate.run import Evaluation

_COLUMNS = ("mode", "accuracy", "95%", "against exact", "p", "identical", "T/F", "tokens/s")


def print_table(evaluation: Evaluation, console: Console) -> None:
    """One line a mode."""
    frontier = evaluation.frontier
    table = Table(title=f"{frontier.checkpoint}: {frontier.points[0].problems} problems")
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right")
    for point in frontier.points:
        table.add_row(
            point.label,
            f"{point.accuracy:.1%}",
            f"{point.accuracy_low:.1%} .. {point.accuracy_high:.1%}",
            f"{point.difference:+.1%}",
            f"{point.p_value:.2f}",
            f"{point.identical:.1%}",
            f"{point.tokens_per_forward:.2f}",
            f"{point.tokens_per_s:,.0f}",
        )
    console.print(table)
    console.print(f"plot: {evaluation.plot}", soft_wrap=True)


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """What the command prints as its last line."""
    return {
        "checkpoint": evaluation.frontier.checkpoint,
        "plot": str(evaluation.plot),
        "points": {
            point.label: {
                "accuracy": point.accuracy,
                "tokens_per_forward": point.tokens_per_forward,
                "identical": point.identical,
            }
            for point in evaluation.frontier.points
        },
    }
