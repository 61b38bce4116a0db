"""What a task is: questions for the model, and a judgement of its answers."""

import re
from dataclasses import dataclass

from mars_ray.data.chat import Message

FINAL_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """A user's message and the number that the answer has to end with.

    Without such a number (`answer` is None) an answer is right if it is that of `exact`.
    """

    question: str
    answer: str | None
    kind: str | None = None  # of the prompt, where a task has several
    turns: tuple[Message, ...] = ()  # the conversation so far, where it is not the question alone

    @property
    def messages(self) -> list[Message]:
        """What the model is asked."""
        return list(self.turns) or [Message("user", self.question)]


def is_correct(problem: Problem, text: str) -> bool:
    """Whether the last `#### number` of the text is the answer, as a number: 7.0 is 7."""
    assert problem.answer is not None, "a prompt without a reference answer"
    found = FINAL_ANSWER.findall(text)
    return bool(found) and _number(found[-1]) == _number(problem.answer)


def final_answer(solution: str) -> str | None:
    """The number after `####` in a reference solution."""
    found = FINAL_ANSWER.findall(solution)
    return found[-1] if found else None


def _number(text: str) -> float:
    return float(text.replace(",", ""))
