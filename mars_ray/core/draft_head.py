"""A mask row's candidates, and the sequential head that chooses among them.

Masks of one step do not know each other's tokens. But drafts are chosen depth by depth, so the
token before is known: it was just committed, or it is the draft just chosen. The head uses it to
correct the mask row's hidden state (Hydra, arXiv 2402.05109, has such heads on real rows, without
masks).

    corrected = h + out(silu(hidden(norm(h)) + token(norm(e)) + depth))

`h` is the last hidden state of the mask row, after the model's final norm, and `e` the embedding of
the token before; `norm` divides by the root mean square, so that no model's scale matters.

Shape suffixes: N or P rows, H hidden size of the model, K of the head, D depths, C candidates,
V vocabulary, J groups of the vocabulary, S groups that are searched.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The head's weights, all on one device and of one dtype."""

    hidden_KH: Tensor
    token_KH: Tensor
    depth_DK: Tensor
    out_HK: Tensor

    def as_of(self, device: torch.device, dtype: torch.dtype) -> "DraftHead":
        """The same on a device, in a dtype."""
        return DraftHead(*(getattr(self, name).to(device, dtype) for name in DraftHead.__slots__))

    def correct(self, hidden_NH: Tensor, previous_NH: Tensor, depth_N: Tensor) -> Tensor:
        """Corrected hidden states, (N, H).

        `previous_NH` holds embeddings of the tokens before the targets; depths count from 1.
        """
        inner_NK = (
            linear(root_mean_square_norm(hidden_NH), self.hidden_KH)
            + linear(root_mean_square_norm(previous_NH), self.token_KH)
            + self.depth_DK[depth_N - 1]
        )
        return hidden_NH + linear(silu(inner_NK), self.out_HK)


def root_mean_square_norm(x_NH: Tensor) -> Tensor:
    return torch.rms_norm(x_NH, x_NH.shape[-1:], None, _EPSILON)


def candidate_logits(hidden_NH: Tensor, weight_VH: Tensor, candidate_NC: Tensor) -> Tensor:
    """Logits of each row's candidates only, float32 (N, C)."""
    return torch.einsum("nh,nch->nc", hidden_NH, weight_VH[candidate_NC]).float()


_GROUP = 64


def likeliest(logits_PV: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest logits of each row, int64 (P, count), largest first.

    A row's largest logits lie in the groups with the largest maxima, so only those are sorted: on a
    CPU, topk over a whole vocabulary costs more than the product that made the logits.
    """
    rows, size = logits_PV.shape
    groups = size // _GROUP
    if groups <= count:
        return logits_PV.topk(min(count, size), dim=-1).indices
    even = groups * _GROUP
    best_PJ = logits_PV[:, :even].unflatten(1, (groups, _GROUP)).amax(dim=-1)
    group_PS = best_PJ.topk(count, dim=-1, sorted=False).indices
    place = torch.arange(_GROUP, device=group_PS.device)
    index = (group_PS[:, :, None] * _GROUP + place).flatten(1)
    rest = torch.arange(even, size, device=index.device).expand(rows, -1)
    index = torch.cat([index, rest], dim=1)
    return index.gather(1, logits_PV.gather(1, index).topk(count, dim=-1).indices)
