"""The lean forward against transformers' own modules, for every architecture and option."""

from typing import cast

import pytest
import torch
from decode.models import SHAPE
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mars_ray.config.decode import EngineConfig
from mars_ray.decode.attention.dense import DenseAttention, Group
from mars_ray.decode.engine import Engine
from mars_ray.decode.fused_model import FusedModel, Linear
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.errors import ConfigError, ModelError
from mars_ray.model.directory import PLAIN

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2-tied-yarn": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, tie_word_embeddings=True, rope_parameters=YARN)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "qwen3-biased": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, attention_bias=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama-biased-llama3": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    # All that is asked of it lies within the window.
    "mistral-sliding": lambda: MistralForCausalLM(
        MistralConfig(**SHAPE, head_dim=16, sliding_window=50)
    ),
}


def awake(kind: str):
    """The model with every parameter random: norms and biases start as ones and zeros."""
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def one_sequence(model, rows: int) -> DenseAttention:
    cache = PagedCache(model.config, 8, 8, model.device, model.dtype)
    hidden = torch.ones(rows, 64).triu(diagonal=1).bool()
    bias = torch.zeros(rows, 64, dtype=model.dtype).masked_fill(hidden, -torch.inf)
    bias = bias.repeat_interleave(cache.shared_heads, dim=0)[None, None]
    # Pages in an order of their own.
    page = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    place = (page[:, None] * 8 + torch.arange(8)).flatten()[:rows]
    return DenseAttention(cache, place, [Group(1, None, page, bias)], None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_runner_computes_what_the_modules_compute(kind, dtype):
    """Logits of all rows; and the model that the runner shares its weights with is unharmed."""
    model = awake(kind).to(dtype)
    ids = torch.randint(0, 20, (1, 50), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        before = model(ids).logits[0]
        runner = FusedModel(model, 64)
        hidden = runner.hidden_states(ids[0], torch.arange(50), one_sequence(model, 50))
        got = runner.logits(hidden)
        after = model(ids).logits[0]
    # transformers rounds to bfloat16 in other places.
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got, before.float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(after, before, atol=tolerance / 10, rtol=0)


def test_weights_are_not_held_twice():
    """The model's parameters lie inside the runner's."""
    model = awake("qwen2")
    runner = FusedModel(model, 64)
    attention = model.model.layers[0].self_attn
    joined = cast(Linear, runner._layers[0].qkv).weight_IO.untyped_storage().data_ptr()
    for module in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert module.weight.untyped_storage().data_ptr() == joined


def test_unsupported_models_are_refused():
    """Better than text that is wrong."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelError, match="rope_type 'dynamic' is not supported"):
        FusedModel(LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=dynamic)), 64)


@pytest.mark.parametrize("kind", [MistralConfig, Qwen2Config])
def test_a_context_beyond_a_sliding_window_is_refused(kind):
    """Guards text that goes astray once the first tokens are out of sight."""
    windows = {"sliding_window": 40, "use_sliding_window": True}
    config = kind(**SHAPE, **(windows if kind is Qwen2Config else {"sliding_window": 40}))
    model = AutoModelForCausalLM.from_config(config)
    Engine(model, PLAIN, EngineConfig(max_batch=1, max_context=40, device="cpu"))
    with pytest.raises(ConfigError, match="set max_context=40 at most"):
        Engine(model, PLAIN, EngineConfig(max_batch=1, max_context=41, device="cpu"))
