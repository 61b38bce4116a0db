"""The proposer that `model` of vLLM's speculative_config names: what MARS needs beside a runner.

vLLM makes it for its model runner and gives it the model. Drafts come from the forward that the
runner has done anyway, so the runner's own methods are extended (`runner.py`) where vLLM would call
`propose`.

Shape suffixes: N rows with logits, M rows of masks, X rows, C candidates, H hidden size,
V vocabulary.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size

from mars_ray.config.vllm import VllmMarsRequest
from mars_ray.core.draft_head import candidate_logits
from mars_ray.core.thresholds import Budget
from mars_ray.errors import ConfigError, ModelError
from mars_ray.model.draft_adapter import DraftAdapter, read_draft_adapter
from mars_ray.vllm import interface, runner, settings
from mars_ray.vllm.adapter import Parts, Sites, fitted
from mars_ray.vllm.budgets import Budgets
from mars_ray.vllm.drafts import HeadedDrafts, likeliest_tokens, rows_of
from mars_ray.vllm.mask_rows import GatedRows, IndexedRows, MaskRows
from mars_ray.vllm.rows import Layout, MarsCounts, Origin, masks_for, next_speculative
from mars_ray.vllm.runner import repair_expansion
from mars_ray.vllm.window import Window

# Below vLLM's own logger, whose handlers and level it has.
_log = logging.getLogger("vllm.mars_ray")


class MarsProposer:
    """Masks, drafts and counts of one model runner."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Raises ConfigError, ModelError or EngineError for what cannot be decoded."""
        interface.check()
        self.settings = settings.read(vllm_config)
        self.counts = MarsCounts()
        self.budgets = Budgets()
        self.layout = Layout((), ())
        self.requests: list[str] = []
        self.logits_NV: Tensor | None = None  # of the step under way
        self._threshold = self.settings.options.threshold
        self._requests: dict[str, VllmMarsRequest] = {}  # what requests have said
        self.window = Window(0)
        self._masks_by_running = list(self.settings.options.masks_by_running)
        self._ended_at: float | None = None  # when the last step did
        self._config = vllm_config
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._model: Any = None
        self._headed: HeadedDrafts | None = None
        self._sites: Sites | None = None
        self._ready: tuple[DraftAdapter, Parts] | None = None
        self.adapter: DraftAdapter | None = None  # the one that makes drafts now
        self.most_masks = 0  # of a request in a step now
        self.masks: MaskRows = IndexedRows(torch.device("cpu"))
        runner.extend()

    def load_model(self, model: Any) -> None:
        """Take the model that vLLM has loaded. Raises ModelError if an adapter does not fit."""
        repair_expansion()
        self._model = model
        device = next(model.parameters()).device
        if self._config.compilation_config.cudagraph_mode in (None, CUDAGraphMode.NONE):
            self.masks = IndexedRows(device)
        else:
            most_rows = self._config.scheduler_config.max_num_batched_tokens
            self.masks = GatedRows(most_rows, device)
        change = self.settings.options.adapters_change
        if change and not isinstance(self.masks, IndexedRows):
            raise ConfigError(
                "adapters_change does not work with CUDA graphs: leave it out, or start vLLM with "
                "enforce_eager"
            )
        first = self.settings.adapter
        parts = fitted(first, model, self._dtype) if first else None
        if parts or change:
            self._sites = Sites(model, self.masks, parts, change=change)
        self._put(first)
        _log.info(
            "MARS: drafts by %s, at most %d masks of a request, threshold %g",
            f"the adapter {self.settings.options.adapter}" if first else "the model's own masks",
            self.most_masks,
            self._threshold,
        )

    def _put(self, adapter: DraftAdapter | None) -> None:
        self.adapter = adapter
        depths = adapter.card.depths if adapter else self.settings.own_depths
        self.most_masks = min(self.settings.masks, depths)
        self.window = Window(self.most_masks)
        device = next(self._model.parameters()).device
        self._headed = None
        if adapter and adapter.head:
            self._headed = HeadedDrafts(
                adapter.head.as_of(device, self._dtype),
                min(adapter.card.candidates, self._config.model_config.get_vocab_size()),
                self._model.embed_input_ids,
                self._candidate_logits,
            )

    def load_adapter(self, directory: str) -> None:
        """Make an adapter ready for use. Raises ModelError if it cannot be read or does not fit."""
        if not self.settings.options.adapters_change:
            raise ModelError(
                "this engine keeps the draft adapter that it was started with: start it with "
                "adapters_change, or anew"
            )
        self._ready = None
        adapter = read_draft_adapter(directory, self.settings.directory)
        if adapter.card.depths > self.settings.masks:
            raise ModelError(
                f"this engine has room for {self.settings.masks} masks, and the draft adapter has "
                f"{adapter.card.depths} depths: start the engine with more num_speculative_tokens"
            )
        self._ready = adapter, fitted(adapter, self._model, self._dtype)

    def use_adapter(self, is_any: bool) -> None:
        """Let the adapter made ready last make drafts from the next step on; or the model itself,
        if it was trained to."""
        ready, self._ready = self._ready, None
        adapter, parts = (None, None) if not is_any or ready is None else ready
        assert not is_any or adapter, "no adapter is ready"
        if self._sites:
            self._sites.put(parts)
        self._put(adapter)

    def _candidate_logits(self, hidden_XH: Tensor, candidate_XC: Tensor) -> Tensor:
        weight_VH = getattr(self._model.lm_head, "weight", None)
        whole = get_tensor_model_parallel_world_size() == 1
        if whole and weight_VH is not None and weight_VH.is_floating_point():
            return candidate_logits(hidden_XH, weight_VH, candidate_XC)
        # Sharded or quantized: all logits, of which only the candidates' are used.
        return self._model.compute_logits(hidden_XH).gather(-1, candidate_XC).float()

    def set_threshold(self, threshold: float) -> None:
        """Set the threshold of requests that name none, from the next step on."""
        assert 0 <= threshold <= 1
        self._threshold = threshold

    def set_masks(self, masks_by_running: Sequence[tuple[int, int]]) -> None:
        """Set how many masks requests have from the next step on; empty: as many as pay."""
        self._masks_by_running = [(least, masks) for least, masks in masks_by_running]

    def threshold_of(self, request: str, state: Any) -> float:
        """A request's threshold: its own, or the engine's; 1 with a budget, which has its own."""
        own = self._said_by(request, state)
        if own.budget is not None:
            return 1.0
        return max(own.floor, self._threshold) if own.threshold is None else own.threshold

    def budget_of(self, request: str, state: Any) -> Budget | None:
        share = self._said_by(request, state).budget
        return None if share is None else Budget(share)

    def _said_by(self, request: str, state: Any) -> VllmMarsRequest:
        if request not in self._requests:
            self._requests[request] = settings.request_options(state.sampling_params)
        return self._requests[request]

    def ended(self, requests: Collection[str]) -> None:
        """Forget requests that have finished or were aborted; their counts stay for a while."""
        self.counts.ended(requests)
        for request in requests:
            self._requests.pop(request, None)
            self.budgets.ended(request)

    def begin(self, requests: Sequence[str], layout: Layout) -> None:
        """Note the rows of the forward that comes."""
        self.requests, self.layout = list(requests), layout

    def next_tokens(
        self, sampled: Sequence[Sequence[int]], hidden_NH: Tensor, states: Mapping[str, Any]
    ) -> list[list[int]]:
        """Count the step, and make each request's speculative tokens of the next one; `states` are
        the runner's, by request."""
        logits_NV, self.logits_NV = self.logits_NV, None
        self.counts.add(self.requests, self.layout, sampled)
        self.budgets.settle(self.requests, sampled)
        origins = self.layout.origins(sampled)
        drafts: dict[int, list[int]] = {}
        if origins and logits_NV is not None:
            chosen = self._drafts(origins, hidden_NH, logits_NV)
            drafts = {origin.request: own for origin, own in zip(origins, chosen, strict=True)}
        wanted = [
            tokens if self._said_by(request, states[request]).drafts else ()
            for request, tokens in zip(self.requests, sampled, strict=True)
        ]
        return next_speculative(wanted, drafts, self._masks_of_next(sampled, wanted))

    def _masks_of_next(
        self, sampled: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> int:
        running = sum(1 for tokens in sampled if tokens)
        drafting = any(wanted)
        for row, tokens in zip(self.layout.rows, sampled, strict=True):
            if row.drafts and tokens:
                # Those of a deeper adapter may still be under way.
                drafts = min(len(row.drafts), self.most_masks)
                self.window.acceptance.add(drafts, len(tokens) - 1)
        before, self._ended_at = self._ended_at, time.perf_counter()
        decodes = self.layout.decodes and drafting
        self.window.note(running, self._ended_at - before if decodes and before else None)
        if not drafting or not self.most_masks:
            return 0
        if self._masks_by_running:
            return masks_for(running, self.most_masks, self._masks_by_running)
        return self.window.choose(running)

    def _drafts(
        self, origins: Sequence[Origin], hidden_NH: Tensor, logits_NV: Tensor
    ) -> list[list[int]]:
        row_M = torch.tensor(rows_of(origins), device=logits_NV.device)
        logits_MV = logits_NV[row_M]
        self.ban_mask(logits_MV)
        if self._headed is None:
            return likeliest_tokens(logits_MV, origins)
        return self._headed.choose(hidden_NH[row_M], logits_MV, origins)

    def ban_mask(self, logits_NV: Tensor) -> None:
        """The mask token of a MARS checkpoint is never emitted."""
        if self.settings.mask_token_id is not None:
            logits_NV[:, self.settings.mask_token_id] = -torch.inf

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """vLLM wants proposers to have it; the extended runner calls `next_tokens` instead."""
        raise AssertionError("the model runner was not extended: `runner.extend` did not run")
