"""Confidence measures, sampling and verification, worked by hand."""

import math

import pytest
import torch

from mars_ray.config.decode import Sampling
from mars_ray.core.accept import accepted_prefix, confidence, passes
from mars_ray.core.randomness import uniform
from mars_ray.core.sampling import choose, probabilities
from mars_ray.core.verify import greedy_accepts, residual, sampled_accepts

LOGITS = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]]).log()


def test_measures_by_hand():
    """Guards a bfloat16 softmax and nan from a banned token (p = 0)."""
    assert confidence(LOGITS, "probability").tolist() == pytest.approx([0.5, 0.9])
    assert confidence(LOGITS, "margin").tolist() == pytest.approx([0.2, 0.8])
    entropy = [-sum(p * math.log(p) for p in row if p) for row in ((0.5, 0.3, 0.2), (0.9, 0.1))]
    assert confidence(LOGITS, "entropy").tolist() == pytest.approx(entropy)
    assert passes(torch.tensor([0.4, 0.5]), 0.5, "probability").tolist() == [False, True]
    assert passes(torch.tensor([0.4, 0.5]), 0.4, "entropy").tolist() == [True, False]


def test_confidence_is_float32():
    """p = 0.9985 rounds to 1.0 in bfloat16: a threshold of 0.999 must not pass."""
    logits = torch.tensor([[math.log(0.9985), math.log(0.0015)]])
    assert confidence(logits, "probability").item() < 0.999
    assert confidence(logits.bfloat16(), "probability").dtype == torch.float32


def test_acceptance_stops_at_the_first_failure():
    """Guards counting passes instead of the leading run."""
    assert accepted_prefix(torch.tensor([True, True, False, True])) == 2
    assert accepted_prefix(torch.tensor([False, True])) == 0
    assert accepted_prefix(torch.tensor([], dtype=torch.bool)) == 0


def test_temperature_zero_is_the_argmax():
    """Guards a division by zero."""
    assert probabilities(LOGITS, Sampling()).tolist() == [[1, 0, 0], [1, 0, 0]]


def test_truncation_by_hand():
    """0.5, 0.3, 0.2: top-k 2 leaves 5/8, 3/8; top-p 0.5 is reached by the first token alone, and
    0.51 needs the second."""
    p = probabilities(LOGITS[:1], Sampling(temperature=1, top_k=2))
    assert p[0].tolist() == pytest.approx([0.625, 0.375, 0])
    p = probabilities(LOGITS[:1], Sampling(temperature=1, top_p=0.5))
    assert p[0].tolist() == pytest.approx([1, 0, 0])
    p = probabilities(LOGITS[:1], Sampling(temperature=1, top_p=0.51))
    assert p[0].tolist() == pytest.approx([0.625, 0.375, 0])


def test_choose_inverts_the_distribution():
    """Edges by hand; a draw never lands on a token without mass, not even at the very end."""
    p = torch.tensor([[0.25, 0.75, 0.0]]).expand(4, 3)
    draws = torch.tensor([0.0, 0.2499, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert choose(p, draws).tolist() == [0, 0, 1, 1]
    assert choose(torch.tensor([[0.0, 1.0]]), torch.zeros(1).double()).tolist() == [1]


def test_greedy_verification_by_hand():
    """p = 0.5, 0.3, 0.2: the runner-up needs threshold <= 0.6."""
    drafts = torch.tensor([0, 1, 2])
    logits = LOGITS[:1].expand(3, 3)
    assert greedy_accepts(logits, drafts, 1.0).tolist() == [True, False, False]
    assert greedy_accepts(logits, drafts, 0.59).tolist() == [True, True, False]
    assert greedy_accepts(logits, drafts, 0.0).tolist() == [True, True, True]


def test_a_tie_is_no_agreement_at_threshold_one():
    """Guards p(d) >= 1 * max p, which a tie passes though AR decoding takes the first."""
    assert greedy_accepts(torch.zeros(1, 2), torch.tensor([1]), 1.0).tolist() == [False]


def test_speculative_sampling_keeps_the_target_distribution():
    """200,000 draws; each frequency within five standard errors (0.0056) of p."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.1, 0.6, 0.3]])
    n = 200_000
    index = torch.arange(n)
    p_N, q_N = p.expand(n, 3), q.expand(n, 3)
    draft = choose(q_N, uniform(1, index))
    accepted = sampled_accepts(p_N, q_N, draft, 1.0, uniform(2, index))
    corrected = choose(residual(p_N, q_N), uniform(3, index))
    frequency = torch.bincount(torch.where(accepted, draft, corrected), minlength=3) / n
    assert (frequency - p[0]).abs().max() < 0.0056
    # Acceptance is sum(min(p, q)) = 0.1 + 0.3 + 0.2.
    assert abs(float(accepted.float().mean()) - 0.6) < 0.0056


def test_a_lower_threshold_accepts_more():
    """p/q = 1/6 for the draft: at threshold 0.5 it is accepted with probability 1/3."""
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.4, 0.6]])
    draft = torch.tensor([1])
    for threshold, edge in ((1.0, 1 / 6), (0.5, 1 / 3)):
        for draw, expected in ((edge - 1e-6, True), (edge + 1e-6, False)):
            draws = torch.tensor([draw], dtype=torch.float64)
            assert sampled_accepts(p, q, draft, threshold, draws).tolist() == [expected]


def test_the_residual_of_equal_distributions_is_the_distribution():
    """Guards 0/0."""
    p = torch.tensor([[0.5, 0.5]])
    assert residual(p, p).tolist() == [[0.5, 0.5]]
