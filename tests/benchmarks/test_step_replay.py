"""What the step replay counts, on a tiny model. No times are judged here."""

import json

import numpy as np
import pytest
import step_replay
import torch
from decode.models import CARD, SHAPE, pattern, request
from step_replay import Run, Step
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_ray.autoscale.service_model import Level, ServiceModel
from mars_ray.config.decode import EngineConfig
from mars_ray.config.modes import ExactMode, VerifiedMode
from mars_ray.core.step_cost import StepCost
from mars_ray.decode.drafts import DraftControl
from mars_ray.decode.engine import Engine
from mars_ray.simulator.engine.run import EXACT


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(0)
    size = EngineConfig(max_batch=3, max_context=64, max_step_tokens=32, prefix_cache=False)
    return Engine(Qwen2ForCausalLM(Qwen2Config(**SHAPE)), CARD, size)


def _requests(mode, count: int = 5, prompt: int = 20):
    return [
        request(str(i), pattern(i, 1, prompt + i), mode, max_new_tokens=6, stop=-1)
        for i in range(count)
    ]


@pytest.mark.parametrize("mode", [ExactMode(), VerifiedMode()], ids=lambda mode: mode.type)
def test_batches_are_repeated(engine: Engine, mode):
    """Guards a noise that is in truth two different batches: arrivals are by the clock in the first
    run only, and what a step is seen to cost changes the drafts of later ones."""
    cost, runs = StepCost({1: 1.0, 8: 2.0, 64: 9.0}), []
    for _ in range(2):
        engine.control = DraftControl(step_replay.Unlearned(cost), CARD.block_size, 28)
        joined = runs[0].joined_N if runs else None
        runs.append(step_replay.record(engine, _requests(mode), np.arange(5) / 1000, joined))
    counts = [[(s.rows, s.sequences, s.context_tokens, s.tokens) for s in r.steps] for r in runs]
    assert counts[0] == counts[1]
    assert runs[0].joined_N == runs[1].joined_N
    assert runs[0].last_N == runs[1].last_N


def test_a_step_is_what_the_engine_did(engine: Engine):
    """Every row, cached token and pair: of a prompt of 20 in one step, then of five tokens."""
    engine.control = None
    run = step_replay.record(engine, _requests(ExactMode(), count=1), np.zeros(1))
    counts = [
        (s.rows, s.prompt_rows, s.sequences, s.context_tokens, s.longest_context, s.prompt_pairs)
        for s in run.steps
    ]
    assert counts == [(20, 20, 0, 0, 0, 190), *((1, 0, 1, n, n, 0) for n in range(20, 25))]
    assert (run.joined_N, run.first_N, run.last_N, run.tokens_N) == ([0], [0], [5], [6])


def test_pairs_of_a_chunk_are_those_with_all_before_it(engine: Engine):
    """A prompt of 40 in steps of 32 rows: 40 * 39 / 2 pairs, however it is cut."""
    engine.control = None
    run = step_replay.record(engine, _requests(ExactMode(), 1, prompt=40), np.zeros(1))
    assert [step.prompt_rows for step in run.steps[:2]] == [32, 8]
    assert [step.prompt_pairs for step in run.steps[:2]] == [496, 40 * 39 // 2 - 496]


def _run() -> Run:
    """Two requests: one joins before the first step, the other before the second."""
    steps = [
        Step(0.0, 2.0, 20, 0, 0, 20, 0, 0, 190, 1),
        Step(2.0, 4.0, 11, 1, 1, 10, 20, 20, 45, 2),
        Step(6.0, 1.0, 2, 2, 2, 0, 31, 21, 0, 2),
    ]
    return Run(steps, joined_N=[0, 1], first_N=[0, 1], last_N=[2, 2], tokens_N=[3, 2])


def test_latencies_are_sums_of_steps():
    """By hand: (2) and (4) to the first token, then (4 + 1) / 2 and 1 a token."""
    first, pace = step_replay.latencies(_run(), np.array([2.0, 4.0, 1.0]))
    assert (first.tolist(), pace.tolist()) == ([2.0, 4.0], [2.5, 1.0])
    first, pace = step_replay.live(_run(), np.array([0.0, 1.0]))
    assert (first.tolist(), pace.tolist()) == ([2.0, 5.0], [2.5, 1.0])


def test_a_step_costs_its_rows_and_what_they_attend_to():
    """By hand: 1 + 20 / 100 s of rows, 0.01 s a cached token, 0.001 s a pair."""
    model = ServiceModel(
        "by hand",
        ((1, 1.01), (101, 2.01)),
        (Level(1.0, 0.0, ()),),
        4,
        cache_token_s=0.01,
        prompt_attention_s=0.001,
    )
    wanted = [1.2 + 0.19, 1.11 + 0.2 + 0.045, 1.02 + 0.31]
    assert step_replay.predicted(model, _run()) == pytest.approx(wanted)


def test_errors_are_relative_to_what_was_measured():
    found = step_replay.errors(np.array([1.0, 3.0]), np.array([2.0, 2.0]))
    assert found == {"steps": 2, "median": 0.5, "p90": 0.5, "bias": 0.0}


def test_the_simulated_run_of_one_request_is_its_steps():
    """One request alone: a step of its prompt, then one for each token."""
    model = ServiceModel("by hand", ((1, 1.01), (101, 2.01)), EXACT, 4, step_rows=64)
    run = Run([], [0], [0], [5], [6])
    first, pace = step_replay.whole(model, EXACT, run, np.zeros(1), [20])
    assert (first.tolist(), pace.tolist()) == (pytest.approx([1.2]), pytest.approx([1.01]))


@pytest.mark.parametrize("mode", [ExactMode(), VerifiedMode()], ids=lambda mode: mode.type)
def test_from_requests_to_tables(engine: Engine, mode, monkeypatch: pytest.MonkeyPatch):
    """Every part in its place: measured at the start, run, predicted, simulated."""
    monkeypatch.setattr(step_replay, "NEW_TOKENS", 6)
    engine.warm_up()
    prompts = [tuple(pattern(i, 1, 20 + i)) for i in range(5)]
    work = step_replay.Workload(np.arange(5) / 1000, prompts)
    levels = step_replay.verified_levels(CARD.block_size) if mode.has_masks else EXACT
    found = json.loads(json.dumps(step_replay.held(engine, mode, work, levels)))
    assert len(found["steps"]) == found["noise"]["steps"] > 6
    assert len(found["steps"][0]) == len(found["columns"])
    assert sum(row["steps"] for row in found["by_rows"]) == len(found["steps"])
