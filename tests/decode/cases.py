"""Sizes, modes and samplings that several tests go through."""

import torch
from decode.models import SHAPE, STOP
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import (
    BlockCachedMode,
    ConfidenceMode,
    ExactMode,
    JacobiMode,
    VerifiedMode,
)

SIZE = EngineConfig(max_batch=3, max_context=64)


# Pages for little more than one sequence, forwards of 25 rows: everybody is in the way.
PAGE_BYTES = 4 * 2 * 2 * 8 * 2 * 4


SCARCE = EngineConfig(
    max_batch=5, max_context=40, page_size=4, cache_bytes=18 * PAGE_BYTES, max_step_tokens=25
)


MODES = [
    ExactMode(),
    VerifiedMode(),
    VerifiedMode(window=2),
    VerifiedMode(threshold=0.3),
    VerifiedMode(groups=2),
    VerifiedMode(groups=9, threshold=0.5, window=3),
    JacobiMode(guesses=3),
    BlockCachedMode(threshold=0.5, cache_block=3),
    BlockCachedMode(threshold=0.3, cache_block=16),
    ConfidenceMode(),
    ConfidenceMode(threshold=0.5),
    ConfidenceMode(threshold=0.5, measure="margin", window=3),
    ConfidenceMode(threshold=0.5, measure="entropy"),
    VerifiedMode(branches=3, groups=4, window=2),
    VerifiedMode(branches=2, groups=4, threshold=0.5),
]


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, seed=4),
    Sampling(
        temperature=1.0,
        seed=5,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.3,
        logit_bias={7: 2.0, STOP: 5.0},
        min_new_tokens=4,
    ),
]


SAMPLING_NAMES = ["greedy", "sampled", "truncated", "adjusted"]


def untrained(kind: str):
    torch.manual_seed(1)
    shape = SHAPE | {"head_dim": 8, "initializer_range": 0.3}
    match kind:
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**shape)).eval()
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
        case "mistral":
            return MistralForCausalLM(MistralConfig(**shape, sliding_window=None)).eval()
        case _:
            return LlamaForCausalLM(LlamaConfig(**shape)).eval()
