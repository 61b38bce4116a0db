"""Tasks: questions for the model, their sources, and the grading of its answers."""

import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from os.path import expanduser
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mars_ray.config.evaluate import (
    CorpusTask,
    ExactMatch,
    FilesTask,
    FunctionGrade,
    Grade,
    Gsm8kTask,
    PromptsTask,
    RegexMatch,
    Task,
)
from mars_ray.config.inputs import FilesSource
from mars_ray.data.chat import encode_prompt
from mars_ray.data.corpus import problems
from mars_ray.data.sources import BadRows, Message, read_prompts
from mars_ray.errors import ConfigError, DataError

# Takes the text of an answer, and its reference. Raises DataError.
Grader = Callable[[str, Any], bool]


def grader_of(grade: Grade) -> Grader:
    """The function that grades. Raises ConfigError if there is none of that name."""
    match grade:
        case ExactMatch():
            return lambda answer, reference: (
                answer.strip() in [text.strip() for text in _texts(reference)]
            )
        case RegexMatch(pattern=pattern):
            return _regex(re.compile(pattern))
        case FunctionGrade(function=name):
            return _function(name)


def grade_label(grade: Grade) -> str:
    """What the column of the shares of right answers is called."""
    match grade:
        case ExactMatch():
            return "exact match"
        case RegexMatch():
            return "regex"
        case FunctionGrade(function=name):
            return name.rpartition(":")[2]


def reference_text(reference: Any) -> str | None:
    """A reference's text, or the first one's of several; None if it is none."""
    first = reference[0] if isinstance(reference, list) and reference else reference
    if isinstance(first, str):
        return first
    is_number = isinstance(first, int | float) and not isinstance(first, bool)
    return str(first) if is_number else None


def check_reference(grade: Grade, grader: Grader, reference: Any) -> None:
    """Raises DataError if nothing can be graded by this reference."""
    if isinstance(grade, FunctionGrade):
        # Its own text is the answer of which every function should make something.
        grader(reference_text(reference) or "", reference)
    else:
        _texts(reference)


def _texts(reference: Any) -> list[str]:
    """The texts of which an answer must be one."""
    several = reference if isinstance(reference, list) and reference else [reference]
    texts = [reference_text(each) for each in several]
    if None in texts:
        raise DataError(
            f"the reference is neither a text, a number nor a list of these but "
            f"{type(reference).__name__}: only a Python function (--function) can grade by it"
        )
    return [text for text in texts if text is not None]


def _regex(pattern: re.Pattern[str]) -> Grader:
    def last(text: str) -> str | None:
        # A group that took no part in a match gives None.
        found = [match[1] for match in pattern.finditer(text) if match[1] is not None]
        return found[-1].strip() if found else None

    def grade(answer: str, reference: Any) -> bool:
        found = last(answer)
        return found is not None and found in [
            last(text) or text.strip() for text in _texts(reference)
        ]

    return grade


def _function(name: str) -> Grader:
    module, _, function = name.partition(":")
    # Commands do not have the working directory on their path.
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"task.grade.function {name}: module {module} cannot be imported from "
            f"{Path.cwd()}: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.pop(0)
    if not callable(called := vars(found).get(function)):
        raise ConfigError(f"task.grade.function {name}: {module} has no function {function}")

    def grade(answer: str, reference: Any) -> bool:
        try:
            is_right = called(answer, reference)
            if is_right in (False, True):
                return bool(is_right)
        except Exception as error:
            raise DataError(
                f"{name}(answer, reference) failed: {type(error).__name__}: {error}"
            ) from error
        raise DataError(
            f"{name}(answer, reference) returned {is_right!r}: it must return True or False"
        )

    return grade


FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """A user's message, and the number that the answer must end with or, for a prompt of `files`,
    the reference that it is graded by.

    If no problem of a task has one (`answer` is None), an answer is right if it is that of `exact`.
    """

    question: str
    answer: Any
    kind: str | None = None  # kind of the prompt, if the task has several
    turns: tuple[Message, ...] = ()  # the conversation so far, if it is more than the question
    origin: str = ""  # file and line of the prompt, if the task is `files`

    @property
    def messages(self) -> list[Message]:
        return list(self.turns) or [Message("user", self.question)]


def is_correct(problem: Problem, text: str) -> bool:
    """Whether the last `#### number` of the text equals the answer as a number: 7.0 is 7."""
    assert problem.answer is not None, "a prompt without a reference answer"
    found = FINAL_ANSWER.findall(text)
    return bool(found) and _number(found[-1]) == _number(problem.answer)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def gsm8k_problems(task: Gsm8kTask) -> list[Problem]:
    """The first `count` problems of the file. Raises DataError, naming the line."""
    path = Path(expanduser(task.path))
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; docs/how-to/fine-tune.md has the lines that fetch GSM8K"
        )
    try:
        # Not splitlines(), which also splits at characters that JSON allows in a text.
        with path.open(encoding="utf-8-sig") as file:
            written = ((n, line) for n, line in enumerate(file, start=1) if line.strip())
            lines = list(islice(written, task.count))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    problems = []
    for number, line in lines:
        try:
            row = json.loads(line)
            answers = FINAL_ANSWER.findall(row["answer"])
            question = row["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not a GSM8K problem: {error!r}") from None
        if not isinstance(question, str):
            raise DataError(f"{path}:{number}: the question is no text")
        if not answers:
            raise DataError(f"{path}:{number}: the solution has no '#### number'")
        problems.append(Problem(question, answers[-1]))
    return problems


def _prompts(source: FilesSource, kind: str | None = None) -> list[Problem]:
    """All prompts of the files. Raises DataError for a bad row."""
    report = BadRows()
    problems = [
        Problem(
            record.messages[-1].content,
            record.reference if kind is None else None,
            kind,
            record.messages,
            record.origin if kind is None else "",
        )
        for record in read_prompts(source, report)
    ]
    report.check(0.0)
    return problems


def prompts_of(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    """Token ids of each problem's prompt. Raises DataError if the template refuses one."""
    prompts = []
    for problem in problems:
        try:
            prompts.append(tuple(encode_prompt(problem.messages, tokenizer)))
        except DataError as error:
            raise DataError(f"{problem.origin or problem.question}: {error}") from error
    return prompts


def kinds_in_turn(problems: list[Problem]) -> list[Problem]:
    """The first problem of every kind, then the second of every kind, and so on."""
    by_kind: dict[str | None, list[Problem]] = {}
    for problem in problems:
        by_kind.setdefault(problem.kind, []).append(problem)
    return [problem for each in zip_longest(*by_kind.values()) for problem in each if problem]


def problems_of(task: Task | FilesTask) -> list[Problem]:
    """The task's problems, at least one. Raises DataError."""
    match task:
        case CorpusTask():
            # Of the test split, whose texts do not occur in training problems.
            drawn = problems("test", task.count, task.seed)
            found = [Problem(each.question, str(each.answer)) for each in drawn]
        case Gsm8kTask():
            found = gsm8k_problems(task)
        case PromptsTask():
            found = [p for kind, source in task.kinds.items() for p in _prompts(source, kind)]
        case FilesTask():
            found = _prompts(task)
            if not found:
                raise DataError(f"{', '.join(task.paths)}: there is no prompt in it")
    if not found:
        raise DataError("the task has no problems: name a file that holds some")
    return found
