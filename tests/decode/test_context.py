"""The context of an engine whose job names none: the model's own, as far as memory holds it."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from decode.models import CARD, request, trained_model
from transformers import PreTrainedModel

from mars_ray.config.decode import EngineConfig
from mars_ray.config.inputs import PresetModel
from mars_ray.config.modes import ExactMode
from mars_ray.decode import kv_cache, warm_up
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.kv_cache import model_context, page_bytes
from mars_ray.decode.loading import load_engine, with_room
from mars_ray.errors import ConfigError, PromptTooLongError
from mars_ray.model.create import create_model

PLENTY = 1e12
CPU = EngineConfig(max_batch=4, device="cpu", threads=1, window_control=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("context") / "tiny"
    texts = ["one two three four five"] * 50
    create_model(PresetModel(preset="tiny", vocab_size=300), lambda: texts, directory, seed=0)
    return directory


@pytest.fixture
def long_model() -> PreTrainedModel:
    """At random, for 4,096 positions."""
    torch.manual_seed(0)
    return trained_model(0, max_position_embeddings=4096)


def engine_of(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, free: float = PLENTY, **settings: Any
) -> Engine:
    """An engine on a machine with so much free memory."""
    monkeypatch.setattr(kv_cache, "free_on_node", lambda: free)
    return Engine(model, CARD, CPU.model_copy(update=settings))


def test_the_context_is_the_models(long_model, monkeypatch):
    """Guards a first long prompt that is refused because of a number that nobody has chosen."""
    engine = engine_of(long_model, monkeypatch)
    assert engine.config.context == 4096
    (done,) = generate_all(engine, [request("long", [1] * 2000, ExactMode(), max_new_tokens=4)])
    assert len(done.tokens) == 4
    with pytest.raises(PromptTooLongError, match="more than the context of 4096"):
        engine.submit(request("longer", [1] * 4096, ExactMode(), max_new_tokens=1))
    # As much cache as for a context that is named.
    named = engine_of(long_model, monkeypatch, max_context=4096)
    assert engine.pool.count == named.pool.count >= 4 * 4096 // 16


def test_a_context_that_is_named_stays(long_model, monkeypatch):
    """Also where there is little memory, and with it its cache."""
    engine = engine_of(long_model, monkeypatch, free=0, max_context=64)
    assert engine.config.context == 64
    # One sequence fits in any case.
    assert engine.pool.count * engine.config.page_size >= 64
    assert engine_of(long_model, monkeypatch, max_context=64).pool.count > 4 * 64 // 16


def test_a_context_is_as_long_as_memory_allows(long_model, monkeypatch, caplog):
    """A part of what is free, since a node may have several replicas; and told in one line."""
    token = page_bytes(long_model.config, 1, torch.float32)
    free = 3000 * token / kv_cache._CPU_SHARE
    with caplog.at_level(logging.WARNING):
        engine = engine_of(long_model, monkeypatch, free=free)
    assert 2000 < engine.config.context < 3000
    assert engine._backend.cache.bytes <= 3000 * token
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"contexts of {engine.config.context} tokens, not the model's 4096" in line
    assert "engine.max_context, cache_bytes or cache_memory_share" in line
    # The longest request is decoded, alone.
    longest = [1] * (engine.config.context - 2)
    assert generate_all(engine, [request("long", longest, ExactMode(), max_new_tokens=2)])


def test_a_context_has_a_least_length(long_model, monkeypatch):
    """As long as it was before the model decided, however little is free."""
    assert engine_of(long_model, monkeypatch, free=0).config.context == 1024
    short = trained_model(0, max_position_embeddings=64)
    assert engine_of(short, monkeypatch, free=0).config.context == 64


def test_a_cache_that_is_named_decides(long_model, monkeypatch):
    token = page_bytes(long_model.config, 1, torch.float32)
    engine = engine_of(long_model, monkeypatch, cache_bytes=600 * token)
    assert 400 < engine.config.context < 600
    assert engine.pool.count == 600 // 16
    engine = engine_of(long_model, monkeypatch, free=2000 * token, cache_memory_share=0.5)
    assert 800 < engine.config.context < 1000
    with pytest.raises(ConfigError, match="one sequence of max_context=8 needs"):
        engine_of(long_model, monkeypatch, cache_bytes=16 * token)


def test_a_cache_is_never_more_than_there_is(long_model, monkeypatch):
    """Guards a context and a batch that together are more than the machine has, by default."""
    token = page_bytes(long_model.config, 1, torch.float32)
    engine = engine_of(long_model, monkeypatch, free=6000 * token, max_context=4000)
    assert 4000 <= engine.pool.count * 16 <= 6000


def test_a_long_context_costs_nothing_until_it_is_used(monkeypatch):
    """Guards a start that touches a cache for 131,072 positions, or measures steps that long."""
    model = trained_model(0, max_position_embeddings=131_072)
    # What any first engine of a process takes.
    engine_of(model, monkeypatch, max_context=1024).warm_up()
    before = resident_bytes()
    engine = engine_of(model, monkeypatch)
    lengths = []
    whole = warm_up.StepTimer._work
    monkeypatch.setattr(
        warm_up.StepTimer,
        "_work",
        lambda timer, items: (lengths.extend(item[0] for item in items), whole(timer, items))[1],
    )
    engine.warm_up()
    assert engine.config.context == 131_072
    assert max(lengths) <= 1024
    cache = engine._backend.cache.bytes
    assert cache > 4 * 131_072 * page_bytes(model.config, 1, torch.float32) > 1e8
    assert resident_bytes() - before < cache / 2


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_sliding_window_ends_the_context(monkeypatch):
    """The engine has none, so a row sees all before it."""
    model = trained_model(0, max_position_embeddings=4096)
    model.config.sliding_window = 512
    assert model_context(model.config) == 512
    assert engine_of(model, monkeypatch).config.context == 512


def test_room_for_known_prompts_is_no_more_than_they_need(checkpoint: Path):
    """Guards a cache for the whole of a long context, where it is known what comes."""
    assert with_room(CPU, checkpoint, 100).max_context == 100
    own = with_room(CPU, checkpoint, 10**9).max_context
    assert own == model_context(load_engine(checkpoint, CPU)[0].model.config)
    named = CPU.model_copy(update={"max_context": 64})
    assert with_room(named, checkpoint, 100) == named


def test_a_share_of_memory_is_looked_at_once(monkeypatch):
    """There is less of it once the model's buffers are made. Guards a start that failed by that."""
    torch.manual_seed(0)
    model = trained_model(0, max_position_embeddings=1 << 20)
    free = iter([1e6, 0.9e6, 0.8e6])
    monkeypatch.setattr(kv_cache, "free_on_node", lambda: next(free))
    engine = Engine(model, CARD, CPU.model_copy(update={"cache_memory_share": 0.5}))
    assert engine.pool.count * page_bytes(model.config, 16, torch.float32) <= 0.5e6
    assert engine.pool.count * 16 >= engine.config.context
