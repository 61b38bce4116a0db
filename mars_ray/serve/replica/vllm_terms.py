"""vLLM's engine in our terms: its arguments, a request's parameters, and its counts since its
start as a `Snapshot` has them.

Every field of ours has one of vLLM's, or is refused by name: none is dropped.

vLLM's scheduler reports each step: what it held, and when it ended. Its tokens come by request, so
tokens of a request are counted whether somebody still waits for them or not. What steps cost is
measured with a few timed answers before traffic comes: vLLM itself runs every kernel when it
starts, and steps cannot be asked of it one by one.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.version import __version__ as VLLM_VERSION

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.config.vllm import VllmConfig, VllmMars
from mars_ray.core.step_cost import StepCost, row_counts
from mars_ray.core.thresholds import Budget, Elastic
from mars_ray.decode.info import EngineInfo
from mars_ray.decode.request import MOST_LOGPROBS, EngineFacts, Request
from mars_ray.decode.stats import ModeMeasures, Snapshot, StepTotals
from mars_ray.errors import ConfigError, RequestError
from mars_ray.vllm.settings import KEY, PROPOSER

# vLLM raises lower temperatures to this one.
_LEAST_TEMPERATURE = 0.01
_SEEDS = 1 << 64
# The model's own length, or as much of it as the cache of a GPU holds.
_AS_MEMORY_ALLOWS = -1


def engine_args(
    directory: Path, config: VllmConfig, masks: int, executor: str | None
) -> AsyncEngineArgs:
    """The arguments of an engine for a model directory, with so many masks of a request in a step;
    `executor` is vLLM's distributed_executor_backend, None for its own choice.

    Raises ConfigError for an argument that vLLM does not have, or does not take.
    """
    given: dict[str, Any] = {
        "model": str(directory),
        "max_num_seqs": config.max_batch,
        "max_model_len": config.max_context or _AS_MEMORY_ALLOWS,
        "max_num_batched_tokens": config.max_step_tokens,
        "enable_prefix_caching": config.prefix_cache,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "trust_remote_code": False,
        # Requests may have a priority.
        "scheduling_policy": "priority",
        # The grammars of requests are in its notation.
        "structured_outputs_config": StructuredOutputsConfig(backend="guidance"),
        # Log-probabilities are the model's own, before any temperature or penalty.
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": MOST_LOGPROBS,
        # Every step reports what it held, by which steps are counted and timed.
        "disable_log_stats": False,
        "enable_logging_iteration_details": True,
    }
    if config.cache_bytes is not None:
        given["kv_cache_memory_bytes"] = config.cache_bytes
    if config.gpu_memory_utilization is not None:
        given["gpu_memory_utilization"] = config.gpu_memory_utilization
    if executor is not None:
        given["distributed_executor_backend"] = executor
    if masks:
        given |= _drafting(config, masks)
    try:
        config.check_names((field.name for field in fields(AsyncEngineArgs)), VLLM_VERSION)
        return AsyncEngineArgs(**config.args | given)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def _drafting(config: VllmConfig, masks: int) -> dict[str, Any]:
    """The arguments by which the plug-in (`mars_ray/vllm`) drafts with so many masks."""
    mars = VllmMars(
        adapter=config.draft_adapter,
        adapters_change=adapters_change(config),
        masks_by_running=config.masks_by_running,
    )
    return {
        # Drafts and masks are speculative tokens, as many of the one as of the other.
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": 2 * masks,
        },
        "additional_config": {
            **config.args.get("additional_config", {}),
            KEY: mars.model_dump(mode="json"),
        },
    }


def adapters_change(config: VllmConfig) -> bool:
    """Whether the draft adapter may change while the engine runs: CUDA graphs keep theirs."""
    may_come = bool(config.draft_adapter or config.masks)
    return may_come and (current_platform.is_cpu() or bool(config.args.get("enforce_eager")))


def sampling_params(request: Request, drafts: bool) -> SamplingParams:
    """The request in vLLM's terms; `drafts` tells whether the engine verifies drafts.

    Raises RequestError for what vLLM does not do.
    """
    sampling, grammar = request.sampling, request.grammar
    _check(request, drafts)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        # vLLM takes -1 as no seed; as an unsigned number it is the same seed to torch.
        seed=sampling.seed % _SEEDS,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        min_tokens=sampling.min_new_tokens,
        max_tokens=request.max_new_tokens,
        logprobs=request.logprobs,
        stop_token_ids=sorted(request.stop_ids),
        ignore_eos=True,  # the request says where it ends
        structured_outputs=StructuredOutputsParams(grammar=grammar.source) if grammar else None,
        # Text, and stop strings in it, are the output processor's business.
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={KEY: _said(request)} if drafts else None,
        skip_clone=True,
    )


def _said(request: Request) -> dict[str, Any]:
    """How the plug-in is to decode a request."""
    own = request.mode.own_threshold
    if own is None:
        return {"drafts": False}
    match request.quality:
        case Elastic(floor):
            return {"floor": floor}
        case Budget(share):
            return {"budget": share}
        case None:
            pass
    return {"threshold": own}


def _check(request: Request, drafts: bool) -> None:
    sampling = request.sampling
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise RequestError(
            f"the vLLM engine samples at temperature {_LEAST_TEMPERATURE} or more: ask for that, "
            "or for 0",
            field="temperature",
        )
    unverified = [name for name in ("min_p", "logit_bias") if getattr(sampling, name)]
    if drafts and unverified:
        raise RequestError(
            f"vLLM does not support {unverified[0]} in an engine that verifies drafts: leave it "
            "out, or ask a service without drafts",
            field=unverified[0],
        )


# Tokens of an answer, and so steps of each batch size that are timed.
_TOKENS = 8
# Tokens of its prompt; more would make a cold start with large batches long.
_PROMPT = 32
# Most rows of a prompt that are measured at once, as a cold start should be short.
_MOST_PROMPT = 512
# Steps of a prompt that are timed.
_PROMPTS = 3


class VllmCounts:
    """Fed with every report of the engine, and every step of every request."""

    def __init__(self, step_tokens: int, cost: StepCost | None = None) -> None:
        """`step_tokens` is the most rows of a step; the steps correct a cost that was measured."""
        self._step_tokens = step_tokens
        self._cost = cost
        self._totals = StepTotals()
        self._preemptions = 0
        self._prefix_queries = self._prefix_hits = 0
        self._last = SchedulerStats()
        self._last_s: float | None = None  # end of the last step of an engine that is still at work
        self._discarded = 0
        self._by_mode: dict[str, ModeMeasures] = {}
        # By mode: counts of steps by the number of tokens that they committed beyond the first.
        self._beyond: dict[str, Counter[int]] = {}

    def begin(self, now: float) -> None:
        """An idle engine gets work."""
        self._last_s = now

    def idle(self) -> None:
        """The engine has no work left: the time until the next step is nobody's."""
        self._last_s = None
        self._last = replace(self._last, num_running_reqs=0, kv_cache_usage=0.0)

    def step(self, outputs: EngineCoreOutputs) -> tuple[int, float] | None:
        """Counts a report; returns the rows and seconds of a timed step of decoding sequences
        alone, or of prompts alone."""
        stats = outputs.scheduler_stats
        if stats is None:
            return None
        self._last = stats
        self._prefix_queries += stats.prefix_cache_stats.queries
        self._prefix_hits += stats.prefix_cache_stats.hits
        details, begin_s = stats.iteration_details, self._last_s
        if details is None or details.is_dummy or begin_s is None:
            return None
        self._last_s = outputs.timestamp
        prompt_rows, sequences = details.num_ctx_tokens, details.num_generation_requests
        rows = prompt_rows + details.num_generation_tokens
        seconds = max(0.0, outputs.timestamp - begin_s)
        totals = self._totals
        totals.steps += 1
        totals.seconds += seconds
        totals.prompt_steps += prompt_rows > 0
        totals.prompt_rows += prompt_rows
        totals.sequences += sequences
        totals.decode_rows += details.num_generation_tokens
        if self._cost:
            self._cost.observe(rows, seconds)
        return (rows, seconds) if prompt_rows == 0 or sequences == 0 else None

    def prompt(self, computed_tokens: int) -> None:
        """Counts a prompt whose answer has begun."""
        self._totals.prompts += 1
        self._totals.prompt_tokens += computed_tokens

    def discard(self, tokens: int) -> None:
        self._discarded += tokens

    def preempted(self) -> None:
        self._preemptions += 1

    def forward(self, mode: str, tokens: int, threshold: float | None) -> None:
        """Counts a request's step; with a threshold, one that verifies drafts by it."""
        self._totals.output_tokens += tokens
        if tokens > 1:
            self._beyond.setdefault(mode, Counter())[tokens - 1] += 1
        if threshold is not None:
            measures = self._by_mode.setdefault(mode, ModeMeasures())
            # vLLM does not say by how much a draft passed, only at which threshold.
            measures.add_step([threshold] * (tokens - 1))

    def snapshot(
        self,
        info: EngineInfo,
        open_requests: int,
        set_point: float,
        windows: Sequence[int],
        adapter: str | None,
    ) -> Snapshot:
        """The engine's state and counts so far; `open_requests` wait or run."""
        # vLLM's number is that of the last step.
        running = min(open_requests, self._last.num_running_reqs)
        return Snapshot(
            info=info,
            running=running,
            waiting=open_requests - running,
            cache_share=self._last.kv_cache_usage,
            preemptions=self._preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            windows=tuple(windows[:running]),
            adapter=adapter,
            set_point=set_point,
            step_tokens=self._step_tokens,
            step_cost=self._cost.table() if self._cost else {},
            totals=replace(self._totals),
            discarded_tokens=self._discarded,
            by_mode=deepcopy(self._by_mode),
            # Tokens that steps committed at each place after their first.
            accepted_at={
                mode: [
                    sum(n for count, n in steps.items() if count > at) for at in range(max(steps))
                ]
                for mode, steps in self._beyond.items()
            },
        )


def loads(facts: EngineFacts, step_tokens: int) -> Iterator[list[Request]]:
    """Requests to run together, one list after another: batches of every size that is measured,
    and prompts that fill a step alone."""
    tokens = min(_TOKENS, facts.max_context - 1)
    for sequences in row_counts(facts.max_batch):
        if sequences <= facts.max_batch:
            length = min(_PROMPT, facts.max_context - tokens)
            yield [_request(f"{sequences}-{n}", length, tokens, facts) for n in range(sequences)]
    for number in range(_PROMPTS):
        length = min(_MOST_PROMPT, step_tokens, facts.max_context - 1)
        yield [_request(f"prompt-{number}", length, 1, facts)]


def _request(name: str, length: int, tokens: int, facts: EngineFacts) -> Request:
    """A prompt that no other begins with, so that none is found in the prefix cache."""
    chosen = random.Random(name)
    prompt = tuple(chosen.randrange(facts.vocabulary) for _ in range(length))
    name = f"warm-up-{name}"
    return Request(name, prompt, ExactMode(), Sampling(), tokens, frozenset())
