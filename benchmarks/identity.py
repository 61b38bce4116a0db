"""Are the original model's answers unchanged? Our answers beside those of `transformers.generate`.

    python benchmarks/identity.py JOB.toml OUTPUT.json [--bfloat16] [KEY=VALUE ...]

transformers answers every prompt of the job greedily in batches of 16, and the first 100 one by
one. This engine answers them in `exact` and in every mode of the job at threshold 1, with the job's
draft adapter and without; modes with trees of drafts answer the first 100 only. The kinds of
prompts alternate, so that the first 100 include all kinds.

Answers are compared token by token. float32: for each pair that differs, the first difference is
listed with the margin between the two likeliest tokens, as transformers computes it. bfloat16, on
hardware that multiplies it: our modes in batches of 16, 7 and 1 against our own `exact` in batches
of 16; elsewhere the half that is there stays. With --bfloat16 only this half is made and put into
the result that is there, since other hardware may have made that. Each decoder's answers are
written to OUTPUT.answers/, so a run that was stopped can continue.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.evaluate import EvaluateJob
from mars_ray.config.load import load_job
from mars_ray.config.modes import ExactMode, Mode, VerifiedMode
from mars_ray.core.frontier import mode_label
from mars_ray.core.statistics import is_looping
from mars_ray.decode.engine import Engine, generate_all
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.evaluate.tasks import kinds_in_turn, problems_of, prompts_of
from mars_ray.model.directory import weight_files
from mars_ray.model.load import load_tokenizer, multiplies_bfloat16, stop_ids
from mars_ray.progress import Bars
from mars_ray.provenance import provenance

BATCH, ALONE = 16, 100
Tokens = list[int]
Answers = list[dict[str, Any]]  # tokens and forwards of each prompt


class Comparison:
    """One run: the prompts, and the answers of each decoder."""

    def __init__(self, job: EvaluateJob, folder: Path, console: Console) -> None:
        self.job, self.folder, self.console = job, folder, console
        self.problems = kinds_in_turn(problems_of(job.task))
        self.prompts = prompts_of(self.problems, load_tokenizer(job.checkpoint))
        folder.mkdir(parents=True, exist_ok=True)

    def answers(self, name: str, give: Callable[[], Answers]) -> Answers:
        """The answers kept in the folder, or else those that `give` produces now."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            self.console.print(name, markup=False)
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(give()))
            draft.replace(path)
        return json.loads(path.read_text())

    def engine(self, **changes: Any) -> Engine:
        """An engine with the job's settings and these changes."""
        own = {"prefix_cache": False, "window_control": False}  # so that every step has all masks
        config = self.job.engine.model_copy(update=own | changes)
        return load_engine(self.job.checkpoint, EngineConfig(**config.model_dump()))[0]

    def ours(
        self, name: str, engine: Engine, mode: Mode, prompts: Sequence[tuple[int, ...]]
    ) -> Answers:
        """The answers of this engine, in batches of its own size."""
        return self.answers(name, lambda: self._generated(engine, mode, prompts))

    def _generated(self, engine: Engine, mode: Mode, prompts: Sequence[tuple[int, ...]]) -> Answers:
        stops = stop_ids(engine.model)
        requests = [
            Request(str(index), prompt, mode, Sampling(), self.job.max_new_tokens, stops)
            for index, prompt in enumerate(prompts)
        ]
        with Bars(self.console) as bars:
            task = bars.add_task(mode_label(mode.model_dump()), total=len(requests))
            done = generate_all(engine, requests, lambda _: bars.advance(task))
        return [_answer(completion) for completion in done]


def _answer(completion: Completion) -> dict[str, Any]:
    return {"tokens": list(completion.tokens), "forwards": completion.forwards}


def theirs(
    model: Any, prompts: Sequence[tuple[int, ...]], stops: list[int], limit: int, batch: int
) -> Answers:
    """The answers of transformers, with prompts padded on the left."""
    config = GenerationConfig(
        max_new_tokens=limit, do_sample=False, eos_token_id=stops, pad_token_id=stops[0]
    )
    answers = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        longest = max(map(len, part))
        padded = torch.tensor([[stops[0]] * (longest - len(ids)) + list(ids) for ids in part])
        seen = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in part])
        with torch.inference_mode():
            output = model.generate(
                padded.to(model.device),
                attention_mask=seen.to(model.device),
                generation_config=config,
            )
        for row in output:
            tokens = row[longest:].tolist()
            end = next((i + 1 for i, t in enumerate(tokens) if t in stops), len(tokens))
            answers.append({"tokens": tokens[:end], "forwards": end})
    return answers


