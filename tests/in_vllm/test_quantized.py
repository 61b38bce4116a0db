"""Quantized weights: vLLM decodes them, and the plug-in leaves its text as it is.

A row's activations are quantized by themselves and integers are summed without rounding, so rows of
masks beside others change nothing.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decode.adapters import random_adapter
from decode.models import pattern
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own: make test-vllm")

from in_vllm.engines import answers, counts, engine, mars_engine, tokens_per_forward

from mars_ray.model.directory import fingerprint
from mars_ray.model.draft_adapter import write_draft_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROMPTS = [pattern(start, 1 + start % 3, 3 + start % 5) for start in range(20)]
# W8A8: a scale for each output of a layer, and one for each row of its inputs.
_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": _EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}


def to_int8(source: Path, directory: Path) -> Path:
    """A copy of a model with weights of one byte, in the format of compressed-tensors."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": INT8}))
    made = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            made[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-6) / 127
        made[name] = (weight / scale).round().to(torch.int8)
        made[f"{name}_scale"] = scale
    save_file(made, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def int8(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that MARS has trained, in int8."""
    return to_int8(checkpoint, tmp_path_factory.mktemp("quantized") / "int8")


@pytest.fixture(scope="module")
def plain(int8: Path) -> Any:
    return engine(int8)


def test_int8_weights(plain: Any, int8: Path):
    """A MARS checkpoint in W8A8, as other programs write it: text of the plain engine, most of it
    from drafts."""
    layer = next(m for name, m in modules(plain) if name.endswith("layers.0.mlp.down_proj"))
    assert "Int8" in type(layer.scheme).__name__
    expected = answers(plain, PROMPTS, max_tokens=60)
    own = mars_engine(int8)
    before = counts(own)
    assert answers(own, PROMPTS, max_tokens=60) == expected
    assert tokens_per_forward(before, counts(own)) > 1.25


def test_an_adapter_on_int8_weights(
    plain: Any, int8: Path, trained: PreTrainedModel, tmp_path: Path
):
    """Its products are added in floating point to the results of masks alone."""
    adapter = random_adapter(trained)
    card = replace(adapter.card, base_fingerprint=fingerprint(int8))
    write_draft_adapter(tmp_path, replace(adapter, card=card))
    own = mars_engine(int8, mars={"adapter": str(tmp_path)})
    assert answers(own, PROMPTS, max_tokens=40) == answers(plain, PROMPTS, max_tokens=40)


def modules(llm: Any) -> Any:
    """Of the model in this process."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.get_model().named_modules()
