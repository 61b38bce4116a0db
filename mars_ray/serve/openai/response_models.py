"""Shapes of replies, for the served OpenAPI schema; `serve/openai/responses.py` writes them.

They have no room for more, and tests hold replies to them: neither can change alone.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Reason = Literal["stop", "length"]
ChatReason = Literal["stop", "length", "tool_calls"]


class Said(BaseModel):
    """Part of a reply: these fields and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Fault(Said):
    """What was wrong; `param` is the request's field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Said):
    """Every error, whatever its status."""

    error: Fault


class AdapterUsage(Said):
    """What a reply got while one draft adapter, or none, was in force."""

    adapter: str | None
    completion_tokens: int
    forwards: int


class MarsUsage(Said):
    """What multi-token decoding did for the answers of a reply."""

    forwards: int
    tokens_per_forward: float
    mode: str
    threshold: float | None
    disagreement: float
    adapter: str | None
    by_adapter: list[AdapterUsage] | None = None


class Usage(Said):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    mars: MarsUsage


class Forwards(Said):
    """The forward that each token of an answer came from; with `return_forwards`."""

    forwards: list[int]


class ChunkForward(Said):
    """The forward that a chunk's tokens came from; with `return_forwards`."""

    forward: int
    tokens: int


class TokenLogprob(Said):
    """A token with the model's own log-probability of it."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of the answer, and the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Said):
    """Of a chat's answer."""

    content: list[ChosenLogprob]
    refusal: None


class TextLogprobs(Said):
    """Of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class SaidFunction(Said):
    """The function to be called; its arguments are JSON."""

    name: str
    arguments: str


class SaidToolCall(Said):
    """A call that the client is asked to make."""

    id: str
    type: Literal["function"]
    function: SaidFunction


class ChatAnswer(Said):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[SaidToolCall] | None = None


class ChatChoice(Said):
    """One answer of a chat."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason
    mars: Forwards | None = None


class TextChoice(Said):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason
    mars: Forwards | None = None


class Headed(Said):
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


class ChunkFunction(Said):
    """The name of the function where its call begins, and more of its arguments."""

    name: str | None = None
    arguments: str


class ChunkToolCall(Said):
    """What a chunk adds to a call, and the call's place among those of the answer."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: ChunkFunction


class ChatDelta(Said):
    """What a chunk adds to the assistant's turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ChunkToolCall] | None = None


class ChatChunkChoice(Said):
    """A step of one answer of a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None
    mars: ChunkForward | None = None


class TextChunkChoice(Said):
    """A step of one continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Reason | None
    mars: ChunkForward | None = None


class ChatChunk(Headed):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextChunk(Headed):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: Usage | None = None


class ModelEntry(Said):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsReply(Said):
    """All of them."""

    object: Literal["list"]
    data: list[ModelEntry]


class PolicyNow(Said):
    """The autoscaling policy's last decision, in seconds of Unix time, and why."""

    at_s: float
    replicas: int
    threshold: float
    shed: float
    reason: str


class EngineNow(Said):
    """What a replica runs as: dtype and device, form of attention, size of the KV cache."""

    engine: str
    dtype: str
    device: str
    attention: str
    threads: int
    cache_bytes: int
    cache_tokens: int


class ModelNow(Said):
    """What a model is doing; null where nothing is known, as no replica or nothing lately."""

    id: str
    replicas: int
    running: int
    waiting: int
    kv_cache_usage: float | None
    tokens_per_second: float
    tokens_per_forward: float | None
    disagreement: float | None
    mode: str | None
    threshold: float | None
    adapter: str | None
    engine: EngineNow | None
    policy: PolicyNow | None


class MarsStatusReply(Said):
    """All models at the moment."""

    object: Literal["list"]
    data: list[ModelNow]


class TokenizeReply(Said):
    """A prompt's tokens, and how many a sequence may have."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeReply(Said):
    """The text of tokens."""

    prompt: str


class StatusReply(Said):
    """Whether the service lives, or would answer now."""

    status: Literal["ok", "ready", "not ready", "draining"]


class VersionReply(Said):
    """Of this package."""

    version: str
