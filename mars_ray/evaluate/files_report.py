"""The report of an evaluation of files: a table, and where answers leave those of `exact`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from mars_ray.config.evaluate import Grade
from mars_ray.core.frontier import Frontier, FrontierPoint, mode_label
from mars_ray.evaluate.answers import ModeAnswers, in_common
from mars_ray.evaluate.grading import grade_label
from mars_ray.evaluate.tasks import Problem
from mars_ray.files import replaced

REPORT_FILE = "report.txt"
_WIDTH = 140
# Answers shown for each mode, and the characters around the place where they part.
_SHOWN, _BEFORE, _BEHIND = 5, 40, 60
_GRADE: TypeAdapter[Grade] = TypeAdapter(Grade)


def files_table(frontier: Frontier) -> Table:
    """One line for each mode."""
    exact = frontier.points[0]
    table = Table(title=f"{frontier.checkpoint}: {exact.problems} prompts")
    columns = ["mode", "T/F", "identical", "differs at", "own tokens", "nll"]
    # Where masks are forced, speeds say nothing. One pass tells no ratio either.
    has_speeds = frontier.provenance["job"]["engine"]["window_control"]
    if has_speeds:
        columns.append("tokens/s")
    if exact.has_references:
        label = grade_label(_GRADE.validate_python(frontier.task["grade"]))
        columns += [f"{label} ({exact.graded})", "95%", "p"]
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for point in frontier.points:
        table.add_row(*_cells(point, has_speeds))
    if frontier.reference_nll is not None:
        table.caption = f"nll of the references: {frontier.reference_nll:.3f} per token"
    return table


def _cells(point: FrontierPoint, has_speeds: bool) -> Iterator[str]:
    yield point.label
    yield f"{point.tokens_per_forward:.2f}"
    yield f"{point.identical:.1%}"
    yield "-" if point.first_difference is None else f"{point.first_difference:,.0f}"
    yield f"{point.agreement:.2%}"
    yield "-" if point.nll is None else f"{point.nll:.3f}"
    if has_speeds:
        yield f"{point.tokens_per_s:,.1f}"
    if point.has_references:
        yield f"{point.accuracy:.1%}"
        yield f"{point.accuracy_low:.1%} .. {point.accuracy_high:.1%}"
        yield f"{point.p_value:.2f}"


def write_report(
    path: Path, frontier: Frontier, problems: Sequence[Problem], results: Sequence[ModeAnswers]
) -> None:
    """Write the table, and the first answers of each mode that differ from those of `exact`."""
    with replaced(path) as draft, draft.open("w", encoding="utf-8") as file:
        console = Console(file=file, width=_WIDTH, color_system=None, legacy_windows=False)
        console.print(files_table(frontier))
        for result in results[1:]:
            for line in _differences(problems, result, results[0]):
                file.write(line + "\n")


def _differences(
    problems: Sequence[Problem], result: ModeAnswers, exact: ModeAnswers
) -> Iterator[str]:
    places = result.first_differences(exact)
    differing = [(number, place) for number, place in enumerate(places) if place is not None]
    label = mode_label(result.mode.model_dump())
    yield f"\n{label}: {len(differing)} of {len(problems)} answers differ from those of exact"
    for number, place in differing[:_SHOWN]:
        own, theirs = result.texts[number], exact.texts[number]
        common = in_common(own, theirs)
        yield f"  {problems[number].origin}, after {place} tokens"
        yield f"    exact: {_around(theirs, common)}"
        yield f"    {label}: {_around(own, common)}"


def _around(text: str, place: int) -> str:
    before, behind = text[max(0, place - _BEFORE) : place], text[place : place + _BEHIND]
    return repr(before)[1:-1] + " | " + repr(behind)[1:-1]
