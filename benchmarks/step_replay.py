"""How well does the simulator know what the engine's steps cost?

    OMP_NUM_THREADS=1 python benchmarks/step_replay.py OUTPUT.json [KEY=VALUE ...]

The engine decodes SmolLM2 in `exact`, and with its draft adapter in `verified`. Requests arrive as
in a piece of Azure's code trace, slowed down so that the batch varies, with prompts of an eighth of
the trace's lengths, made of the texts of jobs/evaluate-smollm2.toml. Every step is recorded, and
predicted from its rows and context with the costs that the engine measured at its start.

The same batches are run again: requests then join at the same steps, not at the same times. By how
much two runs of one batch differ is the machine's noise, which no prediction can undercut; so the
mean of the runs is what predictions are held to. Then the same arrivals, without the batches, go
through the simulator.

Time is the processor time of the engine's one thread: other work on the machine counts only as far
as it takes caches and memory away. While there is no request, the clock is set to the next arrival.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mars_ray.autoscale.service_model import Level, ServiceModel, acceptance_rate, verified_level
from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.load import load_job
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.core.step_cost import StepCost
from mars_ray.data.chat import encode_prompt
from mars_ray.data.sources import Message
from mars_ray.decode.drafts import DraftControl
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.decode.scheduler import decoding_rows
from mars_ray.evaluate.tasks import kinds_in_turn, problems_of
from mars_ray.model.load import stop_ids
from mars_ray.provenance import provenance
from mars_ray.simulator.cases import Fixed
from mars_ray.simulator.config import AzureTrace, Cluster
from mars_ray.simulator.engine.run import EXACT, Fixture, simulate
from mars_ray.simulator.traces.load import load_trace
from mars_ray.simulator.traces.trace import Trace

ROOT = Path(__file__).parents[1]
JOB = "jobs/evaluate-smollm2.toml"
TRACE = "../shared/data/trace_azure_llm_2023/AzureLLMInferenceTrace_code.csv"
# The piece of the trace, and how many times slower it comes.
START_S, DURATION_S, SLOWER = 600.0, 10.0, 4.0
SHORTER = 8  # prompts
NEW_TOKENS = 96
RUNS = 3
# Has the tokens per forward of `verified` with one group, on the texts of the same job.
IDENTITY = ROOT / "benchmarks" / "results" / "smollm2_identity.json"
MODES: dict[str, Mode] = {"exact": ExactMode(), "verified": VerifiedMode()}
Floats = NDArray[np.float64]


class Clock:
    """Processor time of this process since the beginning, with what was skipped."""

    def __init__(self) -> None:
        self._begin_s = time.process_time()

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.process_time() - self._begin_s

    def skip_to(self, at_s: float) -> None:
        """Let it be so late."""
        self._begin_s -= max(0.0, at_s - self.now())


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine counted in one step, and what it took."""

    at_s: float
    seconds: float
    rows: int
    sequences: int  # that decode
    decode_rows: int
    prompt_rows: int
    context_tokens: int
    longest_context: int  # of a sequence that decodes
    prompt_pairs: int
    tokens: int


@dataclass(slots=True)
class Run:
    """One run over N requests. Steps are counted from 0, and so are the arrays' entries."""

    steps: list[Step]
    joined_N: list[int]  # the step before which a request was submitted
    first_N: list[int]  # the step of its first token
    last_N: list[int]
    tokens_N: list[int]  # of its answer
    decoding: set[int] = field(default_factory=set)  # requests with a first token and no last

    @property
    def seconds(self) -> Floats:
        """Seconds of each step."""
        return np.array([step.seconds for step in self.steps])


class Unlearned(StepCost):
    """Costs as measured at the start. No step corrects them, so that batches can be repeated."""

    def __init__(self, cost: StepCost) -> None:
        self.__dict__.update(vars(cost))

    def observe(self, *step: Any, **counts: Any) -> None:
        """Learn nothing."""


