"""Converts GGUF, llama.cpp's files, into a Hugging Face model and tokenizer.

A file is refused if the conversion would lose any of it; an optional key that is missing, or whose
value changes nothing, is no loss.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, ReaderTensor, dequantize, get_tensor_name_map
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mars_ray.errors import ModelError
from mars_ray.model.directory import ARCHITECTURES
from mars_ray.model.load import check_report, opened

SUFFIX = ".gguf"

# By llama.cpp's names. It calls a Mistral a llama, and as one it is the same model.
_KINDS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_NUMBERS = {name: number for number, name in MODEL_ARCH_NAMES.items()}
# Keys of a model's sizes, below its architecture's name.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Three names of one number, if heads are as in our architectures.
_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_OTHERS = ("vocab_size", "rope.freq_base")
# Values besides 0, "" and "none" with which an optional key changes nothing.
_NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
    "tensor_data_layout": "Meta AI original pth",  # the only one that llama.cpp has for these
}
# Read for other architectures than ours, or by nobody.
_UNUSED = ("attention.layer_norm_epsilon", "rope.scaling.finetuned")
# How far angles reach; without a factor none of them changes an angle.
_STRETCHED = ("rope.scaling.", "rope.scale_linear")
# Of a vocabulary, what llama.cpp knows by itself and no tokenizer of ours would.
_VOCABULARY = {
    "gpt2": ("token_type", "merges"),
    "llama": ("token_type", "scores", "bos_token_id"),
}
_LOST = "has what would be lost on the way from GGUF,"
_INSTEAD = "import the model that it was made from"
_HOLDS = "a whole model and its tokenizer"
_LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores")
# What the names of templates begin with, besides the default one's.
_TEMPLATE = "tokenizer.chat_template."
# Errors of the reader on a truncated file, or one that is not GGUF.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError)


# And on one that is whole and newer than it.
_NEWER = ("which we cannot handle", "is not a valid GGMLQuantizationType")


@dataclass(frozen=True, slots=True)
class _Header:
    """Everything in a file except its weights and its vocabulary."""

    path: Path
    fields: dict[str, Any]  # only the length of the vocabulary
    tensors: Mapping[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def own(self, key: str) -> Any:
        """The value of an architecture-specific key; one for all layers if these agree."""
        value = self.fields.get(f"{self.architecture}.{key}")
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            return value[0]
        return value

    def token(self, name: str) -> int | None:
        return self.fields.get(f"tokenizer.ggml.{name}_token_id")


def load_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The file's model, dequantized into bfloat16, and its tokenizer.

    Raises ModelError if the file is damaged or the conversion would lose any of it.
    """
    header = _read(path)
    kind, parts = header.fields.get("general.type", "model"), header.fields.get("split.count", 1)
    if kind != "model":
        raise ModelError(f"{path} is no model: its general.type is {kind!r}")
    if parts > 1:
        raise ModelError(
            f"{path} is one of {parts} files (split.count): make one of them with "
            f"`llama-gguf-split --merge`, or {_INSTEAD}"
        )
    config = _config(header)
    names = _names(header, config)
    # First, because it is quick and more likely to be refused.
    tokenizer = _tokenizer(header)
    named = {
        name.removeprefix(_TEMPLATE): value
        for name, value in header.fields.items()
        if name.startswith(_TEMPLATE)
    }
    if named:
        default = tokenizer.chat_template
        tokenizer.chat_template = named | ({"default": default} if default else {})
    return _model(header, config, names), tokenizer


def _read(path: Path) -> _Header:
    try:
        reader = GGUFReader(path)
        fields = {
            name: len(field.data) if name.startswith(_LONG) else field.contents()
            for name, field in reader.fields.items()
        }
        return _Header(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if any(word in str(error) for word in _NEWER):
            raise ModelError(
                f"{path} is of a newer form of GGUF than can be read here: {error}. {_INSTEAD}"
            ) from error
        raise ModelError(
            f"{path} is no GGUF file, or is damaged or was cut short: {error}. Fetch it again"
        ) from error


def _config(header: _Header) -> Any:
    """transformers' configuration. Raises ModelError for keys that it cannot represent."""
    if header.architecture not in _KINDS:
        raise ModelError(
            f"{header.path} is a model of type {header.architecture!r}; "
            f"supported are {', '.join(ARCHITECTURES.values())}"
        )
    given = {name: header.own(key) for key, name in _SIZES.items()}
    if given["num_key_value_heads"] is None:
        given["num_key_value_heads"] = given["num_attention_heads"]
    # A list means that layers differ.
    wrong = [key for key, name in _SIZES.items() if not isinstance(given[name], int | float)]
    if wrong or not header.fields.get("tokenizer.ggml.tokens"):
        raise ModelError(
            f"{header.path} does not describe a model as it should: see "
            f"{', '.join(wrong) or 'tokenizer.ggml.tokens'}"
        )
    _check_keys(header)
    _check_vocabulary(header)
    heads = header.own("attention.key_length") or header.own("rope.dimension_count")
    make: Any = _KINDS[header.architecture][0]
    config = make(
        **given,
        vocab_size=header.own("vocab_size") or header.fields["tokenizer.ggml.tokens"],
        head_dim=heads or given["hidden_size"] // given["num_attention_heads"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": header.own("rope.freq_base") or 10_000.0,
        },
        # llama.cpp stores no second copy of a tied head.
        tie_word_embeddings="output.weight" not in header.tensors,
        dtype=torch.bfloat16,
    )
    if header.architecture != "qwen2":
        # llama.cpp does without those that are not there.
        biases = tuple(f"attn_{name}.bias" for name in ("q", "k", "v", "output"))
        config.attention_bias = any(
            name.startswith("blk.") and name.endswith(biases) for name in header.tensors
        )
    for name in ("bos", "eos"):
        setattr(config, f"{name}_token_id", header.token(name))
    config.pad_token_id = header.token("padding")
    return config


