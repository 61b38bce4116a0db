"""The evaluation: every mode on the same problems, compared with `exact` problem by problem."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from mars_ray.config.decode import Sampling
from mars_ray.config.evaluate import EvaluateJob, PromptsTask
from mars_ray.config.modes import ExactMode, Mode
from mars_ray.core.frontier import (
    FRONTIER_FILE,
    Frontier,
    FrontierPoint,
    PointPart,
    mode_label,
    read_frontier,
)
from mars_ray.core.statistics import paired_difference, wilson_interval
from mars_ray.data.chat import encode_prompt
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Request
from mars_ray.errors import CheckpointError
from mars_ray.evaluate.answers import Answer, answer_all
from mars_ray.evaluate.plots import plot_frontier
from mars_ray.evaluate.tasks import Problem, is_correct, problems_of
from mars_ray.files import check_writable, replaced, sole_writer, write_whole
from mars_ray.model.card import read_card
from mars_ray.model.stop import stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

PLOT_FILE = "frontier.png"
ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A frontier, and the directory it was written to."""

    frontier: Frontier
    directory: Path

    @property
    def plot(self) -> Path:
        """Path of the plot."""
        return self.directory / PLOT_FILE


@dataclass(frozen=True, slots=True)
class _ModeResult:
    mode: Mode
    answers: list[Answer]
    texts: list[str]
    correct: list[bool] | None  # None for prompts without reference answers
    seconds: float


