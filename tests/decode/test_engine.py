"""The engine against the oracle, token for token, and the oracle against transformers."""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from decode.models import CARD, MASK, SHAPE, STOP, VOCABULARY, pattern, request
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
    JacobiMode,
    Sampling,
    VerifiedMode,
)
from mars_ray.decode import reference
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.errors import ConfigError, PromptTooLongError, RequestError
from mars_ray.model.card import ModelCard

SIZE = EngineConfig(max_batch=3, max_context=64)
MODES = [
    ExactMode(),
    VerifiedMode(),
    VerifiedMode(window=2),
    VerifiedMode(threshold=0.3),
    VerifiedMode(groups=2),
    VerifiedMode(groups=9, threshold=0.5, window=3),
    JacobiMode(guesses=3),
    BlockCachedMode(threshold=0.5, cache_block=3),
    BlockCachedMode(threshold=0.3, cache_block=16),
    ConfidenceMode(),
    ConfidenceMode(threshold=0.5),
    ConfidenceMode(threshold=0.5, measure="margin", window=3),
    ConfidenceMode(threshold=0.5, measure="entropy"),
]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, seed=4),
    Sampling(
        temperature=1.0,
        seed=5,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.3,
        logit_bias={7: 2.0, STOP: 5.0},
        min_new_tokens=4,
    ),
]
SAMPLING_NAMES = ["greedy", "sampled", "truncated", "adjusted"]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=SAMPLING_NAMES)
def test_engine_is_the_reference_in_every_mode(model, sampling):
    """All modes, mixed in batches of three: tokens, forwards and finish reasons."""
    requests = [
        request(f"{i}-{j}", pattern(j * 3, 1 + j % 4, 2 + j), mode, sampling=sampling)
        for i, mode in enumerate(MODES)
        for j in range(4)
    ]
    got = generate_all(Engine(model, CARD, SIZE), requests)
    assert got == [reference.generate(model, CARD, item) for item in requests]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=SAMPLING_NAMES)
