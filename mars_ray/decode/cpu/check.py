"""Whether the compiled step computes what it should on this processor, tried before it is used.

A compiler, a processor or a hypervisor with a fault would else give other texts, without a word.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mars_ray.decode.attention.tables import Tables
from mars_ray.decode.cpu.backend import CompiledModel
from mars_ray.decode.cpu.compiling import NoLibraryError
from mars_ray.decode.kv_cache import PagedCache

_ROWS, _PAGE = 24, 16
# Largest difference of logits from those of transformers in float32, which spread by about 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2}


@cache
def check(instructions: str) -> None:
    """Compare a step of a tiny model with transformers: some hundredths of a second, once.

    Raises NoLibraryError if there is no library, or if its results are wrong.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.1,
        )
        model = LlamaForCausalLM(config).eval()
        ids_1N = torch.randint(0, 96, (1, _ROWS))
        expected_NV = model(ids_1N).logits[0]
        for dtype, most in _TOLERANCE.items():
            torch.nn.Module.to(model, dtype=dtype)
            found_NV = _logits(model, ids_1N[0].numpy(), instructions)
            difference = float((found_NV - expected_NV).abs().nan_to_num(torch.inf).max())
            if difference > most:
                raise NoLibraryError(
                    f"its results are wrong on this processor: a tiny model's logits in "
                    f"{str(dtype).removeprefix('torch.')} differ by {difference:.2g}"
                )


def _logits(model: Any, ids_N: np.ndarray, instructions: str) -> torch.Tensor:
    """Logits of a prompt, by the compiled step."""
    compiled = CompiledModel(model, _ROWS, instructions, threads=2, release=False)
    pages = -(-_ROWS // _PAGE)
    cache = PagedCache(model.config, pages, _PAGE, model.device, model.dtype)
    place_N, none = np.arange(_ROWS), np.zeros(1, np.int64)
    width, page_1M = np.array([_ROWS]), np.arange(pages)[None]
    tables = Tables(width, none, none, width, none, page_1M, 0 * place_N, place_N, [])
    compiled.step(tables, ids_N, place_N, cache)
    logits_NV = torch.empty(_ROWS, compiled.vocabulary)
    compiled.logits(range(_ROWS), logits_NV)
    return logits_NV
