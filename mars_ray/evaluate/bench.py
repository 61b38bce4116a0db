"""Tokens per second on this machine: our modes and transformers' `generate`, in turn.

One round runs each (decoder, batch) once, in the same order, behind one that warms up by the first
batch of each. Medians of rounds are told, so that a drift of the machine affects all.
(`benchmarks/compare_decoders.py` has other engines beside these.)
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mars_ray.config.evaluate import BenchJob, PromptsTask
from mars_ray.config.modes import ExactMode
from mars_ray.core.frontier import mode_label
from mars_ray.core.statistics import ratio_fault
from mars_ray.data.chat import Message
from mars_ray.data.corpus import problems
from mars_ray.decode.loading import drafting_card, load_engine, with_room
from mars_ray.decode.request import window_of
from mars_ray.errors import ConfigError
from mars_ray.evaluate.peers import load_transformers, mars_answer, transformers_answer
from mars_ray.evaluate.run import prompts_of
from mars_ray.evaluate.tasks import Problem, kinds_in_turn, problems_of
from mars_ray.model.load import load_tokenizer
from mars_ray.model.stop import stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

# Differs from the seeds of training, evaluation and the demo question.
_PROMPT_SEED = 77
# Columns of the table: the heading, the key in a case and the form of its value.
_COLUMNS = (
    ("tokens/s", "tokens_per_s", ".1f"),
    ("same output", "same_output", ".0%"),
    ("ms/step", "ms_per_step", ".2f"),
    ("ours", "own_share", ".0%"),
    ("T/F", "tokens_per_forward", ".2f"),
    ("pos. /token", "positions_per_token", ".1f"),
    ("of read", "read_share", ".0%"),
)
_Answer = Callable[[dict[str, Any]], dict[str, Any]]


def run_bench(job: BenchJob, console: Console) -> dict[str, Any]:
    """Measure, print a table, return all figures. Raises MarsError."""
    card = drafting_card(job.checkpoint, job.engine)
    for mode in job.modes:
        window_of(mode, card)
    changes = {"max_batch": max(job.batch_sizes), "prefix_cache": False}
    with Bars(console) as bars:
        asked = asked_problems(job.task, max(job.prompts, *job.batch_sizes))
        prompts = [list(ids) for ids in prompts_of(asked, load_tokenizer(job.checkpoint))]
        needed = max(map(len, prompts)) + job.max_new_tokens
        config = with_room(job.engine.model_copy(update=changes), job.checkpoint, needed)
        check_room(needed, config.context, "engine.max_context")
        engine, _ = load_engine(job.checkpoint, config)
        decoders: dict[str, _Answer] = {}
        for mode in job.modes:
            own = {"mode": mode.model_dump()}
            decoders[mode_label(own["mode"])] = partial(_ours, engine, own)
        if job.transformers:
            dtype = str(engine.model.dtype).removeprefix("torch.")
            model = load_transformers(job.checkpoint, dtype)
            decoders["transformers"] = partial(transformers_answer, model)
        common = {"max_new_tokens": job.max_new_tokens, "temperature": 0.0}
        common |= {"stop_ids": sorted(stop_ids(engine.model))}
        cells = [(label, size) for size in job.batch_sizes for label in decoders]
        rounds = 1 + job.rounds
        bar = bars.add_task("rounds, the first one to warm up", total=rounds * len(cells))
        answers: dict[tuple[str, int], list[dict[str, Any]]] = {cell: [] for cell in cells}
        for round_ in range(rounds):
            for label, size in cells:
                parts = in_batches(prompts, size, job.prompts)
                task = common | {"batches": parts if round_ else parts[:1]}
                answers[label, size] += [decoders[label](task)] * bool(round_)
                bars.advance(bar)
    cases = [_case(cell, answers, job) for cell in cells]
    dtype = str(engine.model.dtype).removeprefix("torch.")
    print_cases(f"decoding {job.checkpoint} in {dtype}", cases, console)
    found = {"job": job.model_dump(mode="json"), "dtype": dtype, "adapter": engine.adapter_name}
    return found | {"cases": cases, "provenance": provenance()}


def _ours(engine: Any, own: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    return mars_answer(engine, task | own)


def _case(
    cell: tuple[str, int],
    answers: dict[tuple[str, int], list[dict[str, Any]]],
    job: BenchJob,
) -> dict[str, Any]:
    label, size = cell
    first = mode_label(job.modes[0].model_dump())
    own, base = answers[cell], answers[first, size]
    is_bounded = label != "transformers" and job.modes[0] == ExactMode()
    most = most_ratio(own[-1], base[-1]) if is_bounded else math.inf
    case = {"label": label, "temperature": 0.0, "batch": size}
    return case | counted(own, base) | timed(own, base, most)


def asked_problems(task: PromptsTask | None, count: int) -> list[Problem]:
    """`count` prompts: equally many of each kind from the task's files, or from the corpus. Raises
    DataError and ConfigError."""
    if task is None:
        found = problems("test", count, _PROMPT_SEED)
        return [Problem(p.question, None, turns=(Message("user", p.question),)) for p in found]
    asked = kinds_in_turn(problems_of(task))
    if len(asked) < count:
        raise ConfigError(f"the task has {len(asked)} prompts: set prompts to that at most")
    return asked[:count]


def check_room(needed: int, max_context: int, key: str) -> None:
    """Raises ConfigError if the longest prompt and its answer need more than the context."""
    if needed > max_context:
        raise ConfigError(
            f"{key} {max_context} is too small: the longest prompt and its answer take {needed} "
            "tokens; set it to that at least, or lower max_new_tokens"
        )


def in_batches(prompts: list[list[int]], size: int, count: int) -> list[list[list[int]]]:
    """The first `count` prompts in batches of this size; at least one batch."""
    return [prompts[i : i + size] for i in range(0, max(count, size), size)]


def counted(answers: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a decoder's last round counted; `same_output` is the share of answers that are those of
    `base`."""
    answer = answers[-1]
    same = [a == b for a, b in zip(answer["tokens"], base[-1]["tokens"], strict=True)]
    tokens = sum(map(len, answer["tokens"]))
    case: dict[str, Any] = {"tokens": tokens, "same_output": sum(same) / len(same)}
    if "steps" in answer:
        case["tokens_per_forward"] = tokens / answer["forwards"]
    if "rows" in answer:
        case["positions_per_token"] = answer["rows"] / tokens
    return case


