"""The built-in model shapes, all of Qwen2 architecture."""

from dataclasses import dataclass

import torch
from transformers import Qwen2Config

from mars_ray.config.model import PresetName


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 shape; `rows` of the embedding, or None for the tokenizer's vocabulary."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    rows: int | None
    tied: bool
    rope_theta: float
    positions: int
    initializer_range: float
    dtype: torch.dtype


SHAPES: dict[PresetName, Shape] = {
    # 0.06 where the published models have 0.02: so narrow a model learns arithmetic faster.
    "tiny": Shape(128, 4, 4, 2, 384, None, True, 1e4, 2048, 0.06, torch.float32),
    "small": Shape(256, 4, 4, 2, 768, None, True, 1e4, 2048, 0.06, torch.float32),
    # A Llama, whose projections have no biases; all else is alike.
    "smollm2-135m": Shape(576, 30, 9, 3, 1536, 49_152, True, 1e5, 8192, 0.02, torch.bfloat16),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 4864, 151_936, True, 1e6, 32_768, 0.02, torch.bfloat16),
    "qwen2.5-7b": Shape(
        3584, 28, 28, 4, 18_944, 152_064, False, 1e6, 131_072, 0.02, torch.bfloat16
    ),
}


def preset_config(name: PresetName, vocabulary: int) -> Qwen2Config:
    """The configuration of a preset for a tokenizer of so many tokens."""
    shape = SHAPES[name]
    rows = vocabulary if shape.rows is None else shape.rows
    assert rows >= vocabulary, f"{name} has {rows} embedding rows for {vocabulary} tokens"
    return Qwen2Config(
        vocab_size=rows,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=shape.positions,
        initializer_range=shape.initializer_range,
        dtype=shape.dtype,
    )
