"""Layouts, mask and loss on a real model: equal layouts, equal streams, and where gradients go."""

import pytest
import torch
from core.rows import MASK, batch_of
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

from mars_ray.config.train import ConstantBlockSize, MaskSchedule
from mars_ray.core.layout import (
    NO_TARGET,
    Layout,
    TokenBatch,
    clean_layout,
    compact_layout,
    dense_mask,
    paper_layout,
)
from mars_ray.core.loss import loss_counts, row_coefficients
from mars_ray.core.mask_schedule import block_starts
from mars_ray.model.forward import hidden_states, output_head

SHAPE = {
    "vocab_size": MASK + 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
ROWS = ("pprrrrrrrpprrrr prrrrr", "ppprrrrrrrrrr")


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama", "mistral"])
def model(request):
    torch.manual_seed(0)
    match request.param:
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
        case "mistral":
            return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)).eval()
        case _:
            return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def layouts(batch: TokenBatch, size: int = 4, grid: str = "zero") -> list[Layout]:
    schedule = MaskSchedule(block_size=ConstantBlockSize(size=size), grid=grid)
    blocks = block_starts(batch, schedule, 0.0, 0)
    weights = torch.linspace(1, 0.5, size)
    return [build(batch, blocks, weights, MASK) for build in (compact_layout, paper_layout)]


def rows_loss(model, layout: Layout) -> torch.Tensor:
    """Cross-entropy of every row, 0 where there is no target."""
    hidden = hidden_states(model, layout.input_ids_BR, layout.position_BR, dense_mask(layout))
    wanted = layout.target_BR != NO_TARGET
    loss = torch.zeros_like(layout.weight_BR)
    loss[wanted] = torch.nn.functional.cross_entropy(
        output_head(model)(hidden[wanted]), layout.target_BR[wanted], reduction="none"
    )
    return loss


@pytest.mark.parametrize("grid", ["zero", "response", "random"])
def test_compact_gives_the_losses_of_the_paper_layout(model, grid):
    """Row by row, on packed conversations of several turns: the same targets, the same losses."""
    compact, paper = layouts(batch_of(*ROWS), grid=grid)
    losses = []
    for layout in (compact, paper):
        loss = rows_loss(model, layout)
        wanted = layout.target_BR != NO_TARGET
        keys = zip(
            layout.document_BR[wanted].tolist(),
            layout.position_BR[wanted].tolist(),
            layout.block_BR[wanted].tolist(),
            strict=True,
        )
        losses.append(dict(zip(keys, loss[wanted].tolist(), strict=True)))
    assert losses[0].keys() == losses[1].keys()
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)


def test_the_clean_stream_does_not_notice_the_noisy_one(model):
    """Guards a leak: the clean rows must be those of ordinary fine-tuning, to rounding."""
    batch = batch_of(*ROWS)
    compact, _ = layouts(batch)
    clean_rows = batch.input_ids_BL.shape[1]
    alone = rows_loss(model, clean_layout(batch))
    torch.testing.assert_close(rows_loss(model, compact)[:, :clean_rows], alone)


def test_packing_changes_no_loss(model):
    """Guards attention or positions that cross a conversation's border."""
    packed, _ = layouts(batch_of("pprrrr prrrrr"), grid="response")
    first, _ = layouts(batch_of("pprrrr"), grid="response")
    second, _ = layouts(batch_of("prrrrr", first_token=16), grid="response")
    total = rows_loss(model, packed).sum()
    torch.testing.assert_close(
        total, rows_loss(model, first).sum() + rows_loss(model, second).sum()
    )


def test_a_mask_row_is_what_decoding_sees(model):
    """The row at depth d is the last row of a causal forward over [clean prefix | d masks]."""
    batch = batch_of("pprrrrrr")
    compact, _ = layouts(batch, grid="response")
    hidden = hidden_states(model, compact.input_ids_BR, compact.position_BR, dense_mask(compact))
    for row in compact.is_noisy_BR[0].nonzero().squeeze(1).tolist():
        start, depth = int(compact.block_BR[0, row]), int(compact.depth_BR[0, row])
        prompt = batch.input_ids_BL[:, :start]
        tokens = torch.cat([prompt, torch.full((1, depth), MASK)], dim=1)
        plain = model.base_model(input_ids=tokens).last_hidden_state[0, -1]
        torch.testing.assert_close(hidden[0, row], plain, atol=2e-5, rtol=1e-4)


def test_gradients_of_each_depth_reach_only_what_they_may(model):
    """The loss at depth d of the block at s may depend on the embeddings of the clean tokens before
    s and of the masks at depths 1..d of its block, and must depend on each of them."""
    compact, _ = layouts(batch_of("prrrrrrr"), grid="response")
    embedding = model.get_input_embeddings()
    for row in compact.is_noisy_BR[0].nonzero().squeeze(1).tolist():
        embedded = embedding(compact.input_ids_BR).detach().requires_grad_()
        handle = embedding.register_forward_hook(lambda *_, out=embedded: out)
        loss = rows_loss(model, compact)[0, row]
        handle.remove()
        (gradient,) = torch.autograd.grad(loss, embedded)
        reached = set((gradient[0].abs().sum(-1) > 0).nonzero().squeeze(1).tolist())
        start, depth = int(compact.block_BR[0, row]), int(compact.depth_BR[0, row])
        own_block = set(range(row - depth + 1, row + 1))
        assert reached == set(range(start)) | own_block


def test_split_over_two_ranks_the_loss_is_the_same(model):
    """Sums with global counts: uneven halves add up to the whole, gradients too."""
    whole, _ = layouts(batch_of(*ROWS))
    parts = [layouts(batch_of(ROWS[0]))[0], layouts(batch_of(ROWS[1]))[0]]
    # The second row's conversation has another index on its own; the grid "zero" draws nothing.
    counts = sum((loss_counts(part) for part in parts), torch.zeros(2, dtype=torch.float64))
    assert torch.equal(counts, loss_counts(whole))

    def loss_and_gradient(layout: Layout):
        loss = (row_coefficients(layout, counts, 2.0) * rows_loss(model, layout)).sum()
        return loss, torch.autograd.grad(loss, model.model.layers[0].mlp.up_proj.weight)[0]

    expected = loss_and_gradient(whole)
    first, second = (loss_and_gradient(part) for part in parts)
    for one, a, b in zip(expected, first, second, strict=True):
        torch.testing.assert_close(one, a + b, atol=1e-5, rtol=1e-4)
