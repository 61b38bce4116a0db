"""Drafts from the rows of masks: each row's likeliest token, or the sequential head's choice.

Shape suffixes: N rows with logits, M rows of masks that are read, X those of one depth,
C candidates, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from mars_ray.core.draft_head import DraftHead, likeliest
from mars_ray.vllm.rows import Origin


@dataclass(frozen=True, slots=True)
class HeadedDrafts:
    """The sequential head on a model's embeddings and output projection."""

    head: DraftHead
    candidates: int
    embed: Callable[[Tensor], Tensor]  # tokens (X,) to embeddings (X, H)
    logits: Callable[[Tensor, Tensor], Tensor]  # hidden (X, H), candidates (X, C) to (X, C)

    def choose(
        self, hidden_MH: Tensor, logits_MV: Tensor, origins: Sequence[Origin]
    ) -> list[list[int]]:
        """Drafts of each origin, depth by depth for all of them together."""
        candidate_MC = likeliest(logits_MV, self.candidates)
        # What is never emitted must be no candidate, as it could be in a small vocabulary.
        banned_MC = logits_MV.gather(-1, candidate_MC) == -torch.inf
        firsts = list(accumulate((origin.masks for origin in origins), initial=0))
        device = hidden_MH.device
        chosen = [torch.tensor([origin.token for origin in origins], device=device)]
        for depth in range(max(origin.masks for origin in origins)):
            # Shorter ones read their last row again; what they get is cut off.
            row_X = torch.tensor(
                [
                    first + min(depth, origin.masks - 1)
                    for first, origin in zip(firsts, origins, strict=False)
                ],
                device=device,
            )
            corrected_XH = self.head.correct(
                hidden_MH[row_X], self.embed(chosen[-1]), torch.full_like(row_X, depth + 1)
            )
            candidate_XC = candidate_MC[row_X]
            logits_XC = self.logits(corrected_XH, candidate_XC)
            logits_XC = logits_XC.masked_fill(banned_MC[row_X], -torch.inf)
            best_X1 = logits_XC.argmax(dim=-1, keepdim=True)
            chosen.append(candidate_XC.gather(-1, best_X1).squeeze(-1))
        drafts = torch.stack(chosen[1:], dim=1).tolist()
        return [own[: origin.masks] for own, origin in zip(drafts, origins, strict=True)]


def likeliest_tokens(logits_MV: Tensor, origins: Sequence[Origin]) -> list[list[int]]:
    """Drafts without a head: the likeliest token of each mask."""
    best = iter(logits_MV.argmax(dim=-1).tolist())
    return [list(islice(best, origin.masks)) for origin in origins]


def rows_of(origins: Sequence[Origin]) -> list[int]:
    """Places of the origins' masks among the rows with logits, one origin after the other."""
    return [row for origin in origins for row in range(origin.first, origin.first + origin.masks)]
