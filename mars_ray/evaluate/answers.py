"""Answers, with what their steps report besides the tokens; how likely the references are; and
what an evaluation of files has beyond others: a directory of its own, and answers to go on with.

output_dir/
  evaluation.json    the job, and a digest of the prompts: no other job writes here
  evaluation.part    until it is finished: the answers of each mode that is
  frontier.json, frontier.png, answers.jsonl, report.txt

The report is a table, and where answers leave those of `exact`.

Shape suffixes: R rows of a conversation, A rows that predict the answer, V vocabulary.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from mars_ray.config.evaluate import EvaluateJob, FilesTask, Grade
from mars_ray.config.modes import Mode
from mars_ray.core.frontier import FRONTIER_FILE, Frontier, FrontierPoint, mode_label
from mars_ray.core.statistics import is_looping
from mars_ray.data.chat import encoder_of
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import engine_model
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import ConfigError, DataError
from mars_ray.evaluate.tasks import Problem, check_reference, grade_label, grader_of, reference_text
from mars_ray.files import ResultCache, claim, replaced
from mars_ray.model.directory import CONFIG_FILE, read_card
from mars_ray.model.forward import hidden_states, output_head
from mars_ray.model.load import read_config
from mars_ray.model.shape import most_positions


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished sequence."""

    completion: Completion
    disagreed: int  # tokens that the model itself would not have chosen
    log_p: float | None  # sum of the tokens' log-probabilities, if the request asks for them

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.completion.tokens

    @property
    def is_looping(self) -> bool:
        """Whether the answer repeats itself at its end."""
        return is_looping(self.tokens)


@dataclass(frozen=True, slots=True)
class ModeAnswers:
    mode: Mode
    answers: list[Answer]
    texts: list[str]
    correct: list[bool | None]  # None for a problem without a reference answer
    seconds: float

    def first_differences(self, exact: "ModeAnswers") -> list[int | None]:
        """How many tokens each answer has in common with that of `exact` before the first that
        differs; None where none does."""
        pairs = [(a.tokens, b.tokens) for a, b in zip(self.answers, exact.answers, strict=True)]
        return [None if a == b else in_common(a, b) for a, b in pairs]


def in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many elements two sequences have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def answer_all(
    engine: Engine, requests: Sequence[Request], advance: Callable[[], None]
) -> list[Answer]:
    """Decode requests in batches; returns answers in the order of the requests.

    Raises RequestError, or the error of a request that failed; no request is left in the engine.
    """
    log_p = {request.id: 0.0 for request in requests}
    asked = {request.id: request.logprobs is not None for request in requests}
    done: dict[str, Answer] = {}
    try:
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                if event.failure:
                    raise event.failure
                log_p[event.request_id] += sum(token.logprob for token in event.logprobs)
                if event.completion:
                    known = log_p[event.request_id] if asked[event.request_id] else None
                    done[event.request_id] = Answer(event.completion, event.disagreed, known)
                    advance()
    finally:
        for request in requests:
            engine.cancel(request.id)
    engine.check_integrity()
    return [done[request.id] for request in requests]


# A prompt and its reference, both as token ids.
Pair = tuple[Sequence[int], Sequence[int]]


