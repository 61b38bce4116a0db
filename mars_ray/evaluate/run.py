"""The evaluation: every mode on the same problems, compared with `exact` problem by problem.

At the end stand a table for people and a summary for programs.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from os.path import expanduser
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from mars_ray.config.decode import Sampling
from mars_ray.config.evaluate import EvaluateJob, FilesTask, PromptsTask
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.core.frontier import (
    FRONTIER_FILE,
    Frontier,
    FrontierPoint,
    PointPart,
    mode_label,
    read_frontier,
)
from mars_ray.core.statistics import paired_difference, wilson_interval
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine, with_room
from mars_ray.decode.request import Request
from mars_ray.errors import CheckpointError
from mars_ray.evaluate.answers import (
    ANSWERS,
    JOURNAL,
    REPORT_FILE,
    Answer,
    ModeAnswers,
    answer_all,
    begun,
    check_apart,
    check_room,
    files_grader,
    files_table,
    reference_pairs,
    score_references,
    write_report,
)
from mars_ray.evaluate.tasks import Problem, is_correct, problems_of, prompts_of
from mars_ray.files import ResultCache, check_writable, replaced, sole_writer, write_whole
from mars_ray.model.directory import read_card
from mars_ray.model.load import load_tokenizer, stop_ids
from mars_ray.page import plain
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

PLOT_FILE = "frontier.png"
ANSWERS_FILE = "answers.jsonl"
_REFERENCES = "references"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A frontier, and the directory it was written to."""

    frontier: Frontier
    directory: Path

    @property
    def plot(self) -> Path:
        return self.directory / PLOT_FILE


@dataclass(frozen=True, slots=True)
class _Work:
    job: EvaluateJob
    problems: list[Problem]
    grade: Callable[[Problem, str], bool]  # whether the text answers a problem with a reference
    kept: ResultCache  # what has been measured, by the mode's JSON
    directory: Path


def run_evaluation(job: EvaluateJob, console: Console) -> Evaluation:
    """Measure `exact` and every mode of the job.

    Frontier, plot and answers are written after each mode, so that an interruption loses one mode
    at most. An existing whole frontier stays until the new one is whole. Raises MarsError; before
    anything is measured if a mode or a prompt cannot be decoded, nothing can be graded, or nothing
    can be written.
    """
    problems = problems_of(job.task)
    is_files = isinstance(job.task, FilesTask)
    grade = files_grader(job.task, problems) if isinstance(job.task, FilesTask) else is_correct
    # Before the output directory is made, which by default is the checkpoint's.
    read_card(job.checkpoint)
    directory = Path(expanduser(job.directory))
    if is_files:
        check_apart(directory)
    check_writable(directory / f".{FRONTIER_FILE}", "output_dir")
    with sole_writer(directory, directory / ".evaluation.lock", "output_dir"):
        kept = begun(job, problems, directory) if is_files else ResultCache(None, "")
        frontier = _measured(_Work(job, problems, grade, kept, directory), console)
        (directory / JOURNAL).unlink(missing_ok=True)
        return Evaluation(frontier, directory)


def is_whole(frontier: Frontier) -> bool:
    """Whether the frontier has a point for every mode of its job; after an interruption it has
    fewer."""
    if "job" not in frontier.provenance:
        return True
    modes = frontier.provenance["job"]["modes"]
    return len(frontier.points) == 1 + sum(mode["type"] != "exact" for mode in modes)


def written(job: EvaluateJob) -> Frontier | None:
    """The whole frontier that this very job has written into its directory, if it has."""
    try:
        known = read_frontier(job.directory)
    except CheckpointError:
        return None
    is_same = known.provenance.get("job") == job.model_dump(mode="json")
    return known if is_same and is_whole(known) else None


