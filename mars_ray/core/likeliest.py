"""The largest of many logits.

Shape suffixes: P rows, V vocabulary, J groups of the vocabulary, S groups that are looked into.
"""

import torch
from torch import Tensor

_GROUP = 64


def likeliest(logits_PV: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest logits of each row, int64 (P, count), largest first.

    A row's largest are among its groups with the largest maxima, so only those are sorted: on a CPU
    topk over a whole vocabulary costs more than the product that made the logits.
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