def _check_keys(header: _Header) -> None:
    """Raises ModelError for an unknown key that affects computation: without its stretched rotary
    embedding, its sliding window or its experts it would be another model."""
    prefix = f"{header.architecture}."
    known = {*_SIZES, *_HEAD_SIZES, *_OTHERS, *_UNUSED}
    own = {key.removeprefix(prefix) for key in header.fields if key.startswith(prefix)}
    strange = [
        f"{prefix}{key}={header.own(key)}"
        for key in sorted(own - known)
        if not _is_neutral(header, key)
    ]
    sizes = {size for key in _HEAD_SIZES if (size := header.own(key)) is not None}
    if len(sizes) > 1:
        strange.append("heads of several sizes")
    if strange:
        raise ModelError(f"{header.path} {_LOST} {', '.join(strange)}: {_INSTEAD}")


def _is_neutral(header: _Header, key: str) -> bool:
    """Whether the model computes the same without this key."""
    value = header.own(key)
    if key in _NEUTRAL:
        return value == _NEUTRAL[key] or (value in (0, "") and value is not False)
    if key.startswith(_STRETCHED):
        factor = header.own("rope.scaling.factor") or header.own("rope.scale_linear") or 1
        kind = header.own("rope.scaling.type") or "linear"
        return kind == "none" or (factor == 1 and kind in ("linear", "yarn"))
    if key == "attention.sliding_window" and value:
        return value >= (header.own("context_length") or math.inf)
    if key == "attention.scale" and value:
        heads = header.own("attention.key_length") or header.own("rope.dimension_count")
        heads = heads or header.own("embedding_length") // header.own("attention.head_count")
        return math.isclose(value, heads**-0.5, rel_tol=1e-5)
    if key == "embedding_length_out":
        return value == header.own("embedding_length")
    return value in (0, "", "none")


def _check_vocabulary(header: _Header) -> None:
    """Raises ModelError for a vocabulary of which a part is missing or would be lost."""
    kind, prefix = str(header.fields.get("tokenizer.ggml.model")), "tokenizer.ggml."
    lacks = [key for key in _VOCABULARY.get(kind, ()) if prefix + key not in header.fields]
    if kind == "llama" and prefix + "merges" in header.fields:
        lacks = [key for key in lacks if key != "scores"]
    if header.fields.get(prefix + "add_bos_token") is False:
        lacks = [key for key in lacks if key != "bos_token_id"]
    if lacks:
        names = ", ".join(prefix + key for key in lacks)
        raise ModelError(f"{header.path} does not say which tokens text becomes: it lacks {names}")
    if kind == "llama" and header.fields.get(prefix + "add_space_prefix") is False:
        raise ModelError(f"{header.path} {_LOST} {prefix}add_space_prefix=False: {_INSTEAD}")


def _names(header: _Header, config: Any) -> dict[str, str]:
    """llama.cpp's name of each of our tensors. Raises ModelError unless the file has exactly
    these."""
    with torch.device("meta"):
        model = _KINDS[header.architecture][1](config)
    own = get_tensor_name_map(_NUMBERS[header.architecture], config.num_hidden_layers)
    names, wanted = {}, {}
    for name, weight in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        if not (stem == "lm_head" and config.tie_word_embeddings):
            names[name] = f"{own.get_name(stem)}.{kind}"
            wanted[names[name]] = tuple(weight.shape)
    # GGUF lists the fastest-moving dimension first.
    there = {name: tuple(map(int, t.shape[::-1])) for name, t in header.tensors.items()}
    lacks, more = wanted.keys() - there.keys(), there.keys() - wanted.keys()
    if header.architecture != "qwen2":  # whose biases are no option
        lacks = {name for name in lacks if not name.endswith(".bias")}
    lost: set[str] = set()
    for name in more:
        # Neither a bias of zeros changes anything, nor rotary factors that are all 1.
        neutral = None
        if name.endswith(".bias"):
            neutral = 0
        elif name.startswith(("rope_freqs.", "rope_factors_")):
            neutral = 1
        tensor = header.tensors[name]
        if neutral is None or (dequantize(tensor.data, tensor.tensor_type) != neutral).any():
            lost.add(name)
    for what, tensors in (
        ("lacks", lacks),
        (_LOST, lost),
        (
            "has other sizes than it says, of",
            {name for name in wanted if there.get(name, wanted[name]) != wanted[name]},
        ),
    ):
        if tensors:
            shown = ", ".join(sorted(tensors)[:3])
            raise ModelError(f"{header.path} {what} {shown}: {_INSTEAD}")
    return names


