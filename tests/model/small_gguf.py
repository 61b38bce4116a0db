"""GGUF files of tiny models, written as llama.cpp's converter does; wheels that ship one."""

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
    quantize,
)
from model.toys import SHAPE, llama_tokenizer
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

F32, F16, Q8_0, Q4_1 = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_1,
)


def write(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    pre: str = "smollm",
    stored: GGMLQuantizationType = Q8_0,
    changes: dict[str, Any] | None = None,
    left_out: tuple[str, ...] = (),
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """The model's matrices as `stored`, everything else in float32; `changes` are fields that are
    added or take the place of others, `tensors` are added, and `left_out` is not written."""
    config = model.config
    own = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "head_dim", None):
        own |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    fields = {f"{config.model_type}.{name}": value for name, value in own.items()}
    fields |= {"general.name": "tiny"} | _vocabulary(tokenizer, config.vocab_size, pre)
    writer = GGUFWriter(path, config.model_type)
    for name, value in (fields | (changes or {})).items():
        if name not in left_out:
            _add(writer, name, value)
    for name, weight in (_tensors(model) | (tensors or {})).items():
        if name in left_out:
            continue
        kind = stored if weight.ndim == 2 and weight.shape[-1] % 32 == 0 else F32
        writer.add_tensor(name, quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)


def _vocabulary(tokenizer: PreTrainedTokenizerFast, rows: int, pre: str) -> dict[str, Any]:
    inside = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    types = [TokenType.CONTROL if i in special else TokenType.NORMAL for i in range(rows)]
    given: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [by_id.get(index, f"[PAD{index}]") for index in range(rows)],
        "token_type": [int(kind) if i in by_id else 5 for i, kind in enumerate(types)],
        "merges": [" ".join(merge) for merge in inside["merges"]],
        "eos_token_id": tokenizer.eos_token_id,
    }
    if tokenizer.bos_token_id is not None:
        given["bos_token_id"] = tokenizer.bos_token_id
    fields = {f"tokenizer.ggml.{name}": value for name, value in given.items()}
    return fields | {"tokenizer.chat_template": str(tokenizer.chat_template)}


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    config = model.config
    arch = {name: number for number, name in MODEL_ARCH_NAMES.items()}[config.model_type]
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        if config.model_type == "llama" and stem.endswith(("q_proj", "k_proj")):
            is_query = stem.endswith("q_proj")
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        tensors[f"{names.get_name(stem)}.{kind}"] = weight.contiguous()
    return tensors


def tiny_gguf(path: Path, **given) -> Path:
    torch.manual_seed(0)
    size = SHAPE | {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**size)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    path.parent.mkdir(exist_ok=True, parents=True)
    return write(path, model, llama_tokenizer(), **given)


def wheel(directory: Path, name: str, files: dict[str, bytes], version: str = "0.1") -> Path:
    """As pip takes it."""
    directory.mkdir(exist_ok=True, parents=True)
    path = directory / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        tag = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in files))
    return path
