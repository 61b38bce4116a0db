"""What the engine refuses, and with which words."""

import pytest
from decode.cases import PAGE_BYTES, SCARCE, SIZE
from decode.models import CARD, MASK, VOCABULARY, request

from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ConfidenceMode, ExactMode, VerifiedMode
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.errors import ConfigError, PromptTooLongError, RequestError
from mars_ray.model.directory import ModelCard
from mars_ray.provenance import free_on_node


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


def test_a_model_without_mars_training_has_no_masks(model):
    """Guards decoding with masks that the model has never seen."""
    engine = Engine(model, ModelCard("<|mask|>", MASK, block_size=0), SIZE)
    with pytest.raises(RequestError, match="needs masks"):
        engine.submit(request("x", [1], ConfidenceMode()))
    engine.submit(request("y", [1], ExactMode()))
    with pytest.raises(RequestError, match="'y' is in use"):
        engine.submit(request("y", [1], ExactMode()))


def test_a_refused_request_takes_the_others_of_its_call_along(model):
    """Guards sequences that nobody waits for, and ids that stay in use."""
    engine = Engine(model, CARD, SIZE)
    good = request("good", [1], ExactMode())
    with pytest.raises(RequestError, match="the prompt is empty"):
        generate_all(engine, [good, request("bad", [], ExactMode())])
    assert not engine.has_work
    assert generate_all(engine, [good])[0].tokens


def test_a_cache_too_small_for_one_sequence_is_refused(model):
    """Guards a request that could never be admitted: it would wait for ever."""
    with pytest.raises(ConfigError, match="one sequence of max_context=40 needs"):
        Engine(model, CARD, SCARCE.model_copy(update={"cache_bytes": 9 * PAGE_BYTES}))


def test_a_cache_may_be_a_share_of_the_free_memory(model):
    """Guards sizes that nobody can know before the model is loaded."""
    with pytest.raises(ValueError, match="set one of them"):
        EngineConfig(cache_bytes=1, cache_memory_share=0.5)
    share = 10_000_000 / free_on_node()
    engine = Engine(model, CARD, EngineConfig(max_context=40, cache_memory_share=share))
    assert 5_000_000 < engine.info.cache_bytes < 20_000_000
    with pytest.raises(ConfigError, match="one sequence of max_context=40 needs"):
        Engine(model, CARD, EngineConfig(max_context=40, cache_memory_share=share / 1000))
