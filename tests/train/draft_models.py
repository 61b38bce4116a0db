"""Tiny models of every architecture with random weights, and adapters whose parts all matter."""

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mars_ray.config.train import DraftAdapterConfig
from mars_ray.model.draft_adapter import DraftCard
from mars_ray.train.draft_adapter import draft_card, fresh_weights
from mars_ray.train.frozen import FrozenModel

# More than one group of 64 for the search of candidates, and a rest.
VOCABULARY = 200
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
ARCHITECTURES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
}


def build(architecture: str = "qwen2") -> PreTrainedModel:
    """The same one each time; biases and norms are not what they start as."""
    model_class, config_class, more = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    model = model_class(config_class(**SHAPE, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def busy_weights(card: DraftCard, base: FrozenModel) -> dict[str, Tensor]:
    """An adapter that changes every mask row: nothing in it is zero."""
    torch.manual_seed(1)
    weights = fresh_weights(card, base, 0)
    return {name: weight + 0.2 * torch.randn_like(weight) for name, weight in weights.items()}


def card_of(depths: int, config: DraftAdapterConfig | None = None) -> DraftCard:
    """Of a small adapter on `build`'s models."""
    config = config or DraftAdapterConfig(rank=3, head_size=20, candidates=8)
    return draft_card(config, depths, SHAPE["hidden_size"], "tiny", "fingerprint")