def _measured(work: _Work, console: Console) -> Frontier:
    job, problems = work.job, work.problems
    # No prefix cache: the first mode would compute the prompts for all. No window control: masks
    # are measured with all of them, whatever steps cost here; but of files the question is how fast
    # they are decoded here.
    changes = {"prefix_cache": False}
    if not isinstance(job.task, FilesTask):
        changes["window_control"] = False
    config = job.engine.model_copy(update=changes)
    modes: list[Mode] = [ExactMode(), *(m for m in job.modes if m != ExactMode())]
    results: list[ModeAnswers] = []
    # Services read the old frontier, and a restart must not destroy an hour's measurement.
    try:
        keeps = is_whole(read_frontier(work.directory))
    except CheckpointError:
        keeps = False
    with Bars(console) as bars:
        tokenizer = load_tokenizer(job.checkpoint)
        prompts = prompts_of(problems, tokenizer)
        config = with_room(config, job.checkpoint, max(map(len, prompts)) + job.max_new_tokens)
        if isinstance(job.task, FilesTask):
            check_room(job, config.context, problems, prompts)
        reference_nll = _reference_nll(work, prompts, tokenizer, bars)

        def so_far() -> Frontier:
            return Frontier(
                checkpoint=Path(job.checkpoint).name,
                task=job.task.model_dump(mode="json"),
                points=tuple(_point(result, results[0], problems) for result in results),
                provenance=provenance() | {"job": job.model_dump(mode="json")},
                reference_nll=reference_nll,
            )

        # Without masks there are none to be forced, and n-grams are drafted under window control.
        controlled = {mode: config.window_control or _has_ngrams_alone(mode) for mode in modes}
        config = config.model_copy(update={"window_control": any(controlled.values())})
        engine, _ = load_engine(job.checkpoint, config)
        control = engine.control
        bars.say(str(engine.info))
        logprobs = 0 if isinstance(job.task, PromptsTask | FilesTask) else None
        stops = stop_ids(engine.model)
        limit = job.max_new_tokens
        asked = [
            (
                mode,
                [
                    Request(str(n), prompt, mode, Sampling(), limit, stops, logprobs=logprobs)
                    for n, prompt in enumerate(prompts)
                ],
            )
            for mode in modes
        ]
        # All requests are checked now: a later refusal would waste the measurements before it.
        for _, requests in asked:
            for request in requests:
                engine.check(request)
        for mode, requests in asked:
            task = bars.add_task(mode_label(mode.model_dump()), total=len(problems))
            advance = partial(bars.advance, task)
            engine.control = control if controlled[mode] else None
            results.append(_measure(engine, tokenizer, mode, work, requests, advance))
            if not keeps or len(results) == len(modes):
                _write(work, so_far(), results)
    return so_far()


def _has_ngrams_alone(mode: Mode) -> bool:
    is_verified = isinstance(mode, VerifiedMode)
    return is_verified and mode.window == 0 and mode.ngram and mode.threshold == 1


def _reference_nll(
    work: _Work,
    prompts: Sequence[tuple[int, ...]],
    tokenizer: PreTrainedTokenizerBase,
    bars: Bars,
) -> float | None:
    """The mean over all tokens of the references of a task of files; None if there are none."""
    if not isinstance(work.job.task, FilesTask):
        return None
    if _REFERENCES not in work.kept:
        pairs = reference_pairs(work.job, work.problems, prompts, tokenizer)
        task = bars.add_task(_REFERENCES, total=len(pairs))
        scored = score_references(work.job, pairs, partial(bars.advance, task)) if pairs else []
        work.kept[_REFERENCES] = scored
    scored = work.kept[_REFERENCES]
    return sum(nll for _, nll in scored) / sum(n for n, _ in scored) if scored else None


def _measure(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    mode: Mode,
    work: _Work,
    requests: list[Request],
    advance: Callable[[], None],
) -> ModeAnswers:
    name = mode.model_dump_json()
    if name not in work.kept:
        started = time.perf_counter()
        new = answer_all(engine, requests, advance)
        seconds = time.perf_counter() - started
        work.kept[name] = {"seconds": seconds, "answers": ANSWERS.dump_python(new, mode="json")}
    answers = ANSWERS.validate_python(work.kept[name]["answers"])
    texts = [str(tokenizer.decode(list(a.tokens), skip_special_tokens=True)) for a in answers]
    pairs = zip(work.problems, texts, strict=True)
    correct = [None if p.answer is None else work.grade(p, text) for p, text in pairs]
    return ModeAnswers(mode, answers, texts, correct, work.kept[name]["seconds"])


def _same(result: ModeAnswers, exact: ModeAnswers) -> list[bool]:
    return [place is None for place in result.first_differences(exact)]


