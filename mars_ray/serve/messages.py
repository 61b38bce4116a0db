"""What crosses from the HTTP ingress to a replica and back.

    ingress  --ChatCall-->  replica
    ingress  <--Piece, Piece, ..., Piece(finish)--  replica      one message per engine step
    ingress  <--Refusal--  replica                              the last one, in place of a piece

Errors travel as values, not as exceptions: the first message decides the HTTP status, and Ray wraps
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


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked request: what to answer, and how."""

    id: str
    messages: tuple[Turn, ...]
    mode: Mode
    sampling: Sampling
    max_new_tokens: int | None  # None: as many as limits and context allow
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended and what it took."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int  # the end-of-turn token is counted, though it is not in the text
    forwards: int

    @property
    def tokens_per_forward(self) -> float:
        """T/F of this answer."""
        return self.completion_tokens / self.forwards


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that one engine step added; the last piece has the finish."""

    text: str
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error the client gets, in OpenAI's terms; `param` is the request's field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


Message = Piece | Refusal
