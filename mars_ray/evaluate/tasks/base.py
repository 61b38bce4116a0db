"""What a task is: questions for the model, and a judgement of its answers."""

import re
from dataclasses import dataclass

FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """A user's message and the number that the answer has to end with."""

    question: str
    answer: str


def is_correct(problem: Problem, text: str) -> bool:
    """Whether the last `#### number` of the text is the answer, as a number: 7.0 is 7."""
    found = FINAL_ANSWER.findall(text)
    return bool(found) and _number(found[-1]) == _number(problem.answer)


def final_answer(solution: str) -> str | None:
    """The number after `####` in a reference solution."""
    found = FINAL_ANSWER.findall(solution)
    return found[-1] if found else None


def _number(text: str) -> float:
    return float(text.replace(",", ""))
