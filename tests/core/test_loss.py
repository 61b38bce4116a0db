"""Sums, counts and coefficients."""

import pytest
import torch
from core.rows import MASK, batch_of

from mars_ray.config.train import ConstantBlockSize, MaskSchedule
from mars_ray.core.layout import clean_layout, compact_layout
from mars_ray.core.loss import WeightedCrossEntropy, loss_counts, row_coefficients
from mars_ray.core.mask_schedule import block_starts


def layout_of(*rows: str):
    batch = batch_of(*rows)
    schedule = MaskSchedule(block_size=ConstantBlockSize(size=2), grid="response")
    blocks = block_starts(batch, schedule, 0.0, 0)
    return compact_layout(batch, blocks, torch.tensor([1.0, 0.5]), MASK)


def test_counts_and_coefficients_by_hand():
    """pprrr: 3 clean targets; masks at depths 1, 2 weigh 1 and 0.5, sum 1.5."""
    layout = layout_of("pprrr")
    counts = loss_counts(layout)
    assert counts.tolist() == [3, 1.5]
    coefficient = row_coefficients(layout, counts, ar_weight=2.0)
    expected = [0, 2 / 3, 2 / 3, 2 / 3, 0, 1 / 1.5, 0.5 / 1.5]
    assert coefficient[0].tolist() == pytest.approx(expected)
    # Whatever the split, the coefficients of a stream add up to its weight.
    assert float(coefficient.sum()) == pytest.approx(2 + 1)


def test_the_loss_of_a_split_batch_is_the_loss_of_the_whole():
    """Guards a mean of means: turns of unequal length must weigh by their tokens."""
    whole = layout_of("prr", "pprrrrrr")
    parts = [layout_of("prr"), layout_of("pprrrrrr")]
    counts = loss_counts(whole)
    assert torch.equal(counts, loss_counts(parts[0]) + loss_counts(parts[1]))

    # A cross-entropy that depends on the target alone stands in for a model.
    def loss(layout):
        coefficient = row_coefficients(layout, counts, 1.0)
        return float((coefficient * (layout.input_ids_BR % 7)).sum())

    assert loss(whole) == pytest.approx(loss(parts[0]) + loss(parts[1]), rel=1e-6)


def test_an_empty_stream_has_no_coefficient():
    """Guards a division by zero in a clean-only layout and in a batch without responses."""
    for layout in (clean_layout(batch_of("prr")), clean_layout(batch_of("ppp"))):
        coefficient = row_coefficients(layout, loss_counts(layout), 1.0)
        assert torch.isfinite(coefficient).all()
        assert not coefficient[layout.is_noisy_BR].any()


@pytest.mark.parametrize("chunk_rows", [100, 5])
def test_the_fused_loss_is_autograds(chunk_rows):
    """Guards the gradients written by hand, and a chunk boundary that drops rows."""
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    target, coefficient = torch.randint(0, 50, (23,)), torch.rand(23)
    ce = torch.nn.functional.cross_entropy(hidden @ weight.t(), target, reduction="none")
    loss, rows = WeightedCrossEntropy.apply(hidden, weight, target, coefficient, chunk_rows)
    torch.testing.assert_close(rows, ce)
    torch.testing.assert_close(loss, (coefficient * ce).sum())
    expected = torch.autograd.grad(3 * (coefficient * ce).sum(), [hidden, weight])
    got = torch.autograd.grad(3 * loss, [hidden, weight])
    torch.testing.assert_close(got, expected)


def test_the_fused_loss_under_autocast_keeps_float32_gradients():
    """Guards bfloat16 runs: the products are rounded, the master weights' gradient is not lost."""
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    given = torch.randint(0, 50, (23,)), torch.rand(23), 5
    exact = torch.autograd.grad(WeightedCrossEntropy.apply(hidden, weight, *given)[0], weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = WeightedCrossEntropy.apply(hidden, weight, *given)[0]
    rounded = torch.autograd.grad(loss, weight)[0]
    assert (loss.dtype, rounded.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
