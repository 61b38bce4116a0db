"""Draft adapters for tiny models, made at random, and one whose drafts are worth accepting."""

from dataclasses import replace

import torch
from decode.models import MASK
from transformers import PreTrainedModel

from mars_ray.core.draft_head import DraftHead
from mars_ray.model.draft_adapter import DraftAdapter, DraftCard, Lora

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INNER = 12


def random_adapter(
    model: PreTrainedModel,
    *,
    depths: int = 4,
    rank: int = 3,
    targets: tuple[str, ...] = TARGETS,
    head: bool = True,
    candidates: int = 9,
    seed: int = 0,
) -> DraftAdapter:
    """Far enough from nothing that each of its parts changes what masks say."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.hidden_size

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.5

    lora = {
        name: Lora(numbers(rank, module.in_features), numbers(module.out_features, rank))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and rank and name.endswith(targets)
    }
    own = DraftHead(
        numbers(INNER, size), numbers(INNER, size), numbers(depths, INNER), numbers(size, INNER)
    )
    card = DraftCard(
        depths=depths,
        base="tiny",
        base_fingerprint="",
        rank=rank,
        alpha=2.0 * rank,
        targets=targets if rank else (),
        head_size=INNER if head else 0,
        candidates=candidates,
    )
    return DraftAdapter(card, numbers(depths, size), lora, own if head else None)


def good_adapter(model: PreTrainedModel, *, head: bool = True, depths: int = 4) -> DraftAdapter:
    """For the trained tiny model, whose own mask it makes a row of its own: nearly all its drafts
    are right, but those that a small head spoils."""
    made = random_adapter(model, rank=0, head=head, depths=depths)
    embedding_H = model.get_input_embeddings().weight[MASK].detach().clone()
    made = replace(made, mask_embedding_DH=embedding_H.repeat(depths, 1))
    if made.head:
        made = replace(made, head=replace(made.head, out_HK=made.head.out_HK * 0.02))
    return made


KINDS = {
    "all": {},
    "embeddings": {"rank": 0, "head": False},
    "lora": {"head": False},
    "head": {"rank": 0},
    "some": {"targets": ("v_proj", "up_proj", "down_proj"), "depths": 3, "candidates": 64},
}