def prompts_of(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    """Token ids of each problem's prompt."""
    return [tuple(encode_prompt(p.messages, tokenizer)) for p in problems]


def run_evaluation(job: EvaluateJob, console: Console) -> Evaluation:
    """Measure `exact` and every mode of the job.

    Frontier, plot and answers are written after each mode, so that an interruption loses one mode
    at most. An existing whole frontier stays until the new one is whole. Raises MarsError; before
    anything is measured if a mode or a prompt cannot be decoded or nothing can be written.
    """
    problems = problems_of(job.task)
    # Before the output directory is made, which by default is the checkpoint's.
    read_card(job.checkpoint)
    directory = Path(job.output_dir or job.checkpoint).expanduser()
    check_writable(directory / f".{FRONTIER_FILE}", "output_dir")
    with sole_writer(directory, directory / ".evaluation.lock", "output_dir"):
        return Evaluation(_measured(job, problems, directory, console), directory)


def is_whole(frontier: Frontier) -> bool:
    """Whether the frontier has a point for every mode of its job; after an interruption it has
    fewer."""
    if "job" not in frontier.provenance:
        return True
    modes = frontier.provenance["job"]["modes"]
    return len(frontier.points) == 1 + sum(mode["type"] != "exact" for mode in modes)


def _measured(
    job: EvaluateJob, problems: list[Problem], directory: Path, console: Console
) -> Frontier:
    # No window control: the value of the masks is measured with all of them, whatever steps cost
    # here. No prefix cache: the first mode would compute the prompts for all.
    config = job.engine.model_copy(update={"window_control": False, "prefix_cache": False})
    modes: list[Mode] = [ExactMode(), *(m for m in job.modes if m != ExactMode())]
    results: list[_ModeResult] = []
    # Services read the old frontier, and a restart must not destroy an hour's measurement.
    keeps = _has_whole(directory)
    with Bars(console) as bars:
        engine, tokenizer = load_engine(job.checkpoint, config)
        prompts, stops = prompts_of(problems, tokenizer), stop_ids(engine.model)
        logprobs = 0 if isinstance(job.task, PromptsTask) else None
        asked = [
            (mode, _requests(prompts, mode, job.max_new_tokens, stops, logprobs)) for mode in modes
        ]
        # All requests are checked now: a later refusal would waste the measurements before it.
        for _, requests in asked:
            for request in requests:
                engine.check(request)
        for mode, requests in asked:
            task = bars.add_task(mode_label(mode.model_dump()), total=len(problems))
            advance = partial(bars.advance, task)
            results.append(_measure(engine, tokenizer, mode, problems, requests, advance))
            if not keeps or len(results) == len(modes):
                _write(directory, _frontier(job, problems, results), problems, results)
    return _frontier(job, problems, results)


def _has_whole(directory: Path) -> bool:
    try:
        return is_whole(read_frontier(directory))
    except CheckpointError:
        return False


def _frontier(job: EvaluateJob, problems: list[Problem], results: list[_ModeResult]) -> Frontier:
    return Frontier(
        checkpoint=Path(job.checkpoint).name,
        task=job.task.model_dump(mode="json"),
        points=tuple(_point(result, results[0], problems) for result in results),
        provenance=provenance() | {"job": job.model_dump(mode="json")},
    )


def _requests(
    prompts: Sequence[tuple[int, ...]],
    mode: Mode,
    max_new_tokens: int,
    stops: frozenset[int],
    logprobs: int | None,
) -> list[Request]:
    return [
        Request(str(index), prompt, mode, Sampling(), max_new_tokens, stops, logprobs=logprobs)
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
    answers = answer_all(engine, requests, advance)
    seconds = time.perf_counter() - started
    texts = [_decode(tokenizer, answer) for answer in answers]
    correct = None
    if problems[0].answer is not None:
        correct = [is_correct(*pair) for pair in zip(problems, texts, strict=True)]
    return _ModeResult(mode, answers, texts, correct, seconds)


def _decode(tokenizer: PreTrainedTokenizerBase, answer: Answer) -> str:
    return str(tokenizer.decode(list(answer.tokens), skip_special_tokens=True))


def _same(result: _ModeResult, exact: _ModeResult) -> list[bool]:
    return [a.tokens == b.tokens for a, b in zip(result.answers, exact.answers, strict=True)]


def _right(result: _ModeResult, exact: _ModeResult) -> list[bool]:
    return _same(result, exact) if result.correct is None else result.correct


def _point(result: _ModeResult, exact: _ModeResult, problems: list[Problem]) -> FrontierPoint:
    right, same = _right(result, exact), _same(result, exact)
    count = len(right)
    low, high = wilson_interval(sum(right), count)
    paired = paired_difference(_right(exact, exact), right)
    tokens = sum(len(answer.tokens) for answer in result.answers)
    return FrontierPoint(
        mode=result.mode.model_dump(),
        problems=count,
        accuracy=sum(right) / count,
        accuracy_low=low,
        accuracy_high=high,
        tokens=tokens,
        forwards=sum(answer.completion.forwards for answer in result.answers),
        tokens_per_s=tokens / result.seconds,
        identical=sum(same) / count,
        difference=paired.difference,
        difference_low=paired.low,
        difference_high=paired.high,
        p_value=paired.p_value,
        **_without_references(
            result.answers,
            same,
            problems,
            tokens,
            is_unseen=result.mode.commits_unseen,
        ),
    )


def _without_references(
    answers: list[Answer],
    same: list[bool],
    problems: list[Problem],
    tokens: int,
    *,
    is_unseen: bool,
) -> dict[str, Any]:
    """The measures that replace accuracy for prompts without reference answers."""
    if problems[0].answer is not None:
        return {}
    rows = list(zip(answers, same, strict=True))
    kinds = dict.fromkeys(problem.kind or "" for problem in problems)
    log_p = [answer.log_p or 0.0 for answer in answers]
    return {
        "agreement": 1 - sum(answer.disagreed for answer in answers) / tokens,
        # For a proposal committed unseen, the model's own probability is not known.
        "nll": None if is_unseen else -sum(log_p) / tokens,
        "looping": _part([row for row in rows if row[0].is_looping]),
        "by_kind": {
            kind: _part(
                [
                    row
                    for row, problem in zip(rows, problems, strict=True)
                    if problem.kind == kind and not row[0].is_looping
                ]
            )
            for kind in kinds
        },
    }


def _part(rows: list[tuple[Answer, bool]]) -> PointPart:
    return PointPart(
        answers=len(rows),
        tokens=sum(len(answer.tokens) for answer, _ in rows),
        forwards=sum(answer.completion.forwards for answer, _ in rows),
        identical=sum(same for _, same in rows) / max(1, len(rows)),
    )


def _write(
    directory: Path, frontier: Frontier, problems: list[Problem], results: list[_ModeResult]
) -> None:
    with replaced(directory / ANSWERS_FILE) as draft, draft.open("w") as file:
        for result in results:
            right = _right(result, results[0])
            for problem, text, correct in zip(problems, result.texts, right, strict=True):
                row = {"mode": result.mode.model_dump(), "question": problem.question}
                row |= {"text": text, "answer": problem.answer, "correct": correct}
                if problem.kind:
                    row["kind"] = problem.kind
                file.write(json.dumps(row) + "\n")
    with replaced(directory / PLOT_FILE) as draft:
        plot_frontier(frontier, draft)
    # Last, so that readers of it find the files that belong to it.
    write_whole(directory / FRONTIER_FILE, frontier.to_json())
