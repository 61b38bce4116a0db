"""The draft step against a slow reference: one forward of transformers over all rows."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from core.rows import batch_of
from torch import Tensor, nn
from torch.nn.functional import kl_div, linear, silu
from train.draft_models import ARCHITECTURES, VOCABULARY, build, busy_weights, card_of
from transformers import PreTrainedModel

from mars_ray.config.train import (
    ConstantBlockSize,
    DraftAdapterConfig,
    DraftObjective,
    MixedBlockSize,
)
from mars_ray.core import draft_loss
from mars_ray.core.draft_layout import draft_layout
from mars_ray.core.layout import NO_TARGET, Layout, dense_mask
from mars_ray.core.loss import loss_counts, row_coefficients
from mars_ray.core.mask_schedule import depth_weights, draft_blocks
from mars_ray.model.draft_adapter import DraftCard
from mars_ray.model.forward import output_head
from mars_ray.train.draft_adapter import DraftStep, adapter_of
from mars_ray.train.frozen import FrozenModel
from mars_ray.train.model_step import layout_tensors

CPU = torch.device("cpu")
# Packed conversations, two turns in one, padding, and one of a prompt alone.
ROWS = ("pprrrrrr pprrprrrr", "ppprrrrrrrrr", "pppp")
BLOCKS = MixedBlockSize(sizes=(2, 4), weights=(1.0, 1.0))


def layout_of(objective: DraftObjective, *rows: str) -> Layout:
    batch = batch_of(*(rows or ROWS))
    sizes = draft_blocks(batch, objective, objective.grids, 0.0, 0)
    return draft_layout(batch, sizes, depth_weights(objective))


@contextmanager
def lora_by_hand(
    model: PreTrainedModel, weights: dict[str, Tensor], card: DraftCard, is_mask_BR: Tensor
) -> Iterator[None]:
    """Adds each layer's low-rank product to the outputs of mask rows."""
    adapter = adapter_of(weights, card, FrozenModel(build_like(model)))
    handles = []
    for name, (down, up) in adapter.lora.items():

        def hook(_: nn.Module, args: tuple, out: Tensor, down=down, up=up) -> Tensor:
            return out + is_mask_BR[..., None] * (args[0] @ down.T @ up.T) * card.scale

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    yield
    for handle in handles:
        handle.remove()


