"""A draft model beside the masks, against the reference, and lossless."""

from itertools import count

import pytest
import torch
from decode.models import CARD, SHAPE, STOP, pattern, request
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.modes import ExactMode, SpeculativeMode
from mars_ray.decode import reference
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.isolation import step_apart
from mars_ray.errors import ConfigError, RequestError
from mars_ray.model.card import ModelCard

SIZE = EngineConfig(max_batch=3, max_context=64)
DRAFT_SIZE = EngineConfig(max_batch=3, max_context=600, page_size=4, window_control=False)
MODES = [
    SpeculativeMode(),
    SpeculativeMode(draft_tokens=2, groups=1),
    SpeculativeMode(draft_tokens=3, window=2, groups=3, threshold=0.3),
    SpeculativeMode(draft_tokens=3, window=0),
]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=1.0, seed=4, presence_penalty=0.5, logit_bias={STOP: 4.0}),
]


@pytest.fixture(scope="module")
def random_model():
    torch.manual_seed(5)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()


def engine_with(model, draft_model, draft_card=CARD) -> Engine:
    return Engine(model, CARD, SIZE, Engine(draft_model, draft_card, DRAFT_SIZE))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.model_dump_json())
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "adjusted"])
@pytest.mark.parametrize("good", [True, False], ids=["good", "random"])
def test_engine_is_the_reference(model, random_model, mode, sampling, good):
    """Tokens and forwards, with a draft model that is right and one that is wrong."""
    draft = model if good else random_model
    requests = [
        request(str(j), pattern(j * 3, 1 + j % 4, 2 + j), mode, sampling=sampling) for j in range(5)
    ]
    engine = engine_with(model, draft)
    got = generate_all(engine, requests)
    assert got == [reference.generate(model, CARD, item, draft) for item in requests]
    if mode.threshold == 1:
        exact = [
            reference.generate(
                model, CARD, request(item.id, list(item.prompt), ExactMode(), sampling=sampling)
            )
            for item in requests
        ]
        assert [c.tokens for c in got] == [c.tokens for c in exact]
    engine.drafter._engine.check_integrity()


def test_a_draft_model_adds_to_what_masks_give(model):
    """With itself as draft model and all outcomes covered, nothing is ever rejected."""
    item = request("a", pattern(0, 2, 5), SpeculativeMode(), max_new_tokens=40, stop=-1)
    done = generate_all(engine_with(model, model), [item])[0]
    # The first forward commits one token; then 4 drafts of masks, those that are right, 4 of the
    # draft model behind them if they all are, and one more.
    assert done.tokens_per_forward > 4


def test_an_untrained_draft_model_will_do(model, random_model):
    """It decodes plainly then; and a target without MARS training has no masks."""
    plain = ModelCard("<|mask|>", CARD.mask_token_id, block_size=0)
    target = Engine(model, plain, SIZE, Engine(random_model, plain, DRAFT_SIZE))
    item = request("a", [1, 2, 3], SpeculativeMode())
    assert generate_all(target, [item])[0] == reference.generate(model, plain, item, random_model)


def test_a_draft_model_that_fails_once_goes_on(model, monkeypatch):
    """Guards what is left over in its engine, requests that every later step would stumble over,
    and sequences with some of the drafts of a step that failed."""
    mode = SpeculativeMode()
    items = [request(str(j), pattern(j * 3, 1 + j % 4, 2 + j), mode) for j in range(3)]
    engine = engine_with(model, model)
    drafts = engine.drafter._engine
    step, calls = drafts.step, count()

    def fail_once(meanwhile):
        # The second step: the first has brought drafts for some.
        if next(calls) == 1:
            raise RuntimeError("cannot forward")
        return step(meanwhile)

    monkeypatch.setattr(drafts, "step", fail_once)
    for item in items:
        engine.submit(item)
    done = {}
    while engine.has_work:
        before = {name: list(s.drafts) for name, s in engine._sequences.items()}
        try:
            events = engine.step()
        except RuntimeError:
            assert {name: s.drafts for name, s in engine._sequences.items()} == before
            assert not drafts.has_work
            events = step_apart(engine)
        for event in events:
            assert event.failure is None
            done[event.request_id] = event.completion
    assert next(calls) > 2
    for item in items:
        assert done[item.id].tokens == reference.generate(model, CARD, item, model).tokens
    drafts.check_integrity()


def test_what_cannot_work_is_refused(model):
    """No draft model, another vocabulary, more rows than a forward may have."""
    with pytest.raises(RequestError, match="needs an engine with a draft_model"):
        Engine(model, CARD, SIZE).submit(request("a", [1], SpeculativeMode()))
    other = Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"vocab_size": 30}))
    with pytest.raises(ConfigError, match="has 30 tokens and the model 24"):
        engine_with(model, other)
    small = Engine(
        model, CARD, SIZE.model_copy(update={"max_step_tokens": 40}), engine_with(model, model)
    )
    with pytest.raises(RequestError, match="of 45 rows, more than max_step_tokens=40"):
        small.submit(request("a", [1], SpeculativeMode()))
