"""How many masks pay, on machines of known speed."""

import random
from collections.abc import Callable

import pytest

from mars_ray.vllm.window import TRIED, Acceptance, Window


def chosen(
    window: Window, running: int, cost: Callable[[int], float], share: float, steps: int = 300
) -> list[int]:
    """The choices in steps whose seconds depend on rows, where each draft is accepted by chance."""
    luck = random.Random(0)
    masks, drafts, made = 0, 0, []
    for _ in range(steps):
        accepted = 0
        while accepted < drafts and luck.random() < share:
            accepted += 1
        if drafts:
            window.acceptance.add(drafts, accepted)
        window.note(running, cost(running * (1 + drafts + masks)))
        drafts = masks if accepted == drafts else 0
        masks = window.choose(running)
        made.append(masks)
    return made


def free(rows: int) -> float:
    return 1.0


def dear(rows: int) -> float:
    return 0.1 + rows


def stepped(rows: int) -> float:
    """Five rows cost as one, nine half as much more."""
    return 1.0 if rows <= 5 else 1.5


@pytest.mark.parametrize(("cost", "best"), [(free, 4), (dear, 0), (stepped, 2)])
def test_the_best_window_is_found(cost: Callable[[int], float], best: int):
    """Free rows want all masks, rows that cost like tokens none, and a cliff is seen."""
    made = chosen(Window(4), 1, cost, share=0.6)
    assert set(made[-100:]) == {best}


def test_trying_takes_few_steps():
    """Guards the loss of looking: what cannot be the best is not tried."""
    made = chosen(Window(4), 1, free, share=0.6)
    assert set(made) == {0, 4}
    assert set(made[2 * (TRIED + 3) :]) == {4}


def test_loads_are_apart():
    """What pays for one request need not pay for sixteen."""
    window = Window(4)

    def shared(rows: int) -> float:
        return 1.0 if rows <= 16 else rows / 16

    assert set(chosen(window, 1, shared, share=0.6)[-50:]) == {4}
    assert set(chosen(window, 16, shared, share=0.6)[-50:]) == {0}
    assert set(chosen(window, 1, shared, share=0.6, steps=20)[-10:]) == {4}


def test_expected_tokens_per_forward():
    """By hand: s(1) = 1/2 and s(2) = 1/4 give 1 + 0.75 / 1.75, and 1 + 0.5 / 1.5 for one mask."""
    acceptance = Acceptance(2)
    assert acceptance.tokens_per_forward(2) == pytest.approx(1 + 0.75 / 1.75)
    assert acceptance.tokens_per_forward(1) == pytest.approx(1 + 0.5 / 1.5)
    assert acceptance.tokens_per_forward(0) == 1


def test_a_step_with_prompts_says_nothing():
    """It takes longer than the window is to blame for."""
    window = Window(1)
    for step in range(200):
        window.note(1, None if step % 3 == 0 else 100.0 if step % 3 == 1 else 1.0)
        window.choose(1)
    # Two steps in a row are never enough to be counted.
    assert window.choose(1) == 1


def test_what_is_far_behind_is_given_up_early():
    """Where rows cost what tokens cost, a second load takes few steps with masks to know it: all of
    them are slower by half or more. Guards batches that were half as fast for a hundred steps."""
    window = Window(4)
    chosen(window, 1, dear, share=0.6)
    assert window.acceptance.is_known
    masks = [masks for masks in chosen(window, 16, dear, share=0.6) if masks]
    assert 0 < len(masks) <= 16
    assert max(masks) <= 2
