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
from mars_ray.config.evaluate import CorpusTask, EvaluateJob, Gsm8kTask, Task
from mars_ray.core.frontier import (
    FRONTIER_FILE,
    Frontier,
    FrontierPoint,
    mode_label,
    read_frontier,
)
from mars_ray.core.statistics import paired_difference, wilson_interval
from mars_ray.data.chat import Message, encode_prompt
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import CheckpointError, DataError
from mars_ray.evaluate.plots import plot_frontier
from mars_ray.evaluate.tasks.base import Problem, is_correct
from mars_ray.evaluate.tasks.corpus import corpus_problems
from mars_ray.evaluate.tasks.gsm8k import gsm8k_problems
from mars_ray.model.card import read_card
from mars_ray.model.stop import stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance
from mars_ray.writer import check_writable, replaced, sole_writer

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


def problems_of(task: Task) -> list[Problem]:
    """The task's problems, at least one. Raises DataError."""
    problems = _TASKS[type(task)](task)
    if not problems:
        raise DataError("the task has no problems: name a file that holds some")
    return problems


def prompts_of(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    """The tokens of each problem, as a model is asked it."""
    return [tuple(encode_prompt([Message("user", p.question)], tokenizer)) for p in problems]


def run_evaluation(job: EvaluateJob, console: Console) -> Evaluation:
    """Measure `exact` and every mode of the job; write frontier, plot and answers after each mode,
    so that an interruption loses one mode at most. Where there is a whole frontier already, it
    stays until the new one is whole. Raises MarsError, before anything is measured if a mode or a
    prompt cannot be decoded or nothing can be written.
    """
    problems = problems_of(job.task)
    # First: the directory is made, and by default it is the checkpoint's.
    read_card(job.checkpoint)
    directory = Path(job.output_dir or job.checkpoint).expanduser()
    check_writable(directory / f".{FRONTIER_FILE}", "output_dir")
    with sole_writer(directory, directory / ".evaluation.lock", "output_dir"):
        return Evaluation(_measured(job, problems, directory, console), directory)


def is_whole(frontier: Frontier) -> bool:
    """Whether it has a point for every mode of its job: that of an interrupted evaluation has
    fewer."""
    if "job" not in frontier.provenance:
        return True
    modes = frontier.provenance["job"]["modes"]
    return len(frontier.points) == 1 + sum(mode["type"] != "exact" for mode in modes)


def _measured(
    job: EvaluateJob, problems: list[Problem], directory: Path, console: Console
) -> Frontier:
    # What a checkpoint's masks are worth is measured with all of them, whatever steps cost here.
    # And every mode computes the prompts: the first one would, for all.
    config = job.engine.model_copy(update={"window_control": False, "prefix_cache": False})
    modes: list[Mode] = [ExactMode(), *(m for m in job.modes if not isinstance(m, ExactMode))]
    results: list[_ModeResult] = []
    # Services read it, and an hour's measurement is not lost to the start of another one.
    keeps = _has_whole(directory)
    with Bars(console) as bars:
        engine, tokenizer = load_engine(job.checkpoint, config)
        prompts, stops = prompts_of(problems, tokenizer), stop_ids(engine.model)
        asked = [(mode, _requests(prompts, mode, job.max_new_tokens, stops)) for mode in modes]
        # All of them now: what is refused after other modes would cost their measurement.
        for _, requests in asked:
            for request in requests:
                engine.check(request)
        for mode, requests in asked:
            task = bars.add_task(mode_label(mode.model_dump()), total=len(problems))
            advance = partial(bars.advance, task)
            results.append(_measure(engine, tokenizer, mode, problems, requests, advance))
            if not keeps or len(results) == len(modes):
                _write(directory, _frontier(job, results), problems, results)
    return _frontier(job, results)


def _has_whole(directory: Path) -> bool:
    try:
        return is_whole(read_frontier(directory))
    except CheckpointError:
        return False


def _frontier(job: EvaluateJob, results: list[_ModeResult]) -> Frontier:
    return Frontier(
        checkpoint=Path(job.checkpoint).name,
        task=job.task.model_dump(),
        points=tuple(_point(result, results[0]) for result in results),
        provenance=provenance() | {"job": job.model_dump(mode="json")},
    )


def _requests(
    prompts: Sequence[tuple[int, ...]],
    mode: Mode,
    max_new_tokens: int,
    stops: frozenset[int],
) -> list[Request]:
    return [
        Request(str(index), prompt, mode, Sampling(), max_new_tokens, stops)
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
    with replaced(directory / ANSWERS_FILE) as draft, draft.open("w") as file:
        for result in results:
            for problem, text, correct in zip(problems, result.texts, result.correct, strict=True):
                row = {"mode": result.mode.model_dump(), "question": problem.question}
                row |= {"text": text, "answer": problem.answer, "correct": correct}
                file.write(json.dumps(row) + "\n")
    with replaced(directory / PLOT_FILE) as draft:
        plot_frontier(frontier, draft)
    # Last: whoever reads it finds what belongs to it.
    with replaced(directory / FRONTIER_FILE) as draft:
        draft.write_text(frontier.to_json())