def _right(result: ModeAnswers, exact: ModeAnswers) -> list[bool]:
    """Of the problems with a reference; where there is none, of all."""
    return [is_right for is_right in result.correct if is_right is not None] or _same(result, exact)


def _point(result: ModeAnswers, exact: ModeAnswers, problems: list[Problem]) -> FrontierPoint:
    right, same = _right(result, exact), _same(result, exact)
    low, high = wilson_interval(sum(right), len(right))
    difference, lowest, highest, p_value = paired_difference(_right(exact, exact), right)
    tokens = sum(len(answer.tokens) for answer in result.answers)
    return FrontierPoint(
        mode=result.mode.model_dump(),
        problems=len(same),
        accuracy=sum(right) / len(right),
        accuracy_low=low,
        accuracy_high=high,
        tokens=tokens,
        forwards=sum(answer.completion.forwards for answer in result.answers),
        tokens_per_s=tokens / result.seconds,
        identical=sum(same) / len(same),
        difference=difference,
        difference_low=lowest,
        difference_high=highest,
        p_value=p_value,
        **_own_measures(result, exact, problems, tokens),
    )


def _own_measures(
    result: ModeAnswers, exact: ModeAnswers, problems: list[Problem], tokens: int
) -> dict[str, Any]:
    """What is measured on prompts of files: by what the model itself would have said."""
    answers = result.answers
    log_p = [answer.log_p for answer in answers if answer.log_p is not None]
    if not log_p:
        return {}
    places = result.first_differences(exact)
    differing = [place for place in places if place is not None]
    rows = list(zip(answers, [place is None for place in places], strict=True))
    kinds = dict.fromkeys(problem.kind for problem in problems if problem.kind)
    return {
        "agreement": 1 - sum(answer.disagreed for answer in answers) / tokens,
        # For a proposal committed unseen, the model's own probability is not known.
        "nll": None if result.mode.commits_unseen else -sum(log_p) / tokens,
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
        }
        or None,
        "graded": sum(is_right is not None for is_right in result.correct),
        "first_difference": statistics.median(differing) if differing else None,
    }


def _part(rows: list[tuple[Answer, bool]]) -> PointPart:
    return PointPart(
        answers=len(rows),
        tokens=sum(len(answer.tokens) for answer, _ in rows),
        forwards=sum(answer.completion.forwards for answer, _ in rows),
        identical=sum(same for _, same in rows) / max(1, len(rows)),
    )


def _write(work: _Work, frontier: Frontier, results: list[ModeAnswers]) -> None:
    directory = work.directory
    with replaced(directory / ANSWERS_FILE) as draft, draft.open("w") as file:
        for result in results:
            for row in _answer_rows(work.problems, result, results[0]):
                file.write(json.dumps(row) + "\n")
    with replaced(directory / PLOT_FILE) as draft:
        plot_frontier(frontier, draft)
    if isinstance(work.job.task, FilesTask):
        write_report(directory / REPORT_FILE, frontier, work.problems, results)
    # Last, so that readers of it find the files that belong to it.
    write_whole(directory / FRONTIER_FILE, frontier.to_json())


def _answer_rows(
    problems: list[Problem], result: ModeAnswers, exact: ModeAnswers
) -> Iterator[dict[str, Any]]:
    places = result.first_differences(exact)
    is_graded = any(is_right is not None for is_right in result.correct)
    for number, (problem, place) in enumerate(zip(problems, places, strict=True)):
        is_right = result.correct[number] if is_graded else place is None
        row = {"mode": result.mode.model_dump(), "question": problem.question}
        row |= {"text": result.texts[number], "answer": problem.answer, "correct": is_right}
        if problem.kind:
            row["kind"] = problem.kind
        if problem.origin:
            completion = result.answers[number].completion
            row |= {"origin": problem.origin, "first_difference": place}
            row |= {"tokens": len(completion.tokens), "forwards": completion.forwards}
        yield row


# Colours of Okabe and Ito's palette, which colour-blind readers can tell apart.
_STYLE = {
    "exact": ("#000000", "s"),
    "verified": ("#0072B2", "o"),
    "confidence": ("#D55E00", "^"),
    "block_cached": ("#009E73", "v"),
    "jacobi": ("#CC79A7", "D"),
}


