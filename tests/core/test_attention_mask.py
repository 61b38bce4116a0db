"""The mask against a brute-force reading of its three rules, and flex against dense."""

import itertools

import torch
from core.rows import MASK, batch_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.config.train import ConstantBlockSize, MaskSchedule
from mars_ray.core.layout import (
    Layout,
    clean_layout,
    compact_layout,
    dense_mask,
    flex_mask,
    paper_layout,
    visible,
)
from mars_ray.core.mask_schedule import block_starts

packings = st.lists(st.text("pr", min_size=1, max_size=9), min_size=1, max_size=3).map(" ".join)


def layouts(rows: list[str], size: int, grid: str) -> list[Layout]:
    batch = batch_of(*rows)
    schedule = MaskSchedule(block_size=ConstantBlockSize(size=size), grid=grid)
    blocks = block_starts(batch, schedule, 0.0, 0)
    weights = torch.ones(size)
    return [
        clean_layout(batch),
        compact_layout(batch, blocks, weights, MASK),
        paper_layout(batch, blocks, weights, MASK),
    ]


def read_the_rules(layout: Layout, row: int, query: int, key: int) -> bool:
    """The rules as sentences, one row and one key at a time."""
    document, position, block = (
        tensor[row].tolist() for tensor in (layout.document_BR, layout.position_BR, layout.block_BR)
    )
    if document[query] != document[key]:
        return False
    if block[query] < 0:
        return block[key] < 0 and position[key] <= position[query]
    if block[key] < 0:
        return position[key] < block[query]
    return block[key] == block[query] and position[key] <= position[query]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(packings, min_size=1, max_size=2),
    st.integers(1, 4),
    st.sampled_from(["zero", "response"]),
)
def test_the_mask_says_what_the_rules_say(rows, size, grid):
    """Any packing, any block size: every (query, key) pair, in all three layouts."""
    for layout in layouts(rows, size, grid):
        mask = dense_mask(layout)[:, 0]
        length = mask.shape[-1]
        for row, query, key in itertools.product(range(len(rows)), range(length), range(length)):
            assert bool(mask[row, query, key]) == read_the_rules(layout, row, query, key)
        assert mask.diagonal(dim1=-2, dim2=-1).all(), "a row without a key is NaN in some kernels"


def test_the_mask_of_the_figure():
    """Design figure: P=3, R=4, B=2, grid at the response; worked by hand. The mask of the last
    token predicts past the end, so compact leaves it out."""
    _, compact, _ = layouts(["ppprrrr"], 2, "response")
    seen = [row.nonzero().squeeze(1).tolist() for row in dense_mask(compact)[0, 0]]
    assert seen[:7] == [list(range(i + 1)) for i in range(7)]
    assert seen[7:] == [[0, 1, 2, 7], [0, 1, 2, 7, 8], [0, 1, 2, 3, 4, 9]]


def test_flex_is_the_dense_mask():
    """Evaluates the BlockMask's own rule at every pair, and checks that no visible pair lies in a
    block that flex would skip."""
    for layout in layouts(["pprrrrr prrpr", "prrrr"], 2, "zero"):
        dense = dense_mask(layout)[:, 0]
        block_mask = flex_mask(layout)
        rows, length = layout.document_BR.shape
        index = torch.arange(length)
        for row in range(rows):
            rule = block_mask.mask_mod(
                torch.tensor(row), torch.tensor(0), index[:, None], index[None, :]
            )
            assert torch.equal(rule, dense[row])
        assert block_mask.to_dense()[:, 0, 0, 0].bool().all()


def test_padding_sees_only_padding():
    """Guards conversation -1 matching a real one."""
    clean = clean_layout(batch_of("pr", "prrr"))
    mask = dense_mask(clean)[0, 0]
    assert not mask[2:, :2].any()
    assert not mask[:2, 2:].any()
    one = torch.ones(1, dtype=torch.long)
    assert not visible(-one, 0 * one, -one, 0 * one, 0 * one, -one).any()
