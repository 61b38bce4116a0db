"""Teacher-forced acceptance, worked by hand."""

import pytest
import torch
from core.rows import MASK, batch_of

from mars_ray.config.train import ConstantBlockSize, MaskSchedule
from mars_ray.core.acceptance import acceptance_counts, survival
from mars_ray.core.layout import compact_layout
from mars_ray.core.loss import acceptance_weights
from mars_ray.core.mask_schedule import block_starts


def counts_with_errors(wrong: set[tuple[int, int]], *rows: str) -> torch.Tensor:
    """Counts when mask rows at these (conversation, position) disagree with their clean twins."""
    batch = batch_of(*rows)
    schedule = MaskSchedule(block_size=ConstantBlockSize(size=3), grid="response")
    layout = compact_layout(batch, block_starts(batch, schedule, 0.0, 0), torch.ones(3), MASK)
    predicted = layout.document_BR * 100 + layout.position_BR
    for document, position in wrong:
        row = (layout.document_BR == document) & (layout.position_BR == position)
        predicted[row & layout.is_noisy_BR] += 1
    return acceptance_counts(layout, predicted, 3)


def test_survival_is_a_running_product():
    """p rrrrrr: blocks at 1 and 4, of 3 and 2 rows with a target. An error at depth 1 of the first
    block rules out all its depths, though depths 2 and 3 agree."""
    assert counts_with_errors(set(), "prrrrrr").tolist() == [[2, 2, 1], [2, 2, 1]]
    counts = counts_with_errors({(0, 1)}, "prrrrrr")
    assert counts.tolist() == [[2, 2, 1], [1, 1, 0]]
    assert survival(counts) == [0.5, 0.5, 0.0]


def test_packed_conversations_and_rows_are_kept_apart():
    """Guards looking up the clean twin of another conversation at the same position."""
    rows = ("prrrr ppprrr", "prrpprrr")
    assert (
        counts_with_errors(set(), *rows)[0].tolist() == counts_with_errors(set(), *rows)[1].tolist()
    )
    counts = counts_with_errors({(1, 3)}, *rows)
    assert (counts[0] - counts[1]).tolist() == [1, 1, 0]


def test_nothing_to_count():
    """A batch of padding or prompts alone adds zeros."""
    assert counts_with_errors(set(), "ppp").sum() == 0


def test_acceptance_weights_are_the_gradient_of_the_expected_length():
    """By autograd, up to the scale: blocks of three, one and two rows."""
    depth_M = torch.tensor([1, 2, 3, 1, 1, 2])
    log_p_M = torch.log(torch.tensor([0.9, 0.5, 0.7, 0.2, 0.6, 0.4], dtype=torch.float64))
    log_p_M.requires_grad_()
    first, second, third = log_p_M[:3], log_p_M[3:4], log_p_M[4:]
    expected = sum(block.cumsum(0).exp().sum() for block in (first, second, third))
    (slope_M,) = torch.autograd.grad(expected, log_p_M)
    weights_M = acceptance_weights(-log_p_M.detach(), depth_M)
    torch.testing.assert_close(weights_M, slope_M / slope_M.mean())


def test_acceptance_weights_of_a_model_that_accepts_nothing_do_not_vanish():
    """Guards a noisy stream that never begins to learn: then shallow rows come first."""
    weights_M = acceptance_weights(torch.full((4,), 6.0), torch.tensor([1, 2, 3, 4]))
    assert weights_M.mean().item() == pytest.approx(1.0)
    assert weights_M.argmax().item() == 0
