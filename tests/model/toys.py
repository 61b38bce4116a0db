"""Model directories of all supported architectures, tiny and with random weights."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mars_ray.model.create import CHAT_TEMPLATE

TEXTS = ["Tom has 12 apples and gives 5 away.", "How many apples are left? 12 - 5 = 7."]
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
# In the form of Llama 3.
LLAMA_SPECIAL = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
]
LLAMA_TEMPLATE = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim "
    "+ '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)


def backend(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def llama_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend(LLAMA_SPECIAL),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        chat_template=LLAMA_TEMPLATE,
    )


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """As of a base model: texts end with another token than turns do."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def build(architecture: str, rows: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model with so many embedding rows, and its tokenizer."""
    torch.manual_seed(0)
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, eos_token_id=3, **SHAPE))
        return model, llama_tokenizer()
    if architecture == "mistral":
        config = MistralConfig(vocab_size=rows, eos_token_id=3, sliding_window=None, **SHAPE)
        return MistralForCausalLM(config), llama_tokenizer()
    if architecture == "qwen3":
        head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
        config = Qwen3Config(vocab_size=rows, head_dim=head_dim, tie_word_embeddings=True, **SHAPE)
        return Qwen3ForCausalLM(config), qwen_tokenizer()
    config = Qwen2Config(vocab_size=rows, tie_word_embeddings=True, **SHAPE)
    return Qwen2ForCausalLM(config), qwen_tokenizer()


def write(
    directory: Path, architecture: str, rows: int, dtype: torch.dtype = torch.float32
) -> Path:
    """A directory as it is downloaded: written by transformers, without a card."""
    model, tokenizer = build(architecture, rows)
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
