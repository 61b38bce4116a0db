"""One forward for a group of sequences whose slots lie next to each other.

Shape suffixes: B sequences, Q rows of the longest, N rows that are read, V vocabulary.
"""

from collections.abc import Sequence as Several
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.core.accept import Measure, confidence
from mars_ray.decode.draws import ban_token
from mars_ray.decode.kv_cache import SlotCache
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.base import Plan, Rows, Wanted
from mars_ray.model.forward import hidden_states, output_head


@torch.inference_mode()
def forward(
    model: PreTrainedModel,
    cache: SlotCache,
    first_slot: int,
    sequences: Several[Sequence],
    plans: Several[Plan],
    mask_token_id: int,
) -> list[Rows]:
    """Forward [pending | drafts | masks] of every sequence and return the rows that are read."""
    pending = [sequence.pending for sequence in sequences]
    tokens = [
        [*real, *plan.drafts, *([mask_token_id] * plan.masks)]
        for real, plan in zip(pending, plans, strict=True)
    ]
    width = max(map(len, tokens))
    ids_BQ, position_BQ = _padded(sequences, tokens, width, cache.context, model.device)
    visible = max(s.cached + len(t) for s, t in zip(sequences, tokens, strict=True))
    places = torch.arange(visible, device=model.device)
    mask_B1QC = (places <= position_BQ[:, :, None])[:, None]
    view = cache.view(first_slot, position_BQ, visible)
    hidden_BQH = hidden_states(model, ids_BQ, position_BQ, mask_B1QC, view)
    # Of the pending rows only the last one predicts something new.
    read = [
        row * width + index
        for row, (real, ids) in enumerate(zip(pending, tokens, strict=True))
        for index in range(len(real) - 1, len(ids))
    ]
    hidden_NH = hidden_BQH.flatten(0, 1)[torch.tensor(read, device=model.device)]
    logits_NV = ban_token(output_head(model)(hidden_NH).float(), mask_token_id)
    return _split(logits_NV, plans)


def _padded(
    sequences: Several[Sequence],
    tokens: Several[list[int]],
    width: int,
    trash: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Token ids and positions, (B, Q) each; padding goes to the slot's last, unread place."""
    ids, position = [], []
    for sequence, own in zip(sequences, tokens, strict=True):
        padding = width - len(own)
        ids.append(own + [0] * padding)
        start = sequence.cached
        position.append([*range(start, start + len(own)), *([trash] * padding)])
    both = torch.tensor([ids, position], device=device)
    return both[0], both[1]


def _split(logits_NV: Tensor, plans: Several[Plan]) -> list[Rows]:
    """Everything that is greedy reaches the host in one copy."""
    wanted: list[Wanted] = sorted({plan.wanted for plan in plans if plan.wanted})
    columns = [logits_NV.argmax(dim=-1).double()]
    columns += [_numbers(logits_NV, plans, name).double() for name in wanted]
    host = torch.stack(columns).tolist()
    best = [int(token) for token in host[0]]
    rows, start = [], 0
    for plan in plans:
        own = slice(start, start + 1 + len(plan.drafts) + plan.masks)
        numbers = host[1 + wanted.index(plan.wanted)][own] if plan.wanted else None
        rows.append(Rows(best[own], numbers, logits_NV[own]))
        start = own.stop
    return rows


def _numbers(logits_NV: Tensor, plans: Several[Plan], wanted: Wanted) -> Tensor:
    if wanted != "ratio":
        return confidence(logits_NV, cast(Measure, wanted))
    drafts = [
        token
        for plan in plans
        for token in [*plan.drafts, *([0] * (1 + plan.masks))]  # no draft follows these rows
    ]
    draft_N1 = torch.tensor(drafts, device=logits_NV.device)[:, None]
    # p(d) / max p without the softmax's common denominator.
    return (logits_NV.gather(-1, draft_N1).squeeze(-1) - logits_NV.amax(dim=-1)).exp()
