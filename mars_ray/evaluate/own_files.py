"""What an evaluation of files has beyond others: a directory of its own, and answers to go on with.

output_dir/
  evaluation.json    the job, and a digest of the prompts: no other job writes here
  evaluation.part    until it is finished: the answers of each mode that is
  frontier.json, frontier.png, answers.jsonl, report.txt

The report is a table, and where answers leave those of `exact`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from mars_ray.config.evaluate import EvaluateJob, FilesTask, Grade
from mars_ray.core.frontier import FRONTIER_FILE, Frontier, FrontierPoint, mode_label
from mars_ray.errors import ConfigError, DataError
from mars_ray.evaluate.answers import Answer, ModeAnswers, in_common
from mars_ray.evaluate.tasks import Problem, check_reference, grade_label, grader_of
from mars_ray.files import ResultCache, claim, replaced
from mars_ray.model.directory import CONFIG_FILE

JOB_FILE = "evaluation.json"
JOURNAL = "evaluation.part"
# Errors name this many lines.
_TOLD = 5
_ANSWERS = TypeAdapter(list[Answer])
REPORT_FILE = "report.txt"
_WIDTH = 140
# Answers shown for each mode, and the characters around the place where they part.
_SHOWN, _BEFORE, _BEHIND = 5, 40, 60
_GRADE: TypeAdapter[Grade] = TypeAdapter(Grade)


def files_grader(task: FilesTask, problems: Sequence[Problem]) -> Callable[[Problem, str], bool]:
    """The function that grades the text of an answer to a problem with a reference.

    Raises ConfigError if there is none, or DataError, naming the line, if it does not take a
    reference; nothing has been loaded then.
    """
    grader = grader_of(task.grade)

    def grade(problem: Problem, text: str) -> bool:
        try:
            return grader(text, problem.answer)
        except DataError as error:
            raise DataError(f"{problem.origin}: {error}") from error

    for problem in problems:
        if problem.answer is not None:
            try:
                check_reference(grader, problem.answer)
            except DataError as error:
                raise DataError(f"{problem.origin}: {error}") from error
    return grade


def check_apart(directory: Path) -> None:
    """Raises ConfigError if the directory is a model's, or holds another evaluation's frontier."""
    if (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"{directory} is a model's directory, and services read the frontier there: set "
            "another output_dir for what is measured on files"
        )
    if (directory / FRONTIER_FILE).exists() and not (directory / JOB_FILE).exists():
        raise ConfigError(
            f"{directory} holds the {FRONTIER_FILE} of another evaluation: choose another "
            "output_dir"
        )


def begun(job: EvaluateJob, problems: Sequence[Problem], directory: Path) -> ResultCache:
    """What an interrupted run of this job has left, in a directory that is the job's from now on.
    Raises ConfigError if it is another's."""
    path, journal = directory / JOB_FILE, directory / JOURNAL
    if not journal.exists() and not (directory / FRONTIER_FILE).exists():
        # A job that was refused before it measured anything.
        path.unlink(missing_ok=True)
    now = job.model_dump(mode="json", exclude={"output_dir"}) | {"prompts": _digest(problems)}
    claim(path, now, "an evaluation", "output_dir")
    return ResultCache(journal, json.dumps([now, _weights(job)]))


def _digest(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        turns = [turn.key for turn in problem.turns]
        digest.update(json.dumps([turns, problem.answer]).encode() + b"\n")
    return digest.hexdigest()


def _weights(job: EvaluateJob) -> list[Any]:
    """What tells whether weights have changed since a run was interrupted."""
    places = (job.checkpoint, job.engine.draft_adapter)
    files = [file for place in places if place for file in Path(place).glob("*.safetensors")]
    states = [(file.name, file.stat()) for file in sorted(files)]
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]


def check_room(
    job: EvaluateJob, context: int, problems: Sequence[Problem], prompts: Sequence[Sequence[int]]
) -> None:
    """Raises DataError, naming lines, if prompts leave no room for an answer."""
    most = context - job.max_new_tokens
    pairs = zip(problems, prompts, strict=True)
    long = [(problem.origin, len(prompt)) for problem, prompt in pairs if len(prompt) > most]
    if long:
        longest = max(tokens for _, tokens in long)
        raise DataError(
            f"{len(long)} of {len(problems)} prompts leave no room for {job.max_new_tokens} new "
            f"tokens in engine.max_context {context}: set "
            f"engine.max_context={longest + job.max_new_tokens}, lower max_new_tokens, or take "
            "them out. The first:\n  "
            + "\n  ".join(f"{origin}: {tokens} tokens" for origin, tokens in long[:_TOLD])
        )


def packed(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """A mode's answers as JSON."""
    return {"seconds": seconds, "answers": _ANSWERS.dump_python(answers, mode="json")}


def unpacked(value: dict[str, Any]) -> tuple[list[Answer], float]:
    """A mode's answers, and the time that they took."""
    return _ANSWERS.validate_python(value["answers"]), value["seconds"]


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