def timed(
    answers: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], most: float
) -> dict[str, Any]:
    """A decoder's speeds, and their ratios to those of `base`; none of them can be above `most`."""
    answer, seconds = answers[-1], [each["seconds"] for each in answers]
    # Compared round by round, so that a drift of the machine affects both.
    ratios = [_speed(one) / _speed(other) for one, other in zip(answers, base, strict=True)]
    fault = ratio_fault(ratios, most)
    case = {
        "tokens_per_s": statistics.median(map(_speed, answers)),
        "speed_up": None if fault else statistics.median(ratios),
        "speed_ups": [] if fault else ratios,
        "fault": fault,
        "seconds": seconds,
    }
    if "steps" in answer:
        case["ms_per_step"] = 1e3 * statistics.median(seconds) / answer["steps"]
    if "model_seconds" in answer:
        # In the last round, the share of a step's time outside the model's forward.
        case["own_share"] = 1 - answer["model_seconds"] / seconds[-1]
    return case


def most_ratio(answer: dict[str, Any], base: dict[str, Any]) -> float:
    """The largest ratio of speeds that can be to plain decoding by the same engine: a step with
    drafts costs no less than one without, so time falls at most as forwards or steps do."""
    tokens, base_tokens = (sum(map(len, each["tokens"])) for each in (answer, base))
    return max(
        tokens / answer["forwards"],
        (base["steps"] / base_tokens) / (answer["steps"] / tokens),
    )


def print_cases(title: str, cases: Sequence[dict[str, Any]], console: Console) -> None:
    """Print one line for each decoder and batch size, and why some have no ratio."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for column in ("temp.", "batch", "decoder", "x", "rounds", *(head for head, *_ in _COLUMNS)):
        is_name = column == "decoder"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for case in cases:
        ratios = case.get("speed_ups")
        table.add_row(
            f"{case['temperature']:g}",
            str(case["batch"]),
            case["label"],
            f"{case['speed_up']:.2f}" if ratios else "-",
            f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-",
            *(format(case[key], form) if key in case else "-" for _, key, form in _COLUMNS),
        )
    console.print(table)
    faults = Counter(case["fault"] for case in cases if case["fault"])
    for fault, count in faults.items():
        console.print(f"{count} of {len(cases)} without a ratio: {fault}")


def _speed(answer: dict[str, Any]) -> float:
    return sum(map(len, answer["tokens"])) / answer["seconds"]
