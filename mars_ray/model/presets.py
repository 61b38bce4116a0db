"""The built-in models: shapes, all of Qwen2 architecture, and their tokenizer.

The tokenizer is a byte-level BPE trained on the job's own texts, with a ChatML template.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2Tokenizer

from mars_ray.config.model import PresetName

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MASK = "<|mask|>"

# Tools are listed in a turn of their own before the conversation, and calls have the form of Hermes
# and Qwen2.5 models.
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\nTools:\\n' -}}"
    "{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}"
    '{{- \'A tool is called by <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>\' -}}'
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>\\n' + call['function'] | tojson + '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


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
    # 0.06 instead of the published models' 0.02: so narrow a model learns arithmetic faster.
    "tiny": Shape(128, 4, 4, 2, 384, None, True, 1e4, 2048, 0.06, torch.float32),
    "small": Shape(256, 4, 4, 2, 768, None, True, 1e4, 2048, 0.06, torch.float32),
    # A Llama: its projections have no biases, the rest is the same.
    "smollm2-135m": Shape(576, 30, 9, 3, 1536, 49_152, True, 1e5, 8192, 0.02, torch.bfloat16),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 4864, 151_936, True, 1e6, 32_768, 0.02, torch.bfloat16),
    "qwen2.5-7b": Shape(
        3584, 28, 28, 4, 18_944, 152_064, False, 1e6, 131_072, 0.02, torch.bfloat16
    ),
}


def preset_config(name: PresetName, vocabulary: int) -> Qwen2Config:
    """The configuration of a preset for a tokenizer of `vocabulary` tokens."""
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


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Qwen2Tokenizer:
    """A tokenizer of at most `vocab_size` tokens, fewer if the texts give no more merges; the same
    every time.

    Each digit is a token, so that a number is always spelled in one way. Normalisation and
    pre-tokenisation are Qwen2's: when transformers loads a Qwen2 model's tokenizer, it replaces any
    others with these, and words would be cut differently than in training.
    """
    like = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = like.normalizer
    tokenizer.pre_tokenizer = like.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Drops half characters, which JSON can spell; a row with one is refused when it is tokenised.
    whole = (text.encode(errors="ignore").decode() for text in texts)
    tokenizer.train_from_iterator(whole, trainer)
    trained: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    # Pairs, which it requires in spite of its annotation.
    merges: Any = [tuple(merge) for merge in trained["merges"]]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        extra_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
