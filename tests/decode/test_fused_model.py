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
from mars_ray.decode.fused_model import FusedModel
from mars_ray.decode.kv_cache import PagedCache
from mars_ray.decode.linear import Linear
from mars_ray.errors import ConfigError, ModelError
from mars_ray.model.card import PLAIN
from mars_ray.model.load import multiplies_bfloat16

LARGE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_large_matrices_are_reordered_and_given_up_by_the_model(dtype, tied):
    """The same logits, bit by bit however many rows there are, and no weight held twice but that of
    a head that is the embedding too."""
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        pytest.skip("this CPU does not multiply bfloat16")
    torch.manual_seed(0)
    large = SHAPE | {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 600}
    model = Qwen2ForCausalLM(Qwen2Config(**large, tie_word_embeddings=tied)).eval().to(dtype)
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.data.normal_()
    ids = torch.randint(0, 600, (1, 50), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids).logits[0].float()
        runner = FusedModel(model, 64)
        hidden = runner.hidden_states(ids[0], torch.arange(50), one_sequence(model, 50))
        got = runner.logits(hidden)
        alone = torch.cat([runner.logits(hidden[i : i + 1]) for i in range(50)])
    tolerance = (1e-5 if dtype == torch.float32 else 0.03) * float(expected.abs().max())
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
    assert torch.equal(got, alone)
    empty = {name for name, weight in model.named_parameters() if weight.numel() == 0}
    assert {name.split(".")[-2] for name in empty} == (LARGE if tied else LARGE | {"lm_head"})


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_that_bfloat16_makes_equal_are_told_apart(tied):
    """Guards the first of several equal logits as the answer: the float32 products differ, and what
    is never emitted is not brought back."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied)).eval().bfloat16()
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    with torch.inference_mode():
        # Logits of 20, give or take 0.3.
        head.weight.copy_(torch.randn_like(head.weight) * 0.05 + 20 / head.in_features)
        runner = FusedModel(model, 64)
        hidden_NH = 1 + 0.1 * torch.randn(30, head.in_features).bfloat16()
        logits_NV = runner.logits(hidden_NH)
        expected_NV = hidden_NH.float() @ head.weight.float().t()
        rounded_N = logits_NV.argmax(dim=-1)
        banned = int(expected_NV[0].argmax())
        logits_NV[0, banned] = -torch.inf
        expected_NV[0, banned] = -torch.inf
        runner.read_again(hidden_NH, logits_NV)
    assert (rounded_N != expected_NV.argmax(dim=-1)).sum() > 3
    assert torch.equal(logits_NV.argmax(dim=-1), expected_NV.argmax(dim=-1))


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
