"""llama.cpp as a peer. It imports nothing of this package: the Python of its environment
(`tools/llamacpp_env.sh`) runs it.

Its decoder is driven as its own batched benchmark does, a sequence id for each sequence, and tokens
are chosen by numpy. The checkpoint becomes a GGUF file with the same weights, bit for bit; as
`llamacpp-q8` its matrices are quantized to Q8_0, which makes it another model. As `llamacpp-lookup`
it verifies the drafts of llama-cpp-python's prompt lookup, with that class's defaults.
"""

import ctypes
import importlib
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from numpy.typing import NDArray

_STEP_TOKENS = 2048
_LOG_ERROR = 4  # ggml.h
_TYPES = {"bfloat16": GGMLQuantizationType.BF16, "float32": GGMLQuantizationType.F32}


def main() -> None:
    """Argument: the settings (`decoders/__init__.py`)."""
    settings = json.loads(sys.argv[1])
    llama: Any = importlib.import_module("llama_cpp")
    kind = _TYPES[settings["dtype"]]
    if settings["peer"] == "llamacpp-q8":
        kind = GGMLQuantizationType.Q8_0
    with TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_gguf(Path(settings["checkpoint"]), path, kind)
        decoder = _Decoder(llama, path, settings)
        hello = {"peer": "llamacpp", "version": llama.__version__}
        weights = llama.llama_model_size(decoder.model)
        print(json.dumps(hello | {"weight_bytes": weights}), flush=True)
        for line in sys.stdin:
            print(json.dumps(decoder.answer(json.loads(line))), flush=True)