def test_the_limit_only_cuts(sampling):
    """A random model at every limit: the engine is the reference, and a prefix of the longest.

    With a trained model nearly every draft is right, which hides what happens at the limit.
    """
    model = untrained("qwen2")
    requests = [
        request(f"{i}-{new}", pattern(i, 2, 5), mode, max_new_tokens=new, sampling=sampling)
        for i, mode in enumerate(MODES)
        for new in (1, 2, 3, 5, 6, 8, 12)
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


# Pages for little more than one sequence, forwards of 25 rows: everybody is in the way.
PAGE_BYTES = 4 * 2 * 2 * 8 * 2 * 4
SCARCE = EngineConfig(
    max_batch=5, max_context=40, page_size=4, cache_bytes=18 * PAGE_BYTES, max_step_tokens=25
)
actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(0, len(MODES) - 1),
            st.integers(1, 20),
            st.integers(1, 20),
            st.integers(0, 2),
        ),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("size", [SIZE, SCARCE], ids=["ample", "scarce"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(script=actions)
def test_company_and_timing_change_nothing(model, size, script):
    """Any order of arrivals, steps, cancellations, any shortage of pages and rows, any shared
    beginnings: who is left gets what it gets alone, and nothing leaks."""
    engine = Engine(model, CARD, size)
    submitted, done, names = {}, {}, itertools.count()

    def run_steps(count: int) -> None:
        for _ in range(count):
            for event in engine.step():
                if event.completion:
                    done[event.request_id] = event.completion
            engine.check_integrity()

    for action, *values in script:
        if action == "submit":
            mode, length, new, priority = values
            index = next(names)
            name = str(index)
            submitted[name] = replace(
                # Strides repeat, so prompts share their beginnings.
                request(
                    name,
                    pattern(3, 1 + new % 2, length),
                    MODES[mode],
                    sampling=SAMPLINGS[index % 4],
                    max_new_tokens=new,
                ),
                priority=priority,
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
    assert engine.pool.in_use == 0


def test_scarcity_is_real(model):
    """The test above would prove little if nobody ever had to give way."""
    engine = Engine(model, CARD, SCARCE)
    requests = [
        request(str(j), pattern(j, 1, 12), VerifiedMode(), max_new_tokens=28, stop=-1)
        for j in range(5)
    ]
    done = generate_all(engine, requests)
    assert done == [reference.generate(model, CARD, item) for item in requests]
    assert engine.preemptions > 0
    assert engine.cache_bytes == 18 * PAGE_BYTES


def test_a_shared_beginning_is_computed_once(model):
    """The second request forwards only what the first has not left behind."""
    engine = Engine(model, CARD, EngineConfig(max_batch=2, max_context=64, page_size=4))
    rows = []

    def run(name: str, prompt: list[int]) -> None:
        engine.submit(request(name, prompt, ExactMode(), max_new_tokens=1))
        in_use = engine.pool.in_use
        engine.step()
        rows.append(engine.last_rows)
        assert engine.pool.in_use == in_use == 0

    run("first", pattern(0, 1, 17))
    run("same", pattern(0, 1, 17))
    run("longer", [*pattern(0, 1, 14), 9, 9, 9, 9])
    assert rows == [17, 1, 6]
    assert engine.pool.kept == 5


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


def test_priorities_go_first(model):
    """A later request of a smaller number overtakes those that wait."""
    engine = Engine(model, CARD, EngineConfig(max_batch=1, max_context=64))
    for name, priority in (("running", 5), ("late", 1), ("urgent", 0), ("later", 1)):
        item = request(name, [1, 2], ExactMode(), max_new_tokens=3, stop=-1)
        engine.submit(replace(item, priority=priority))
        if name == "running":
            engine.step()
    order = []
    while engine.has_work:
        order += [event.request_id for event in engine.step() if event.completion]
    assert order == ["running", "urgent", "late", "later"]


def test_a_long_prompt_does_not_hold_up_the_others(model):
    """Chunked prefill: the sequence that decodes gets a token in every forward meanwhile."""
    engine = Engine(
        model, CARD, EngineConfig(max_batch=2, max_context=200, page_size=8, max_step_tokens=16)
    )
    engine.submit(request("short", [1, 2], ExactMode(), max_new_tokens=40, stop=-1))
    engine.step()
    engine.submit(request("long", pattern(0, 1, 150), ExactMode(), max_new_tokens=1, stop=-1))
    first_of_long = None
    for step in range(1, 30):
        events = {event.request_id: event for event in engine.step()}
        assert len(events["short"].tokens) == 1
        if "long" in events:
            first_of_long = step
            break
    assert first_of_long == 10  # 150 tokens, 15 rows each


def test_a_thousand_requests_wait_their_turn(model):
    """None is lost, none overtakes another of its priority, and nothing is left behind."""
    engine = Engine(model, CARD, EngineConfig(max_batch=64, max_context=16, page_size=4))
    for index in range(1000):
        engine.submit(request(str(index), [index % 20], VerifiedMode(), max_new_tokens=3, stop=-1))
    assert engine.waiting == 1000
    first_tokens = []
    while engine.has_work:
        first_tokens += [int(e.request_id) for e in engine.step() if e.forward == 1]
        assert engine.running <= 64
    assert first_tokens == list(range(1000))
    engine.check_integrity()
    assert engine.pool.in_use == 0


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.model_dump_json())
def test_the_shortest_and_the_longest_prompt(model, mode):
    """One token, and so many that one new token fills the context."""
    requests = [
        request("short", [3], mode, max_new_tokens=39, stop=-1),
        request("long", pattern(0, 1, 39), mode, max_new_tokens=1),
    ]
    done = generate_all(Engine(model, CARD, SCARCE), requests)
    assert done == [reference.generate(model, CARD, item) for item in requests]


def test_a_deadline_ends_a_request_with_what_it_has(model):
    """Waiting or running, and everything it held is free."""
    engine = Engine(model, CARD, EngineConfig(max_batch=1, max_context=64))
    past = time.monotonic() - 1
    item = request("running", [1, 2], ExactMode(), max_new_tokens=50, stop=-1)
    engine.submit(replace(item, deadline=time.monotonic() + 0.2))
    engine.submit(replace(item, id="waiting", deadline=past))
    engine.step()
    time.sleep(0.25)
    ended = {e.request_id: e.completion for e in engine.step() if e.completion}
    assert ended["running"].finish_reason == "deadline"
    assert len(ended["running"].tokens) == 1
    assert not engine.has_work
    assert engine.pool.in_use == 0


def test_a_cache_too_small_for_one_sequence_is_refused(model):
    """Guards a request that could never be admitted: it would wait for ever."""
    with pytest.raises(ConfigError, match="one sequence of max_context=40 needs"):
        Engine(model, CARD, SCARCE.model_copy(update={"cache_bytes": 9 * PAGE_BYTES}))


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


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"prompt": []}, RequestError, "the prompt is empty"),
        ({"prompt": [VOCABULARY]}, RequestError, "outside the vocabulary"),
        ({"max_new_tokens": 0}, RequestError, "at least 1"),
        ({"prompt": [1] * 60}, PromptTooLongError, "60 prompt tokens and 16 new tokens are 76"),
        ({"mode": VerifiedMode(window=5)}, RequestError, "window 5 .* trained depth 4"),
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
