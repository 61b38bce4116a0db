"""The engine against the oracle, token for token, and the oracle against transformers."""

import pytest
import torch
from decode.models import CARD, MASK, SHAPE, VOCABULARY, pattern, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mars_ray.config.decode import (
    BlockCachedMode,
    ConfidenceMode,
    EngineConfig,
    ExactMode,
    Sampling,
    VerifiedMode,
)
from mars_ray.decode import reference
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.errors import PromptTooLongError, RequestError
from mars_ray.model.card import ModelCard

SIZE = EngineConfig(max_batch=3, max_context=64)
MODES = [
    ExactMode(),
    VerifiedMode(),
    VerifiedMode(window=2),
    VerifiedMode(threshold=0.3),
    ConfidenceMode(),
    ConfidenceMode(threshold=0.5),
    ConfidenceMode(threshold=0.5, measure="margin", window=3),
    ConfidenceMode(threshold=0.5, measure="entropy"),
]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_p=0.9, top_k=5, seed=4),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "truncated"])
def test_engine_is_the_reference_in_every_mode(model, sampling):
    """32 requests of all modes mixed in batches of three: tokens, forwards and finish reasons."""
    requests = [
        request(f"{i}-{j}", pattern(j * 3, 1 + j % 4, 2 + j), mode, sampling=sampling)
        for i, mode in enumerate(MODES)
        for j in range(4)
    ]
    got = generate_all(Engine(model, CARD, SIZE), requests)
    assert got == [reference.generate(model, CARD, item) for item in requests]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "truncated"])
def test_the_limit_only_cuts(sampling):
    """A random model at every limit: the engine is the reference, and a prefix of the longest.

    With a trained model nearly every draft is right, which hides what happens at the limit.
    """
    model = untrained("qwen2")
    requests = [
        request(f"{i}-{new}", pattern(i, 2, 5), mode, max_new_tokens=new, sampling=sampling)
        for i, mode in enumerate(MODES)
        for new in range(1, 13)
    ]
    got = generate_all(Engine(model, CARD, SIZE), requests)
    assert got == [reference.generate(model, CARD, item) for item in requests]
    longest = {c.request_id.split("-")[0]: c.tokens for c in got if c.request_id.endswith("-12")}
    for completion in got:
        whole = longest[completion.request_id.split("-")[0]]
        assert completion.tokens == whole[: len(completion.tokens)]


def test_the_trained_model_makes_acceptance_real(model):
    """Without it the equalities here would hold with nothing ever accepted."""
    requests = [request(str(j), pattern(j, 2, 5), VerifiedMode()) for j in range(8)]
    done = generate_all(Engine(model, CARD, SIZE), requests)
    assert sum(len(c.tokens) for c in done) / sum(c.forwards for c in done) > 2


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 7), st.integers(1, 12), st.integers(1, 20)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=30,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions)
def test_company_and_timing_change_nothing(model, script):
    """Any order of arrivals, steps and cancellations: who is left gets what it gets alone."""
    engine = Engine(model, CARD, SIZE)
    submitted, done = {}, {}

    def run_steps(count: int) -> None:
        for _ in range(count):
            for event in engine.step():
                if event.completion:
                    done[event.request_id] = event.completion
            engine.check_integrity()

    for action, *values in script:
        if action == "submit":
            mode, length, new = values
            name = str(len(submitted))
            sampling = SAMPLINGS[len(submitted) % 3]
            submitted[name] = request(
                name, pattern(new, 2, length), MODES[mode], sampling=sampling, max_new_tokens=new
            )
            engine.submit(submitted[name])
        elif action == "step":
            run_steps(values[0])
        else:
            name = str(values[0])
            engine.cancel(name)
            if name not in done:
                submitted.pop(name, None)
    while engine.has_work:
        run_steps(1)
    assert done == {name: reference.generate(model, CARD, item) for name, item in submitted.items()}


