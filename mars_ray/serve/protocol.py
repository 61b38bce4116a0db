"""The messages between the HTTP ingress and a replica.

    ingress  --GenerationRequest-->  replica
    ingress  <--Envelope, ..., Envelope(ending)--  replica    the text of one or more engine steps
    ingress  <--ErrorInfo--  replica                          always the last message

A replica writes the reply, as JSON or as server-sent events, and the ingress sends it on as it is:
of an envelope it reads only the counts. It owns what must not depend on the replica that answers:
id, time and seed of the request, the event of an error, and the mark at the end of a stream.

A request has `choices` answers, each with deltas of its own; it is over when all have finished.
Errors are sent as values, not raised: the first message decides the HTTP status, and Ray wraps
exceptions in types of its own.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import Mode
from mars_ray.core.thresholds import Quality


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an answer asks the client to make; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece's addition to one of an answer's calls: its beginning, or more of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None  # with `name`, only where the call begins
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation; a tool's message answers one of the assistant's calls."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None  # of the call whose result a tool's message is
    reasoning: str | None = None  # the thoughts before an answer
    name: str | None = None  # of who speaks, for templates that show it


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that an answer may call."""

    definitions: tuple[dict[str, Any], ...]  # as in the request: type, function
    is_required: bool = False
    is_parallel: bool = True
    named: str | None = None  # the one that must be called


# Variables of the chat template that a request sets, by name.
Switches = tuple[tuple[str, bool | str], ...]
# A conversation, a text without chat template, or tokens.
Prompt = tuple[Turn, ...] | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How a request is to be answered."""

    route: Literal["chat", "completion", "response"] = "chat"
    model: str = ""  # by its name in requests
    created: int = 0  # Unix time
    is_streamed: bool = True  # else the client gets nothing before all answers are whole
    # Steps are told apart, each in an event of its own, at most one per `stream_interval_s` else.
    by_step: bool = False
    has_usage: bool = False  # the stream ends with an event of usage
    has_usage_so_far: bool = False  # every event has the usage up to it
    # Of a response: the reply as far as it is known before there are any answers.
    response: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request: the prompts, and how to answer them."""

    id: str
    prompts: tuple[Prompt, ...]
    mode: Mode
    sampling: Sampling
    # None: as many as the limit below and the context allow; 0: only what is echoed.
    max_new_tokens: int | None
    new_tokens_limit: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own
    ignore_eos: bool = False  # the model's own do not end the answer
    shows_stop: bool = False  # the text has the stop string, or the stop token's text
    is_echoed: bool = False  # the text begins with the prompt
    switches: Switches = ()
    add_special_tokens: bool = True  # to prompts that are texts: what the tokenizer adds to any
    shows_reasoning: bool | None = None  # None: thoughts are part of the answer
    priority: int = 0  # smaller goes first
    n: int = 1  # number of answers to each prompt
    logprobs: int | None = None  # number of likeliest tokens to report with each token
    is_mode_open: bool = False  # the request leaves the mode to the service
    quality: Quality | None = None  # replaces the mode's threshold
    quality_class: str | None = None  # None: the request pins its settings
    schema: dict[str, Any] | None = None  # schema of the JSON that the answer must be
    is_strict: bool = False  # the whole schema is followed, or the request refused
    tools: Tools | None = None
    reply: ReplyForm = ReplyForm()
    timeout_s: float | None = None  # a replica counts it from the request's arrival there

    @property
    def choices(self) -> int:
        """Total number of answers; those to one prompt are adjacent."""
        return len(self.prompts) * self.n

    @property
    def choices_param(self) -> str:
        """The request's field at fault if there are too many choices."""
        return "n" if self.n > 1 else "prompt"


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as the client sees it, and the model's own log-probability of it; none for the first
    token of a prompt."""

    text: str
    bytes: tuple[int, ...]
    logprob: float | None
    top: tuple["TokenText", ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """The counts of an answer while one draft adapter, or none, was in force."""

    adapter: str | None
    tokens: int
    forwards: int


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended, and its counts."""

    reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int  # including the end-of-turn token, which is not in the text
    forwards: int
    disagreed: int = 0  # tokens found, one step later, not to be the model's own choice
    threshold: float | None = None  # the lowest in force, in modes that have one
    mode: str | None = None  # if it differs from the request's mode
    served: tuple[Served, ...] = ()  # in order of time; their sums are the counts above
    cached_tokens: int = 0  # of the prompt: those that the prefix cache had
    ngram_tokens: int = 0  # of the completion: drafts that the n-gram lookup proposed
    reasoning_tokens: int | None = None  # of the completion; None if nobody tells them apart


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The addition of one or more engine steps to an answer; the last one has the finish."""

    text: str
    finish: Finish | None = None
    choice: int = 0
    forward: int = 0  # number of the last step, counted per answer
    tokens: int = 0  # number of committed tokens
    logprobs: tuple[TokenText, ...] = ()
    calls: tuple[ToolCallDelta, ...] = ()
    prompt_tokens: int = 0
    reasoning: str = ""  # an addition to the thoughts, which stand before the text


@dataclass(frozen=True, slots=True)
class Used:
    """The counts of a whole request; a prompt with several answers counts once."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forwards: int = 0
    disagreed: int = 0
    replica: str | None = None  # name of who has counted


@dataclass(frozen=True, slots=True)
class Envelope:
    """Text for the client as it is, and what the ingress notes of it."""

    text: str  # server-sent events, or in a single envelope the JSON of a reply
    used: Used  # by the whole request so far
    ending: str | None = None  # of the last envelope: why the last answer has finished
    mode: str | None = None  # of decoding, if it differs from the request's


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error the client gets, in OpenAI's terms; `param` is the request's field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    used: Used | None = None  # as far as the replica says it


Message = Envelope | ErrorInfo


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A prompt whose tokens are asked for; the fields are those of a `GenerationRequest`."""

    prompt: Prompt
    tools: Tools | None = None
    switches: Switches = ()
    add_special_tokens: bool = True
    add_generation_prompt: bool = True  # what the template writes for an answer to begin
    with_strings: bool = False


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A prompt's tokens, and the most that a sequence may have."""

    tokens: tuple[int, ...]
    max_context: int
    strings: tuple[str, ...] | None = None  # the tokens as the vocabulary writes them
