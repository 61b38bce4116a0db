"""The layout of draft adapters: which blocks start where, and what each mask row is."""

import pytest
import torch
from core.rows import batch_of

from mars_ray.config.train import ConstantBlockSize, DraftObjective, MixedBlockSize
from mars_ray.core.draft_layout import DraftRows, draft_layout
from mars_ray.core.mask_schedule import draft_blocks

FOUR = DraftObjective()


def blocks(objective: DraftObjective, *rows: str, progress: float = 0.0, seed: int = 0):
    batch = batch_of(*rows)
    return batch, draft_blocks(batch, objective, objective.grids, progress, seed)


def test_layout_by_hand():
    """Guards the picture in the module: 3 prompt tokens, 5 of response, blocks at 3, 4 and 6."""
    batch = batch_of("ppprrrrr", first_token=20)
    sizes = torch.tensor([[0, 0, 0, 2, 2, 0, 2, 0]])
    layout = draft_layout(batch, sizes, torch.tensor([1.0, 0.5]))
    masks = slice(8, None)
    assert layout.input_ids_BR[0, masks].tolist()[:5] == [23, 24, 24, 25, 26]
    assert layout.position_BR[0, masks].tolist() == [3, 4, 4, 5, 6, 0]
    assert layout.document_BR[0, masks].tolist() == [0, 0, 0, 0, 0, -1]
    assert layout.block_BR[0, masks].tolist() == [3, 3, 4, 4, 6, -1]
    assert layout.target_BR[0, masks].tolist() == [24, 25, 25, 26, 27, -100]
    assert layout.depth_BR[0, masks].tolist() == [1, 2, 1, 2, 1, 0]
    assert layout.weight_BR[0, masks].tolist() == [1, 0.5, 1, 0.5, 1, 0]
    assert (layout.target_BR[0, :8] == -100).all()
    assert not layout.weight_BR[0, :8].any()
    rows = DraftRows.of(layout)
    assert rows.twin_BM[0, :5].tolist() == [3, 4, 4, 5, 6]
    assert rows.sees_BKL[0].sum(dim=1).tolist() == [3, 4, 6]


def test_blocks_end_with_their_turn_and_conversation():
    """Guards masks that would predict a later turn, or another conversation packed behind."""
    batch = batch_of("prrprr prrr")
    layout = draft_layout(batch, torch.full_like(batch.input_ids_BL, 4), torch.ones(4))
    found = [
        (int(block), int(position))
        for block, position, depth in zip(
            layout.block_BR[0], layout.position_BR[0], layout.depth_BR[0], strict=True
        )
        if depth > 0
    ]
    # Of the last token of a turn nothing is predicted: it starts no block, and no mask stands for
    # it. The widest block left has two slots.
    assert found == [(1, 1), (4, 4), (1, 1), (1, 2), (2, 2)]
    rows = DraftRows.of(layout)
    assert rows.width == 2
    # The blocks of the second conversation see its own prompt only.
    assert rows.sees_BKL[0, 2:, :6].sum() == 0
    assert rows.twin_BM[0, 4:6].tolist() == [7, 8]


@pytest.mark.parametrize("grids", [1, 2, 3, 4])
def test_grids_never_start_a_block_at_the_same_token(grids):
    """Guards a mask row that would be trained on twice: of 4 tokens so many start a block."""
    objective = DraftObjective(grids=grids)
    _, sizes = blocks(objective, "p" + "r" * 12)
    assert set(sizes[0, 1:].tolist()) <= {0, 4}
    starts = (sizes[0, 1:] > 0).view(3, 4)
    assert (starts.sum(dim=1) == grids).all()
    assert (starts == starts[0]).all()


def test_grids_change_from_visit_to_visit():
    """Guards a schedule that shows every epoch the same rows: all four offsets come up."""
    objective = DraftObjective(grids=1)
    seen = set()
    for visit in range(40):
        _, sizes = blocks(objective, "prrrr", progress=visit / 40)
        seen.add(int(sizes[0, 1:].argmax()))
    # An offset is missing with probability 4 * 0.75^40 = 4e-5.
    assert seen == {0, 1, 2, 3}


def test_blocks_do_not_depend_on_the_batch():
    """Guards resumed runs and other numbers of ranks: a conversation keeps its draws."""
    mixed = MixedBlockSize(sizes=(2, 5), weights=(1.0, 1.0))
    objective = DraftObjective(block_size=mixed, noisy_share=0.5)
    _, alone = blocks(objective, "pprrrrrrrr")
    _, beside = blocks(objective, "pprrrrrrrr", "prrrrrrrrrrrrrrrrrrr", "pr")
    assert torch.equal(alone[0], beside[0, : alone.shape[1]])


def test_a_batch_without_masks_has_one_slot_of_padding():
    """Guards ranks that have nothing to train on in a step: their forward must be one all the
    same."""
    batch, sizes = blocks(FOUR, "ppp")
    layout = draft_layout(batch, sizes, torch.ones(4))
    rows = DraftRows.of(layout)
    assert (rows.ids_BL.shape[1], rows.width) == (3, 1)
    assert layout.depth_BR.tolist() == [[0, 0, 0, 0]]
    assert rows.sees_BKL.sum() == 0


def test_cut_blocks_do_not_widen_others():
    """Guards the width told by a layout: a size of 8 in turns of 3 has blocks of 2 slots."""
    objective = DraftObjective(block_size=ConstantBlockSize(size=8), grids=8)
    batch, sizes = blocks(objective, "prrr", "prrr")
    layout = draft_layout(batch, sizes, torch.ones(8))
    rows = DraftRows.of(layout)
    assert (rows.ids_BL.shape[1], rows.width) == (4, 2)
    assert layout.depth_BR[:, 4:].tolist() == [[1, 2, 1, 0]] * 2
