"""What an evaluation of files has beyond others: a directory of its own, and answers to go on with.

output_dir/
  evaluation.json    the job, and a digest of the prompts: no other job writes here
  evaluation.part    until it is finished: the answers of each mode that is
  frontier.json, frontier.png, answers.jsonl, report.txt
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mars_ray.config.evaluate import EvaluateJob, FilesTask
from mars_ray.core.frontier import FRONTIER_FILE
from mars_ray.errors import ConfigError, DataError
from mars_ray.evaluate.answers import Answer
from mars_ray.evaluate.grading import check_reference, grader_of
from mars_ray.evaluate.tasks import Problem
from mars_ray.files import Kept, claim
from mars_ray.model.directory import CONFIG_FILE

JOB_FILE = "evaluation.json"
JOURNAL = "evaluation.part"
# Errors name this many lines.
_TOLD = 5
_ANSWERS = TypeAdapter(list[Answer])


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


def begun(job: EvaluateJob, problems: Sequence[Problem], directory: Path) -> Kept:
    """What an interrupted run of this job has left, in a directory that is the job's from now on.
    Raises ConfigError if it is another's."""
    path, journal = directory / JOB_FILE, directory / JOURNAL
    if not journal.exists() and not (directory / FRONTIER_FILE).exists():
        # A job that was refused before it measured anything.
        path.unlink(missing_ok=True)
    now = job.model_dump(mode="json", exclude={"output_dir"}) | {"prompts": _digest(problems)}
    claim(path, now, "an evaluation", "output_dir")
    return Kept(journal, json.dumps([now, _weights(job)]))


def _digest(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        turns = [(turn.role, turn.content) for turn in problem.turns]
        digest.update(json.dumps([turns, problem.answer]).encode() + b"\n")
    return digest.hexdigest()


def _weights(job: EvaluateJob) -> list[Any]:
    """What tells whether weights have changed since a run was interrupted."""
    places = (job.checkpoint, job.engine.draft_adapter)
    files = [file for place in places if place for file in Path(place).glob("*.safetensors")]
    states = [(file.name, file.stat()) for file in sorted(files)]
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]


def check_room(
    job: EvaluateJob, problems: Sequence[Problem], prompts: Sequence[Sequence[int]]
) -> None:
    """Raises DataError, naming lines, if prompts leave no room for an answer."""
    most = job.engine.max_context - job.max_new_tokens
    pairs = zip(problems, prompts, strict=True)
    long = [(problem.origin, len(prompt)) for problem, prompt in pairs if len(prompt) > most]
    if long:
        longest = max(tokens for _, tokens in long)
        raise DataError(
            f"{len(long)} of {len(problems)} prompts leave no room for {job.max_new_tokens} new "
            f"tokens in engine.max_context {job.engine.max_context}: set "
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
