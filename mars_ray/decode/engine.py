"""The batched engine: admit, plan, forward, absorb; sequences come and go at any step."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ADAPTERS_DEPTH, VerifiedMode, widest_rows
from mars_ray.core.step_cost import CONTEXT, StepCost
from mars_ray.core.thresholds import Budget, Thresholds
from mars_ray.decode.adapter import FusedAdapter, fused
from mars_ray.decode.attention.backend import backend_of, runner_of
from mars_ray.decode.drafts import DraftControl
from mars_ray.decode.info import EngineInfo
from mars_ray.decode.kv_cache import PagedCache, PagePool, moved_places, page_count, sized
from mars_ray.decode.model_runner import forward
from mars_ray.decode.request import (
    Completion,
    Request,
    TokenEvent,
    TokenLogprobs,
    check_request,
    check_sees_all,
    window_of,
)
from mars_ray.decode.sampler import Sampler
from mars_ray.decode.scheduler import Scheduler, Work, decoding_rows
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.stats import LiveMeasures, Snapshot, StepTotals
from mars_ray.decode.strategies import Plan, Proposals, Rows, strategy_of
from mars_ray.decode.warm_up import Clock, StepTimer, measure_steps
from mars_ray.errors import ModelError, RequestError
from mars_ray.model.directory import ModelCard
from mars_ray.model.draft_adapter import DraftAdapter

# Rows of a prompt whose log-probabilities are computed at once: the vocabulary is large.
_PROMPT_ROWS = 32
# In place of minus infinity, for which JSON has no number; OpenAI and vLLM say the same.
_LEAST_LOGPROB = -9999.0

# A sequence's rows, its outcome and the proposals of the masks behind that outcome.
_Read = tuple[Rows, int, Proposals]


class Engine:
    """Decodes requests in batches. Not thread-safe: one thread owns it (`decode.async_engine`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        card: ModelCard,
        config: EngineConfig,
        adapter: DraftAdapter | None = None,
        adapter_name: str | None = None,
        release: bool = False,
    ) -> None:
        """With `release` the model's matrices are the engine's alone: it empties those that it
        copies, so that none is held twice, and the model cannot be used any more.

        Raises ConfigError if the cache cannot hold a single sequence or attention slides within the
        context, and ModelError, also as `fitting` does.
        """
        self.model = model
        self.card = self._own_card = card  # self.card: with an adapter's depth, if any
        depth = max(card.block_size, adapter.card.depths if adapter else 0, ADAPTERS_DEPTH)
        # Rows of an answer's last step may lie beyond the limit.
        self._spare = min(config.step_tokens, widest_rows(depth))
        self.config = config = sized(model, self._spare, config)
        check_sees_all(config.context, model.config)
        positions = config.context + self._spare
        runner = runner_of(model, config, positions, release)
        pages = page_count(model, positions, config)  # from the memory that the runner has left
        self.pool = PagePool(pages)
        cache = PagedCache(model.config, pages, config.page_size, model.device, model.dtype)
        self._backend = backend_of(config, runner, cache, positions)
        self._scheduler = Scheduler(config, self.pool)
        self._sequences: dict[str, Sequence] = {}
        self.measures = LiveMeasures()
        self.thresholds = Thresholds()
        self.totals = StepTotals()
        self.cost: StepCost | None = None  # until `warm_up`
        self.control: DraftControl | None = None  # until `warm_up`
        self.last_rows = 0  # positions of the last forward
        self.adapter_name: str | None = None  # of the adapter that makes drafts now
        self._adapters = 0  # number set so far
        if adapter:
            self.set_adapter(self.fitting(adapter), adapter_name)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences)

    @property
    def step_tokens(self) -> int:
        """Most rows of a step, but for a single sequence that needs more."""
        return self._scheduler.step_tokens

    def set_step_tokens(self, rows: int) -> None:
        """Let steps have so many rows from the next one on, within what the configuration leaves
        room for, and at least what a sequence of the default mode may need."""
        depth = max(self.card.block_size, self._own_card.block_size, ADAPTERS_DEPTH)
        rows = min(max(rows, VerifiedMode().most_rows(depth)), self.config.step_tokens)
        self._scheduler.step_tokens = rows
        if self.control:
            self.control.most_rows = decoding_rows(rows)

    @property
    def overlaps(self) -> bool:
        """Whether the processor is free while a forward runs."""
        return self.model.device.type != "cpu"

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Sequences that are not admitted yet, or were sent back because pages ran out."""
        return self._scheduler.waiting

    @cached_property
    def info(self) -> EngineInfo:
        """The engine's dtype, device, attention backend and cache."""
        device, backend = self.model.device, self._backend
        return EngineInfo(
            engine="mars-ray",
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            attention=backend.name,
            instructions=backend.instructions,
            threads=backend.threads,
            cache_bytes=backend.cache.bytes,
            cache_tokens=self.pool.count * self.config.page_size,
        )

    def snapshot(self) -> Snapshot:
        """The engine's state and counts so far, in values that later steps do not change."""
        scheduler, control = self._scheduler, self.control
        return Snapshot(
            info=self.info,
            running=self.running,
            waiting=self.waiting,
            cache_share=self.pool.in_use / self.pool.count,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            windows=tuple(sequence.window for sequence in scheduler.running_sequences()),
            adapter=self.adapter_name,
            set_point=self.thresholds.set_point,
            step_tokens=self.step_tokens,
            step_cost=control.cost.table(self.config.max_batch, CONTEXT) if control else {},
            totals=replace(self.totals),
            by_mode=deepcopy(self.measures.by_mode),
            accepted_at=self.measures.accepted_at,
        )

    @property
    def model_seconds(self) -> float:
        """Time spent in the model's forward so far; the rest of a step is the engine's own work."""
        return self._backend.seconds

    @property
    def drafts_itself(self) -> bool:
        """Whether the model was trained to make drafts, and so needs no adapter."""
        return self._own_card.block_size > 0

    def fitting(self, adapter: DraftAdapter) -> FusedAdapter:
        """The adapter for `set_adapter`; nothing changes. Raises ModelError if it is not for this
        model, or too deep for this engine."""
        own, rows = fused(adapter, self.model), self.config.step_tokens
        if (
            min(rows, widest_rows(own.depths)) > self._spare
            or VerifiedMode().most_rows(own.depths) > rows
        ):
            raise ModelError(
                f"this engine has no room for the {own.depths} depths of the draft adapter: start "
                "it with the adapter, or with a larger max_step_tokens"
            )
        return own

    def set_adapter(self, adapter: FusedAdapter | None, name: str | None = None) -> None:
        """Let an adapter that is `fitting` make drafts from the next step on, or with None the
        model itself, if it was trained to.

        Running sequences continue, since proposals of the last adapter are only drafts. `name`
        tells in events and completions whose drafts a sequence had.
        """
        depth = adapter.depths if adapter else self._own_card.block_size
        self._backend.set_adapter(adapter)
        self.card = replace(self._own_card, block_size=depth)
        self._adapters += 1
        self.adapter_name = (name or f"adapter-{self._adapters}") if adapter else None
        for sequence in self._scheduler.all():
            sequence.refit(depth, self._spare)
        if self.control:
            self.control.forget(max(1, depth))

    def warm_up(self, clock: Clock = time.perf_counter) -> None:
        """Run steps of every size and measure them; call it before the first request."""
        assert not self.has_work, "the engine is at work"
        assert not self.pool.kept, "warming up would overwrite what is kept"
        with self._torch_threads():
            self._backend.warm_up()
            self.cost = measure_steps(StepTimer(self._backend, self.card, self.config, clock))
        if self.config.window_control:
            depth = max(1, self.card.block_size)
            rows = decoding_rows(self.step_tokens)
            self.control = DraftControl(self.cost, depth, rows, self._spare)

    def check(self, request: Request) -> None:
        """Raise RequestError or PromptTooLongError if this engine cannot decode the request."""
        check_request(request, self.model.config.vocab_size, self.card, self.config.context)
        rows = request.mode.most_rows(window_of(request.mode, self.card))
        if rows > self.config.step_tokens:
            raise RequestError(
                f"mode {request.mode.type!r} needs forwards of {rows} rows, more than "
                f"max_step_tokens={self.config.step_tokens}",
                field="mode",
            )
        if rows > self._spare:
            raise RequestError(
                f"so many branches and groups need forwards of {rows} rows, more than the "
                f"{self._spare} that this engine has room for: ask for fewer",
                field="mode",
            )

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError or PromptTooLongError."""
        self.check(request)
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is in use")
        sequence = Sequence(request, window_of(request.mode, self.card), list(request.prompt))
        sequence.submitted_s = time.monotonic()
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its pages; an unknown id is ignored."""
        if sequence := self._sequences.pop(request_id, None):
            self._scheduler.remove(sequence)

    def set_aside(self) -> list[Sequence]:
        """Remove all sequences, with their committed tokens; those nearest to the batch first."""
        everybody = sorted(self._scheduler.all(), key=lambda s: (not s.pages, s.order))
        for sequence in everybody:
            self.cancel(sequence.request.id)
        return everybody

    def take_back(self, sequence: Sequence) -> None:
        """Let a sequence that was set aside continue, as one that was sent back to wait."""
        self._sequences[sequence.request.id] = sequence
        self._scheduler.add(sequence)

    def step(self, overlap: Callable[[], None] = lambda: None) -> list[TokenEvent]:
        """Run one forward, or end the requests that are late; returns an event per changed request.

        `overlap` is called in every forward, once all its work is launched on the device; it must
        not touch the engine. If a step raises, nothing was committed: `step_apart` finds the
        sequence that is to blame.
        """
        with self._torch_threads():
            return self._step(overlap)

    @contextmanager
    def _torch_threads(self) -> Iterator[None]:
        """Beside the compiled step, which has threads of its own, torch gets one: the others would
        go on spinning for a while after an operation, and the next step would wait for its own."""
        threads = torch.get_num_threads()
        if self._backend.instructions:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _step(self, overlap: Callable[[], None]) -> list[TokenEvent]:
        begin_s = time.monotonic()
        late = [
            sequence
            for sequence in self._sequences.values()
            if sequence.request.deadline is not None and sequence.request.deadline <= begin_s
        ]
        if late:
            for sequence in late:
                self.cancel(sequence.request.id)
            return [sequence.event((), sequence.completion("deadline")) for sequence in late]
        self._prepare()
        work = self._scheduler.schedule()
        self.last_rows = sum(item.rows for item in work)
        if not work:
            return []
        forward_s = time.monotonic()
        reader = forward(self._backend, work, self.card.mask_token_id)
        for number, item in enumerate(work):
            _read_prompt(reader, number, item)
        rows, planned = reader.rows(overlap), [item for item in work if item.plan]
        outcomes = [
            strategy_of(item.sequence).outcome(item.sequence, cast(Plan, item.plan), own)
            for item, own in zip(planned, rows, strict=True)
        ]
        tokens = [own.best[outcome] for own, outcome in zip(rows, outcomes, strict=True)]
        read = zip(rows, outcomes, reader.proposals(outcomes, tokens), strict=True)
        end_s = time.monotonic()
        attended = *self.totals.add(work), sum(item.masks for item in work)
        events = self._commit(work, read)
        self.totals.seconds += time.monotonic() - begin_s
        if self.control:
            self.control.cost.observe(self.last_rows, end_s - forward_s, len(work), *attended)
        return events

    def _prepare(self) -> None:
        """Set threshold, masks and drafts of each sequence for the next step."""
        # Also of those that wait: the step may admit them, and the first one may have masks.
        for sequence in self._scheduler.all():
            if quality := sequence.request.quality:
                sequence.threshold = self.thresholds.of(quality)
        if self.control:
            self.control.choose(self._scheduler.next_sequences())

    def _commit(self, work: list[Work], read: Iterator[_Read]) -> list[TokenEvent]:
        """Commit the results of the forward's rows for each sequence."""
        events: list[TokenEvent] = []
        moves: list[tuple[int, int]] = []
        for item in work:
            sequence = item.sequence
            if item.plan is None:
                sequence.cached += item.count
                self._scheduler.publish(sequence)
                continue
            try:
                rows, outcome, proposals = next(read)
                path, size = item.plan.path(outcome), self.config.page_size
                moves += moved_places(sequence.pages, size, sequence.committed, path)
                event = self._absorb(sequence, item.plan, rows, outcome, proposals)
                self.totals.output_tokens += len(event.tokens)
            except Exception as error:  # noqa: BLE001 - the fault of this request only
                event = TokenEvent(sequence.request.id, (), sequence.forwards, failure=error)
            if event.completion or event.failure:
                self.cancel(event.request_id)
            else:
                self._scheduler.publish(sequence)
            events.append(event)
        if moves:
            self._backend.cache.move(moves)
        return events

    def _absorb(
        self, sequence: Sequence, plan: Plan, rows: Rows, outcome: int, proposals: Proposals
    ) -> TokenEvent:
        """Commit the results of the sequence's rows, and learn from them."""
        disagreed = sequence.disagreed
        tokens = strategy_of(sequence).absorb(sequence, plan, rows, outcome, proposals)
        if self.control:
            self.control.observe(sequence, plan, outcome, len(tokens))
        self.totals.add_drafts(sequence, plan, outcome)
        kept = sequence.kept(tokens)
        sequence.ngram_tokens += plan.looked_up(outcome, len(kept))
        self.measures.observe(sequence, plan, rows, outcome, proposals, kept)
        quality = sequence.request.quality
        if quality and plan.is_judged:
            assert sequence.lowest_threshold is not None
            sequence.lowest_threshold = min(sequence.lowest_threshold, sequence.threshold)
            if isinstance(quality, Budget):
                self.thresholds.observe(quality, len(kept), sequence.disagreed - disagreed)
        # Which adapter's masks the forward had; drafts that are not theirs are no adapter's.
        name = self.adapter_name
        if name and plan.masks and name not in sequence.adapters[-1:]:
            sequence.adapters.append(name)
        if not plan.drafts:
            sequence.adapter = self.adapter_name
        event = sequence.commit(kept)
        if sequence.forwards == 1 and sequence.prompt_logprobs:
            event = replace(event, prompt_logprobs=tuple(sequence.prompt_logprobs))
        sequence.adapter = self.adapter_name  # its new drafts are this adapter's
        if plan.measure in plan.wanted:
            first = rows.numbers[plan.measure][0]
            event = replace(event, confidences=(first, *proposals.confidences)[: len(kept)])
        asked = sequence.request.logprobs
        if rows.log_p_NV is not None and asked is not None:
            log_p_NV = rows.log_p_NV[[0, *plan.path(outcome)]]
            if proposals.log_p_NV is not None:
                log_p_NV = torch.cat([log_p_NV, proposals.log_p_NV])
            event = replace(event, logprobs=_logprobs(event.tokens, log_p_NV, asked))
        return event

    def check_idle(self) -> None:
        """Assert, by counts alone, that the requests that were here have left nothing behind."""
        counts = self.running, self.waiting, self.pool.in_use
        assert not any(counts), f"sequences that run and wait, and pages in use: {counts}, not 0"

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps; this looks at every page."""
        self._scheduler.check()
        here = {sequence.request.id for sequence in self._scheduler.all()}
        assert here == set(self._sequences), "a request is lost or left over"


def _read_prompt(reader: Sampler, number: int, item: Work) -> None:
    """Note the log-probabilities of the prompt's tokens that this item's rows predict, if they are
    asked for and not known since an earlier, interrupted, reading."""
    sequence = item.sequence
    asked, prompt = sequence.request.prompt_logprobs, sequence.request.prompt
    if asked is None or sequence.forwards:
        return
    known = sequence.prompt_logprobs
    end = min(item.count, len(prompt) - 1 - sequence.cached)
    for start in range(len(known) - sequence.cached, end, _PROMPT_ROWS):
        rows = range(start, min(start + _PROMPT_ROWS, end))
        tokens = prompt[sequence.cached + rows.start + 1 : sequence.cached + rows.stop + 1]
        known += _logprobs(tokens, reader.log_p(number, rows), asked)


def _logprobs(tokens: tuple[int, ...], log_p_NV: Tensor, most: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of tokens; row i predicted the i-th, and says so many of the likeliest."""
    count = len(tokens)
    chosen = log_p_NV[:count].gather(-1, torch.tensor(tokens, device=log_p_NV.device)[:, None])
    top = log_p_NV[:count].topk(min(most, log_p_NV.shape[-1]), dim=-1)
    return tuple(
        TokenLogprobs(logprob, tuple(zip(tokens, values, strict=True)))
        for (logprob,), tokens, values in zip(
            chosen.clamp_min(_LEAST_LOGPROB).tolist(),
            top.indices.tolist(),
            top.values.clamp_min(_LEAST_LOGPROB).tolist(),
            strict=True,
        )
    )


def generate_all(
    engine: Engine,
    requests: Iterable[Request],
    on_progress: Callable[[Completion], None] | None = None,
) -> list[Completion]:
    """Decode requests in batches; completions in the order of the requests.

    Raises RequestError, or a request's failure; then no request is left in the engine.
    """
    order: list[str] = []
    done: dict[str, Completion] = {}
    try:
        for request in requests:
            engine.submit(request)
            order.append(request.id)
        while engine.has_work:
            for event in engine.step():
                if event.failure:
                    raise event.failure
                if event.completion:
                    done[event.request_id] = event.completion
                    if on_progress:
                        on_progress(event.completion)
    finally:
        for request_id in order:
            engine.cancel(request_id)
    engine.check_integrity()
    return [done[request_id] for request_id in order]
