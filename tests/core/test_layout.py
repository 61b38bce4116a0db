"""The two layouts: worked by hand, and against each other."""

import torch
from core.rows import MASK, batch_of

from mars_ray.config.train import ConstantBlockSize, MaskSchedule
from mars_ray.core.layout import (
    NO_TARGET,
    clean_layout,
    compact_layout,
    paper_layout,
    with_own_answers,
)
from mars_ray.core.mask_schedule import block_starts

N = NO_TARGET
PAIRS = MaskSchedule(block_size=ConstantBlockSize(size=2), grid="response")


def both_layouts(*rows: str, weights: tuple[float, ...] = (1.0, 0.5)):
    batch = batch_of(*rows)
    blocks = block_starts(batch, PAIRS, 0.0, 0)
    return [
        build(batch, blocks, torch.tensor(weights), MASK)
        for build in (compact_layout, paper_layout)
    ]


def test_compact_by_hand():
    """The figure in the module's docstring: tokens 10..16, three prompt tokens."""
    compact, _ = both_layouts("ppprrrr")
    assert compact.input_ids_BR.tolist() == [[10, 11, 12, 13, 14, 15, 16, MASK, MASK, MASK]]
    assert compact.position_BR.tolist() == [[0, 1, 2, 3, 4, 5, 6, 3, 4, 5]]
    assert compact.block_BR.tolist() == [[-1] * 7 + [3, 3, 5]]
    assert compact.target_BR.tolist() == [[N, N, 13, 14, 15, 16, N, 14, 15, 16]]
    assert compact.depth_BR.tolist() == [[0] * 7 + [1, 2, 1]]
    assert compact.weight_BR.tolist() == [[0, 0, 1, 1, 1, 1, 0, 1, 0.5, 1]]


def test_paper_by_hand():
    """The noisy half keeps the prompt unmasked, in blocks of one that predict nothing."""
    _, paper = both_layouts("pprr")
    assert paper.input_ids_BR.tolist() == [[10, 11, MASK, MASK, 10, 11, 12, 13]]
    assert paper.block_BR.tolist() == [[0, 1, 2, 2, -1, -1, -1, -1]]
    assert paper.target_BR.tolist() == [[N, N, 13, N, N, 12, 13, N]]


def test_turns_and_packing_have_no_targets_across_their_borders():
    """Guards a target that is the next turn's, or the next conversation's, first token."""
    clean = clean_layout(batch_of("prpr rr"))
    assert clean.target_BR.tolist() == [[11, N, 13, N, 15, N]]
    compact, _ = both_layouts("prrprr prr")
    noisy = compact.is_noisy_BR[0]
    assert compact.document_BR[0][noisy].tolist() == [0, 0, 1]
    assert compact.target_BR[0][noisy].tolist() == [12, 15, 18]


def test_rows_of_unequal_noise_are_padded():
    """Guards padding rows that count: they are of conversation -1 and weigh nothing."""
    compact, _ = both_layouts("pr", "prrr")
    assert compact.document_BR[0].tolist() == [0, 0, -1, -1, -1, -1]
    assert compact.weight_BR[0].tolist() == [1, 0, 0, 0, 0, 0]


def test_own_answers_keep_their_noisy_rows_only():
    """By hand: conversation 1 is the model's own. Its clean rows are anchored where they had a
    target; conversation 0 is as it was, in either layout."""
    for layout in both_layouts("prrr", "prrr"):
        own = with_own_answers(layout, 1, 0.25)
        clean = ~layout.is_noisy_BR[1]
        assert own.target_BR[1][clean].tolist() == [N, N, N, N]
        assert own.weight_BR[1][clean].tolist() == [0.25, 0.25, 0.25, 0]
        assert own.is_anchored_BR[1][clean].tolist() == [True, True, True, False]
        assert own.target_BR[1][~clean].tolist() == layout.target_BR[1][~clean].tolist()
        assert own.target_BR[0].tolist() == layout.target_BR[0].tolist()
        assert not own.is_anchored_BR[0].any()


def test_a_batch_without_responses_is_no_error():
    """A rank may draw padding only; it still has to take part in the step."""
    compact, _ = both_layouts("ppp")
    assert compact.weight_BR.sum() == 0


def test_both_layouts_have_the_same_noisy_targets():
    """What makes the equal losses of `test_two_stream_model` possible."""
    compact, paper = both_layouts("pprrrrrpprrr prrrr", "prrrrrr")
    for layout in (compact, paper):
        rows = layout.target_BR != NO_TARGET
        key = [layout.document_BR, layout.position_BR, layout.block_BR, layout.target_BR]
        layout_keys = sorted(zip(*[tensor[rows].tolist() for tensor in key], strict=True))
        if layout is compact:
            expected = layout_keys
    noisy = [key for key in layout_keys if key[2] >= 0]
    assert layout_keys == expected
    assert len(noisy) == 4 + 2 + 3 + 5
