"""A tiny model whose masks are worth accepting: trained for seconds on repeating patterns."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import Mode
from mars_ray.config.train import ConstantBlockSize, MaskSchedule
from mars_ray.core.layout import NO_TARGET, TokenBatch, compact_layout, dense_mask
from mars_ray.core.loss import loss_counts, row_coefficients
from mars_ray.core.mask_schedule import block_starts
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import EngineError
from mars_ray.model.directory import ModelCard
from mars_ray.model.forward import hidden_states, output_head

VOCABULARY, MASK, STOP = 24, 23, 22
CARD = ModelCard("<|mask|>", MASK, block_size=4)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "eos_token_id": STOP,
}


def pattern(start: int, stride: int, length: int) -> list[int]:
    """Numbers that count up by `stride` modulo 20: easy, but not constant."""
    return [(start + stride * i) % 20 for i in range(length)]


def trained_model(steps: int = 220, **shape: int) -> Qwen2ForCausalLM:
    """Qwen2, float32, MARS-trained with block size 4; right on most patterns, not on all."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE | shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = MaskSchedule(block_size=ConstantBlockSize(size=4), grid="random")
    for step in range(steps):
        rows = [pattern(step * 7 + i, 1 + (step + i) % 3, 20) for i in range(16)]
        batch = TokenBatch(
            input_ids_BL=torch.tensor(rows),
            document_BL=torch.arange(16)[:, None].expand(16, 20) + 16 * step,
            position_BL=torch.arange(20).expand(16, 20),
            response_BL=(torch.arange(20) >= 3).expand(16, 20),
        )
        blocks = block_starts(batch, schedule, 0.0, 0)
        layout = compact_layout(batch, blocks, torch.ones(4), MASK)
        hidden = hidden_states(model, layout.input_ids_BR, layout.position_BR, dense_mask(layout))
        wanted = layout.target_BR != NO_TARGET
        ce = torch.nn.functional.cross_entropy(
            output_head(model)(hidden[wanted]), layout.target_BR[wanted], reduction="none"
        )
        (row_coefficients(layout, loss_counts(layout), 1.0)[wanted] * ce).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def request(
    name: str,
    prompt: list[int],
    mode: Mode,
    *,
    max_new_tokens: int = 16,
    sampling: Sampling | None = None,
    stop: int = STOP,
) -> Request:
    return Request(
        name, tuple(prompt), mode, sampling or Sampling(), max_new_tokens, frozenset({stop})
    )


async def complete(engine: AsyncEngine, request: Request) -> Completion:
    """The whole answer at once. Raises as `AsyncEngine.stream`."""
    async for events in engine.stream(request):
        if events[-1].completion:
            return events[-1].completion
    raise EngineError("the engine ended a stream without a completion")
