"""Speeds in turn: what is counted, and when the rounds tell no ratio."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from mars_ray.adapt import speed as speeds
from mars_ray.adapt.report import Speed
from mars_ray.adapt.speed import measure_speeds
from mars_ray.config.adapt import MeasureConfig
from mars_ray.config.decode import EngineConfig
from mars_ray.config.train import DraftAdapterConfig
from mars_ray.decode.request import Completion
from mars_ray.evaluate.tasks import Problem
from mars_ray.model.draft_adapter import write_draft_adapter
from mars_ray.train.draft_adapter import untrained_adapter

QUIET = Console(quiet=True)
ENGINE = EngineConfig(max_batch=4, max_context=128, threads=1, dtype="float32")
CONFIG = MeasureConfig(
    batch_sizes=(1, 2), speed_prompts=4, rounds=3, max_new_tokens=8, engine=ENGINE
)


@pytest.fixture(scope="module")
def adapter(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speed") / "adapter"
    shape = DraftAdapterConfig(rank=4, head_size=32, candidates=16)
    write_draft_adapter(directory, untrained_adapter(talker, shape, 4))
    return directory


def problems(count: int) -> list[Problem]:
    texts = [f"How many are {n} and {n + 1}?" for n in range(count)]
    return [Problem(text, None) for text in texts]


def measured(talker: Path, adapter: Path, **changes: Any) -> list[Speed]:
    """By a clock on which every batch takes a second, whoever answers it."""
    seconds = itertools.count()
    more = {"one_text": True} | changes
    return measure_speeds(
        talker, adapter, problems(4), CONFIG, QUIET, clock=lambda: next(seconds), **more
    )


def test_the_same_text_is_counted_in_turn(talker, adapter):
    """Of every size three rounds; in equal time the same text is the same speed, and the speed is
    that of all batches."""
    one, two = measured(talker, adapter)
    assert (one.batch, two.batch) == (1, 2)
    for speed in (one, two):
        assert speed.exact == speed.drafts
        assert speed.ratios == [1.0, 1.0, 1.0]
        assert (speed.same, speed.fault) == (1, None)
        assert speed.tokens_per_forward >= 1
    # Four batches of one, or two of two, of four answers.
    assert two.exact == [2 * rate for rate in one.exact]
    assert "one at a time: exact" in one.line
    assert "1.00 (1.00 to 1.00) times exact in 3 rounds" in one.line
    assert two.line.startswith("2 at once: ")


def test_both_modes_answer_a_batch_before_the_next(talker, adapter, monkeypatch):
    """Guards a drift of the machine that only one of them has."""
    asked: list[tuple[str, tuple[int, ...]]] = []
    generate_all = speeds.generate_all

    def noting(engine: Any, requests: Any) -> list[Completion]:
        asked.append((requests[0].mode.type, requests[0].prompt))
        return generate_all(engine, requests)

    monkeypatch.setattr(speeds, "generate_all", noting)
    measured(talker, adapter)
    assert len(asked) == 2 + 3 * 2 * (4 + 2)
    assert [mode for mode, _ in asked] == ["exact", "verified"] * (len(asked) // 2)
    assert all(a[1] == b[1] for a, b in zip(asked[::2], asked[1::2], strict=True))


def test_another_text_is_a_fault_where_one_is_asked_for(talker, adapter, monkeypatch):
    """Guards a ratio between the speeds of two texts; in bfloat16 an adaptation says how many."""
    generate_all = speeds.generate_all

    def shorter(engine: Any, requests: Any) -> list[Completion]:
        if requests[0].mode.type == "verified":
            requests = [replace(request, max_new_tokens=2) for request in requests]
        return generate_all(engine, requests)

    monkeypatch.setattr(speeds, "generate_all", shorter)
    one = measured(talker, adapter)[0]
    assert one.same < 1
    assert one.fault is not None
    assert "of the answers differ from exact's" in one.fault
    assert one.line == f"one at a time: not measured: {one.fault}"
    one = measured(talker, adapter, one_text=False)[0]
    assert one.fault is None
    assert f"{one.same:.1%} of the answers the same" in one.line


def test_no_speeds_with_masks_that_do_not_pay(talker, adapter):
    """Guards tokens a second of forced masks beside those of `exact`."""
    forced = ENGINE.model_copy(update={"window_control": False})
    with pytest.raises(ValidationError, match="window_control = false forces masks"):
        MeasureConfig(engine=forced)
    config = MeasureConfig(engine=forced, batch_sizes=())
    assert measure_speeds(talker, adapter, problems(1), config, QUIET) == []
