"""The shapes of replies that `serve/openai/responses.py` writes and the OpenAPI schema describes.

They are plain dicts at run time. They allow no further fields, and tests check replies against
them.
"""

from typing import (
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
    """What was wrong; `param` is the request's field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Part):
    """Every error, whatever its status."""

    error: Fault


class AdapterUsage(Part):
    """What a reply got while one draft adapter, or none, was in force."""

    adapter: str | None
    completion_tokens: int
    forwards: int


class MarsUsage(Part):
    """What multi-token decoding did for the answers of a reply."""

    forwards: int
    tokens_per_forward: float
    mode: str
    threshold: float | None
    disagreement: float
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
    """Log-probabilities of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
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
    """What stands before an answer, as vLLM's clients read it, and as those of DeepSeek's API."""

    reasoning: str
    reasoning_content: str


class ChatAnswer(Thoughts):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[SaidToolCall]]


class ChatContent(Part):
    """What an answer of a chat says."""

    message: ChatAnswer
    logprobs: ChatLogprobs | None


class ChatChoice(ChatContent):
    """One answer of a chat."""

    index: int
    finish_reason: ChatReason
    mars: NotRequired[Forwards]


class TextContent(Part):
    """What a continuation says, whole or in a chunk."""

    text: str
    logprobs: TextLogprobs | None


class TextChoice(TextContent):
    """One continuation of a prompt."""

    index: int
    finish_reason: Reason
    mars: NotRequired[Forwards]


class Headed(Part):
    """What replies and chunks have in common."""

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
    """What a chunk adds to a call, and the call's place among those of the answer."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: ChunkFunction


class ChatDelta(Thoughts, total=False):
    """What a chunk adds to the assistant's turn."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[ChunkToolCall]


class ChatAddition(Part):
    """What a chunk says of an answer of a chat."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunkChoice(ChatAddition):
    """A step of one answer of a chat."""

    index: int
    finish_reason: ChatReason | None
    mars: NotRequired[ChunkForward]


class TextChunkChoice(TextContent):
    """A step of one continuation."""

    index: int
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


class DetokenizeReply(Part):
    """The text of tokens."""

    prompt: str


class StatusReply(Part):
    """Whether the service lives, or would answer now."""

    status: Literal["ok", "ready", "not ready", "draining"]


class VersionReply(Part):
    """The version of this package."""

    version: str