def original(directory: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model as transformers has it."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.to(device).eval()


def compared(name: str, reference: Answers, answers: Answers) -> dict[str, Any]:
    """The number of equal answers, and where the others first differ."""
    pairs = [(a["tokens"], b["tokens"]) for a, b in zip(reference, answers, strict=True)]
    differ = [
        {"prompt": index, "at": _first_difference(*pair)}
        for index, pair in enumerate(pairs)
        if pair[0] != pair[1]
    ]
    return {
        "name": name,
        "answers": len(pairs),
        "identical": 1 - len(differ) / len(pairs),
        "differences": differ,
    }


def _first_difference(a: Tokens, b: Tokens) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(min(a, b, key=len))
    )


@torch.inference_mode()
def add_margins(result: dict[str, Any], model: Any, prompts: Any, reference: Answers) -> None:
    """Add to each first difference the margin between the two likeliest logits there."""
    for difference in result["differences"]:
        index = difference["prompt"]
        text = [*prompts[index], *reference[index]["tokens"][: difference["at"]]]
        top = model(torch.tensor([text], device=model.device)).logits[0, -1].float().topk(2).values
        difference["margin"] = float(top[0] - top[1])


def tokens_per_forward(answers: Answers, kinds: list[str]) -> dict[str, Any]:
    """T/F over all answers, over those that do not end in a loop, and over the latter by kind."""
    loops = [is_looping(answer["tokens"]) for answer in answers]
    straight = [a for a, loop in zip(answers, loops, strict=True) if not loop]
    by_kind = {
        kind: _ratio(
            [a for a, k, loop in zip(answers, kinds, loops, strict=True) if k == kind and not loop]
        )
        for kind in dict.fromkeys(kinds)
    }
    return {
        "all": _ratio(answers),
        "without_loops": _ratio(straight),
        "looping": sum(loops),
        "by_kind": by_kind,
    }


def _ratio(answers: Answers) -> float | None:
    forwards = sum(answer["forwards"] for answer in answers)
    return sum(len(a["tokens"]) for a in answers) / forwards if forwards else None


