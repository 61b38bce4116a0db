"""vLLM's V1 model runner, extended where its proposer is MARS's: six methods.

`_update_states`    forgets requests that have ended, also in steps without tokens
`_prepare_inputs`   notes which rows are masks
`_model_forward`    lets the adapter act on them (or embeds the mask token) during the forward
`_sample`           keeps masks from the sampler: it sees tokens and drafts, as of any speculation
`propose_draft_token_ids`   drafts from the rows of masks, which the forward has computed
`_input_fits_in_drafter`    always: there is no other model whose context could end

Beside them the rejection sampler's last function, for thresholds below 1 (`budgets.py`).

vLLM's CPU build is repaired, whose speculation ignores the temperature, top-k and top-p. Its
stand-in for the kernel that repeats a request's value for each of its drafts writes into a copy of
the result, unless that is int64. Versions without the fault are left alone: it is looked for.

Shape suffixes: B requests, N drafts of all requests.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial, partialmethod, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from mars_ray.vllm.budgets import Budgets, Spender, relax
from mars_ray.vllm.rows import laid_out

log = init_logger(__name__)

# Of vLLM's method, and of the one here: vLLM's comes first, then the runner and its arguments.
_Method = Callable[..., Any]


@dataclass
class _Metadata(SamplingMetadata):
    """vLLM's parameters of a batch, and how its drafts may be accepted."""

    threshold_N: Tensor | None = None  # of each draft; None if all are 1
    budgets: Budgets | None = None
    spenders: tuple[Spender, ...] = ()


def _update_states(original: _Method, runner: Any, scheduler_output: Any) -> Any:
    # An id may end and begin again in the same step.
    runner.drafter.ended(scheduler_output.finished_req_ids)
    return original(runner, scheduler_output)


def _prepare_inputs(
    original: _Method, runner: Any, scheduler_output: Any, num_scheduled_tokens: Any
) -> Any:
    prepared = original(runner, scheduler_output, num_scheduled_tokens)
    requests = runner.input_batch.req_ids
    layout = laid_out(
        requests,
        scheduler_output.num_scheduled_tokens,
        scheduler_output.scheduled_spec_decode_tokens,
        runner.drafter.most_masks,
    )
    runner.drafter.begin(requests, layout)
    return prepared


def _model_forward(original: _Method, runner: Any, *args: Any, **kwargs: Any) -> Any:
    mars = runner.drafter
    places, depths = mars.layout.masks()
    if places and mars.adapter is None:
        place_M = torch.tensor(places, device=runner.input_ids.gpu.device)
        runner.input_ids.gpu[place_M] = mars.settings.mask_token_id
    mars.masks.begin(places, depths)
    try:
        return original(runner, *args, **kwargs)
    finally:
        mars.masks.end()


def _sample(
    original: _Method, runner: Any, logits: Tensor, spec_decode_metadata: SpecDecodeMetadata | None
) -> Any:
    mars = runner.drafter
    mars.logits_NV = logits
    kept: list[tuple[int, ...]] = []
    thresholds: list[float] = []  # of each draft
    spenders: list[Spender] = []
    for request, row in zip(mars.requests, mars.layout.rows, strict=True):
        state = runner.requests[request]
        # vLLM bans stop tokens from the row behind the last draft by the answer's length before
        # this step, so of an answer that is too short to stop, no draft may make it long enough.
        tokens = len(state.output_token_ids)
        missing = (state.sampling_params.min_tokens if state.sampling_params else 0) - tokens
        drafts = row.drafts if missing <= 0 else row.drafts[: missing - 1]
        budget = mars.budget_of(request, state)
        if drafts and budget:
            spenders.append(Spender(request, budget, tokens, len(thresholds), len(drafts)))
        thresholds += [mars.threshold_of(request, state)] * len(drafts)
        kept.append(drafts)
    real_NV = logits[torch.tensor(mars.layout.real_logits(kept), device=logits.device)]
    mars.ban_mask(real_NV)
    metadata = _metadata(kept, logits.device) if any(kept) else None
    batch = runner.input_batch
    whole = batch.sampling_metadata
    values = {field.name: getattr(whole, field.name) for field in fields(SamplingMetadata)}
    values["spec_token_ids"] = [list(drafts) for drafts in kept]
    is_relaxed = any(threshold != 1 for threshold in thresholds)
    batch.sampling_metadata = _Metadata(
        **values,
        threshold_N=torch.tensor(thresholds, device=runner.device) if is_relaxed else None,
        budgets=mars.budgets,
        spenders=tuple(spenders),
    )
    try:
        return original(runner, real_NV, metadata)
    finally:
        batch.sampling_metadata = whole


