"""What crosses from the HTTP ingress to a replica and back.

    ingress  --GenerationRequest-->  replica
    ingress  <--OutputDelta, ..., OutputDelta(finish)--  replica    of an engine step or several
    ingress  <--ErrorInfo--  replica                                the last one, and no delta

A request has `choices` answers, each with deltas of its own; it is over when all have finished.
Errors travel as values, not as exceptions: the first message decides the HTTP status, and Ray wraps
exceptions in types of its own.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import Mode
from mars_ray.decode.thresholds import Quality


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What an answer asks the client to do; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What a piece adds to one of an answer's calls: its beginning, or more of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None  # with `name` where it begins, and nowhere else
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation; that of a tool answers a call of the assistant's."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that an answer may call."""

    definitions: tuple[dict[str, Any], ...]  # as in the request: type, function
    is_required: bool = False
    is_parallel: bool = True
    named: str | None = None  # the one that must be called


# A conversation, a text as it is, or tokens.
Prompt = tuple[Turn, ...] | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request: what to answer, and how."""

    id: str
    prompts: tuple[Prompt, ...]
    mode: Mode
    sampling: Sampling
    max_new_tokens: int | None  # None: as many as the limit below and the context allow
    new_tokens_limit: int
    stop: tuple[str, ...] = ()
    n: int = 1  # answers to each prompt
    logprobs: int | None = None  # likeliest tokens to report beside each token
    is_mode_open: bool = False  # the request leaves to the service how it is decoded
    quality: Quality | None = None  # in place of the mode's threshold
    quality_class: str | None = None  # None: the request has pinned what it wants
    schema: dict[str, Any] | None = None  # of the JSON that the answer must be
    tools: Tools | None = None
    # A message for each step, at most one in each `stream_interval_s`, or one in all.
    delivery: Literal["steps", "paced", "whole"] = "paced"
    is_streamed: bool = True  # or the client gets nothing before all answers are whole
    timeout_s: float | None = None  # a replica counts it from the arrival there

    @property
    def choices(self) -> int:
        """Number of answers in all; those to one prompt stand together."""
        return len(self.prompts) * self.n

    @property
    def choices_param(self) -> str:
        """The request's field at fault where these are too many."""
        return "n" if self.n > 1 else "prompt"

    @property
    def is_forced(self) -> bool:
        """Whether the request names the tool; OpenAI then does not call the reason `tool_calls`."""
        return self.tools is not None and self.tools.named is not None


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as the client sees it, and the model's own log-probability of it."""

    text: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple["TokenText", ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """What an answer got while one draft adapter, or none, was in force."""

    adapter: str | None
    tokens: int
    forwards: int


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended and what it took."""

    reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int  # the end-of-turn token is counted, though it is not in the text
    forwards: int
    disagreed: int = 0  # tokens seen not to be the model's own choice, one step later
    threshold: float | None = None  # the lowest in force, in modes that have one
    mode: str | None = None  # where it is another one than the call's
    served: tuple[Served, ...] = ()  # one after the other; their sums are the counts above


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one engine step, or several, added to an answer; the last piece has the finish."""

    text: str
    finish: Finish | None = None
    choice: int = 0
    forward: int = 0  # the last step's number among those of the answer
    tokens: int = 0  # that were committed
    logprobs: tuple[TokenText, ...] = ()
    calls: tuple[ToolCallDelta, ...] = ()


def joined(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    """Two pieces of one answer as one; it has the forward of the second."""
    return replace(
        second,
        text=first.text + second.text,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        calls=_joined_calls(first.calls, second.calls),
    )


def _joined_calls(
    first: tuple[ToolCallDelta, ...], second: tuple[ToolCallDelta, ...]
) -> tuple[ToolCallDelta, ...]:
    """Arguments that follow each other as one piece of them."""
    if not first or not second or first[-1].name or second[0].name:
        return first + second
    arguments = first[-1].arguments + second[0].arguments
    return (*first[:-1], replace(second[0], arguments=arguments), *second[1:])


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error the client gets, in OpenAI's terms; `param` is the request's field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


Message = OutputDelta | ErrorInfo


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a replica says of a draft adapter that it gets ready: its name, or what is wrong."""

    name: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A prompt's tokens, and how many a sequence may have."""

    tokens: tuple[int, ...]
    max_context: int
