"""What the plug-in needs of vLLM's V1 model runner, checked before anything is replaced.

The runner is no public interface. So a version that has changed it must fail when it starts, and
say so, rather than decode wrongly.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false

import inspect
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.version import __version__

from mars_ray.errors import EngineError

# The versions that the plug-in's tests have run with.
TESTED = ("0.32.0",)
# Methods that are replaced or called, with their parameters.
METHODS: dict[tuple[Any, str], tuple[str, ...]] = {
    (rejection_sampler, "rejection_sample"): (
        "draft_token_ids",
        "num_draft_tokens",
        "max_spec_len",
        "cu_num_draft_tokens",
        "draft_probs",
        "target_logits",
        "bonus_token_ids",
        "sampling_metadata",
        "synthetic_mode",
        "synthetic_conditional_rates",
        "use_fp64_gumbel",
    ),
    (rejection_sampler, "expand_batch_to_tokens"): (
        "x",
        "cu_num_tokens",
        "num_tokens",
        "replace_from",
        "replace_to",
    ),
    (SamplingParams, "_validate_spec_decode"): ("speculative_config",),
    (GPUModelRunner, "_update_states"): ("scheduler_output",),
    (GPUModelRunner, "_prepare_inputs"): ("scheduler_output", "num_scheduled_tokens"),
    (GPUModelRunner, "_model_forward"): (
        "input_ids",
        "positions",
        "intermediate_tensors",
        "inputs_embeds",
        "model_kwargs",
    ),
    (GPUModelRunner, "_sample"): ("logits", "spec_decode_metadata"),
    (GPUModelRunner, "_input_fits_in_drafter"): ("common_attn_metadata",),
    (GPUModelRunner, "propose_draft_token_ids"): (
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
        "slot_mappings",
    ),
    (StructuredOutputManager, "validate_tokens"): ("request", "spec_tokens"),
}
# Fields of classes that are read, made or changed here.
FIELDS: dict[type, tuple[str, ...]] = {
    SpecDecodeMetadata: (
        "draft_token_ids",
        "num_draft_tokens",
        "cu_num_draft_tokens",
        "cu_num_sampled_tokens",
        "target_logits_indices",
        "bonus_logits_indices",
        "logits_indices",
    ),
    SamplingMetadata: ("spec_token_ids", "output_token_ids", "generators", "temperature"),
    SchedulerOutput: (
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "finished_req_ids",
    ),
    CachedRequestState: ("sampling_params", "output_token_ids"),
    SamplerOutput: ("sampled_token_ids", "logprobs_tensors"),
}


def differences() -> list[str]:
    """What this vLLM has otherwise than the plug-in knows it."""
    found: list[str] = []
    for (owner, name), wanted in METHODS.items():
        method: Any = getattr(owner, name, None)
        if method is None:
            found.append(f"{owner.__name__}.{name} is missing")
            continue
        known = tuple(name for name in inspect.signature(method).parameters if name != "self")
        if known != wanted:
            found.append(f"{owner.__name__}.{name} takes ({', '.join(known)})")
    for owner, names in FIELDS.items():
        known = tuple(inspect.signature(owner).parameters)
        missing = [name for name in names if name not in known]
        found += [f"{owner.__name__} has no {name}" for name in missing]
        if owner is SpecDecodeMetadata and set(known) - set(names):
            found.append(f"{owner.__name__} has new fields: {set(known) - set(names)}")
    return found


def check() -> None:
    """Raises EngineError if vLLM is not as the plug-in knows it."""
    if found := differences():
        raise EngineError(
            f"vLLM {__version__} has another interface than this version of mars-ray knows "
            f"({'; '.join(found)}): install vLLM {TESTED[-1]}, or decode without the plug-in"
        )