def reference_pairs(
    job: EvaluateJob,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[Pair]:
    """The prompts whose references are texts, with these. Raises DataError, naming the line, if a
    reference does not fit the model."""
    encoder, most = encoder_of(tokenizer), most_positions(read_config(job.checkpoint))
    pairs = []
    for problem, prompt in zip(problems, prompts, strict=True):
        text = None if problem.answer is None else reference_text(problem.answer)
        if not text:
            continue
        reference = encoder.encode([[(text, True)]])[0].input_ids.tolist()
        if len(prompt) + len(reference) > most:
            raise DataError(
                f"{problem.origin}: the prompt and its reference are "
                f"{len(prompt) + len(reference)} tokens, and this model knows {most} positions: "
                "shorten the reference, or take the line out"
            )
        pairs.append((prompt, reference))
    return pairs


@torch.inference_mode()
def score_references(
    job: EvaluateJob, pairs: Sequence[Pair], advance: Callable[[], None]
) -> list[tuple[int, float]]:
    """Tokens of each reference, and the sum of their negative log-probabilities behind its prompt,
    by the job's model as its engine has it."""
    model, mask = engine_model(job.checkpoint, job.engine), read_card(job.checkpoint).mask_token_id
    scored = []
    for prompt, reference in pairs:
        ids = torch.tensor([[*prompt, *reference]], device=model.device)
        rows = ids.shape[1]
        sees_RR = torch.ones(rows, rows, dtype=torch.bool, device=model.device).tril()
        position = torch.arange(rows, device=model.device)[None]
        hidden = hidden_states(model, ids, position, sees_RR[None, None])
        # The row of a token predicts the next one.
        logits_AV = output_head(model)(hidden[0, len(prompt) - 1 : -1]).float()
        if mask is not None:
            # As in the engine: it is never said.
            logits_AV[:, mask] = -torch.inf
        nll = torch.nn.functional.cross_entropy(logits_AV, ids[0, len(prompt) :], reduction="sum")
        scored.append((len(reference), nll.item()))
        advance()
    return scored


JOB_FILE = "evaluation.json"
JOURNAL = "evaluation.part"
# Errors name this many lines.
_TOLD = 5
ANSWERS = TypeAdapter(list[Answer])
REPORT_FILE = "report.txt"
_WIDTH = 140
# Answers shown for each mode, and the characters around the place where they part.
_SHOWN, _BEFORE, _BEHIND = 5, 40, 60
_GRADE: TypeAdapter[Grade] = TypeAdapter(Grade)


def files_grader(task: FilesTask, problems: Sequence[Problem]) -> Callable[[Problem, str], bool]:
    """The function that grades the text of an answer to a problem with a reference.

    Raises ConfigError if there is none, or DataError, naming the line, if it does not take a
    reference; nothing has been loaded then.
    """
    grader = grader_of(task.grade)

    def grade(problem: Problem, text: str) -> bool:
        try:
            return grader(text, problem.answer)
        except DataError as error:
            raise DataError(f"{problem.origin}: {error}") from error

    for problem in problems:
        if problem.answer is not None:
            try:
                check_reference(task.grade, grader, problem.answer)
            except DataError as error:
                raise DataError(f"{problem.origin}: {error}") from error
    return grade


def check_apart(directory: Path) -> None:
    """Raises ConfigError if the directory is a model's, or holds another evaluation's frontier."""
    if (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"{directory} is a model's directory, and services read the frontier there: set "
            "another output_dir for what is measured on files"
        )
    if (directory / FRONTIER_FILE).exists() and not (directory / JOB_FILE).exists():
        raise ConfigError(
            f"{directory} holds the {FRONTIER_FILE} of another evaluation: choose another "
            "output_dir"
        )


def begun(job: EvaluateJob, problems: Sequence[Problem], directory: Path) -> ResultCache:
    """What an interrupted run of this job has left, in a directory that is the job's from now on.
    Raises ConfigError if it is another's."""
    path, journal = directory / JOB_FILE, directory / JOURNAL
    if not journal.exists() and not (directory / FRONTIER_FILE).exists():
        # A job that was refused before it measured anything.
        path.unlink(missing_ok=True)
    now = job.model_dump(mode="json", exclude={"output_dir"}) | {"prompts": _digest(problems)}
    claim(path, now, "an evaluation", "output_dir")
    return ResultCache(journal, json.dumps([now, _weights(job)]))


def _digest(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        turns = [turn.key for turn in problem.turns]
        digest.update(json.dumps([turns, problem.answer]).encode() + b"\n")
    return digest.hexdigest()


def _weights(job: EvaluateJob) -> list[Any]:
    """What tells whether weights have changed since a run was interrupted."""
    places = (job.checkpoint, job.engine.draft_adapter)
    files = [file for place in places if place for file in Path(place).glob("*.safetensors")]
    states = [(file.name, file.stat()) for file in sorted(files)]
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]


def check_room(
    job: EvaluateJob, context: int, problems: Sequence[Problem], prompts: Sequence[Sequence[int]]
) -> None:
    """Raises DataError, naming lines, if prompts leave no room for an answer."""
    most = context - job.max_new_tokens
    pairs = zip(problems, prompts, strict=True)
    long = [(problem.origin, len(prompt)) for problem, prompt in pairs if len(prompt) > most]
    if long:
        longest = max(tokens for _, tokens in long)
        raise DataError(
            f"{len(long)} of {len(problems)} prompts leave no room for {job.max_new_tokens} new "
            f"tokens in engine.max_context {context}: set "
            f"engine.max_context={longest + job.max_new_tokens}, lower max_new_tokens, or take "
            "them out. The first:\n  "
            + "\n  ".join(f"{origin}: {tokens} tokens" for origin, tokens in long[:_TOLD])
        )


def files_table(frontier: Frontier) -> Table:
    """One line for each mode."""
    exact = frontier.points[0]
    table = Table(title=f"{frontier.checkpoint}: {exact.problems} prompts")
    columns = ["mode", "T/F", "identical", "differs at", "own tokens", "nll"]
    # Where masks are forced, speeds say nothing. One pass tells no ratio either.
    has_speeds = frontier.provenance["job"]["engine"]["window_control"]
    if has_speeds:
        columns.append("tokens/s")
    if exact.has_references:
        label = grade_label(_GRADE.validate_python(frontier.task["grade"]))
        columns += [f"{label} ({exact.graded})", "95%", "p"]
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for point in frontier.points:
        table.add_row(*_cells(point, has_speeds))
    if frontier.reference_nll is not None:
        table.caption = f"nll of the references: {frontier.reference_nll:.3f} per token"
    return table


def _cells(point: FrontierPoint, has_speeds: bool) -> Iterator[str]:
    yield point.label
    yield f"{point.tokens_per_forward:.2f}"
    yield f"{point.identical:.1%}"
    yield "-" if point.first_difference is None else f"{point.first_difference:,.0f}"
    yield f"{point.agreement:.2%}"
    yield "-" if point.nll is None else f"{point.nll:.3f}"
    if has_speeds:
        yield f"{point.tokens_per_s:,.1f}"
    if point.has_references:
        yield f"{point.accuracy:.1%}"
        yield f"{point.accuracy_low:.1%} .. {point.accuracy_high:.1%}"
        yield f"{point.p_value:.2f}"


def write_report(
    path: Path, frontier: Frontier, problems: Sequence[Problem], results: Sequence[ModeAnswers]
) -> None:
    """Write the table, and the first answers of each mode that differ from those of `exact`."""
    with replaced(path) as draft, draft.open("w", encoding="utf-8") as file:
        console = Console(file=file, width=_WIDTH, color_system=None, legacy_windows=False)
        console.print(files_table(frontier))
        for result in results[1:]:
            for line in _differences(problems, result, results[0]):
                file.write(line + "\n")


def _differences(
    problems: Sequence[Problem], result: ModeAnswers, exact: ModeAnswers
) -> Iterator[str]:
    places = result.first_differences(exact)
    differing = [(number, place) for number, place in enumerate(places) if place is not None]
    label = mode_label(result.mode.model_dump())
    yield f"\n{label}: {len(differing)} of {len(problems)} answers differ from those of exact"
    for number, place in differing[:_SHOWN]:
        own, theirs = result.texts[number], exact.texts[number]
        common = in_common(own, theirs)
        yield f"  {problems[number].origin}, after {place} tokens"
        yield f"    exact: {_around(theirs, common)}"
        yield f"    {label}: {_around(own, common)}"


def _around(text: str, place: int) -> str:
    before, behind = text[max(0, place - _BEFORE) : place], text[place : place + _BEHIND]
    return repr(before)[1:-1] + " | " + repr(behind)[1:-1]
