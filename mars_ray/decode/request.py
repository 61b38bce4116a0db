"""The inputs and outputs of a decoder.

A grammar restricts an answer to a form (`structured_output.py` implements it). Rows of successive
tokens are filtered by the grammar's state before them, so they never choose a forbidden token. A
mask's row stands behind tokens that are not known yet, so it is not filtered: its proposals are
kept up to the first one that the grammar forbids.

Shape suffixes: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import Mode
from mars_ray.core.thresholds import Budget, Quality
from mars_ray.errors import ConfigError, PromptTooLongError, RequestError
from mars_ray.model.directory import ModelCard
from mars_ray.model.shape import most_positions, sliding_window

MOST_LOGPROBS = 20  # OpenAI's limit
FinishReason = Literal["stop", "length", "deadline"]


class GrammarState(Protocol):
    """The state of one answer in its grammar."""

    def allowed(self, back: int, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """The tokens that may follow, (R, V): after each of the last `back` tokens but one, after
        the answer so far, and after each of `tokens`. Rows after a forbidden token are all True."""
        ...

    def admissible(self, tokens: Sequence[int]) -> int:
        """The number of leading tokens that the grammar allows to follow."""
        ...

    def forced(self) -> list[int]:
        """The tokens of the only text that can follow; empty if there is a choice."""
        ...

    def consume(self, tokens: Sequence[int]) -> None:
        """Advance past these tokens of the answer."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by all answers of a request."""

    source: str  # in llguidance's notation, for engines that compile it themselves

    def start(self) -> GrammarState:
        """The state at the beginning of an answer."""
        ...


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that hold for every request to an engine."""

    max_context: int  # tokens of a prompt and its answer
    max_batch: int  # sequences that decode at a time
    vocabulary: int
    stop_ids: frozenset[int]  # tokens at which answers end


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to decode. Its text depends only on this and the model."""

    id: str
    prompt: tuple[int, ...]
    mode: Mode
    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int]
    priority: int = 0  # smaller goes first
    deadline: float | None = None  # on the clock of `time.monotonic`
    logprobs: int | None = None  # how many of the likeliest tokens to report beside each token
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, from the second on
    grammar: Grammar | None = None  # what the answer must be
    quality: Quality | None = None  # in place of the mode's threshold


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sequence; a stop token, if one was met, is its last token."""

    request_id: str
    tokens: tuple[int, ...]
    token_forward: tuple[int, ...]  # number of the forward, from 1, that committed each token
    forwards: int  # those that committed tokens; for a long prompt only its last one does
    finish_reason: FinishReason
    # Names of the draft adapters that made its drafts, in order. Only if there is just one does the
    # T/F belong to an adapter. They do not affect the text.
    adapters: tuple[str, ...] = field(default=(), compare=False)

    @property
    def tokens_per_forward(self) -> float:
        """T/F: committed tokens per forward pass."""
        return len(self.tokens) / self.forwards if self.forwards else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The model's own log-probability of a token, before any temperature or penalty."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with theirs


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The result of one forward for one request."""

    request_id: str
    tokens: tuple[int, ...]
    forward: int
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # in the first event, if asked for
    # Of each token, in modes that have a measure, but for steps of plain decoding.
    confidences: tuple[float, ...] = ()
    # Tokens so far that the next step showed to differ from AR decoding's choice. Tokens of a last
    # step of `confidence` are never checked.
    disagreed: int = 0
    ngram_tokens: int = 0  # so far: accepted drafts that the n-gram lookup proposed
    queue_s: float = 0.0  # from submission to the request's first forward
    cached_tokens: int = 0  # of the prompt: those that the prefix cache had
    threshold: float | None = None  # the lowest in force so far, in modes that have one
    adapter: str | None = None  # the draft adapter whose drafts this forward has checked
    failure: Exception | None = None  # what ended the request in place of a completion

    @property
    def is_last(self) -> bool:
        """Whether the request is over, one way or the other."""
        return self.completion is not None or self.failure is not None


