"""The search for a row's likeliest tokens."""

import pytest
import torch

from mars_ray.core.draft_head import likeliest


@pytest.mark.parametrize(("size", "count"), [(49, 8), (640, 4), (1000, 8), (1000, 1), (6, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_are_those_of_topk(size, count, dtype):
    """Guards the search by groups, and the rest that fills no group."""
    torch.manual_seed(size)
    logits = torch.randn(5, size).to(dtype)
    # Large ones side by side, and in the rest.
    logits[0, :8] += 10
    logits[1, -7:] += 10
    found = likeliest(logits, count)
    expected = logits.topk(min(count, size), dim=-1).values
    assert torch.equal(logits.gather(1, found), expected)
    assert all(len(set(row)) == len(row) for row in found.tolist())
