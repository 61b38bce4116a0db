"""The shapes of replies that `serve/openai/sse.py` writes and the OpenAPI schema describes.

They are plain dicts at run time. They allow no further fields, and tests check replies against
them.
"""

from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic takes typing's from Python 3.12 on
)

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

Reason = Literal["stop", "length"]
ChatReason = Literal["stop", "length", "tool_calls"]


@with_config(ConfigDict(extra="forbid", strict=True))
class Part(TypedDict):
    """Part of a reply: these fields and no others."""


class Fault(Part):
    """An error; `param` is the request's field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Part):
    """Every error, whatever its status."""

    error: Fault


class AdapterUsage(Part):
    """A reply's counts while one draft adapter, or none, was in force."""

    adapter: str | None
    completion_tokens: int
    forwards: int


class MarsUsage(Part):
    """The effect of multi-token decoding on a reply."""

    forwards: int
    tokens_per_forward: float
    mode: str
    threshold: float | None
    disagreement: float
    ngram_tokens: int
    adapter: str | None
    by_adapter: NotRequired[list[AdapterUsage]]


class PromptTokensDetails(Part):
    """Of a prompt's tokens, those that need not be computed, as the prefix cache had them."""

    cached_tokens: int


class CompletionTokensDetails(Part):
    """Of an answer's tokens, those of its thoughts; with a `reasoning_parser`."""

    reasoning_tokens: int


class Tokens(Part):
    """Tokens of a request; in a chunk with `continuous_usage_stats` those so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(Tokens):
    """Tokens of a request, and how they came about."""

    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    mars: MarsUsage


class Forwards(Part):
    """The forward that each token of an answer came from; with `return_forwards`."""

    forwards: list[int]


class ChunkForward(Part):
    """The forward that a chunk's tokens came from; with `return_forwards`."""

    forward: int
    tokens: int


class TokenLogprob(Part):
    """A token with the model's own log-probability of it."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Part):
    """Log-probabilities of a chat's answer."""

    content: list[ChosenLogprob]
    refusal: None


class TextLogprobs(Part):
    """Log-probabilities of a completion; the first token of a prompt, with `echo`, has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class SaidFunction(Part):
    """The function to be called; its arguments are JSON."""

    name: str
    arguments: str


class SaidToolCall(Part):
    """A call that the client is asked to make."""

    id: str
    type: Literal["function"]
    function: SaidFunction


class Thoughts(Part, total=False):
    """The thoughts before an answer, as vLLM's clients read it, and as those of DeepSeek's API."""

    reasoning: str
    reasoning_content: str


class ChatAnswer(Thoughts):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[SaidToolCall]]


class ChatChoice(Part):
    """One answer of a chat."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason
    mars: NotRequired[Forwards]


class TextChoice(Part):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason
    mars: NotRequired[Forwards]


class Headed(Part):
    """The head of replies and chunks."""

    id: str
    created: int
    model: str


class ChatReply(Headed):
    """A chat completion that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class TextReply(Headed):
    """A completion that is not streamed."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class ChunkFunction(Part):
    """The name of the function where its call begins, and more of its arguments."""

    name: NotRequired[str]
    arguments: str


class ChunkToolCall(Part):
    """A chunk's addition to a call, and the call's place among those of the answer."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: ChunkFunction


class ChatDelta(Thoughts, total=False):
    """A chunk's addition to the assistant's turn."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[ChunkToolCall]


class ChatChunkChoice(Part):
    """A step of one answer of a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None
    mars: NotRequired[ChunkForward]


class TextChunkChoice(Part):
    """A step of one continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason | None
    mars: NotRequired[ChunkForward]


class ChatChunk(Headed):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | Tokens | None]


class TextChunk(Headed):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage | Tokens | None]


class InputDetails(Part):
    """Of a response's input tokens, those that the prefix cache had."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Part):
    """Tokens of a response, and how they came about."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int
    mars: MarsUsage


class ThoughtPart(Part):
    """Thoughts as they were written."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningOutput(Part):
    """The thoughts before the answer."""

    id: str
    type: Literal["reasoning"]
    summary: list[str]
    content: list[ThoughtPart]
    encrypted_content: None
    status: Literal["in_progress", "completed", "incomplete"]


class TextPartOutput(Part):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[ChosenLogprob]


class MessageOutput(Part):
    """An answer's text."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[TextPartOutput]


class CallOutput(Part):
    """A call that the client is asked to make."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class CutShort(Part):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseReply(Part):
    """A response; in the first events of a stream it is still empty."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: CutShort | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[ReasoningOutput | MessageOutput | CallOutput]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


@with_config(ConfigDict(extra="allow", strict=True))
class ResponseEvent(TypedDict):
    """An event of a streamed response, with what belongs to its type."""

    type: str
    sequence_number: int


class ModelEntry(Part):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsReply(Part):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelEntry]


class TokenizeReply(Part):
    """A prompt's tokens, and how many a sequence may have."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class DetokenizeReply(Part):
    """The text of tokens."""

    prompt: str


class StatusReply(Part):
    """Whether the service lives, or would answer now."""

    status: Literal["ok", "ready", "not ready", "draining"]


class VersionReply(Part):
    """The version of this package."""

    version: str
