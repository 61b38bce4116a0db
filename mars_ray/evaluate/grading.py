"""Grading of answers by their references: exact match, a regular expression, a Python function."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mars_ray.config.evaluate import ExactMatch, FunctionGrade, Grade, RegexMatch
from mars_ray.errors import ConfigError, DataError

# Takes the text of an answer, and its reference. Raises DataError.
Grader = Callable[[str, Any], bool]


def grader_of(grade: Grade) -> Grader:
    """The function that grades. Raises ConfigError if there is none of that name."""
    match grade:
        case ExactMatch():
            return _is_exact
        case RegexMatch(pattern=pattern):
            return _Regex(pattern)
        case FunctionGrade(function=name):
            return _Function(name)


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


def check_reference(grader: Grader, reference: Any) -> None:
    """Raises DataError if nothing can be graded by this reference."""
    if isinstance(grader, _Function):
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


def _is_exact(answer: str, reference: Any) -> bool:
    return answer.strip() in [text.strip() for text in _texts(reference)]


class _Regex:
    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)

    def __call__(self, answer: str, reference: Any) -> bool:
        found = self._last(answer)
        wanted = [(text, self._last(text)) for text in _texts(reference)]
        return found is not None and found in [last or text.strip() for text, last in wanted]

    def _last(self, text: str) -> str | None:
        # A group that took no part in a match gives None.
        found = [match[1] for match in self._pattern.finditer(text) if match[1] is not None]
        return found[-1].strip() if found else None


class _Function:
    def __init__(self, name: str) -> None:
        module, _, function = name.partition(":")
        self._name = name
        try:
            with _working_directory():
                found = importlib.import_module(module)
        except Exception as error:
            raise ConfigError(
                f"task.grade.function {name}: module {module} cannot be imported from "
                f"{Path.cwd()}: {type(error).__name__}: {error}"
            ) from error
        if not callable(called := vars(found).get(function)):
            raise ConfigError(f"task.grade.function {name}: {module} has no function {function}")
        self._function = called

    def __call__(self, answer: str, reference: Any) -> bool:
        try:
            is_right = self._function(answer, reference)
            if is_right in (False, True):
                return bool(is_right)
        except Exception as error:
            raise DataError(
                f"{self._name}(answer, reference) failed: {type(error).__name__}: {error}"
            ) from error
        raise DataError(
            f"{self._name}(answer, reference) returned {is_right!r}: it must return True or False"
        )


@contextmanager
def _working_directory() -> Iterator[None]:
    """Lets modules of the working directory be imported: commands do not have it on their path."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path.pop(0)