def untrained(kind: str):
    torch.manual_seed(1)
    shape = SHAPE | {"head_dim": 8, "initializer_range": 0.3}
    match kind:
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**shape)).eval()
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
        case _:
            return LlamaForCausalLM(LlamaConfig(**shape)).eval()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_verified_and_exact_are_transformers_greedy_decoding(kind):
    """Three architectures with random weights: hardly any draft is right, all must be corrected."""
    model = untrained(kind)
    prompts = [pattern(j, 3, 4 + j) for j in range(4)]
    for mode in (ExactMode(), VerifiedMode()):
        done = generate_all(
            Engine(model, CARD, SIZE),
            [request(str(j), prompt, mode, stop=-1) for j, prompt in enumerate(prompts)],
        )
        for prompt, completion in zip(prompts, done, strict=True):
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=16,
                do_sample=False,
                eos_token_id=None,
                suppress_tokens=[MASK],
            )
            assert list(completion.tokens) == expected[0, len(prompt) :].tolist()


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


def test_block_cached_never_reaches_over_its_block(model):
    """The paper's boundaries: with cache blocks of 2 a forward commits at most 2 tokens."""
    item = request("a", pattern(0, 2, 5), BlockCachedMode(threshold=0.0, cache_block=2))
    done = reference.generate(model, CARD, item)
    assert done.token_forward == (1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8)
    wide = request("b", pattern(0, 2, 5), BlockCachedMode(threshold=0.0, cache_block=16))
    # Trained depth 4: five tokens a forward at most, then what is left of the block.
    assert reference.generate(model, CARD, wide).token_forward == (1,) * 5 + (2,) * 5 + (3,) * 5 + (
        4,
    )


def test_sampled_verified_has_the_distribution_of_exact(model):
    """Chi-square over the third token of 1,500 seeds each; p < 0.001 by chance in 1 of 1,000."""
    count, third = 1500, {}
    for mode in (ExactMode(), VerifiedMode(window=2)):
        engine = Engine(model, CARD, EngineConfig(max_batch=128, max_context=16))
        requests = [
            request(
                str(seed),
                pattern(3, 2, 4),
                mode,
                sampling=Sampling(temperature=2.0, seed=seed + 100_000 * len(third)),
                max_new_tokens=3,
                stop=-1,
            )
            for seed in range(count)
        ]
        tokens = torch.tensor([done.tokens[2] for done in generate_all(engine, requests)])
        third[mode.type] = torch.bincount(tokens, minlength=VOCABULARY).double()
    exact, verified = third["exact"], third["verified"]
    seen = (exact + verified) >= 20
    chi_square = ((exact - verified) ** 2 / (exact + verified))[seen].sum()
    freedom = int(seen.sum()) - 1
    assert freedom >= 3, "the test needs several outcomes"
    # Wilson-Hilferty: the 99.9% point of chi-square.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert chi_square < limit


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"prompt": []}, RequestError, "the prompt is empty"),
        ({"prompt": [VOCABULARY]}, RequestError, "outside the vocabulary"),
        ({"max_new_tokens": 0}, RequestError, "at least 1"),
        ({"prompt": [1] * 60}, PromptTooLongError, "60 prompt tokens and 16 new tokens are 76"),
        ({"mode": VerifiedMode(window=5)}, RequestError, "window 5 .* trained depth 4"),
        ({"mode": BlockCachedMode()}, RequestError, "'block_cached' is not served"),
    ],
)
def test_bad_requests_are_refused_with_reasons(model, changes, error, text):
    """Each is refused when it is submitted, and leaves nothing behind."""
    engine = Engine(model, CARD, SIZE)
    with pytest.raises(error, match=text):
        engine.submit(request("x", **({"prompt": [1], "mode": ExactMode()} | changes)))
    assert not engine.has_work


def test_a_model_without_mars_training_serves_exact_only(model):
    """Guards decoding with masks that the model has never seen."""
    engine = Engine(model, ModelCard("<|mask|>", MASK, block_size=0), SIZE)
    with pytest.raises(RequestError, match="needs a checkpoint trained with MARS"):
        engine.submit(request("x", [1], VerifiedMode()))
    engine.submit(request("y", [1], ExactMode()))
    with pytest.raises(RequestError, match="'y' is in use"):
        engine.submit(request("y", [1], ExactMode()))