def record(
    engine: Engine,
    requests: list[Request],
    arrival_s: Floats,
    joined_N: list[int] | None = None,
) -> Run:
    """Run all requests, which join as they arrive, or before the steps of an earlier run."""
    count = len(requests)
    run = Run([], [], [-1] * count, [-1] * count, [0] * count)
    clock = Clock()
    while len(run.joined_N) < len(requests) or engine.has_work:
        if not engine.has_work and not joined_N:
            clock.skip_to(arrival_s[len(run.joined_N)])
        now_s, number = clock.now(), len(run.steps)
        while (index := len(run.joined_N)) < len(requests) and (
            joined_N[index] <= number if joined_N else arrival_s[index] <= now_s
        ):
            engine.submit(requests[index])
            run.joined_N.append(number)
        _step(engine, requests, run, clock)
    return run


def _step(engine: Engine, requests: list[Request], run: Run, clock: Clock) -> None:
    """Make one step and add it to the run."""
    number, before = len(run.steps), replace(engine.totals)
    contexts = [len(requests[index].prompt) + run.tokens_N[index] - 1 for index in run.decoding]
    begin_s = clock.now()
    events = engine.step()
    seconds, after = clock.now() - begin_s, engine.totals
    for event in events:
        index = int(event.request_id)
        if run.first_N[index] < 0:
            run.first_N[index] = number
        run.last_N[index] = number
        run.tokens_N[index] += len(event.tokens)
        run.decoding.add(index)
        if event.completion:
            run.decoding.remove(index)
    run.steps.append(
        Step(
            at_s=begin_s,
            seconds=seconds,
            rows=engine.last_rows,
            sequences=after.sequences - before.sequences,
            decode_rows=after.decode_rows - before.decode_rows,
            prompt_rows=after.prompt_rows - before.prompt_rows,
            context_tokens=after.context_tokens - before.context_tokens,
            longest_context=max(contexts, default=0),
            prompt_pairs=after.prompt_pairs - before.prompt_pairs,
            tokens=sum(len(event.tokens) for event in events),
        )
    )


def prompts_like(
    lengths: list[int], texts: Iterator[str], tokenizer: PreTrainedTokenizerBase, most: int
) -> list[tuple[int, ...]]:
    """Prompts of about these lengths in tokens: questions, one behind another in a message."""
    prompts = []
    for length in lengths:
        message = next(texts)
        prompt = encode_prompt([Message("user", message)], tokenizer)
        while len(prompt) < length:
            message += "\n\n" + next(texts)
            prompt = encode_prompt([Message("user", message)], tokenizer)
        prompts.append(tuple(prompt[-most:]))
    return prompts


def service_model(engine: Engine, cost: StepCost, levels: tuple[Level, ...]) -> ServiceModel:
    """What the simulator knows of this engine."""
    size = engine.config.max_batch
    return ServiceModel(
        "SmolLM2-135M with its adapter, one CPU core",
        tuple(cost.table(size).items()),
        levels,
        max_batch=size,
        step_rows=engine.step_tokens,
        cache_token_s=cost.cache_token_s,
        prompt_attention_s=cost.prompt_attention_s,
    )


def predicted(model: ServiceModel, run: Run) -> Floats:
    """Seconds of each step, by its rows and what they attend to."""
    return np.array(
        [model.step_s(step.rows, step.context_tokens, step.prompt_pairs) for step in run.steps]
    )


def errors(predicted_s: Floats, measured_s: Floats) -> dict[str, float]:
    """Of single steps: errors relative to the measured seconds; and of their sum, the bias."""
    off = np.abs(predicted_s / measured_s - 1)
    return {
        "steps": len(off),
        "median": float(np.median(off)),
        "p90": float(np.quantile(off, 0.9)),
        "bias": float(predicted_s.sum() / measured_s.sum() - 1),
    }


