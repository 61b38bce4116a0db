"""Tokens per second on this machine: our engine and transformers' `generate`, the same prompts in
this process, in turn.

A task is {"batches": [[[ids], ...], ...], "places": n, "max_new_tokens": n, "stop_ids": [...],
"temperature": t}, and for our engine also "mode"; an answer {"seconds": s, "tokens": [[ids], ...],
...}. Our engine decodes as many sequences at a time as there are places, and the next one takes the
place of one that has ended; transformers decodes one batch after the other.

One round runs each (decoder, batch) once, in the same order, behind one that warms up by the first
batch of each. Medians of rounds are told, so that a drift of the machine affects all.
(`benchmarks/compare_decoders.py` has other engines beside these.)
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from pydantic import TypeAdapter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from mars_ray.config.decode import Sampling
from mars_ray.config.evaluate import BenchJob, EvaluateJob, PromptsTask
from mars_ray.config.modes import ExactMode, Mode
from mars_ray.core.frontier import mode_label
from mars_ray.core.statistics import ratio_fault
from mars_ray.data.corpus import problems
from mars_ray.data.sources import Message
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import drafting_card, load_engine, with_room
from mars_ray.decode.request import Completion, Request, window_of
from mars_ray.errors import ConfigError
from mars_ray.evaluate.tasks import Problem, kinds_in_turn, problems_of, prompts_of
from mars_ray.files import ResultCache
from mars_ray.model.load import load_tokenizer, stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

_MODE: TypeAdapter[Any] = TypeAdapter(Mode)


def mars_answer(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """Our engine's answer, in the task's mode."""
    mode = _MODE.validate_python(task["mode"])
    limit, stops = task["max_new_tokens"], frozenset(task["stop_ids"])
    sampling = Sampling(temperature=task["temperature"])
    requests = [
        Request(str(index), tuple(ids), mode, sampling, limit, stops)
        for index, ids in enumerate(ids for batch in task["batches"] for ids in batch)
    ]
    started, in_model = time.perf_counter(), engine.model_seconds
    completions, steps, rows = _run(engine, requests, task["places"])
    return {
        "seconds": time.perf_counter() - started,
        "tokens": [list(completion.tokens) for completion in completions],
        "forwards": sum(completion.forwards for completion in completions),
        "steps": steps,
        "rows": rows,
        "model_seconds": engine.model_seconds - in_model,
    }


def _run(engine: Engine, requests: list[Request], places: int) -> tuple[list[Completion], int, int]:
    """The completions, the number of engine steps, and the number of positions forwarded; where an
    answer ends, the next request takes its place."""
    waiting = iter(requests)
    for request in islice(waiting, places):
        engine.submit(request)
    completions: dict[str, Completion] = {}
    steps = rows = 0
    while engine.has_work:
        for event in engine.step():
            if event.failure:
                raise event.failure
            if event.completion:
                completions[event.request_id] = event.completion
                for request in islice(waiting, 1):
                    engine.submit(request)
        steps += 1
        rows += engine.last_rows
    return [completions[request.id] for request in requests], steps, rows


def load_transformers(checkpoint: str, dtype: str) -> PreTrainedModel:
    """The model as transformers loads it, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    return model.to(device).eval()


@torch.inference_mode()
def transformers_answer(model: PreTrainedModel, task: dict[str, Any]) -> dict[str, Any]:
    """The answer of `generate` on padded batches, whose rows wait for the longest."""
    config = GenerationConfig(
        max_new_tokens=task["max_new_tokens"],
        **transformers_sampling(task["temperature"]),
        prompt_lookup_num_tokens=task.get("prompt_lookup_num_tokens"),
        # -1 means that no token ends a sequence; without it the model's own token would.
        eos_token_id=task["stop_ids"] or [-1],
        pad_token_id=0,
    )
    started = time.perf_counter()
    tokens = [ids for batch in task["batches"] for ids in _generate(model, batch, config)]
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


def transformers_sampling(temperature: float) -> dict[str, Any]:
    """The settings of `generate` for a temperature and all tokens; 0 is greedy."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def _generate(
    model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig
) -> list[list[int]]:
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    seen = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    output: Any = model.generate(  # type: ignore[operator]
        padded.to(model.device), attention_mask=seen.to(model.device), generation_config=config
    )
    answers = []
    for row in output:
        tokens = row[longest:].tolist()
        # Up to the first stop token; behind it is padding.
        ends = (i + 1 for i, token in enumerate(tokens) if token in config.eos_token_id)
        answers.append(tokens[: next(ends, len(tokens))])
    return answers


TRANSFORMERS = "transformers"
Answers = list[list[int]]  # token ids


def identical(own: Answers, other: Answers) -> float:
    """The share of answers whose tokens equal the other's."""
    same = [a == b for a, b in zip(own, other, strict=True)]
    return sum(same) / len(same)


