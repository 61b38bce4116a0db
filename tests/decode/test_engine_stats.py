"""Live measures against what really happened, and against the model asked afterwards."""

import pytest
import torch
from decode.models import CARD, MASK, pattern, request, trained_model

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import BlockCachedMode, ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.core.sampling import scores
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.stats import THRESHOLDS

SIZE = EngineConfig(max_batch=4, max_context=64, max_step_tokens=30)
# 20 tokens of each; no stop token cuts a commit short, so what was accepted was committed.
PROMPTS = [pattern(index, 1 + index % 3, 2 + index) for index in range(12)]


@pytest.fixture(scope="module")
def model():
    """Hardly trained: it is sure of little, so that thresholds make a difference."""
    return trained_model(steps=25)


def run(model, mode, sampling=None):
    engine = Engine(model, CARD, SIZE)
    requests = [
        request(str(index), prompt, mode, sampling=sampling, max_new_tokens=20, stop=-1)
        for index, prompt in enumerate(PROMPTS)
    ]
    return engine.measures, generate_all(engine, requests)


@pytest.mark.parametrize(
    ("kind", "threshold"),
    [
        (kind, threshold)
        for kind in (VerifiedMode, ConfidenceMode, BlockCachedMode)
        for threshold in (0.1, 0.5, 0.9, 1.0)
        if not kind(threshold=threshold).is_plain_at(threshold)
    ],
)
def test_the_curve_at_the_threshold_in_use_is_what_happened(model, kind, threshold):
    """Guards the whole counterfactual: at one point of its grid it is a fact. (`confidence` at 1
    has no masks that it could be read from.)"""
    measured, done = run(model, kind(threshold=threshold))
    (measures,) = measured.by_mode.values()
    assert measures.forwards == sum(completion.forwards for completion in done)
    committed = sum(len(completion.tokens) for completion in done)
    at = measures.tokens_at[THRESHOLDS.index(threshold)]
    # The last commit of a sequence may have been cut at the limit.
    assert committed <= at <= committed + 4 * len(done)
    assert measures.tokens_at == sorted(measures.tokens_at, reverse=True)
    assert measures.tokens_at[0] > measures.tokens_at[-1]
    # Every step commits one token; what it commits beyond that is counted by place.
    places = measured.accepted_at.get(kind().type, [])
    assert sum(places) == committed - measures.forwards
    assert places == sorted(places, reverse=True)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=3)])
@pytest.mark.parametrize("mode", [VerifiedMode(threshold=0.1), ConfidenceMode(threshold=0.3)])
def test_disagreement_is_what_the_model_says_when_asked(model, mode, sampling):
    """Of all tokens committed without their own row, those that AR decoding would not have taken
    after the same text: counted again with a forward over each whole text."""
    measured, done = run(model, mode, sampling)
    (measures,) = measured.by_mode.values()
    checked = disagreed = 0
    for prompt, completion in zip(PROMPTS, done, strict=True):
        text = torch.tensor([[*prompt, *completion.tokens]])
        with torch.no_grad():
            logits = model(text).logits[0]
        logits[:, MASK] = -torch.inf
        position = torch.arange(1, text.shape[1] + 1)
        choice = scores(logits, sampling or Sampling(), position).argmax(dim=-1)
        own = choice[len(prompt) - 1 : -1].tolist()
        for index, (token, forward) in enumerate(
            zip(completion.tokens, completion.token_forward, strict=True)
        ):
            if isinstance(mode, VerifiedMode):
                is_row = index + 1 == len(completion.tokens) or (
                    completion.token_forward[index + 1] != forward
                )
            else:
                is_row = index == 0 or completion.token_forward[index - 1] != forward
            # A text's last commit is not forwarded again.
            seen = isinstance(mode, VerifiedMode) or forward < completion.forwards
            if not is_row and seen:
                checked += 1
                disagreed += token != own[index]
    assert measures.disagreed == pytest.approx(disagreed, abs=len(done))
    assert measures.checked == pytest.approx(checked, abs=len(done))
    if not isinstance(mode, VerifiedMode):
        assert (measures.checked, measures.disagreed) == (checked, disagreed)
    assert 0 < measures.disagreed < measures.checked


def test_lossless_modes_never_disagree(model):
    """At threshold 1 every accepted draft is the row's own token."""
    measured, _ = run(model, VerifiedMode())
    assert measured.by_mode["verified"].checked > 20
    assert measured.by_mode["verified"].disagreed == 0
    assert run(model, ExactMode())[0].by_mode == {}


def test_disagreement_is_counted_for_every_measure(model):
    """All proposals pass, so it is what it is for the probability. Guards evaluations, by which a
    model of half its own words was told to have kept them all."""

    def disagreed(mode: ConfidenceMode) -> list[int]:
        engine, told = Engine(model, CARD, SIZE), {}
        for index, prompt in enumerate(PROMPTS):
            engine.submit(request(str(index), prompt, mode, max_new_tokens=20, stop=-1))
        while engine.has_work:
            told |= {event.request_id: event.disagreed for event in engine.step()}
        assert (mode.measure == "probability") == bool(engine.measures.by_mode)
        return [told[str(index)] for index in range(len(PROMPTS))]

    own = disagreed(ConfidenceMode(threshold=0.0, measure="margin"))
    assert own == disagreed(ConfidenceMode(threshold=0.0))
    assert sum(own) > 0