def as_one(events: Sequence[TokenEvent]) -> TokenEvent:
    """The events of successive forwards for one request, joined into one."""
    if len(events) == 1:
        return events[0]
    return replace(
        events[-1],
        tokens=tuple(chain.from_iterable(event.tokens for event in events)),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
        prompt_logprobs=events[0].prompt_logprobs,
        confidences=tuple(chain.from_iterable(event.confidences for event in events)),
    )


def without_masks(mode: Mode) -> str:
    """What is wrong with a mode that needs masks where there are none."""
    return (
        f"mode {mode.type!r} needs masks, and this model has none: use mode 'exact', or give it a "
        "draft adapter (`mars-ray adapt MODEL` makes one)"
    )


def window_of(mode: Mode, card: ModelCard) -> int:
    """Masks per step; 0 for the modes that have none. Raises RequestError beyond the trained
    depth."""
    depth, asked = card.block_size, mode.asked_window
    if depth == 0 and (mode.needs_masks or asked):
        raise RequestError(without_masks(mode), field="mode")
    if asked > depth:
        raise RequestError(f"window {asked} is more than the trained depth {depth}", field="window")
    return mode.widest(depth)


def check_context(max_context: int | None, model_config: Any) -> None:
    """Raises ConfigError if a model has fewer positions than a given context, or does not see them
    all."""
    if max_context is None:
        return
    if max_context > (most := most_positions(model_config)):
        raise ConfigError(
            f"max_context={max_context}: this model knows {most} positions; give at most so many "
            "(max_context, or --max-model-len)"
        )
    check_sees_all(max_context, model_config)


def check_sees_all(max_context: int, model_config: Any) -> None:
    """Raises ConfigError if a model's attention has a window that slides within the context."""
    window = sliding_window(model_config)
    if window is not None and window < max_context:
        raise ConfigError(
            f"max_context={max_context}: this model's rows see {window} tokens (sliding_window), "
            f"and the decoding engine has no sliding window: set max_context={window} at most"
        )


def check_request(request: Request, vocabulary: int, card: ModelCard, max_context: int) -> None:
    """Raise RequestError or PromptTooLongError when the request cannot be decoded."""
    quality, mode = request.quality, request.mode
    window_of(mode, card)
    if not request.prompt:
        raise RequestError("the prompt is empty", field="messages")
    if request.max_new_tokens < 1:
        raise RequestError("max_tokens must be at least 1", field="max_tokens")
    if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
        raise RequestError(f"a prompt token is outside the vocabulary of {vocabulary}")
    foreign = [token for token in request.sampling.logit_bias if not 0 <= token < vocabulary]
    if foreign:
        raise RequestError(
            f"logit_bias names token {foreign[0]}, outside the vocabulary of {vocabulary}",
            field="logit_bias",
        )
    if any(token >= vocabulary for token in request.stop_ids):
        raise RequestError(
            f"stop_token_ids names a token outside the vocabulary of {vocabulary}",
            field="stop_token_ids",
        )
    for asked in (request.logprobs, request.prompt_logprobs):
        if asked is not None and not 0 <= asked <= MOST_LOGPROBS:
            raise RequestError(f"logprobs must lie in 0 .. {MOST_LOGPROBS}", field="logprobs")
    if request.grammar and request.sampling.min_new_tokens:
        raise RequestError(
            "a least length may contradict the format asked for; leave one of the two out",
            field="min_tokens",
        )
    if isinstance(quality, Budget) and not mode.verifies:
        raise RequestError(
            f"a quality budget has no effect in mode {mode.type!r}, which verifies no drafts; use "
            "'verified'",
            field="quality_budget",
        )
    if quality and not mode.is_elastic:
        raise RequestError(
            f"a quality has no effect in mode {mode.type!r} as it is set; use 'verified', or "
            "'confidence' by probability",
            field="quality",
        )
    total = len(request.prompt) + request.max_new_tokens
    if total > max_context:
        raise PromptTooLongError(
            f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new tokens are "
            f"{total}, more than the context of {max_context}",
            field="max_tokens",
        )