def _rejection_sample(
    original: _Method,
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata: SamplingMetadata,
    **kwargs: Any,
) -> Tensor:
    if isinstance(sampling_metadata, _Metadata):
        # vLLM's rule accepts, by these logits, what thresholds below 1 and budgets accept.
        greedy_N = _greedy(sampling_metadata, num_draft_tokens, target_logits.device)
        if sampling_metadata.threshold_N is not None:
            relax(target_logits, draft_token_ids, sampling_metadata.threshold_N, greedy_N)
        for spender in sampling_metadata.spenders:
            assert sampling_metadata.budgets is not None
            rows = slice(spender.first, spender.first + spender.drafts)
            drafts, greedy = draft_token_ids[rows].tolist(), bool(greedy_N[spender.first])
            sampling_metadata.budgets.decide(spender, target_logits[rows], drafts, greedy)
    return original(
        draft_token_ids,
        num_draft_tokens,
        max_spec_len,
        cu_num_draft_tokens,
        draft_probs,
        target_logits,
        bonus_token_ids,
        sampling_metadata,
        **kwargs,
    )


def _greedy(metadata: SamplingMetadata, drafts: list[int], device: torch.device) -> Tensor:
    """Whether each draft's request is decoded at temperature 0."""
    if metadata.all_greedy or metadata.temperature is None:
        return torch.ones(sum(drafts), dtype=torch.bool, device=device)
    count_B = torch.tensor(drafts, device=device)
    return (metadata.temperature[: len(drafts)] == 0).repeat_interleave(count_B)


def _metadata(drafts: list[tuple[int, ...]], device: torch.device) -> SpecDecodeMetadata:
    """vLLM's description of rows that are tokens and drafts only."""
    counts = [len(own) for own in drafts]
    ends = list(accumulate(count + 1 for count in counts))
    checked = [
        end - 1 - count + index
        for end, count in zip(ends, counts, strict=True)
        for index in range(count)
    ]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return SpecDecodeMetadata(
        draft_token_ids=tensor([token for own in drafts for token in own]),
        num_draft_tokens=counts,
        cu_num_draft_tokens=tensor(list(accumulate(counts))),
        cu_num_sampled_tokens=tensor(ends),
        target_logits_indices=tensor(checked),
        bonus_logits_indices=tensor([end - 1 for end in ends]),
        logits_indices=tensor(list(range(ends[-1]))),
    )


def _propose(
    original: _Method,
    runner: Any,
    scheduler_output: Any,
    sampled_token_ids: list[list[int]],
    sampling_metadata: Any,
    hidden_states: Tensor,
    sample_hidden_states: Tensor,
    *_: Any,
) -> list[list[int]]:
    return runner.drafter.next_tokens(sampled_token_ids, sample_hidden_states, runner.requests)


def _always_fits(original: _Method, runner: Any, common_attn_metadata: Any) -> bool:
    return common_attn_metadata is not None


_OWN: dict[str, _Method] = {
    "_update_states": _update_states,
    "_prepare_inputs": _prepare_inputs,
    "_model_forward": _model_forward,
    "_sample": _sample,
    "propose_draft_token_ids": _propose,
    "_input_fits_in_drafter": _always_fits,
}
_extended = False


def extend() -> None:
    """Extend vLLM's runner in this process; runners with another proposer stay as they are."""
    global _extended
    if _extended:
        return
    _extended = True
    for name, own in _OWN.items():
        setattr(GPUModelRunner, name, _for_mars(getattr(GPUModelRunner, name), own))
    sample = rejection_sampler.rejection_sample
    rejection_sampler.rejection_sample = wraps(sample)(partial(_rejection_sample, sample))
    # The methods of the proposer that engines call in all workers, as
    # `collective_rpc("mars_set_threshold", args=(0.3,))`.
    WorkerBase.mars_counts = _counts
    for name in ("set_threshold", "load_adapter", "use_adapter", "set_masks"):
        setattr(WorkerBase, f"mars_{name}", partialmethod(_of_proposer, name))


def _for_mars(original: _Method, own: _Method) -> _Method:
    @wraps(original)
    def method(runner: Any, *args: Any, **kwargs: Any) -> Any:
        # Only ours has this method; vLLM's proposers are many classes.
        if not hasattr(getattr(runner, "drafter", None), "next_tokens"):
            return original(runner, *args, **kwargs)
        return own(original, runner, *args, **kwargs)

    return method


def _counts(worker: Any) -> dict[str, Any]:
    """`collective_rpc("mars_counts")`: what this worker's steps did."""
    return worker.model_runner.drafter.counts.to_json()


def _of_proposer(worker: Any, name: str, *args: Any) -> None:
    getattr(worker.model_runner.drafter, name)(*args)


def repair_expansion() -> None:
    """Replace the function in this process if it is at fault."""
    if not current_platform.is_cpu():
        return
    value_B = torch.tensor([0.5, 0.25])
    end_B = torch.tensor([1, 3], dtype=torch.int32)
    found_N = rejection_sampler.expand_batch_to_tokens(value_B, end_B, 3)
    if not torch.equal(found_N, torch.tensor([0.5, 0.25, 0.25])):
        log.info("vLLM's CPU build loses sampling parameters of drafts: repaired")
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Each request's value, once for each of its drafts; `replace_from` becomes `replace_to`."""
    count_B = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    value_B = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return value_B.repeat_interleave(count_B.long(), output_size=num_tokens)
