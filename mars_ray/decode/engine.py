"""The batched engine: admit, plan, forward, absorb; sequences come and go at any step."""

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars_ray.config.decode import ConfidenceMode, EngineConfig, ExactMode, Mode, VerifiedMode
from mars_ray.decode.batch import forward
from mars_ray.decode.kv_cache import SlotCache
from mars_ray.decode.request import Completion, Request, TokenEvent, check_request, window_of
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Strategy
from mars_ray.decode.strategies.confidence import Confidence
from mars_ray.decode.strategies.exact import Exact
from mars_ray.decode.strategies.verified import Verified
from mars_ray.errors import RequestError
from mars_ray.model.card import ModelCard, read_card
from mars_ray.model.load import load_model, load_tokenizer

_STRATEGIES: dict[type[Mode], Strategy] = {
    ExactMode: Exact(),
    ConfidenceMode: Confidence(),
    VerifiedMode: Verified(),
}
# Above this, bfloat16 is faster on a CPU; below it, float32 (docs/log.md).
_FLOAT32_PARAMETERS = 100_000_000


class Engine:
    """Not thread-safe: one thread owns it (`decode.thread`).

    Active sequences hold slots 0, 1, ... in their order, so that a forward's view of the cache is a
    slice and not a copy.
    """

    def __init__(self, model: PreTrainedModel, card: ModelCard, config: EngineConfig) -> None:
        self.model = model
        self.card = card
        self.config = config
        self._cache = SlotCache(
            model.config, config.max_batch, config.max_context, model.device, model.dtype
        )
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._active or self._waiting)

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Sequences not admitted yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError or PromptTooLongError."""
        if type(request.mode) not in _STRATEGIES:
            known = ", ".join(mode.model_fields["type"].default for mode in _STRATEGIES)
            raise RequestError(
                f"mode {request.mode.type!r} is not served by this engine, which knows {known}",
                field="mode",
            )
        check_request(request, self.model, self.card, self.config.max_context)
        if any(s.request.id == request.id for s in [*self._active, *self._waiting]):
            raise RequestError(f"request id {request.id!r} is in use")
        window = window_of(request.mode, self.card)
        self._waiting.append(Sequence(request, window, list(request.prompt)))

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its slot; an id that is not here is none of our business."""
        self._waiting = deque(s for s in self._waiting if s.request.id != request_id)
        for slot, sequence in enumerate(self._active):
            if sequence.request.id == request_id:
                self._free([slot])
                return

    def step(self) -> list[TokenEvent]:
        """One forward for every sequence: of new ones the prompt, of the others their next rows."""
        decoding = len(self._active)
        while self._waiting and len(self._active) < self.config.max_batch:
            self._active.append(self._waiting.popleft())
        events = []
        # Prompts in a forward of their own, or every decoding row would be padded to their length.
        for first, last in ((0, decoding), (decoding, len(self._active))):
            if first < last:
                events += self._forward(first, last)
        self._free([slot for slot, event in enumerate(events) if event.completion])
        return events

    def check_integrity(self) -> None:
        """Assert what must hold between steps."""
        assert len(self._active) <= self.config.max_batch
        ids = [s.request.id for s in [*self._active, *self._waiting]]
        assert len(ids) == len(set(ids)), "a request is here twice"
        for sequence in [*self._active, *self._waiting]:
            sequence.check()

    def _forward(self, first: int, last: int) -> list[TokenEvent]:
        sequences = self._active[first:last]
        strategies = [_STRATEGIES[type(sequence.request.mode)] for sequence in sequences]
        plans = [
            strategy.plan(sequence)
            for strategy, sequence in zip(strategies, sequences, strict=True)
        ]
        mask_token_id = self.card.mask_token_id
        rows = forward(self.model, self._cache, first, sequences, plans, mask_token_id)
        return [
            sequence.commit(strategy.absorb(sequence, plan, own))
            for sequence, strategy, plan, own in zip(
                sequences, strategies, plans, rows, strict=True
            )
        ]

    def _free(self, slots: list[int]) -> None:
        """The last active sequence moves into a freed slot."""
        for slot in sorted(slots, reverse=True):
            last = len(self._active) - 1
            if slot != last:
                self._cache.move(last, slot, self._active[last].cached)
                self._active[slot] = self._active[last]
            self._active.pop()


def load_engine(
    directory: str | Path, config: EngineConfig
) -> tuple[Engine, PreTrainedTokenizerBase]:
    """An engine for a model directory, and its tokenizer. Raises MarsError."""
    card = read_card(directory)
    if config.threads:
        torch.set_num_threads(config.threads)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    model = load_model(directory, dtype=dtype, device=device)
    large = model.num_parameters() > _FLOAT32_PARAMETERS
    if config.dtype == "auto" and (device != "cpu" or large):
        torch.nn.Module.to(model, torch.bfloat16)
    return Engine(model, card, config), load_tokenizer(directory)


def generate_all(
    engine: Engine,
    requests: Iterable[Request],
    on_progress: Callable[[Completion], None] | None = None,
) -> list[Completion]:
    """Decode requests in batches; completions in the order of the requests. Raises RequestError."""
    order = []
    for request in requests:
        engine.submit(request)
        order.append(request.id)
    done: dict[str, Completion] = {}
    while engine.has_work:
        for event in engine.step():
            if event.completion:
                done[event.request_id] = event.completion
                if on_progress:
                    on_progress(event.completion)
    engine.check_integrity()
    return [done[request_id] for request_id in order]
