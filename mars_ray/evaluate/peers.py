"""Our engine beside transformers' `generate`: the same prompts in this process, to be compared.

A task is {"batches": [[[ids], ...], ...], "max_new_tokens": n, "stop_ids": [...],
"temperature": t}, and for our engine also "mode"; an answer {"seconds": s, "tokens": [[ids], ...],
...}. The sequences of a batch are decoded together, and batches one after the other.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter
from rich.console import Console
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from mars_ray.config.decode import Sampling
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.modes import Mode
from mars_ray.core.frontier import mode_label
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.evaluate.run import prompts_of
from mars_ray.evaluate.tasks import problems_of
from mars_ray.files import ResultCache
from mars_ray.model.stop import stop_ids
from mars_ray.progress import Bars

_MODE: TypeAdapter[Any] = TypeAdapter(Mode)


def mars_answer(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """Our engine's answer, in the task's mode."""
    mode = _MODE.validate_python(task["mode"])
    limit, stops = task["max_new_tokens"], frozenset(task["stop_ids"])
    sampling = Sampling(temperature=task["temperature"])
    completions: list[Completion] = []
    steps = rows = 0
    started, in_model = time.perf_counter(), engine.model_seconds
    for batch in task["batches"]:
        done, own_steps, own_rows = _run(
            engine,
            [
                Request(str(index), tuple(ids), mode, sampling, limit, stops)
                for index, ids in enumerate(batch)
            ],
        )
        completions += done
        steps += own_steps
        rows += own_rows
    return {
        "seconds": time.perf_counter() - started,
        "tokens": [list(completion.tokens) for completion in completions],
        "forwards": sum(completion.forwards for completion in completions),
        "steps": steps,
        "rows": rows,
        "model_seconds": engine.model_seconds - in_model,
    }


def _run(engine: Engine, requests: list[Request]) -> tuple[list[Completion], int, int]:
    """The completions, the number of engine steps, and the number of positions forwarded."""
    for request in requests:
        engine.submit(request)
    completions: dict[str, Completion] = {}
    steps = rows = 0
    while engine.has_work:
        for event in engine.step():
            if event.completion:
                completions[event.request_id] = event.completion
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
    return [_until_stop(row[longest:].tolist(), config.eos_token_id) for row in output]


def _until_stop(tokens: list[int], stops: list[int]) -> list[int]:
    """The tokens up to the first stop token, without the padding behind it."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


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
                kept[name] = answers[label](task | {"batches": [batch]})["tokens"]
            bars.advance(bar)


def _answer(engine: Any, mode: Mode, task: dict[str, Any]) -> dict[str, Any]:
    return mars_answer(engine, task | {"mode": mode.model_dump()})
