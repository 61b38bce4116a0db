"""The compiled choice of tokens, beside that of torch on the same logits."""

import numpy as np
import pytest
import torch
from decode.models import request

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.core.sampling import scores
from mars_ray.decode.cpu.backend import CompiledBackend, _declared
from mars_ray.decode.cpu.library import library, supported
from mars_ray.decode.logits import NOT_A_NUMBER, Block, best, sample

pytestmark = pytest.mark.skipif(not supported(), reason="the processor has no AVX2")
ROWS = 6
# Scores closer than this may be ordered otherwise, as may tokens at the border of top_p.
CLOSE = 1e-5


def chooser(instructions: str, threads: int = 1) -> CompiledBackend:
    """The library's functions without a model."""
    found = CompiledBackend.__new__(CompiledBackend)
    found._library, found.threads = _declared(library(instructions)[1]), threads
    return found


def logits_of(vocabulary: int, kind: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_PV = torch.randn(ROWS, vocabulary, generator=generator)
    match kind:
        case "peaked":
            logits_PV *= 4
        case "ties":
            logits_PV = (2 * logits_PV).round()
        case "holes":
            logits_PV[torch.rand(ROWS, vocabulary, generator=generator) < 0.7] = -torch.inf
    return logits_PV


def chosen(
    instructions: str, logits_PV: torch.Tensor, sampling: Sampling, threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and ratios of token 3 to them."""
    rows = len(logits_PV)
    block = Block(request("a", [1], ExactMode(), sampling=sampling), slice(0, rows))
    token_P, ratio_P = chooser(instructions, threads).choose(
        logits_PV, [block], 100 + np.arange(rows), np.full(rows, 3), np.arange(rows)
    )
    return token_P.numpy(), ratio_P.numpy()


SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, seed=2),
    Sampling(temperature=2.0, seed=3, top_k=20),
    Sampling(temperature=0.7, seed=4, top_k=1),
    Sampling(temperature=0.7, seed=2**63 - 1, top_k=2**70),
    Sampling(temperature=0.7, seed=5, top_p=0.9),
    Sampling(temperature=1.0, seed=6, top_p=0.1),
    Sampling(temperature=1.0, seed=7, min_p=0.05),
    Sampling(temperature=0.9, seed=8, top_k=50, top_p=0.95, min_p=0.01),
    Sampling(temperature=1e-30, seed=9),
]


@pytest.mark.parametrize("instructions", supported())
@pytest.mark.parametrize("vocabulary", [70, 1000, 49_152, 151_936])
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "holes"])
def test_tokens_are_those_of_torch(instructions, vocabulary, kind):
    """And so are the ratios by which drafts are judged."""
    for sampling in SETTINGS if vocabulary < 100_000 else SETTINGS[1::4]:
        logits_PV = logits_of(vocabulary, kind, sampling.seed)
        token_P, ratio_P = chosen(instructions, logits_PV, sampling)
        block = Block(request("a", [1], ExactMode(), sampling=sampling), slice(0, ROWS))
        scores_PV = logits_PV.clone()
        sample(scores_PV, [block], 100 + np.arange(ROWS))
        best_P, expected_P = best(scores_PV, np.full(ROWS, 3), np.arange(ROWS))
        for row, (own, other) in enumerate(zip(token_P, best_P.tolist(), strict=True)):
            if own != other:
                margin = scores_PV[row, other] - scores_PV[row, own]
                assert abs(margin) < CLOSE or (sampling.top_p < 1 and margin == torch.inf)
        same = torch.from_numpy(token_P) == best_P
        torch.testing.assert_close(
            torch.from_numpy(ratio_P)[same], expected_P[same], rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize("instructions", supported())
def test_neither_threads_nor_other_rows_change_a_token(instructions):
    """Bit by bit, ratios too."""
    sampling = Sampling(temperature=1.0, seed=5, top_p=0.9)
    logits_PV = logits_of(5000, "flat")
    together = chosen(instructions, logits_PV, sampling)
    for threads in (2, 3):
        for one, other in zip(
            together, chosen(instructions, logits_PV, sampling, threads), strict=True
        ):
            assert np.array_equal(one, other)
    alone = chosen(instructions, logits_PV[:1].clone(), sampling)
    assert [alone[0][0], alone[1][0]] == [together[0][0], together[1][0]]


@pytest.mark.parametrize("sampling", SETTINGS[:2])
def test_a_row_that_is_not_numbers_is_told(sampling):
    """The others keep their tokens."""
    logits_PV = logits_of(1000, "flat")
    before_P, _ = chosen("auto", logits_PV, sampling)
    logits_PV[2, 17] = torch.nan
    after_P, _ = chosen("auto", logits_PV, sampling)
    assert after_P[2] == NOT_A_NUMBER
    assert np.array_equal(np.delete(after_P, 2), np.delete(before_P, 2))


def test_noise_follows_the_distribution():
    """20,000 positions of one row: shares are those of the softmax, within four deviations."""
    logits_1V = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -torch.inf]])
    logits_PV = logits_1V.expand(20_000, -1).contiguous()
    token_P, _ = chosen("auto", logits_PV, Sampling(temperature=1.0, seed=3))
    share_V = np.bincount(token_P, minlength=6) / len(token_P)
    p_V = logits_1V[0].softmax(0).numpy()
    assert np.all(np.abs(share_V - p_V) <= 4 * np.sqrt(p_V * (1 - p_V) / len(token_P)))
    scores_PV = scores(logits_PV, Sampling(temperature=1.0, seed=3), 100 + torch.arange(20_000))
    assert (torch.from_numpy(token_P) == scores_PV.argmax(-1)).all()
