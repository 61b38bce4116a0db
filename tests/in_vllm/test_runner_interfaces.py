"""vLLM's two model runners, beyond the signatures that the plug-in itself compares when it starts.

Of the V1 runner: what the plug-in reads of a runner and a model that live. Of the newer runner,
which takes no proposer of others yet: that vLLM says so, and what support for it would extend. When
one of these fails, vLLM has changed: the message says what.
"""

import inspect
import operator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from in_vllm.engines import PROPOSER, answers, mars_engine

from mars_ray.errors import ConfigError
from mars_ray.vllm import settings

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
# By the object: what is read of it in each step, or once when an adapter is fitted.
READ = {
    "worker.model_runner": (
        "drafter.layout",
        "input_batch.req_ids",
        "input_batch.sampling_metadata.temperature",
        "input_batch.sampling_metadata.all_greedy",
        "input_ids.gpu",
        "requests",
    ),
    "the model": (
        "config.hidden_size",
        "embed_input_ids",
        "compute_logits",
        "lm_head.weight",
        "model.embed_tokens",
        "model.layers",
    ),
    "qkv_proj": (
        "tp_rank",
        "tp_size",
        "num_heads",
        "num_kv_heads",
        "num_kv_head_replicas",
        "head_size",
        "v_head_size",
        "input_size",
    ),
    "gate_up_proj": ("tp_rank", "tp_size", "output_partition_sizes", "input_size"),
    "down_proj": ("tp_rank", "tp_size", "input_size_per_partition", "input_size", "output_size"),
}
# Of the newer runner: what makes a speculator, and the methods around its rows and samples.
NEWER = {
    "init_speculator": ("vllm_config", "device", "req_states"),
    "BaseSpeculator.propose": (
        "input_batch",
        "attn_metadata",
        "slot_mappings",
        "last_hidden_states",
        "aux_hidden_states",
        "num_sampled",
        "num_rejected",
        "last_sampled",
        "next_prefill_tokens",
        "temperature",
        "seeds",
        "dp_sync_state",
        "dummy_run",
        "skip_attn_for_dummy_run",
        "mm_inputs",
        "is_profile",
        "num_speculative_tokens",
    ),
    "GPUModelRunner.prepare_inputs": (
        "scheduler_output",
        "batch_req_state",
        "batch_desc",
        "num_active_loras",
    ),
    "GPUModelRunner.sample": ("hidden_states", "input_batch", "grammar_output"),
    "GPUModelRunner.postprocess_sampled": (
        "idx_mapping",
        "sampled_tokens",
        "num_sampled",
        "num_rejected",
        "query_start_loc",
    ),
    "GPUModelRunner.sample_tokens": ("grammar_output",),
}


def missing(worker: Any) -> list[str]:
    """What a worker's runner and model do not have of READ."""
    runner = worker.model_runner
    model = runner.get_model()
    layer = model.model.layers[0]
    objects = {
        "worker.model_runner": runner,
        "the model": model,
        "qkv_proj": layer.self_attn.qkv_proj,
        "gate_up_proj": layer.mlp.gate_up_proj,
        "down_proj": layer.mlp.down_proj,
    }
    found = []
    for name, paths in READ.items():
        for path in paths:
            try:
                operator.attrgetter(path)(objects[name])
            except AttributeError as error:
                found.append(f"{name}: no {path} ({error})")
    return found


def test_a_live_runner_has_what_the_plugin_reads(checkpoint: Path):
    """Guards an AttributeError in the middle of a step, which ends vLLM's engine."""
    llm = mars_engine(checkpoint)
    answers(llm, [[1, 2, 3]], max_tokens=4)
    assert llm.collective_rpc(missing) == [[]]


def newer() -> dict[str, Any]:
    """The functions of NEWER as this vLLM has them; None for one that is gone."""
    from vllm.v1.worker.gpu import model_runner, spec_decode
    from vllm.v1.worker.gpu.spec_decode import speculator

    found = {}
    for name in NEWER:
        places = (spec_decode, speculator, model_runner)
        owner, _, method = name.rpartition(".")
        owners = [getattr(place, owner, None) for place in places] if owner else places
        found[name] = next(filter(None, (getattr(each, method, None) for each in owners)), None)
    return found


def test_the_newer_runner_is_as_it_was():
    """What a plug-in for it would replace or call. Fails when it is time to look again."""
    changed = []
    for name, function in newer().items():
        if function is None:
            changed.append(f"{name} is gone")
            continue
        known = tuple(inspect.signature(function).parameters)
        if tuple(each for each in known if each != "self") != NEWER[name]:
            changed.append(f"{name} takes ({', '.join(known)})")
    assert not changed, f"vLLM's newer model runner has changed: {'; '.join(changed)}"


def config(checkpoint: Path) -> Any:
    """vLLM's configuration of an engine with the plug-in, which is not started."""
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 8}
    arguments = EngineArgs(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        max_model_len=128,
        speculative_config=speculative,
    )
    return arguments.create_engine_config()


def test_vllm_keeps_custom_proposers_from_the_newer_runner(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """If nobody names a runner, vLLM must take the V1 runner: hooks on it are silent in the other.
    And one who names the newer runner is told what to do, should it ever make our proposer."""
    made = config(checkpoint)
    unsupported = made._get_v2_model_runner_unsupported_features()
    assert "speculative method 'custom_class'" in unsupported, (
        "vLLM's newer model runner takes custom proposers now: the plug-in must refuse it or use it"
    )
    settings.read(made)
    monkeypatch.setattr(type(made), "use_v2_model_runner", True)
    with pytest.raises(ConfigError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        settings.read(made)


def test_the_names_of_arguments_are_read_from_the_source():
    """As `mars-ray serve` does before it starts anything, because an import takes ten seconds."""
    from dataclasses import fields

    from vllm.engine import arg_utils

    from mars_ray.serve.preflight import _arguments

    assert arg_utils.__file__ is not None
    names = {field.name for field in fields(arg_utils.AsyncEngineArgs)}
    assert _arguments(Path(arg_utils.__file__)) == names
