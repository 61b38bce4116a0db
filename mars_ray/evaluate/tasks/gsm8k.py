"""GSM8K (Cobbe et al., 2021, arXiv 2110.14168) from its JSONL files."""

import json
from itertools import islice
from pathlib import Path

from mars_ray.config.evaluate import Gsm8kTask
from mars_ray.errors import DataError
from mars_ray.evaluate.tasks.base import Problem, final_answer


def gsm8k_problems(task: Gsm8kTask) -> list[Problem]:
    """The first `count` problems of the file. Raises DataError, naming the line."""
    path = Path(task.path).expanduser()
    if not path.is_file():
        raise DataError(f"{path}: no such file; docs/quickstart.md has the lines that fetch GSM8K")
    try:
        # Not splitlines(), to which characters that JSON allows in a text are ends of lines.
        with path.open(encoding="utf-8-sig") as file:
            written = ((n, line) for n, line in enumerate(file, start=1) if line.strip())
            lines = list(islice(written, task.count))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    return [_problem(line, f"{path}:{number}") for number, line in lines]


def _problem(line: str, origin: str) -> Problem:
    try:
        row = json.loads(line)
        answer = final_answer(row["answer"])
        question = row["question"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{origin}: not a GSM8K problem: {error!r}") from None
    if not isinstance(question, str):
        raise DataError(f"{origin}: the question is no text")
    if answer is None:
        raise DataError(f"{origin}: the solution has no '#### number'")
    return Problem(question, answer)
