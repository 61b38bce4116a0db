"""What goes into a decoder and what comes out."""

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from mars_ray.config.decode import ConfidenceMode, ExactMode, Mode, Sampling, VerifiedMode
from mars_ray.errors import PromptTooLongError, RequestError
from mars_ray.model.card import ModelCard

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to decode. Its text depends on nothing but this and the model."""

    id: str
    prompt: tuple[int, ...]
    mode: Mode
    sampling: Sampling
    max_new_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sequence; a stop token, if one was met, is its last token."""

    request_id: str
    tokens: tuple[int, ...]
    token_forward: tuple[int, ...]  # number of the forward, from 1, that committed each token
    forwards: int  # the prompt's forward included
    finish_reason: FinishReason
    error: str | None = None

    @property
    def tokens_per_forward(self) -> float:
        """T/F: committed tokens per forward pass."""
        return len(self.tokens) / self.forwards if self.forwards else 0.0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one forward did for one request."""

    request_id: str
    tokens: tuple[int, ...]
    forward: int
    completion: Completion | None = None


def window_of(mode: Mode, card: ModelCard) -> int:
    """Masks per step, 0 for `exact`. Raises RequestError beyond the trained depth."""
    if isinstance(mode, ExactMode):
        return 0
    if card.block_size == 0:
        raise RequestError(
            f"mode {mode.type!r} needs a checkpoint trained with MARS; this one was not: use mode "
            "'exact'",
            field="mode",
        )
    window = mode.window if isinstance(mode, VerifiedMode | ConfidenceMode) else card.block_size
    if window is not None and window > card.block_size:
        raise RequestError(
            f"window {window} is more than the checkpoint's trained depth {card.block_size}",
            field="window",
        )
    return window or card.block_size


def check_request(
    request: Request, model: PreTrainedModel, card: ModelCard, max_context: int
) -> None:
    """Raise RequestError or PromptTooLongError when the request cannot be decoded."""
    window_of(request.mode, card)
    if not request.prompt:
        raise RequestError("the prompt is empty", field="messages")
    if request.max_new_tokens < 1:
        raise RequestError("max_tokens must be at least 1", field="max_tokens")
    vocabulary = model.config.vocab_size
    if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
        raise RequestError(f"a prompt token is outside the vocabulary of {vocabulary}")
    total = len(request.prompt) + request.max_new_tokens
    if total > max_context:
        raise PromptTooLongError(
            f"{len(request.prompt)} prompt tokens and {request.max_new_tokens} new tokens are "
            f"{total}, more than the context of {max_context}",
            field="max_tokens",
        )
