"""Answers, with what their steps report besides the tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mars_ray.config.modes import Mode
from mars_ray.core.loops import is_looping
from mars_ray.decode.engine import Engine
from mars_ray.decode.request import Completion, Request


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished sequence."""

    completion: Completion
    disagreed: int  # tokens that the model itself would not have chosen
    log_p: float | None  # sum of the tokens' log-probabilities, if the request asks for them

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the answer."""
        return self.completion.tokens

    @property
    def is_looping(self) -> bool:
        """Whether the answer repeats itself at its end."""
        return is_looping(self.tokens)


@dataclass(frozen=True, slots=True)
class ModeAnswers:
    """A mode's answers to all problems."""

    mode: Mode
    answers: list[Answer]
    texts: list[str]
    correct: list[bool | None]  # None for a problem without a reference answer
    seconds: float

    def first_differences(self, exact: "ModeAnswers") -> list[int | None]:
        """How many tokens each answer has in common with that of `exact` before the first that
        differs; None where none does."""
        pairs = [(a.tokens, b.tokens) for a, b in zip(self.answers, exact.answers, strict=True)]
        return [None if a == b else in_common(a, b) for a, b in pairs]


def in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many elements two sequences have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def answer_all(
    engine: Engine, requests: Sequence[Request], advance: Callable[[], None]
) -> list[Answer]:
    """Decode requests in batches; returns answers in the order of the requests.

    Raises RequestError, or the error of a request that failed; no request is left in the engine.
    """
    log_p = {request.id: 0.0 for request in requests}
    asked = {request.id: request.logprobs is not None for request in requests}
    done: dict[str, Answer] = {}
    try:
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                if event.failure:
                    raise event.failure
                log_p[event.request_id] += sum(token.logprob for token in event.logprobs)
                if event.completion:
                    known = log_p[event.request_id] if asked[event.request_id] else None
                    done[event.request_id] = Answer(event.completion, event.disagreed, known)
                    advance()
    finally:
        for request in requests:
            engine.cancel(request.id)
    engine.check_integrity()
    return [done[request.id] for request in requests]