def build_like(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that may be taken over."""
    return build(model.config.model_type)


def reference(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    card: DraftCard,
    layout: Layout,
    objective: DraftObjective,
) -> Tensor:
    """The loss, by one forward over clean and mask rows, and whole distributions."""
    embed, head_weight = model.get_input_embeddings(), output_head(model).weight
    hidden = all_hidden(model, weights, card, layout)
    counts = loss_counts(layout)
    coefficient_BR = row_coefficients(layout, counts, 1.0)
    loss = torch.zeros(())
    for b, r in (layout.target_BR != NO_TARGET).nonzero().tolist():
        twin = (
            (layout.depth_BR[b] == 0)
            & (layout.document_BR[b] == layout.document_BR[b, r])
            & (layout.position_BR[b] == layout.position_BR[b, r])
        ).nonzero()
        assert twin.numel() == 1
        teacher = linear(hidden[b, twin.item()], head_weight).detach()
        target = int(layout.target_BR[b, r])
        logits = linear(hidden[b, r], head_weight)
        row = divergence(teacher, logits, target, objective.loss)
        total = objective.row_loss_weight * row
        if card.head_size:
            corrected = correct(weights, hidden[b, r], embed, layout, b, r)
            wanted = target if objective.loss == "ce" else int(teacher.argmax())
            likely = logits.topk(card.candidates).indices.tolist()
            among = torch.tensor(likely if wanted in likely else [*likely[:-1], wanted])
            choice = linear(corrected, head_weight)[among]
            place = among.tolist().index(wanted)
            total = total + objective.head_loss_weight * divergence(
                teacher[among], choice, place, objective.loss
            )
        loss = loss + coefficient_BR[b, r] * total
    return loss


def all_hidden(
    model: PreTrainedModel, weights: dict[str, Tensor], card: DraftCard, layout: Layout
) -> Tensor:
    """Last hidden states of all rows."""
    is_mask_BR = layout.depth_BR > 0
    masks = weights["mask_embedding_DH"][(layout.depth_BR - 1).clamp_min(0)]
    embedded = model.get_input_embeddings()(layout.input_ids_BR)
    with lora_by_hand(model, weights, card, is_mask_BR):
        return model.base_model(
            inputs_embeds=torch.where(is_mask_BR[..., None], masks, embedded),
            position_ids=layout.position_BR,
            attention_mask=dense_mask(layout),
            use_cache=False,
        ).last_hidden_state


def correct(weights, h: Tensor, embed: nn.Module, layout: Layout, b: int, r: int) -> Tensor:
    previous = embed(layout.input_ids_BR[b, r])
    inner = (
        weights["head_hidden_KH"] @ (h / (h.square().mean() + 1e-6).sqrt())
        + weights["head_token_KH"] @ (previous / (previous.square().mean() + 1e-6).sqrt())
        + weights["head_depth_DK"][layout.depth_BR[b, r] - 1]
    )
    return h + weights["head_out_HK"] @ silu(inner)


def divergence(teacher: Tensor, logits: Tensor, target: int, kind: str) -> Tensor:
    p, log_q = teacher.softmax(-1), logits.log_softmax(-1)
    match kind:
        case "ce":
            return -log_q[target]
        case "kl":
            return kl_div(log_q, p.log(), reduction="sum", log_target=True)
        case "tv":
            return 0.5 * (p - log_q.exp()).abs().sum()
        case _:
            one, other = (divergence(teacher, logits, target, k) for k in ("tv", "kl"))
            return 0.9 * one + 0.1 * other


def compare(
    architecture: str,
    objective: DraftObjective,
    adapter: DraftAdapterConfig | None = None,
    **settings,
) -> None:
    """Loss and gradients of the step and of the reference."""
    card = card_of(objective.max_block_size, adapter)
    base = FrozenModel(build(architecture))
    step = DraftStep(base, card, busy_weights(card, base), objective, **settings)
    layout = layout_of(objective)
    coefficients = row_coefficients(layout, loss_counts(layout), 1.0)
    loss, _ = step(coefficient_BR=coefficients, **layout_tensors(layout, CPU))
    loss.backward()
    weights = {n: w.detach().requires_grad_() for n, w in busy_weights(card, base).items()}
    model = build(architecture).requires_grad_(False)
    expected = reference(model, weights, card, layout, objective)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in step.named_parameters():
        torch.testing.assert_close(
            parameter.grad,
            weights[name].grad,
            rtol=1e-4,
            atol=2e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_step_equals_the_reference(architecture):
    """Guards the two passes: positions, who sees whom, biases, norms of heads, shared key heads."""
    compare(architecture, DraftObjective(block_size=BLOCKS))


@pytest.mark.parametrize("loss", ["kl", "ce", "tv", "tv_kl"])
@pytest.mark.parametrize("weights", [(0.5, 1.0), (1.0, 0.0), (0.0, 1.0)])
def test_losses_equal_the_reference(loss, weights):
    """Guards gradients that are made by hand, and the weights of the two losses."""
    row, head = weights
    objective = DraftObjective(
        block_size=BLOCKS, loss=loss, row_loss_weight=row, head_loss_weight=head
    )
    compare("qwen2", objective)


@pytest.mark.parametrize(
    "adapter",
    [
        {"head_size": 0},
        {"rank": 0},
        {"rank": 0, "head_size": 0},
        {"targets": ["v_proj", "down_proj"], "alpha": 1.5},
    ],
)
def test_parts_may_be_left_out(adapter):
    """Guards ablations: each part is there without the others."""
    config = {"rank": 3, "head_size": 20, "candidates": 8} | adapter
    compare("qwen3", DraftObjective(block_size=BLOCKS), DraftAdapterConfig.model_validate(config))


def test_rows_of_one_twin_may_be_in_several_parts(monkeypatch):
    """Guards the edges of chunks and parts: with three rows each, twins lie on both sides."""
    monkeypatch.setattr(draft_loss, "_PART_BYTES", {"cpu": 3 * 4 * VOCABULARY})
    monkeypatch.setattr(draft_loss, "_CHUNK_PARTS", 2)
    compare("qwen2", DraftObjective(block_size=BLOCKS))


def test_depths_are_weighted_and_blocks_left_out():
    """Guards the coefficients' way through the sorting of rows by their twins."""
    size = ConstantBlockSize(size=4)
    objective = DraftObjective(
        block_size=size, grids=4, depth_weights=(1.0, 0.3, 2.0), noisy_share=0.6
    )
    compare("llama", objective)


def test_the_model_stays_as_it_is_while_an_adapter_learns():
    """Guards in-place operations on the base: steps must not change one bit of what it computes."""
    objective = DraftObjective(block_size=BLOCKS)
    model = build("qwen3")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    base = FrozenModel(model)
    card = card_of(objective.max_block_size)
    step = DraftStep(base, card, busy_weights(card, base), objective)
    layout = layout_of(objective)
    coefficients = row_coefficients(layout, loss_counts(layout), 1.0)
    optimizer = torch.optim.AdamW(step.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss, _ = step(coefficient_BR=coefficients, **layout_tensors(layout, CPU))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    # Its matrices are joined now; the model's own are views of them.
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_evaluation_says_what_rows_head_and_twins_choose():
    """Guards the expected T/F: predictions at the columns that acceptance compares."""
    objective = DraftObjective(block_size=BLOCKS)
    card = card_of(objective.max_block_size)
    base = FrozenModel(build())
    step = DraftStep(base, card, busy_weights(card, base), objective)
    layout = layout_of(objective)
    sums, predicted = step(**layout_tensors(layout, CPU))
    coefficients = row_coefficients(layout, loss_counts(layout), 1.0)
    loss, trained_sums = step(coefficient_BR=coefficients, **layout_tensors(layout, CPU))
    torch.testing.assert_close(sums, trained_sums)
    head, row = (sums / loss_counts(layout)[1]).tolist()
    assert loss.item() == pytest.approx(0.5 * row + head, rel=1e-5)
    model = build()
    embed, weight = model.get_input_embeddings(), output_head(model).weight.detach()
    adapter = {name: parameter.detach() for name, parameter in step.named_parameters()}
    with torch.no_grad():
        hidden = all_hidden(model, adapter, card, layout)
    for b, r in (layout.target_BR != NO_TARGET).nonzero().tolist():
        logits = weight @ hidden[b, r]
        assert predicted[0, b, r] == logits.argmax()
        corrected = correct(adapter, hidden[b, r], embed, layout, b, r)
        among = logits.topk(card.candidates).indices
        assert predicted[1, b, r] == among[(weight @ corrected)[among].argmax()]
    wanted = (predicted[0] >= 0) & (layout.depth_BR == 0)
    for b, r in wanted.nonzero().tolist():
        assert predicted[0, b, r] == predicted[1, b, r] == (weight @ hidden[b, r]).argmax()
    assert wanted.sum() > 10


def test_gradient_checkpointing_changes_nothing():
    """Guards what a layer computed again saves of the first time."""
    compare("qwen2", DraftObjective(block_size=BLOCKS), gradient_checkpointing=True)
