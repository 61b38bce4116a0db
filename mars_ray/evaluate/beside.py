"""Answers of our modes and of transformers' `generate` to the same prompts, to be compared.

No speeds: each answers every prompt once, and one round tells no ratio (`adapt/speed.py` does).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.modes import Mode
from mars_ray.core.frontier import mode_label
from mars_ray.decode.loading import load_engine
from mars_ray.evaluate.peers import load_transformers, mars_answer, transformers_answer
from mars_ray.evaluate.run import prompts_of
from mars_ray.evaluate.tasks import problems_of
from mars_ray.files import Kept
from mars_ray.model.stop import stop_ids
from mars_ray.progress import Bars

TRANSFORMERS = "transformers"
Answers = list[list[int]]  # token ids


def identical(own: Answers, other: Answers) -> float:
    """The share of answers whose tokens equal the other's."""
    same = [a == b for a, b in zip(own, other, strict=True)]
    return sum(same) / len(same)


def decode_beside(
    job: EvaluateJob, modes: Sequence[Mode], kept: Kept, console: Console
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
    kept: Kept,
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
                kept[name] = answers[label](task | {"batches": [batch]})["tokens"]
            bars.advance(bar)


def _answer(engine: Any, mode: Mode, task: dict[str, Any]) -> dict[str, Any]:
    return mars_answer(engine, task | {"mode": mode.model_dump()})