def plot_frontier(frontier: Frontier, path: Path) -> None:
    """Draw one curve per mode, thresholds as labels, 95% intervals as bars; 1200 x 800 pixels."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    exact = frontier.points[0]
    axes.axhspan(exact.accuracy_low, exact.accuracy_high, color="#000000", alpha=0.06, lw=0)
    axes.axhline(exact.accuracy, color="#000000", lw=0.8, ls=":")
    ordered = sorted(frontier.points, key=lambda p: (p.mode["type"], -(p.threshold or 0)))
    for mode, each in groupby(ordered, key=lambda point: point.mode["type"]):
        points, (colour, marker) = list(each), _STYLE[mode]
        axes.errorbar(
            [point.tokens_per_forward for point in points],
            [point.accuracy for point in points],
            yerr=[
                [point.accuracy - point.accuracy_low for point in points],
                [point.accuracy_high - point.accuracy for point in points],
            ],
            label=mode,
            color=colour,
            marker=marker,
            ms=6,
            lw=1.5,
            elinewidth=0.8,
            capsize=2,
        )
        for point in points:
            if point.threshold is not None:
                axes.annotate(
                    f"{point.threshold:g}",
                    (point.tokens_per_forward, point.accuracy),
                    xytext=(5, 6),
                    textcoords="offset points",
                    fontsize=9,
                    color=colour,
                )
    axes.set_xlabel("tokens per forward pass")
    axes.set_ylabel("accuracy" if exact.has_references else "answers identical to exact's")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title(f"Speed and quality of {frontier.checkpoint}, {exact.problems} problems")
    plain(axes)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=1200 / 9)


def print_table(evaluation: Evaluation, console: Console) -> None:
    frontier = evaluation.frontier
    if frontier.task["type"] == "files":
        console.print(files_table(frontier))
        console.print(f"report: {evaluation.directory / REPORT_FILE}", soft_wrap=True)
        return
    table = Table(title=f"{frontier.checkpoint}: {frontier.points[0].problems} problems")
    without_references = frontier.points[0].agreement is not None
    # No tokens/s: masks are forced here, also those that do not pay.
    columns = ("accuracy", "95%", "against exact", "p", "identical", "T/F")
    if without_references:  # "without loops" omits answers that end in a loop
        columns = ("identical", "own tokens", "nll", "T/F", "without loops")
    table.add_column("mode")
    for column in columns:
        table.add_column(column, justify="right")
    for point in frontier.points:
        if without_references:
            table.add_row(
                point.label,
                f"{point.identical:.1%}",
                f"{point.agreement:.2%}",
                "-" if point.nll is None else f"{point.nll:.3f}",
                f"{point.tokens_per_forward:.2f}",
                "-" if point.without_loops is None else f"{point.without_loops:.2f}",
            )
        else:
            table.add_row(
                point.label,
                f"{point.accuracy:.1%}",
                f"{point.accuracy_low:.1%} .. {point.accuracy_high:.1%}",
                f"{point.difference:+.1%}",
                f"{point.p_value:.2f}",
                f"{point.identical:.1%}",
                f"{point.tokens_per_forward:.2f}",
            )
    console.print(table)
    console.print(f"plot: {evaluation.plot}", soft_wrap=True)


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """The last line that the command prints."""
    frontier = evaluation.frontier
    told = {"checkpoint": frontier.checkpoint, "plot": str(evaluation.plot)}
    if frontier.task["type"] == "files":
        told |= {"report": str(evaluation.directory / REPORT_FILE)}
        told |= {"reference_nll": frontier.reference_nll}
    points: dict[str, dict[str, Any]] = {}
    for point in frontier.points:
        points[point.label] = {
            "accuracy": point.accuracy,
            "tokens_per_forward": point.tokens_per_forward,
            "identical": point.identical,
        }
        if point.graded is not None:
            points[point.label] |= {
                "accuracy": point.accuracy if point.has_references else None,
                "graded": point.graded,
                "nll": point.nll,
                "own_tokens": point.agreement,
                "first_difference": point.first_difference,
            }
    return told | {"points": points}
