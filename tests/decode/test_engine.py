"""The engine against the oracle, token for token, and the oracle against transformers."""

import itertools
from dataclasses import replace

import pytest
import torch
from decode import reference
from decode.cases import MODES, PAGE_BYTES, SAMPLING_NAMES, SAMPLINGS, SCARCE, SIZE, untrained
from decode.models import CARD, MASK, pattern, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mars_ray.config.modes import BlockCachedMode, ExactMode, VerifiedMode
from mars_ray.decode.engine import Engine, generate_all


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
    assert engine.snapshot().preemptions > 0
    assert engine.info.cache_bytes == 18 * PAGE_BYTES


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.model_dump_json())
def test_the_shortest_and_the_longest_prompt(model, mode):
    """One token, and so many that one new token fills the context."""
    requests = [
        request("short", [3], mode, max_new_tokens=39, stop=-1),
        request("long", pattern(0, 1, 39), mode, max_new_tokens=1),
    ]
    done = generate_all(Engine(model, CARD, SCARCE), requests)
    assert done == [reference.generate(model, CARD, item) for item in requests]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral"])
def test_verified_and_exact_are_transformers_greedy_decoding(kind):
    """All architectures with random weights: hardly any draft is right, all must be corrected."""
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
