"""Which tokens the engine draws: lossless, from the right distribution, and what it reports."""

from dataclasses import replace

import pytest
import torch
from decode.cases import MODES, SAMPLINGS, SIZE, untrained
from decode.models import CARD, MASK, VOCABULARY, pattern, request

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import BlockCachedMode, ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.decode.engine import Engine, generate_all


def test_sampled_verified_is_exact_with_the_same_seed(model):
    """Lossless token by token, not only in distribution: drafts cannot be seen in the text."""
    requests = [
        request(
            f"{mode.type}-{getattr(mode, 'window', 0)}-{seed}",
            [3, 11, 2, 17],
            mode,
            sampling=Sampling(temperature=2.0, seed=seed),
            max_new_tokens=20,
        )
        for mode in (ExactMode(), VerifiedMode(), VerifiedMode(window=1))
        for seed in range(40)
    ]
    done = generate_all(Engine(model, CARD, SIZE), requests)
    exact, verified, narrow = (
        [(c.tokens, c.finish_reason) for c in done[i : i + 40]] for i in (0, 40, 80)
    )
    assert exact == verified == narrow
    assert len({tokens for tokens, _ in exact}) > 30


def test_sampling_follows_the_models_distribution(model):
    """Chi-square of 3,000 first tokens, sampled by `verified`, against the model's softmax."""
    count, prompt = 3000, [3, 11, 2, 17]
    requests = [
        request(
            str(seed),
            prompt,
            VerifiedMode(window=2),
            sampling=Sampling(temperature=2.0, seed=seed),
            max_new_tokens=1,
            stop=-1,
        )
        for seed in range(count)
    ]
    engine = Engine(model, CARD, EngineConfig(max_batch=128, max_context=16))
    tokens = torch.tensor([done.tokens[0] for done in generate_all(engine, requests)])
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    logits[MASK] = -torch.inf
    expected = (logits / 2.0).softmax(dim=-1) * count
    seen = expected >= 5
    observed = torch.bincount(tokens, minlength=VOCABULARY)
    chi_square = ((observed - expected) ** 2 / expected)[seen].sum()
    freedom = int(seen.sum()) - 1
    assert freedom >= 3, "the test needs several outcomes"
    # Wilson-Hilferty: the 99.9% point of chi-square.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi_square < limit


def test_logprobs_are_the_models_own(model):
    """Of each token, in every mode, whatever temperature and penalties made of the choice."""
    for index, mode in enumerate(MODES):
        item = replace(
            request(str(index), pattern(index, 2, 5), mode, sampling=SAMPLINGS[3], stop=-1),
            logprobs=2,
        )
        engine = Engine(model, CARD, SIZE)
        engine.submit(item)
        tokens, reported = [], []
        while engine.has_work:
            for event in engine.step():
                tokens += event.tokens
                reported += event.logprobs
        if isinstance(mode, ConfidenceMode | BlockCachedMode):
            continue  # a proposal's own row says what it said, not what AR decoding would
        with torch.no_grad():
            logits = model(torch.tensor([[*item.prompt, *tokens]])).logits[0]
        logits[:, MASK] = -torch.inf
        log_p = logits.log_softmax(dim=-1)[len(item.prompt) - 1 : -1]
        expected = log_p.gather(-1, torch.tensor(tokens)[:, None]).flatten().tolist()
        assert [entry.logprob for entry in reported] == pytest.approx(expected, abs=1e-4)
        best = log_p.topk(2, dim=-1).indices.tolist()
        assert [[token for token, _ in entry.top] for entry in reported] == best


@pytest.mark.parametrize("least", [0, 2, 4])
@pytest.mark.parametrize(
    "mode", [ConfidenceMode(threshold=0.9), BlockCachedMode(threshold=0.9, cache_block=4)]
)
def test_a_least_length_that_is_reached_anyway_changes_nothing(model, mode, least):
    """Guards masks behind the least length that are not let stop, as the step began before it."""
    asked = request("x", pattern(0, 1, 5), mode, stop=9, sampling=Sampling(min_new_tokens=least))
    expected = request("x", pattern(0, 1, 5), ExactMode(), stop=9)
    got, exact = (generate_all(Engine(model, CARD, SIZE), [each]) for each in (asked, expected))
    assert len(exact[0].tokens) == 5
    assert got[0].tokens == exact[0].tokens


def test_the_mask_token_is_never_emitted():
    """Untrained models like it as well as any other; at threshold 0 everything is accepted."""
    model = untrained("qwen2")
    with torch.no_grad():
        model.get_output_embeddings().weight[MASK] *= 50
    modes = [ExactMode(), VerifiedMode(threshold=0), ConfidenceMode(threshold=0)]
    samplings = [Sampling(), Sampling(temperature=2.0)]
    requests = [
        request(f"{i}{k}", [1, 2, 3], mode, sampling=sampling, max_new_tokens=30)
        for i, mode in enumerate(modes)
        for k, sampling in enumerate(samplings)
    ]
    for completion in generate_all(Engine(model, CARD, SIZE), requests):
        assert MASK not in completion.tokens


@pytest.mark.parametrize("measure", ["probability", "entropy"])
def test_events_tell_how_sure_the_model_was(model, measure):
    """Of every token; those behind a commit's first passed the threshold."""
    engine = Engine(model, CARD, SIZE)
    mode = ConfidenceMode(threshold=0.5, measure=measure)
    engine.submit(request("a", pattern(0, 2, 5), mode, max_new_tokens=16, stop=-1))
    engine.submit(request("b", pattern(0, 2, 5), ExactMode(), max_new_tokens=4, stop=-1))
    longest = 0
    while engine.has_work:
        for event in engine.step():
            if event.request_id == "b":
                assert event.confidences == ()
                continue
            assert len(event.confidences) == len(event.tokens)
            passed = event.confidences[1:]
            if measure == "entropy":
                assert all(value <= 0.5 for value in passed)
            else:
                assert all(0.5 <= value <= 1 for value in passed)
            longest = max(longest, len(event.tokens))
    assert longest > 1
