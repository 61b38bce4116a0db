"""The sweep: every mode on the same problems, compared with `exact` problem by problem."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from mars_ray.config.decode import ExactMode, Mode, Sampling
from mars_ray.config.evaluate import CorpusTask, EvaluateJob, Gsm8kTask
from mars_ray.core.frontier import FRONTIER_FILE, Frontier, FrontierPoint, mode_label
from mars_ray.core.statistics import paired_difference, wilson_interval
from mars_ray.data.chat import Message, encode_prompt
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import DataError
from mars_ray.evaluate.plots import plot_frontier
from mars_ray.evaluate.tasks.base import Problem, is_correct
from mars_ray.evaluate.tasks.corpus import corpus_problems
from mars_ray.evaluate.tasks.gsm8k import gsm8k_problems
from mars_ray.model.stop import stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

PLOT_FILE = "frontier.png"
ANSWERS_FILE = "answers.jsonl"
_TASKS: dict[type, Callable[[Any], list[Problem]]] = {
    CorpusTask: corpus_problems,
    Gsm8kTask: gsm8k_problems,
}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A frontier and where it was written."""

    frontier: Frontier
    directory: Path

    @property
    def plot(self) -> Path:
        """The picture."""
        return self.directory / PLOT_FILE


@dataclass(frozen=True, slots=True)
class _ModeResult:
    mode: Mode
    completions: list[Completion]
    texts: list[str]
    correct: list[bool]
    seconds: float


def run_evaluation(job: EvaluateJob, console: Console) -> Evaluation:
    """Measure `exact` and every mode of the job; write frontier, plot and answers after each mode,
    so that an interruption loses one mode at most. Where there is a frontier already, it stays
    until the new one is whole. Raises MarsError.
    """
    problems = _TASKS[type(job.task)](job.task)
    if not problems:
        raise DataError("the task has no problems")
    # What a checkpoint's masks are worth is measured with all of them, whatever steps cost here.
    # And every mode computes the prompts: the first one would, for all.
    config = job.engine.model_copy(update={"window_control": False, "prefix_cache": False})
    directory = Path(job.output_dir or job.checkpoint).expanduser()
    modes: list[Mode] = [ExactMode(), *(m for m in job.modes if not isinstance(m, ExactMode))]
    results: list[_ModeResult] = []
    with Bars(console) as bars:
        engine, tokenizer = load_engine(job.checkpoint, config)
        directory.mkdir(parents=True, exist_ok=True)
        # Services read it, and an hour's measurement is not lost to the start of another one.
        is_first = not (directory / FRONTIER_FILE).exists()
        prompts = [
            encode_prompt([Message("user", problem.question)], tokenizer) for problem in problems
        ]
        for mode in modes:
            task = bars.add_task(mode_label(mode.model_dump()), total=len(problems))
            requests = _requests(prompts, mode, job.max_new_tokens, stop_ids(engine.model))
            advance = partial(bars.advance, task)
            results.append(_measure(engine, tokenizer, mode, problems, requests, advance))
            if is_first or len(results) == len(modes):
                _write(directory, _frontier(job, results), problems, results)
    return Evaluation(_frontier(job, results), directory)


def _frontier(job: EvaluateJob, results: list[_ModeResult]) -> Frontier:
    return Frontier(
        checkpoint=Path(job.checkpoint).name,
        task=job.task.model_dump(),
        points=tuple(_point(result, results[0]) for result in results),
        provenance=provenance() | {"job": job.model_dump(mode="json")},
    )


def _requests(
    prompts: Sequence[list[int]],
    mode: Mode,
    max_new_tokens: int,
    stops: frozenset[int],
) -> list[Request]:
    return [
        Request(str(index), tuple(prompt), mode, Sampling(), max_new_tokens, stops)
        for index, prompt in enumerate(prompts)
    ]


def _measure(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    mode: Mode,
    problems: list[Problem],
    requests: list[Request],
    advance: Callable[[], None],
) -> _ModeResult:
    started = time.perf_counter()
    completions = generate_all(engine, requests, lambda _: advance())
    seconds = time.perf_counter() - started
    texts = [_decode(tokenizer, completion) for completion in completions]
    correct = [is_correct(*pair) for pair in zip(problems, texts, strict=True)]
    return _ModeResult(mode, completions, texts, correct, seconds)


def _decode(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    return str(tokenizer.decode(list(completion.tokens), skip_special_tokens=True))


def _point(result: _ModeResult, exact: _ModeResult) -> FrontierPoint:
    count = len(result.correct)
    low, high = wilson_interval(sum(result.correct), count)
    paired = paired_difference(exact.correct, result.correct)
    same = sum(
        a.tokens == b.tokens for a, b in zip(result.completions, exact.completions, strict=True)
    )
    tokens = sum(len(completion.tokens) for completion in result.completions)
    return FrontierPoint(
        mode=result.mode.model_dump(),
        problems=count,
        accuracy=sum(result.correct) / count,
        accuracy_low=low,
        accuracy_high=high,
        tokens=tokens,
        forwards=sum(completion.forwards for completion in result.completions),
        tokens_per_s=tokens / result.seconds,
        identical=same / count,
        difference=paired.difference,
        difference_low=paired.low,
        difference_high=paired.high,
        p_value=paired.p_value,
    )


def _write(
    directory: Path, frontier: Frontier, problems: list[Problem], results: list[_ModeResult]
) -> None:
    partial = directory / f".{FRONTIER_FILE}"
    partial.write_text(frontier.to_json())
    partial.replace(directory / FRONTIER_FILE)
    plot_frontier(frontier, directory / PLOT_FILE)
    with (directory / ANSWERS_FILE).open("w") as file:
        for result in results:
            for problem, text, correct in zip(problems, result.texts, result.correct, strict=True):
                row = {"mode": result.mode.model_dump(), "question": problem.question}
                row |= {"text": text, "answer": problem.answer, "correct": correct}
                file.write(json.dumps(row) + "\n")
