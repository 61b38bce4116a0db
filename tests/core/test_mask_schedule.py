"""The mask schedule."""

import torch
from core.rows import batch_of
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.config.train import (
    ConstantBlockSize,
    CurriculumBlockSize,
    CurriculumStep,
    LinearWeight,
    MaskSchedule,
    MixedBlockSize,
)
from mars_ray.core.mask_schedule import ar_weight, block_starts, depth_weights

FOUR = ConstantBlockSize(size=4)


def starts(schedule: MaskSchedule, *rows: str, progress: float = 0.0, seed: int = 0) -> list:
    return block_starts(batch_of(*rows), schedule, progress, seed).tolist()


def test_grid_at_zero_cuts_the_first_block_at_the_response():
    """Worked by hand: positions 3..7, blocks of 4 on the grid 0, 4, 8."""
    schedule = MaskSchedule(block_size=FOUR)
    assert starts(schedule, "ppprrrrr") == [[-1, -1, -1, 3, 4, 4, 4, 4]]


def test_grid_at_the_response_restarts_in_every_turn_and_conversation():
    """Two turns and a packed second conversation, whose positions start again at 0."""
    schedule = MaskSchedule(block_size=ConstantBlockSize(size=2), grid="response")
    assert starts(schedule, "prrrprr prr") == [[-1, 1, 1, 3, -1, 5, 5, -1, 1, 1]]


def test_random_grid_visits_every_offset_and_keeps_blocks_whole():
    """Guards an offset that is always 0, or drawn per token instead of per sample."""
    schedule = MaskSchedule(block_size=FOUR, grid="random")
    rows = starts(schedule, *["p" + "r" * 16] * 64)
    assert len({tuple(row) for row in rows}) == 4
    for row in rows:
        sizes = [row.count(start) for start in sorted(set(row[1:]))]
        assert all(size == 4 for size in sizes[1:-1])
        assert all(size <= 4 for size in sizes)


def test_mixed_block_sizes_follow_their_weights():
    """300 samples, P(size 2) = 3/4: 225 expected, standard deviation 7.5; five of them allowed."""
    schedule = MaskSchedule(
        block_size=MixedBlockSize(sizes=(2, 8), weights=(3.0, 1.0)), grid="response"
    )
    rows = starts(schedule, *["p" + "r" * 8] * 300)
    twos = sum(row[3] == 3 for row in rows)
    assert 187 < twos < 263
    assert schedule.max_block_size == 8


def test_curriculum_changes_at_its_steps():
    """Guards an off-by-one at the boundary: a step holds from its progress on."""
    steps = (CurriculumStep(progress=0, size=2), CurriculumStep(progress=0.5, size=4))
    schedule = MaskSchedule(block_size=CurriculumBlockSize(steps=steps), grid="response")
    assert starts(schedule, "prrrr", progress=0.49) == [[-1, 1, 1, 3, 3]]
    assert starts(schedule, "prrrr", progress=0.5) == [[-1, 1, 1, 1, 1]]


def test_noisy_share_drops_whole_blocks():
    """2,000 blocks at share 0.3: 600 expected, standard deviation 20.5; five of them allowed."""
    schedule = MaskSchedule(block_size=FOUR, noisy_share=0.3, grid="response")
    rows = starts(schedule, *["p" + "r" * 80] * 100)
    blocks = [tuple(row[i : i + 4]) for row in rows for i in range(1, 81, 4)]
    assert all(len(set(block)) == 1 for block in blocks)
    assert 497 < sum(block[0] >= 0 for block in blocks) < 703


def test_the_schedule_is_a_pure_function_of_progress_sample_and_seed():
    """Guards hidden generator state and draws that depend on the place in the batch."""
    schedule = MaskSchedule(block_size=FOUR, noisy_share=0.5, grid="random")
    rows = ["p" + "r" * 12] * 32
    first = starts(schedule, *rows, progress=0.25)
    assert first == starts(schedule, *rows, progress=0.25)
    assert first[:3] == starts(schedule, *rows[:3], progress=0.25)
    assert first != starts(schedule, *rows, progress=0.26)
    assert first != starts(schedule, *rows, progress=0.25, seed=1)


def test_weights():
    """The AR weight moves linearly; the last depth weight holds for deeper ones."""
    schedule = MaskSchedule(block_size=FOUR, ar_weight=LinearWeight(start=1, end=3))
    assert ar_weight(schedule, 0.25) == 1.5
    assert depth_weights(schedule).tolist() == [1, 1, 1, 1]
    assert depth_weights(MaskSchedule(block_size=FOUR, depth_weights=(1, 0.5))).tolist() == [
        1,
        0.5,
        0.5,
        0.5,
    ]


@given(
    st.lists(st.text("pr", min_size=1, max_size=12), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from(["zero", "response", "random"]),
)
def test_blocks_lie_inside_their_turn(conversations, size, grid):
    """Any packing: a start is at most `size - 1` back, in the same turn, and is its own start."""
    batch = batch_of(" ".join(conversations))
    schedule = MaskSchedule(block_size=ConstantBlockSize(size=size), grid=grid)
    start_L = block_starts(batch, schedule, 0.3, 5)[0]
    assert torch.equal(start_L >= 0, batch.response_BL[0])
    for index, start in enumerate(start_L.tolist()):
        if start < 0:
            continue
        back = int(batch.position_BL[0, index]) - start
        assert 0 <= back < size
        assert start_L[index - back : index + 1].tolist() == [start] * (back + 1)
