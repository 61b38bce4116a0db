"""A second, smaller model that proposes tokens for `speculative`."""

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from transformers import PreTrainedModel

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode, VerifiedMode
from mars_ray.decode.request import Request, TokenEvent
from mars_ray.decode.sequence import Sequence
from mars_ray.errors import ConfigError
from mars_ray.model.card import ModelCard


class DraftEngine(Protocol):
    """The part of an engine that a drafter needs (`decode.engine` is above this module)."""

    model: PreTrainedModel
    card: ModelCard

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request, if the engine has it."""
        ...

    def step(self, meanwhile: Callable[[], None]) -> list[TokenEvent]:
        """One forward."""
        ...


class Drafter:
    """Makes drafts with a separate engine, whose prefix cache keeps what it computed for a text.

    If the draft model is itself a MARS model, its drafts take fewer forwards than tokens.
    """

    def __init__(self, engine: DraftEngine, vocabulary: int) -> None:
        """Raises ConfigError if the draft model's vocabulary is not the target's."""
        own = engine.model.config.vocab_size
        if own != vocabulary:
            raise ConfigError(
                f"the draft model has {own} tokens and the model {vocabulary}: both must have been "
                "trained with the same tokenizer"
            )
        self._engine = engine
        self._mode = VerifiedMode() if engine.card.block_size else ExactMode()

    def extend(
        self, wanting: Iterable[tuple[Sequence, int]], meanwhile: Callable[[], None]
    ) -> None:
        """Add the wanted number of tokens to each sequence's drafts, with their probabilities.

        `meanwhile` is called in every forward (`Engine.step`). If the draft model fails, no
        sequence has changed, and no request is left in its engine.
        """
        by_id: dict[str, Sequence] = {}
        events: list[TokenEvent] = []
        try:
            for sequence, count in wanting:
                by_id[sequence.request.id] = sequence
                self._engine.submit(self._request(sequence, count))
            while self._engine.has_work:
                events += self._engine.step(meanwhile)
        except Exception:
            for request_id in by_id:
                self._engine.cancel(request_id)
            raise
        for sequence in by_id.values():
            sequence.extended = sequence.forwards
        for event in events:
            sequence = by_id[event.request_id]
            probabilities = [math.exp(each.logprob) for each in event.logprobs]
            sequence.set_drafts(
                [*sequence.drafts, *event.tokens],
                [*sequence.draft_probabilities, *probabilities],
            )

    def _request(self, sequence: Sequence, count: int) -> Request:
        """A request for drafts, with the sequence's seed: verification uses the same noise."""
        sampling = sequence.request.sampling
        own = Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
        )
        text = tuple(sequence.tokens + sequence.drafts)
        return Request(sequence.request.id, text, self._mode, own, count, frozenset(), logprobs=0)