def _model(header: _Header, config: Any, names: dict[str, str]) -> PreTrainedModel:
    kind = _KINDS[header.architecture][1]
    weights = {
        name: _weight(header, config, own) for name, own in names.items() if own in header.tensors
    }
    for name in names.keys() - weights.keys():  # only biases may be missing
        outputs = len(weights[name.removesuffix("bias") + "weight"])
        weights[name] = torch.zeros(outputs)
    loaded: Any = opened(
        header.path,
        lambda: kind.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=torch.bfloat16,
            output_loading_info=True,
        ),
        holds=_HOLDS,
    )
    model, report = loaded
    check_report(report, f"the weights in {header.path} do not fit what it says")
    ends = [header.token(name) for name in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(token for token in ends if token is not None))
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=known or None,
        pad_token_id=config.pad_token_id,
    )
    return model.eval()


def _weight(header: _Header, config: Any, name: str) -> Tensor:
    """A tensor of the file in bfloat16, in transformers' layout."""
    stored = header.tensors[name]
    weight = torch.tensor(dequantize(stored.data, stored.tensor_type), dtype=torch.bfloat16)
    if header.architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return weight
    # Rotary embeddings rotate neighbours in llama.cpp, and the halves of a head in transformers.
    is_query = ".attn_q." in name
    heads = config.num_attention_heads if is_query else config.num_key_value_heads
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


# How text is cut before tokenisation, by `tokenizer.ggml.pre`, which transformers ignores. Text cut
# in another way becomes other tokens, with which the model still answers, but worse. The names are
# llama.cpp's (src/llama-vocab.cpp), the values those in the tokenizer.json of the models.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORD, _SIGNS = r"[^\r\n\p{L}\p{N}]?\p{L}+|", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = _CONTRACTION + _WORD + r"\p{N}{1,3}" + _SIGNS + _SPACE
_QWEN_2 = _CONTRACTION + _WORD + r"\p{N}" + _SIGNS + _SPACE
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACE
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How text is cut into words, and words into tokens."""

    split: str | None  # regular expression; None: GPT-2's, after separating every digit
    normalizes: bool = False  # to composed characters (NFC), which llama.cpp leaves to its callers
    ignores_merges: bool = False  # a word that is a token is taken whole
    adds_bos: bool = False  # if the file does not say


_LLAMA = _Cut(_LLAMA_3, ignores_merges=True, adds_bos=True)
_QWEN = _Cut(_QWEN_2, normalizes=True)
_CUTS = {
    "smollm": _Cut(None),
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": _QWEN,
    "tekken": _Cut(_TEKKEN, ignores_merges=True, adds_bos=True),
}


def _tokenizer(header: _Header) -> PreTrainedTokenizerBase:
    """The file's tokenizer. Raises ModelError for one that is not supported."""
    path, prefix = header.path, "tokenizer.ggml."
    kind, pre = (str(header.fields.get(prefix + name)) for name in ("model", "pre"))
    # SentencePiece vocabularies have no such step.
    is_plain = kind == "llama" and pre in ("None", "default")
    if not is_plain and (kind != "gpt2" or pre not in _CUTS):
        raise ModelError(
            f"{path} cuts text in a way that is not known here: tokenizer.ggml.model={kind}, "
            f"tokenizer.ggml.pre={pre}; known are {', '.join(_CUTS)}: {_INSTEAD}"
        )
    tokenizer = opened(
        path, lambda: AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name), holds=_HOLDS
    )
    if is_plain:
        return tokenizer
    # Changed to cut text as its file says.
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    step, backend = _CUTS[pre], tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(step.split), behavior="isolated")
            if step.split
            else pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step.split is None),
        ]
    )
    if step.normalizes:
        backend.normalizer = normalizers.NFC()
    assert isinstance(backend.model, BPE)
    backend.model.ignore_merges = step.ignores_merges
    adds_bos = header.fields.get(prefix + "add_bos_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=step.adds_bos if adds_bos is None else adds_bos,
        add_eos_token=bool(header.fields.get(prefix + "add_eos_token")),
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **tokenizer.special_tokens_map,
    )