def by_rows(run: Run, predicted_s: Floats, measured_s: Floats) -> list[dict[str, Any]]:
    """Errors of steps with and without prompts, by rows up to each power of two."""
    rows = np.array([step.rows for step in run.steps])
    prompts = np.array([step.prompt_rows > 0 for step in run.steps])
    size = np.ceil(np.log2(rows)).astype(int)
    found = []
    for kind, name in ((False, "decoding"), (True, "with prompts")):
        for exponent in np.unique(size[prompts == kind]).tolist():
            here = (size == exponent) & (prompts == kind)
            own = errors(predicted_s[here], measured_s[here])
            share = float(measured_s[here].sum() / measured_s.sum())
            found.append({"steps_of": name, "rows": 2**exponent, "share": share} | own)
    return found


def latencies(run: Run, seconds: Floats) -> tuple[Floats, Floats]:
    """Seconds of each request from joining to its first token, and by token after it."""
    after = np.concatenate([[0.0], np.cumsum(seconds)])
    joined, first, last, tokens = map(
        np.array, (run.joined_N, run.first_N, run.last_N, run.tokens_N)
    )
    several = tokens > 1
    pace = (after[last + 1] - after[first + 1])[several] / (tokens - 1)[several]
    return after[first + 1] - after[joined], pace


def quantile_errors(
    predicted: tuple[Floats, Floats], measured: tuple[Floats, Floats]
) -> dict[str, dict[str, float]]:
    """Errors of quantiles of first tokens and of times per token."""
    found = {}
    for name, ours, theirs in zip(
        ("first_token", "time_per_token"), predicted, measured, strict=True
    ):
        for q in (0.5, 0.9):
            ours_s, theirs_s = float(np.quantile(ours, q)), float(np.quantile(theirs, q))
            found[f"{name}_p{100 * q:.0f}"] = {
                "predicted_s": ours_s,
                "measured_s": theirs_s,
                "error": ours_s / theirs_s - 1,
            }
    return found


def whole(
    model: ServiceModel, levels: tuple[Level, ...], run: Run, arrival_s: Floats, prompts: list[int]
) -> tuple[Floats, Floats]:
    """First tokens and times per token of the same arrivals in the simulator. It is given the
    lengths of the answers, but neither batches nor steps."""
    tokens = np.array(run.tokens_N)
    outcome = simulate(
        Fixture(
            Trace("live", arrival_s, np.array(prompts), tokens),
            model,
            Cluster(step_tokens=model.step_rows),
            levels,
            set_point=1.0,
            replicas=1,
            most=1,
            seed=0,
        ),
        Fixed(1),
    )
    requests, several = outcome.requests, tokens > 1
    pace = (requests["end_s"] - requests["first_s"])[several] / (tokens - 1)[several]
    return outcome.ttft_s, pace


def live(run: Run, arrival_s: Floats) -> tuple[Floats, Floats]:
    """First tokens, from the arrival on, and times per token of the run that had a clock."""
    end_s = np.array([step.at_s + step.seconds for step in run.steps])
    first, last, tokens = map(np.array, (run.first_N, run.last_N, run.tokens_N))
    several = tokens > 1
    pace = (end_s[last] - end_s[first])[several] / (tokens - 1)[several]
    return end_s[first] - arrival_s, pace


@dataclass(frozen=True, slots=True)
class Workload:
    """N requests: when they arrive, and what they say."""

    arrival_s: Floats
    prompts: list[tuple[int, ...]]

    def requests(self, mode: Mode, stops: frozenset[int]) -> list[Request]:
        """The requests, to be answered in this mode."""
        return [
            Request(str(index), prompt, mode, Sampling(), NEW_TOKENS, stops)
            for index, prompt in enumerate(self.prompts)
        ]


