"""What a budget lets drafts do, by hand-worked probabilities."""

import pytest
import torch

from mars_ray.core.thresholds import Budget
from mars_ray.vllm.budgets import Budgets, Spender

P_V = torch.tensor([0.5, 0.3, 0.15, 0.05])


def decided(
    budgets: Budgets, share: float, drafts: list[int], *, tokens: int = 0, greedy: bool = True
) -> torch.Tensor:
    """The probabilities that vLLM's rule sees, for drafts whose model always says P_V."""
    logits_DV = P_V.log().repeat(len(drafts), 1)
    spender = Spender("a", Budget(share), tokens, 0, len(drafts))
    budgets.decide(spender, logits_DV, drafts, greedy)
    return logits_DV.softmax(-1)


def test_no_budget_is_plain_decoding():
    """The argmax is accepted; what differs is not, and the row behind it keeps its numbers."""
    p_DV = decided(Budgets(), 0.0, [0, 1, 0])
    assert p_DV[0, 0] == 1
    torch.testing.assert_close(p_DV[1:], P_V.expand(2, 4))


def test_a_draft_is_accepted_as_long_as_there_is_room():
    """0.3 is 0.6 of 0.5, above the first threshold. Half of two tokens may differ, and of three; of
    four it may be two."""
    p_DV = decided(Budgets(), 0.5, [0, 1, 1, 1])
    assert p_DV[0, 0] == p_DV[1, 1] == 1
    torch.testing.assert_close(p_DV[2], P_V)
    p_DV = decided(Budgets(), 0.5, [0, 1, 0, 1])
    assert p_DV[3, 1] == 1


def test_an_unlikely_draft_is_not_accepted():
    """0.05 is a tenth of 0.5."""
    torch.testing.assert_close(decided(Budgets(), 1.0, [3])[0], P_V)


def test_only_what_was_accepted_is_counted():
    """Of two drafts that may differ the step took one: its last token is the model's own."""
    budgets = Budgets()
    decided(budgets, 1.0, [1, 1])
    budgets.settle(["a", "b"], [[1, 7], [3]])
    assert (budgets.disagreed("a"), budgets.disagreed("b")) == (1, 0)
    # One of two has differed, so the third may not.
    torch.testing.assert_close(decided(budgets, 0.5, [1], tokens=2)[0], P_V)
    assert decided(budgets, 0.5, [1], tokens=3)[0, 1] == 1
    budgets.ended("a")
    assert budgets.disagreed("a") == 0


def test_the_threshold_follows_what_is_spent():
    """A budget that is not used lets less likely drafts in: 0.1 of the likeliest token's."""
    budgets = Budgets()
    for _ in range(400):
        decided(budgets, 0.4, [0], tokens=100)
        budgets.settle(["a"], [[0, 2]])
    assert decided(budgets, 0.4, [3], tokens=100)[0, 3] == 1


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.3), (1.0, 0.6)])
def test_sampling_accepts_by_the_ratio_while_there_is_room(share: float, expected: float):
    """p = 0.3: plain sampling takes the draft that often, and the first threshold of 0.5 twice as
    often; 2,000 draws, a false alarm in 10,000. What replaces it is the rest in proportion."""
    torch.manual_seed(0)
    rows = torch.cat([decided(Budgets(), share, [1], greedy=False) for _ in range(2000)])
    taken = rows[:, 1] == 1
    assert float(taken.float().mean()) == pytest.approx(expected, abs=0.043)
    rest = torch.tensor([0.5, 0.0, 0.15, 0.05]) / 0.7
    torch.testing.assert_close(rows[~taken], rest.expand(int((~taken).sum()), 4))


def test_sampling_counts_what_plain_sampling_would_not_have_taken():
    """Of the drafts taken half are plain sampling's: 0.3 of 0.6."""
    torch.manual_seed(0)
    budgets = Budgets()
    taken = 0
    for number in range(2000):
        # The threshold stays near the first one, as what is spent is what is allowed.
        p_DV = decided(budgets, 0.15, [1], tokens=10**6 + 2 * number, greedy=False)
        taken += int(p_DV[0, 1] == 1)
        budgets.settle(["a"], [[1, 0] if p_DV[0, 1] == 1 else [0]])
    assert 0.35 < budgets.disagreed("a") / taken < 0.65
