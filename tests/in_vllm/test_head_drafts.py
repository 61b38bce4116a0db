"""Drafts of several requests in one call, beside the same ones alone."""

import pytest
import torch

from mars_ray.core.draft_head import DraftHead, candidate_logits
from mars_ray.vllm.drafts import HeadedDrafts, likeliest_tokens, rows_of
from mars_ray.vllm.rows import Origin

VOCABULARY, HIDDEN, INNER, DEPTHS = 40, 16, 8, 3
ORIGINS = [Origin(0, 1, 3, 5), Origin(2, 6, 1, 7), Origin(3, 8, 2, 9)]


@pytest.fixture
def numbers() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def headed(numbers: torch.Generator) -> tuple[HeadedDrafts, torch.Tensor]:
    weight_VH = torch.randn(VOCABULARY, HIDDEN, generator=numbers)
    shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (DEPTHS, INNER), (HIDDEN, INNER)]
    head = DraftHead(*(torch.randn(*shape, generator=numbers) for shape in shapes))
    drafts = HeadedDrafts(
        head,
        candidates=9,
        embed=lambda token_X: weight_VH[token_X],
        logits=lambda hidden_XH, candidate_XC: candidate_logits(hidden_XH, weight_VH, candidate_XC),
    )
    return drafts, weight_VH


def test_requests_of_different_length_do_not_mix(numbers: torch.Generator):
    """Guards the row offsets of a batch: each request's drafts are those that it has alone."""
    drafts, weight_VH = headed(numbers)
    hidden_NH = torch.randn(10, HIDDEN, generator=numbers)
    logits_NV = hidden_NH @ weight_VH.T
    rows = rows_of(ORIGINS)
    assert rows == [1, 2, 3, 6, 8, 9]
    together = drafts.choose(hidden_NH[rows], logits_NV[rows], ORIGINS)
    for origin, own in zip(ORIGINS, together, strict=True):
        alone = rows_of([origin])
        assert drafts.choose(hidden_NH[alone], logits_NV[alone], [origin]) == [own]
        assert len(own) == origin.masks


def test_a_chosen_draft_is_what_the_next_one_follows(numbers: torch.Generator):
    """Guards the head's input: the token before, which is first the answer's, then the draft."""
    drafts, weight_VH = headed(numbers)
    hidden_MH = torch.randn(2, HIDDEN, generator=numbers)
    logits_MV = hidden_MH @ weight_VH.T
    origin = Origin(0, 0, 2, 5)
    first, second = drafts.choose(hidden_MH, logits_MV, [origin])[0]
    corrected_XH = drafts.head.correct(
        hidden_MH[1:], weight_VH[torch.tensor([first])], torch.tensor([2])
    )
    candidates = logits_MV[1].topk(9).indices
    assert second == candidates[(weight_VH[candidates] @ corrected_XH[0]).argmax()]


def test_a_banned_token_is_no_draft(numbers: torch.Generator):
    """In a small vocabulary all tokens are candidates, the mask token too."""
    drafts, _ = headed(numbers)
    logits_MV = torch.full((1, VOCABULARY), -torch.inf)
    logits_MV[0, 3] = 1.0
    hidden_MH = torch.randn(1, HIDDEN, generator=numbers)
    assert drafts.choose(hidden_MH, logits_MV, [Origin(0, 0, 1, 5)]) == [[3]]
    assert likeliest_tokens(logits_MV, [Origin(0, 0, 1, 5)]) == [[3]]
