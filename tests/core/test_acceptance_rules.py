"""Confidence measures, sampling and verification, worked by hand."""

import math

import pytest
import torch
from decode.reference import accepted_prefix, accepts

from mars_ray.config.decode import Sampling
from mars_ray.core.acceptance import confidence, passes
from mars_ray.core.sampling import scores, truncated

LOGITS = torch.tensor([[0.5, 0.3, 0.2], [0.9, 0.1, 0.0]]).log()


def test_measures_by_hand():
    """Guards a bfloat16 softmax and nan from a banned token (p = 0)."""
    assert confidence(LOGITS, "probability").tolist() == pytest.approx([0.5, 0.9])
    assert confidence(LOGITS, "margin").tolist() == pytest.approx([0.2, 0.8])
    entropy = [-sum(p * math.log(p) for p in row if p) for row in ((0.5, 0.3, 0.2), (0.9, 0.1))]
    assert confidence(LOGITS, "entropy").tolist() == pytest.approx(entropy)
    assert [passes(number, 0.5, "probability") for number in (0.4, 0.5)] == [False, True]
    assert [passes(number, 0.4, "entropy") for number in (0.4, 0.5)] == [True, False]


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
    """Guards a division by zero, and noise where there must be none."""
    assert scores(LOGITS, Sampling(), torch.arange(2)).equal(LOGITS)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 5e-324])
def test_the_coldest_sampling_takes_the_best_token(temperature):
    """Guards logits that overflow, whose softmax is nan and its argmax token 0; one unit in the
    last place of float32 is a lead, unless 1e-6 makes it a matter of chance."""
    logits = torch.tensor([[20.0, 30.0, 31.0, -50.0, -torch.inf]])
    close = logits.clone()
    close[0, 1] = torch.nextafter(close[0, 2], torch.tensor(0.0))
    for rows in [logits] if temperature == 1e-6 else [logits, close]:
        sampling = Sampling(temperature=temperature, seed=3)
        log_p = scores(rows.expand(200, 5), sampling, torch.arange(200))
        assert not log_p.isnan().any()
        assert log_p.argmax(dim=-1).tolist() == [2] * 200


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1), [0, 1, 2]),
        (Sampling(temperature=1, top_k=2), [0, 1]),
        # The first token alone reaches 0.5, but not 0.51.
        (Sampling(temperature=1, top_p=0.5), [0]),
        (Sampling(temperature=1, top_p=0.51), [0, 1]),
        (Sampling(temperature=1, top_p=1e-50), [0]),
        # 0.3 is 0.6 of the largest, 0.2 is 0.4 of it.
        (Sampling(temperature=1, min_p=0.59), [0, 1]),
        (Sampling(temperature=1, min_p=0.61), [0]),
        # At temperature 0.5 p is proportional to 0.25, 0.09, 0.04.
        (Sampling(temperature=0.5, min_p=0.35), [0, 1]),
    ],
)
def test_truncation_by_hand(sampling, kept):
    """p = 0.5, 0.3, 0.2; guards a `top_p` so small that float32 takes it for 0."""
    log_p = truncated(LOGITS[:1], sampling)[0]
    assert log_p.isfinite().nonzero().flatten().tolist() == kept
    if sampling.temperature == 1:
        ratios = (log_p[kept] - log_p[0]).exp().tolist()
        assert ratios == pytest.approx([[1, 0.6, 0.4][i] for i in kept])


def test_noise_draws_from_the_distribution():
    """200,000 positions; each frequency within five standard errors (0.0056) of p."""
    n = 200_000
    sampling = Sampling(temperature=1, seed=7)
    tokens = scores(LOGITS[:1].expand(n, 3), sampling, torch.arange(n)).argmax(dim=-1)
    frequency = torch.bincount(tokens, minlength=3) / n
    assert (frequency - LOGITS[0].exp()).abs().max() < 0.0056


def test_a_draft_and_its_row_share_their_noise():
    """Two distributions at total variation distance d agree with probability >= (1-d)/(1+d)."""
    n = 100_000
    sampling = Sampling(temperature=1, seed=7)
    other = torch.tensor([[0.1, 0.6, 0.3]]).log()
    mine, draft = (
        scores(logits.expand(n, 3), sampling, torch.arange(n)).argmax(dim=-1)
        for logits in (LOGITS[:1], other)
    )
    # d = 0.4; independent draws would agree in 0.05 + 0.18 + 0.06 = 0.29 of all cases.
    assert float((mine == draft).float().mean()) > 0.6 / 1.4 - 0.01


def test_noise_depends_on_seed_position_and_token_only():
    """Guards a draw that changes with the batch a row happens to be in."""
    sampling = Sampling(temperature=1, seed=7)
    rows = scores(LOGITS[:1].expand(4, 3), sampling, torch.tensor([5, 6, 5, 9]))
    assert rows[0].equal(rows[2])
    assert not rows[0].equal(rows[1])
    alone = scores(LOGITS[:1], sampling, torch.tensor([9]))
    assert rows[3].equal(alone[0])
    other_seed = scores(LOGITS[:1], Sampling(temperature=1, seed=8), torch.tensor([9]))
    assert not alone.equal(other_seed)


def test_verification_by_hand():
    """p = 0.5, 0.3, 0.2: the runner-up needs threshold <= 0.6."""
    drafts = torch.tensor([0, 1, 2])
    logits = LOGITS[:1].expand(3, 3)
    assert accepts(logits, drafts, 1.0).tolist() == [True, False, False]
    assert accepts(logits, drafts, 0.59).tolist() == [True, True, False]
    assert accepts(logits, drafts, 0.0).tolist() == [True, True, True]


def test_a_tie_is_no_agreement_at_threshold_one():
    """Guards p(d) >= 1 * max p, which a tie passes though AR decoding takes the first."""
    assert accepts(torch.zeros(1, 2), torch.tensor([1]), 1.0).tolist() == [False]