def decode_beside(
    job: EvaluateJob, modes: Sequence[Mode], kept: ResultCache, console: Console
) -> dict[str, Answers]:
    """Greedy answers of transformers and of each mode, under the keys `transformers` and the modes'
    labels. Batches are as large as the engine's. The engine's dtype must be set, because
    transformers uses the same.

    Batches that are kept already are not decoded again. Raises MarsError.
    """
    labels = {mode_label(mode.model_dump()): mode for mode in modes}
    problems = problems_of(job.task)
    size = job.engine.max_batch
    names = {
        (label, first): f"{label}, batches of {size}, from {first}"
        for first in range(0, len(problems), size)
        for label in (TRANSFORMERS, *labels)
    }
    if any(name not in kept for name in names.values()):
        _decode(job, labels, names, kept, console)
    return {
        label: [ids for (own, _), name in names.items() if own == label for ids in kept[name]]
        for label in (TRANSFORMERS, *labels)
    }


def _decode(
    job: EvaluateJob,
    labels: dict[str, Mode],
    names: dict[tuple[str, int], str],
    kept: ResultCache,
    console: Console,
) -> None:
    size, dtype = job.engine.max_batch, job.engine.dtype
    assert dtype != "auto", "another dtype is another text"
    config = job.engine.model_copy(update={"prefix_cache": False})
    engine, tokenizer = load_engine(job.checkpoint, config)
    prompts = [list(ids) for ids in prompts_of(problems_of(job.task), tokenizer)]
    task = {"stop_ids": sorted(stop_ids(engine.model)), "temperature": 0.0}
    task |= {"max_new_tokens": job.max_new_tokens}
    model = load_transformers(job.checkpoint, dtype)
    answers = {TRANSFORMERS: partial(transformers_answer, model)}
    for label, mode in labels.items():
        answers[label] = partial(_answer, engine, mode)
    with Bars(console) as bars:
        bar = bars.add_task("beside transformers", total=len(names))
        for (label, first), name in names.items():
            if name not in kept:
                batch = prompts[first : first + size]
                kept[name] = answers[label](task | {"batches": [batch], "places": size})["tokens"]
            bars.advance(bar)


def _answer(engine: Engine, mode: Mode, task: dict[str, Any]) -> dict[str, Any]:
    return mars_answer(engine, task | {"mode": mode.model_dump()})


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
            decoders[mode_label(mode.model_dump())] = partial(_answer, engine, mode)
        if job.transformers:
            dtype = str(engine.model.dtype).removeprefix("torch.")
            model = load_transformers(job.checkpoint, dtype)
            decoders["transformers"] = partial(transformers_answer, model)
        common = {"max_new_tokens": job.max_new_tokens, "temperature": 0.0}
        common |= {"stop_ids": sorted(stop_ids(engine.model))}
        cells = [(label, size) for size in job.batch_sizes for label in decoders]
        rounds = 1 + job.rounds
        bar = bars.add_task("warming up", total=rounds * len(cells))
        answers: dict[tuple[str, int], list[dict[str, Any]]] = {cell: [] for cell in cells}
        for round_ in range(rounds):
            for label, size in cells:
                name = f"round {round_} of {job.rounds}" if round_ else "warming up"
                bars.update(bar, description=f"{name}: {label}, batch {size}")
                parts = in_batches(prompts, size, job.prompts)
                task = common | {"batches": parts if round_ else parts[:1], "places": size}
                answer = decoders[label](task)
                if round_:
                    answers[label, size].append(answer)
                    bars.say(f"{name}: {label}, batch {size}: {_speed(answer):.1f} tokens/s")
                bars.advance(bar)
    cases = [_case(cell, answers, job) for cell in cells]
    dtype = str(engine.model.dtype).removeprefix("torch.")
    print_cases(f"decoding {job.checkpoint} in {dtype}", cases, console)
    found = {"job": job.model_dump(mode="json"), "dtype": dtype, "adapter": engine.adapter_name}
    return found | {"cases": cases, "provenance": provenance()}


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
