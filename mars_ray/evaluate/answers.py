"""Answers, with what their steps report besides the tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
