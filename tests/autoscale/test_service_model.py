"""The service model: hand-worked numbers, its physics, its file, and what it is built from."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_models import data_sheet_steps, measured_steps, spread_of
from simulator.simulated import run, trace

from mars_ray.autoscale.service_model import (
    Level,
    Mix,
    ServiceModel,
    Shape,
    acceptance_rate,
    confidence_level,
    expected,
    levels_of,
    load_service_model,
    verified_level,
)
from mars_ray.core.frontier import Frontier
from mars_ray.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LEVELS = (
    Level(1.0, 0.0, (Shape(1, 3.0, 1.5),)),
    Level(0.5, 1.0, (Shape(1, 3.0, 2.0),)),
)
# 4 ms up to 100 rows, then 40 us each.
MODEL = ServiceModel("toy", ((1, 0.004), (100, 0.004), (1000, 0.04)), LEVELS, 200, step_rows=1000)
NO_PROMPTS = Mix(0, 100)


def test_hand_worked_capacity():
    """10 sequences of 3 rows are 30 rows, 4 ms, and commit 15 or 20 tokens."""
    strict, loose = (MODEL.at(level, 10, NO_PROMPTS) for level in LEVELS)
    assert strict.tokens_per_s == pytest.approx(15 / 0.004)
    assert loose.tokens_per_s == pytest.approx(20 / 0.004)
    assert loose.requests_per_s == pytest.approx(loose.tokens_per_s / 100)
    assert strict.time_per_token_s == pytest.approx(0.004 / 1.5)


def test_prompts_fill_steps():
    """A step completes 10 * 2 / 100 requests of 970 prompt tokens: a fifth of the steps is full."""
    operating = MODEL.at(LEVELS[1], 10, Mix(970, 100))
    assert operating.step_s == pytest.approx(0.8 * 0.004 + 0.2 * 0.04)


def test_short_prompts_share_steps_by_chance():
    """0.2 prompts of 100 tokens a step: 18% of the steps have any, and 110 rows of them."""
    operating = MODEL.at(LEVELS[1], 10, Mix(100, 100))
    some = 1 - math.exp(-0.2)
    longer = 0.004 + (30 + 20 / some - 100) * 4e-5
    assert operating.step_s == pytest.approx((1 - some) * 0.004 + some * longer)


@pytest.mark.parametrize(("prompt", "output"), [(20, 60), (100, 50), (100, 200), (600, 60)])
def test_a_busy_replica_carries_what_the_model_says(prompt, output):
    """Against the simulator, which makes every step: within 5%, whatever the prompts."""
    model = replace(MODEL, levels=(Level(1.0, 0.0, ()),), max_batch=40)
    outputs = np.random.default_rng(0).geometric(1 / output, 3000)
    given = trace(*((0.0, prompt, int(tokens)) for tokens in outputs))
    done = run(given, model=model, step_tokens=1000, waiting_requests=5000)
    # Without the last ones, who have the replica to themselves.
    end_s = np.sort(done.requests["end_s"])[2700]
    said = model.at(model.levels[0], 40, Mix(prompt, float(outputs.mean()))).requests_per_s
    assert 2700 / end_s == pytest.approx(said, rel=0.05)


def test_where_prompts_are_all_there_is_no_level_helps():
    """(1000 - 30) rows of prompts a step of 40 ms are 1 / 0.04 requests of 970 tokens."""
    for level in LEVELS:
        assert MODEL.at(level, 10, Mix(970, 1)).requests_per_s <= 1000 / 970 / 0.04


@given(st.integers(1, 200), st.floats(0, 5000), st.floats(1, 2000))
def test_a_lower_threshold_never_carries_less(batch, prompt, output):
    """And where every row costs, it carries no more than plain decoding does."""
    mix = Mix(prompt, output)
    strict, loose = (MODEL.at(level, batch, mix).tokens_per_s for level in LEVELS)
    plain = MODEL.at(Level(1.0, 0.0, ()), batch, mix).tokens_per_s
    assert plain <= strict * (1 + 1e-9)
    assert strict <= loose * (1 + 1e-9)
    by_row = ServiceModel("rows", ((1, 0.001), (1000, 1.0)), LEVELS, 200, step_rows=1000)
    best = by_row.at(LEVELS[1], batch, mix)
    assert best.shape.tokens_per_forward == 1


@given(st.floats(0.001, 0.1), st.floats(0, 2000))
def test_the_largest_batch_is_the_largest(limit_s, prompt):
    """One more would break the time per token, or does not fit."""
    mix = Mix(prompt, 200)
    batch = MODEL.largest_batch(LEVELS[0], mix, limit_s)
    if batch:
        assert MODEL.at(LEVELS[0], batch, mix).time_per_token_s <= limit_s
    if batch < MODEL.max_batch:
        assert MODEL.at(LEVELS[0], batch + 1, mix).time_per_token_s > limit_s


def test_the_cache_bounds_the_batch():
    """1,000 tokens hold 10 sequences of 100 tokens, half of which are there in the mean."""
    small = ServiceModel("small", MODEL.seconds_at, LEVELS, 200, cache_tokens=1000)
    assert small.most_sequences(Mix(50, 100)) == 10


def test_the_file_round_trips_and_a_bad_one_is_refused(tmp_path):
    """Every committed model loads; nonsense is named."""
    MODEL.save(tmp_path / "model.json")
    assert load_service_model(tmp_path / "model.json") == MODEL
    for path in (RESULTS.parents[1] / "jobs" / "models").glob("*.json"):
        assert load_service_model(path).levels[0].threshold == 1
    (tmp_path / "bad.json").write_text('{"name": "x"}')
    with pytest.raises(ConfigError, match="no service model"):
        load_service_model(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_service_model(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="thresholds must fall"):
        ServiceModel("x", MODEL.seconds_at, (LEVELS[0], LEVELS[0]), 1)
    with pytest.raises(ConfigError, match="tokens_per_forward <= positions"):
        ServiceModel("x", MODEL.seconds_at, (Level(1.0, 0.0, (Shape(1, 1.0, 2.0),)),), 1)


def test_live_gain_scales_what_masks_bring():
    """Half the gain of 1.5 is 1.25, and no more tokens than rows."""
    assert LEVELS[0].with_gain(0.5).shapes[0].tokens_per_forward == 1.25
    assert LEVELS[1].with_gain(9.0).shapes[0].tokens_per_forward == 3.0
    assert LEVELS[0].tokens_per_forward(2.0) == pytest.approx(1.25)


def test_data_sheet_steps_are_the_formula():
    """max(a, b n) + c at points off the table too."""
    model = ServiceModel("sheet", data_sheet_steps(0.004, 0.00004, 0.001), LEVELS, 4)
    for rows in (1, 50, 100, 500, 3000):
        assert model.step_s(rows) == pytest.approx(max(0.004, 0.00004 * rows) + 0.001)


def test_the_one_rate_gives_the_frontier_back():
    """The rate that a T/F is read back to has that T/F at the evaluated window."""
    rate = acceptance_rate("verified", 1.8, 4)
    assert expected(4, 1, [rate] * 4)[0] == pytest.approx(1.8)
    rate = acceptance_rate("confidence", 1.8, 4)
    level = confidence_level(0.9, 1.0, [rate] * 4)
    assert level.tokens_per_forward(5.0) == pytest.approx(1.8)
    assert verified_level(1.0, 0.0, [0.0] * 4).shapes == ()


@pytest.mark.parametrize(("groups", "used"), [(None, 1), (2, 2), (99, 5)])
def test_a_point_with_groups_is_read_with_them(groups, used):
    """Guards a service that counts on an eighth more than was measured: what several groups gave
    is not what one would have to give."""
    rates = [0.7] * 4
    measured = expected(4, used, rates)[0]
    exact, point = Frontier.from_json((RESULTS / "demo.json").read_text()).points[:2]
    mode = {"type": "verified", "threshold": 1.0, "window": 4, "groups": groups}
    point = replace(point, mode=mode, tokens=round(1e6 * measured), forwards=10**6)
    (level,) = levels_of(Frontier("m", {}, (exact, point), {}), "verified", 4)
    most = max(shape.tokens_per_forward for shape in level.shapes)
    assert most == pytest.approx(1 + sum(0.7**n for n in range(1, 5)), rel=1e-4)


def test_levels_of_the_committed_frontier():
    """Lossless first, loss rising, and `confidence` begins with plain decoding."""
    frontier = Frontier.from_json((RESULTS / "demo.json").read_text())
    verified = levels_of(frontier, "verified", 8)
    assert [level.threshold for level in verified] == [1.0, 0.5, 0.1]
    confidence = levels_of(frontier, "confidence", 8)
    assert confidence[0] == Level(1.0, 0.0, ())
    lost = [level.points_lost for level in confidence]
    assert lost == sorted(lost)
    assert lost[-1] > 30


def test_what_is_lost_where_nothing_was_graded():
    """Guards a budget of quality that is spent by one early difference in each answer: all of them
    differ from those of `exact`, and one token in twenty is not the model's own."""
    exact, *_ = Frontier.from_json((RESULTS / "demo.json").read_text()).points
    mode = {"type": "confidence", "threshold": 0.8, "measure": "probability"}
    point = replace(exact, mode=mode, difference=-1.0, agreement=0.95, forwards=exact.tokens // 2)
    plain, lower = levels_of(Frontier("m", {}, (exact, point), {}), "confidence", 4)
    assert (plain.points_lost, lower.points_lost) == (0, pytest.approx(5))
    # With reference answers their share counts.
    graded = replace(point, difference=-0.02, graded=40)
    _, lower = levels_of(Frontier("m", {}, (exact, graded), {}), "confidence", 4)
    assert lower.points_lost == pytest.approx(2)


@pytest.mark.parametrize("mode", ["verified", "confidence"])
def test_a_threshold_with_several_windows_is_one_level(mode):
    """Guards a service that refuses a checkpoint evaluated with two windows; the whole depth
    counts, however fast another window is, and in either order."""
    frontier = Frontier.from_json((RESULTS / "demo.json").read_text())
    narrow = [
        replace(point, mode=point.mode | {"window": 4}, forwards=point.forwards // 2)
        for point in frontier.points
        if point.mode["type"] == mode
    ]
    for points in ((*narrow, *frontier.points), (*frontier.points, *narrow)):
        assert levels_of(replace(frontier, points=points), mode, 8) == levels_of(frontier, mode, 8)
    plain, *rest = (point for point in frontier.points if point.mode["type"] != mode)
    only_narrow = levels_of(replace(frontier, points=(plain, *rest, *narrow)), mode, 8)
    assert len(only_narrow) == len(levels_of(frontier, mode, 8))


def test_a_point_without_masks_tells_nothing_of_them():
    """Guards a service that counts on masks for what n-gram lookup alone has given."""
    frontier = Frontier.from_json((RESULTS / "demo.json").read_text())
    plain, point = frontier.points[:2]
    alone = replace(point, mode=point.mode | {"window": 0}, forwards=point.forwards // 2)
    both = replace(frontier, points=(plain, point, alone))
    assert levels_of(both, "verified", 8)[0] == levels_of(frontier, "verified", 8)[0]
    with pytest.raises(ConfigError, match="no point verified 1"):
        levels_of(replace(frontier, points=(plain, alone)), "verified", 8)


def test_steps_of_the_committed_benchmarks():
    """Step measurements if there are any, else the decoders' own mean steps; else an error."""
    result = json.loads((RESULTS / "decode_0_5b.json").read_text())
    largest = max(result["steps"], key=lambda step: step["batch"] * step["positions"])
    rows = largest["batch"] * largest["positions"]
    assert measured_steps(result)[-1] == (rows, pytest.approx(largest["seconds"]))
    rows = [n for n, _ in measured_steps(json.loads((RESULTS / "decode_demo.json").read_text()))]
    assert len(rows) > 10
    with pytest.raises(ConfigError, match="step_positions"):
        measured_steps({"steps": [], "cases": []})


def test_the_spread_keeps_tokens_per_forward():
    """Half of the tokens at 1.5 a forward, half at 3: of 2 in the mean masks bring 0.5 and 2 times
    as much. A reply of three tokens says nothing."""
    quantiles = spread_of([300, 300, 3], [200, 100, 1])
    assert quantiles == (*[0.5] * 10, *[2.0] * 10)
    assert 1 / np.mean([1 / (1 + gain) for gain in quantiles]) == pytest.approx(2)


def test_assumed_models_are_named_so():
    """Who reads a table knows which numbers nobody has measured."""
    models = RESULTS.parents[1] / "jobs" / "models"
    for name in ("7b-paper", "7b-verified"):
        model = load_service_model(models / f"{name}.json")
        assert model.name.startswith("7B assumed")
        # Attention of a 10,000-token prompt is a sixth of the rest of its rows.
        rows_s = 10_000 * (model.step_s(1600) - model.step_s(600)) / 1000
        assert model.prompt_attention_s * 10_000**2 / 2 == pytest.approx(0.13 * rows_s, rel=0.05)
        assert 1 / np.mean([1 / (1 + 0.8 * g) for g in model.spread]) == pytest.approx(
            1.8, rel=0.01
        )


def test_long_prompts_cost_their_attention():
    """A prompt of P rows has P * P / 2 pairs: at 1 us 970 tokens take 0.47 s more a request."""
    dear = replace(MODEL, prompt_attention_s=1e-6)
    mix = Mix(970, 100)
    cheap_s, dear_s = (1 / m.at(LEVELS[1], 10, mix).requests_per_s for m in (MODEL, dear))
    assert dear_s - cheap_s == pytest.approx(1e-6 * 970**2 / 2)
