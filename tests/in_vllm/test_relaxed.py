"""Thresholds below 1, by hand-worked probabilities."""

import pytest
import torch

from mars_ray.vllm.budgets import relax

P_V = torch.tensor([0.5, 0.3, 0.15, 0.05])


def relaxed(draft: int, threshold: float, greedy: bool) -> torch.Tensor:
    logits_NV = P_V.log()[None].clone()
    relax(logits_NV, torch.tensor([draft]), torch.tensor([threshold]), torch.tensor([greedy]))
    return logits_NV[0]


@pytest.mark.parametrize(("draft", "threshold", "chosen"), [(1, 0.5, 1), (1, 0.7, 0), (3, 0.1, 3)])
def test_greedy_by_the_share_of_the_best(draft: int, threshold: float, chosen: int):
    """0.3 is 0.6 of 0.5; 0.05 is exactly 0.1 of it."""
    assert int(relaxed(draft, threshold - 1e-6, greedy=True).argmax()) == chosen


def test_sampling_accepts_by_the_ratio():
    """0.15 / 0.3 = 0.5; the rest shares the other half in proportion."""
    expected = torch.tensor([0.5 / 0.85, 0.3 / 0.85, 0.0, 0.05 / 0.85]) * 0.5
    expected[2] = 0.5
    torch.testing.assert_close(relaxed(2, 0.3, greedy=False).softmax(-1), expected)


@pytest.mark.parametrize("threshold", [0.5, 0.1, 0.0])
def test_sampling_accepts_a_likely_draft_always(threshold: float):
    """Its probability is above the threshold; nothing may become NaN."""
    torch.testing.assert_close(
        relaxed(0, threshold, greedy=False).softmax(-1), torch.tensor([1.0, 0.0, 0.0, 0.0])
    )


@pytest.mark.parametrize("greedy", [True, False])
def test_what_was_ruled_out_stays_out(greedy: bool):
    """By a grammar, say: no threshold may let it in again."""
    logits_NV = torch.tensor([[1.0, -torch.inf, 0.0]])
    relax(logits_NV, torch.tensor([1]), torch.tensor([0.0]), torch.tensor([greedy]))
    p_V = logits_NV[0].softmax(-1)
    assert p_V[1] == 0
    assert p_V[0] == pytest.approx(0.7311, abs=1e-4)


def test_threshold_one_changes_no_bit():
    """Lossless decoding must not depend on a neighbour's threshold."""
    logits_NV = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    before = logits_NV.clone()
    relax(
        logits_NV,
        torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 0.2, 1.0]),
        torch.tensor([True, False, False]),
    )
    assert torch.equal(logits_NV[[0, 2]], before[[0, 2]])
    assert not torch.equal(logits_NV[1], before[1])
