"""The model that a training job starts from: a built-in one or an existing one, with a mask token.

Built-in models are all of Qwen2 architecture; their tokenizer is a byte-level BPE trained on the
job's own texts, with a ChatML template. A model that was never trained with masks has no mask
token. Growing the vocabulary would change the shape of its checkpoint, so existing unused tokens
are preferred.

Shape suffixes: V rows of the vocabulary, H hidden size.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from mars_ray.config.inputs import ModelConfig, PresetModel, PresetName
from mars_ray.errors import ModelError
from mars_ray.model.directory import CARD_FILE, ModelCard, read_card, written
from mars_ray.model.load import load_model, load_tokenizer, stop_at_turn_end, write_model

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


# Llama 3: <|reserved_special_token_7|>; others: <unused7>, <|unused_7|>, <|extra_7|>.
_RESERVED = re.compile(r"^<\|?(reserved|unused|extra)[a-z_]*_?\d+\|?>$")


def create_model(
    config: ModelConfig,
    texts: Callable[[], Iterable[str]],
    directory: str | Path,
    seed: int,
) -> None:
    """Writes the model directory of `config`, complete with mask token and card.

    `texts` is only called for presets, whose tokenizer is trained on them. The same arguments
    write the same files. Raises ModelError if a pretrained model cannot be used, a preset has fewer
    rows than the tokenizer has tokens, or the directory cannot be written.
    """
    if isinstance(config, PresetModel):
        shape = SHAPES[config.preset]
        if shape.rows is not None and config.vocab_size > shape.rows:
            raise ModelError(
                f"model.vocab_size {config.vocab_size} is too large: {config.preset} has "
                f"{shape.rows} rows"
            )
        tokenizer = train_tokenizer(texts(), config.vocab_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen2ForCausalLM(preset_config(config.preset, len(tokenizer)))
        torch.nn.Module.to(model, dtype=shape.dtype)
        block_size = 0
    else:
        model = load_model(config.path, dtype=None, revision=config.revision)
        tokenizer = load_tokenizer(config.path, config.revision)
        # Of an earlier MARS training: our own directories may be trained further.
        has_card = (Path(config.path) / CARD_FILE).exists()
        block_size = read_card(config.path).block_size if has_card else 0
    card = replace(ensure_mask_token(model, tokenizer), block_size=block_size)
    check_rows(model, tokenizer)
    stop_at_turn_end(model, tokenizer)
    with written(directory) as fresh:
        write_model(fresh, model, tokenizer, card)


def check_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ModelError if a token that texts may have lacks an embedding row.

    Such a token would end training or serving at the first text that has it. Special tokens (often
    one for padding) occur in no text, except those that the template writes.
    """
    rows = model.config.vocab_size
    template = str(tokenizer.chat_template)
    added = tokenizer.added_tokens_decoder.values()
    unused = {token.content for token in added if token.special and token.content not in template}
    beyond = [t for t, i in tokenizer.get_vocab().items() if i >= rows and t not in unused]
    if beyond:
        raise ModelError(
            f"the tokenizer has {len(beyond)} tokens, such as {beyond[0]!r}, for which the model's "
            f"embedding of {rows} rows has none: it is another model's tokenizer, or tokens were "
            "added without resizing the embedding"
        )


def ensure_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelCard:
    """Gives the tokenizer a mask token, and the model a row for it if none is free.

    Takes the first that exists: the tokenizer's own mask token; an unused special token; a new
    token on an unused embedding row; a new token on a new row.
    """
    if tokenizer.mask_token is None:
        in_use, template = tokenizer.special_tokens_map.values(), str(tokenizer.chat_template)
        reserved = (
            added.content
            for _, added in sorted(tokenizer.added_tokens_decoder.items())
            if added.special and _RESERVED.match(added.content)
        )
        free = (text for text in reserved if text not in in_use and text not in template)
        token: Any = next(free, MASK)
        tokenizer.add_special_tokens({"mask_token": token})
    mask_id = tokenizer.mask_token_id
    assert isinstance(mask_id, int)
    embedding: Any = model.get_input_embeddings()
    old = len(embedding.weight)
    if mask_id >= old:
        # New rows start at the mean of the others: random ones would depend on the generator's
        # state and lie far from them.
        model.resize_token_embeddings(mask_id + 1, mean_resizing=False)
        layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        with torch.no_grad():
            for layer in layers:
                weight_VH = layer.weight
                weight_VH[old:] = weight_VH[:old].float().mean(0).to(weight_VH.dtype)
    return ModelCard(mask_token=str(tokenizer.mask_token), mask_token_id=mask_id, block_size=0)