def tensor_hashes(directory: str) -> str:
    """One hash over the hashes of all tensors of the base model."""
    digest = hashlib.sha256()
    for name in weight_files(Path(directory)):
        for key, value in sorted(load_file(Path(directory) / name).items()):
            digest.update(key.encode() + value.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Compare in both precisions, one after the other."""
    settings = [word for word in sys.argv[3:] if word != "--bfloat16"]
    job = load_job(sys.argv[1], settings)
    assert isinstance(job, EvaluateJob), "a job of kind evaluate"
    output = Path(sys.argv[2])
    run = Comparison(job, output.with_suffix(".answers"), Console(stderr=True))
    lossless = [m for m in job.modes if isinstance(m, VerifiedMode) and m.threshold == 1]
    there = json.loads(output.read_text()) if output.exists() else {}
    for name in ("task", "max_new_tokens") if there else ():
        assert there["job"][name] == job.model_dump(mode="json")[name], name
    result = there if "--bfloat16" in sys.argv else there | first_half(run, lossless)
    if torch.cuda.is_available() or multiplies_bfloat16():
        result["bfloat16"] = bfloat16(run, lossless)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("prompts", "tokens_per_forward", "base_sha256")}))


def first_half(run: Comparison, lossless: Sequence[VerifiedMode]) -> dict[str, Any]:
    """The result in float32, and the hashes of the base model before and after it."""
    before = tensor_hashes(run.job.checkpoint)
    single = float32(run, lossless)
    return {
        "job": run.job.model_dump(mode="json"),
        "prompts": len(run.prompts),
        "float32": single,
        "tokens_per_forward": {
            drafts_of(VerifiedMode(**row["mode"])): row["tokens_per_forward"]["without_loops"]
            for row in single["rows"]
            if row.get("mode", {}).get("type") == "verified" and row["batch"] == BATCH
        },
        "base_sha256": {"before": before, "after": tensor_hashes(run.job.checkpoint)},
        "provenance": provenance(),
    }


def drafts_of(mode: VerifiedMode) -> str:
    """A description of a mode's drafts."""
    if (mode.branches or 1) > 1:
        return "tree"
    return "groups" if (mode.groups or 1) > 1 else "one_group"


def float32(run: Comparison, modes: Sequence[VerifiedMode]) -> dict[str, Any]:
    """Compare all modes with transformers."""
    job = run.job
    engine = run.engine(dtype="float32", max_batch=BATCH)
    model = original(job.checkpoint, torch.float32, engine.model.device)
    stops, limit = sorted(stop_ids(engine.model)), job.max_new_tokens
    few = run.prompts[:ALONE]
    together = run.answers(
        "transformers_16", lambda: theirs(model, run.prompts, stops, limit, BATCH)
    )
    alone = run.answers("transformers_1", lambda: theirs(model, few, stops, limit, 1))
    rows = [compared("transformers, batch 1 against 16", together[: len(few)], alone)]

    def add(engine: Engine, mode: Mode, batch: int, name: str) -> None:
        is_tree = isinstance(mode, VerifiedMode) and drafts_of(mode) == "tree"
        prompts = run.prompts if batch == BATCH and not is_tree else few
        reference = (together if batch == BATCH else alone)[: len(prompts)]
        name = f"{mode_label(mode.model_dump())}, {name}, batch {batch}"
        own = run.ours(f"float32 {name}", engine, mode, prompts)
        row = compared(name, reference, own) | {"mode": mode.model_dump(), "batch": batch}
        add_margins(row, model, run.prompts, reference)
        kinds = [problem.kind or "" for problem in run.problems[: len(prompts)]]
        rows.append(row | {"tokens_per_forward": tokens_per_forward(own, kinds)})

    for mode in [ExactMode(), *modes]:
        add(engine, mode, BATCH, "with adapter")
    engine.set_adapter(None)
    add(engine, ExactMode(), BATCH, "without adapter")
    engine = run.engine(dtype="float32", max_batch=1)
    for mode in [ExactMode(), *modes]:
        add(engine, mode, 1, "with adapter")
    engine.set_adapter(None)
    add(engine, ExactMode(), 1, "without adapter")
    ours: list[dict[str, Any]] = rows[1:]
    return {
        "against": "transformers.generate, float32",
        "prompts": len(run.prompts),
        "identical_share": min(row["identical"] for row in ours),
        "largest_margin": max(
            (d["margin"] for row in ours for d in row["differences"]), default=None
        ),
        "rows": rows,
    }


def bfloat16(run: Comparison, modes: Sequence[VerifiedMode]) -> dict[str, Any]:
    """Compare with our own `exact` in batches of 16."""
    modes = [mode for mode in modes if drafts_of(mode) != "tree"]
    kinds = [problem.kind or "" for problem in run.problems]
    exact: Answers = []
    rows, device = [], torch.device("cpu")
    for batch in (BATCH, BATCH // 2 - 1, 1):
        engine = run.engine(dtype="bfloat16", max_batch=batch)
        device = engine.model.device
        for mode in [ExactMode(), *(modes if batch == BATCH else modes[-1:])]:
            label = mode_label(mode.model_dump())
            own = run.ours(f"bfloat16 {label} {batch}", engine, mode, run.prompts)
            if not exact:
                exact = own
                continue
            row = compared(f"{label}, batch {batch}", exact, own)
            row |= {"mode": mode.model_dump(), "batch": batch}
            rows.append(row | {"tokens_per_forward": tokens_per_forward(own, kinds)})
    model = original(run.job.checkpoint, torch.bfloat16, device)
    for row in rows:
        add_margins(row, model, run.prompts, exact)
    return {
        "against": "our exact, bfloat16, batch 16",
        "identical_share": min(row["identical"] for row in rows),
        "rows": rows,
        "provenance": provenance(),
    }


if __name__ == "__main__":
    main()