def write_gguf(checkpoint: Path, path: Path, kind: GGMLQuantizationType) -> None:
    """A model directory's weights as GGUF, without its tokenizer, as all prompts are ids."""
    config = json.loads((checkpoint / "config.json").read_text())
    arch, heads = config["model_type"], config["num_attention_heads"]
    kv_heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, layers)
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta") or 10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    permuted = {"q_proj": heads, "k_proj": kv_heads} if arch == "llama" else {}
    for name, bits in _tensors(checkpoint):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own, f"llama.cpp has no tensor for {name}"
        if count := permuted.get(name.split(".")[-2]):
            # Its rotation pairs neighbours, and ours halves of a head.
            halves = bits.reshape(count, 2, head_dim // 2, -1)
            bits = halves.swapaxes(1, 2).reshape(bits.shape)
        _add(writer, own, bits, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(checkpoint: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """The names and values of all weights; bfloat16, which numpy lacks, as its 16 bits."""
    types = {"BF16": np.uint16, "F32": np.float32}
    for path in sorted(checkpoint.glob("*.safetensors")):
        content = np.memmap(path, np.uint8, "r")
        start = 8 + int(content[:8].view(np.uint64)[0])
        header = json.loads(content[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            first, end = tensor["data_offsets"]
            raw = content[start + first : start + end].tobytes()
            yield name, np.frombuffer(raw, types[tensor["dtype"]]).reshape(tensor["shape"])


def _add(writer: GGUFWriter, name: str, bits: NDArray[Any], kind: GGMLQuantizationType) -> None:
    if bits.ndim == 1:  # llama.cpp wants vectors in float32
        kind = GGMLQuantizationType.F32
    if bits.dtype == np.uint16 and kind == GGMLQuantizationType.BF16:
        data = np.ascontiguousarray(bits).view(np.uint8)
    else:
        is_16 = bits.dtype == np.uint16
        values = (bits.astype(np.uint32) << 16).view(np.float32) if is_16 else bits
        data = quants.quantize(np.ascontiguousarray(values), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _log_errors(level: int, text: bytes, _: Any) -> None:
    if level == _LOG_ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def _accepted(tokens: list[int], drafts: list[int]) -> list[int]:
    """Of the tokens behind a row and behind its drafts: those whose row was what came before."""
    same = (token == draft for token, draft in zip(tokens, drafts, strict=False))
    return tokens[: 1 + sum(takewhile(bool, same))]


class _Decoder:
    """A model and its context, for the largest batch."""

    def __init__(self, llama: Any, path: Path, settings: dict[str, Any]) -> None:
        self._llama = llama
        # Kept, as the library calls it: without it, hundreds of lines about tensors are printed.
        self._log = llama.llama_log_callback(_log_errors)
        llama.llama_log_set(self._log, None)
        llama.llama_backend_init()
        model = llama.llama_model_default_params()
        # Matrices that it packs for AMX, which are none of 16 or 32 bits, crash in llama_decode
        # (0.3.36, SmolLM2-135M in Q8_0).
        model.use_extra_bufts = False
        self.model = llama.llama_model_load_from_file(str(path).encode(), model)
        own = llama.llama_context_default_params()
        own.n_seq_max = settings["max_batch"]
        own.n_ctx = settings["max_batch"] * settings["max_context"]
        own.n_batch = _STEP_TOKENS
        own.n_threads = own.n_threads_batch = settings["threads"]
        self._context = llama.llama_init_from_model(self.model, own)
        assert self._context, "llama.cpp has made no context; what it said is above"
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self._batch = llama.llama_batch_init(_STEP_TOKENS, 0, 1)
        self._random = np.random.default_rng(0)
        self._lookup = None
        if settings["peer"] == "llamacpp-lookup":
            own = importlib.import_module("llama_cpp.llama_speculative")
            self._lookup = own.LlamaPromptLookupDecoding()

    def answer(self, task: dict[str, Any]) -> dict[str, Any]:
        """Decode the task's prompts, a number of them at a time."""
        llama, stops, limit = self._llama, task["stop_ids"], task["max_new_tokens"]
        prompts = [ids for batch in task["batches"] for ids in batch]
        answers: list[list[int]] = [[] for _ in prompts]
        started = time.perf_counter()
        memory = llama.llama_get_memory(self._context)
        llama.llama_memory_clear(memory, True)
        waiting, free = iter(range(len(prompts))), list(range(task["places"]))
        running: dict[int, int] = {}  # prompts by their places
        while True:
            drafts = {
                place: self._drafts(prompts[index] + answers[index])
                for place, index in running.items()
            }
            rows = [
                (place, at, token)
                for place, index in running.items()
                for at, token in enumerate(
                    [answers[index][-1], *drafts[place]],
                    len(prompts[index]) + len(answers[index]) - 1,
                )
            ]
            for index in islice(waiting, len(free)):
                place = free.pop()
                running[place] = index
                rows += [(place, at, token) for at, token in enumerate(prompts[index])]
            if not rows:
                break
            lengths = {place: len(prompts[index]) for place, index in running.items()}
            for place, tokens in self._forward(rows, lengths, task["temperature"]).items():
                answer, length = answers[running[place]], lengths[place]
                for token in _accepted(tokens, drafts.get(place, [])):
                    answer.append(token)
                    if token in stops or len(answer) == limit:
                        llama.llama_memory_seq_rm(memory, place, -1, -1)
                        free.append(place)
                        del running[place]
                        break
                else:  # what it keeps of drafts that were rejected
                    llama.llama_memory_seq_rm(memory, place, length + len(answer) - 1, -1)
        return {"seconds": time.perf_counter() - started, "tokens": answers}

    def _drafts(self, ids: list[int]) -> list[int]:
        return self._lookup(np.array(ids, np.intc)).tolist() if self._lookup else []

    def _forward(
        self, rows: list[tuple[int, int, int]], lengths: dict[int, int], temperature: float
    ) -> dict[int, list[int]]:
        """Forward rows of (sequence, position, token); by sequence, the next token behind its
        prompt's last row and all later ones. `lengths` are those of the sequences' prompts."""
        found: dict[int, list[int]] = {}
        for first in range(0, len(rows), _STEP_TOKENS):
            part, batch = rows[first : first + _STEP_TOKENS], self._batch
            batch.n_tokens = len(part)
            wanted = [at >= lengths[index] - 1 for index, at, _ in part]
            for row, (index, at, token) in enumerate(part):
                batch.token[row], batch.pos[row], batch.logits[row] = token, at, wanted[row]
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, index
            if self._llama.llama_decode(self._context, batch):
                raise RuntimeError("llama_decode failed; what it said is above")
            for row, (index, *_) in enumerate(part):
                if wanted[row]:
                    found.setdefault(index, []).append(self._choose(row, temperature))
        return found

    def _choose(self, row: int, temperature: float) -> int:
        pointer = self._llama.llama_get_logits_ith(self._context, row)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        logits_V = np.ctypeslib.as_array(address, (self._vocabulary,))
        if not temperature:
            return int(logits_V.argmax())
        shares_V = np.exp((logits_V - logits_V.max()) / np.float32(temperature)).cumsum()
        return int(shares_V.searchsorted(self._random.random() * shares_V[-1]))


if __name__ == "__main__":
    main()