def workload(job: EvaluateJob, tokenizer: PreTrainedTokenizerBase, most: int) -> Workload:
    """The arrivals of the piece of the trace, with prompts of at most so many tokens."""
    source = AzureTrace(path=str(ROOT / TRACE), start_s=START_S, duration_s=DURATION_S)
    trace = load_trace(source, seed=0)
    problems = kinds_in_turn(problems_of(job.task))
    texts = cycle([problem.messages[0].content for problem in problems])
    lengths = (trace.prompt_tokens // SHORTER).tolist()
    return Workload(trace.arrival_s * SLOWER, prompts_like(lengths, texts, tokenizer, most))


def held(engine: Engine, mode: Mode, work: Workload, levels: tuple[Level, ...]) -> dict[str, Any]:
    """Run one mode several times, and hold the predictions to it."""
    assert engine.control, "engine.window_control has costs measured"
    cost, stops = engine.control.cost, frozenset(stop_ids(engine.model))
    depth, rows = max(1, engine.card.block_size), decoding_rows(engine.step_tokens)
    runs: list[Run] = []
    for _ in range(RUNS):
        engine.control = DraftControl(Unlearned(cost), depth, rows)
        joined = runs[0].joined_N if runs else None
        runs.append(record(engine, work.requests(mode, stops), work.arrival_s, joined))
        print(
            mode.type, len(runs[-1].steps), "steps,", f"{sum(runs[-1].seconds):.1f} s", flush=True
        )
    first = runs[0]
    assert all(run.tokens_N == first.tokens_N for run in runs), "the runs differ"
    seconds = np.array([run.seconds for run in runs])
    mean_s, model = seconds.mean(0), service_model(engine, cost, levels)
    ours_s = predicted(model, first)
    prompts = [len(prompt) for prompt in work.prompts]
    return {
        "cost": {name.removeprefix("_"): value for name, value in vars(cost).items()},
        "tokens_per_forward": _tokens_per_forward(first),
        "one_run": errors(ours_s, first.seconds),
        "mean_of_runs": errors(ours_s, mean_s),
        "noise": errors(seconds[1], seconds[2]),
        "by_rows": by_rows(first, ours_s, mean_s),
        "replayed": quantile_errors(latencies(first, ours_s), latencies(first, mean_s)),
        "whole": quantile_errors(
            whole(model, levels, first, work.arrival_s, prompts), live(first, work.arrival_s)
        ),
        "columns": [*Step.__dataclass_fields__, "mean_s", "predicted_s"],
        "steps": [
            [*astuple(step), mean, ours]
            for step, mean, ours in zip(first.steps, mean_s.tolist(), ours_s.tolist(), strict=True)
        ],
    }


def _tokens_per_forward(run: Run) -> float:
    decoding = [step for step in run.steps if not step.prompt_rows]
    return sum(step.tokens for step in decoding) / sum(step.sequences for step in decoding)


def verified_levels(depth: int) -> tuple[Level, ...]:
    """Lossless `verified` with masks to this depth, as a committed result has it."""
    known = json.loads(IDENTITY.read_text())["tokens_per_forward"]["one_group"]
    rate = acceptance_rate("verified", known, depth)
    return (verified_level(1.0, 0.0, [rate] * depth),)


def main() -> None:
    """Run both modes and write what was found."""
    output = Path(sys.argv[1])
    job = load_job(ROOT / JOB, sys.argv[2:])
    assert isinstance(job, EvaluateJob), "a job of kind evaluate"
    result: dict[str, Any] = {"runs": RUNS, "modes": {}}
    for name, mode in MODES.items():
        changes = {"prefix_cache": False, "threads": 1, "device": "cpu"}
        if not mode.has_masks:
            changes["draft_adapter"] = None
        config = EngineConfig(**job.engine.model_dump() | changes)
        engine, tokenizer = load_engine(job.checkpoint, config)
        engine.warm_up(clock=time.process_time)
        work = workload(job, tokenizer, engine.config.context - NEW_TOKENS)
        levels = verified_levels(engine.card.block_size) if mode.has_masks else EXACT
        result["modes"][name] = held(engine, mode, work, levels)
        result["requests"] = len(work.prompts)
        result["engine"] = asdict(engine.info)
        result["provenance"] = provenance()
        output.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
