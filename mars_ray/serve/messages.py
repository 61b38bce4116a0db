"""What crosses from the HTTP ingress to a replica and back.

    ingress  --Call-->  replica
    ingress  <--Piece, Piece, ..., Piece(finish)--  replica      one message per engine step
    ingress  <--Refusal--  replica                              the last one, in place of a piece

A call has `choices` answers, each with pieces of its own; it is over when all have finished. Errors
travel as values, not as exceptions: the first message decides the HTTP status, and Ray wraps
exceptions in types of its own.
"""

from dataclasses import dataclass
from typing import Literal

from mars_ray.config.decode import Mode, Sampling


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


# A conversation, a text as it is, or tokens.
Prompt = tuple[Turn, ...] | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request: what to answer, and how."""

    id: str
    prompts: tuple[Prompt, ...]
    mode: Mode
    sampling: Sampling
    max_new_tokens: int | None  # None: as many as the limit and the context allow
    new_tokens_limit: int
    stop: tuple[str, ...] = ()
    n: int = 1  # answers to each prompt
    logprobs: int | None = None  # likeliest tokens to report beside each token

    @property
    def choices(self) -> int:
        """Answers in all; those to one prompt stand together."""
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as the client sees it, and the model's own log-probability of it."""

    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple["TokenText", ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended and what it took."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int  # the end-of-turn token is counted, though it is not in the text
    forwards: int
    disagreed: int = 0  # tokens seen not to be the model's own choice, one step later


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine step added to an answer; the last piece has the finish."""

    text: str
    finish: Finish | None = None
    choice: int = 0
    forward: int = 0  # the step's number among those of the answer
    tokens: int = 0  # that it committed
    logprobs: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error the client gets, in OpenAI's terms; `param` is the request's field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


Message = Piece | Refusal


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A prompt's tokens, and how many a sequence may have."""

    tokens: tuple[int, ...]
    max_context: int
