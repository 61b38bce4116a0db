"""Measures the gain of each part of a draft adapter by short trainings with one part changed.

    python benchmarks/adapter_parts.py ADAPTATION OUTPUT.json [STEPS [VARIANT ...]]

ADAPTATION is the directory of a `mars-ray adapt` run: its model, its answers and its recipe. Every
variant is trained from scratch on one rank for STEPS steps, with a schedule that ends there: of one
conversation on a CPU, of eight rows of packed conversations on a GPU. All see the same answers in
the same order, except the two variants that train on own or on real prompts alone. The result is
teacher-forced over the held-out answers: the tokens per forward with masks behind every outcome,
and with masks behind all drafts only. Finished variants and their adapters are in OUTPUT.parts/,
where several processes may write; a run that was stopped continues with the next one. Needs no Ray.
"""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mars_ray.adapt.jobs import Places
from mars_ray.config.adapt import AdaptJob
from mars_ray.config.inputs import DataConfig, FilesSource, PretrainedModel
from mars_ray.config.train import StageConfig, TrainJob
from mars_ray.errors import MarsError
from mars_ray.generate.prompts import OWN_ORIGIN
from mars_ray.model.directory import CONFIG_FILE
from mars_ray.model.load import multiplies_bfloat16
from mars_ray.provenance import provenance
from mars_ray.train.checkpoint import MODEL
from mars_ray.train.metrics import MetricsReader
from mars_ray.train.plan import stage_plan, with_absolute_paths
from mars_ray.train.ranks import Ranks
from mars_ray.train.worker import train_stage

STEPS = 280  # about 50,000 mask tokens with two grids on a CPU
ROWS = 8  # of a GPU's step
CURVE = 8  # evaluations of a variant
T_F = "tokens_per_forward"


@dataclass(frozen=True, slots=True)
class Variant:
    """The changes of one variant to the recipe."""

    adapter: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    rate: float = 1.0  # factor on the learning rate
    prompts: str | None = None  # only answers to these prompts: own or real
    seed: int = 0
    times: int = 1  # factor on the number of steps


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
VARIANTS = {
    "all parts": Variant(),
    "all parts, another seed": Variant(seed=1),
    "mask embeddings as they start": Variant({"train_mask_embeddings": False}),
    "no LoRA": Variant({"rank": 0}),
    "no head": Variant({"head_size": 0}),
    "own prompts alone": Variant(prompts="own"),
    "real prompts alone": Variant(prompts="real"),
    "all parts, 4 times the steps": Variant(times=4),
    "all parts, 20 times the steps": Variant(times=20),
    "rank 16": Variant({"rank": 16}),
    "rank 64": Variant({"rank": 64}),
    "rank 128": Variant({"rank": 128}),
    "twice the head": Variant({"head_size": 2304}),
    "attention's matrices alone": Variant({"targets": _ATTENTION}),
    "the MLP's matrices alone": Variant({"targets": _MLP}),
    "total variation": Variant(objective={"loss": "tv"}),
    "total variation and KL": Variant(objective={"loss": "tv_kl"}),
    "rows' loss at full weight": Variant(objective={"row_loss_weight": 1.0}),
    "rows' loss at an eighth": Variant(objective={"row_loss_weight": 0.125}),
    "four grids": Variant(objective={"grids": 4}),
    "half the learning rate": Variant(rate=0.5),
    "a quarter of the learning rate": Variant(rate=0.25),
    "twice the learning rate": Variant(rate=2.0),
}


def rows_of(adaptation: Path, prompts: str | None, scratch: Path) -> Path:
    """The file of training answers: all, or only those to own or to real prompts."""
    source = adaptation / "train.jsonl"
    if prompts is None:
        return source
    target = scratch / f"{prompts}.jsonl"
    with source.open() as lines, target.open("w") as kept:
        for line in lines:
            is_own = json.loads(line)["origin"].startswith(OWN_ORIGIN)
            if is_own == (prompts == "own"):
                kept.write(line)
    return target


def job_of(adaptation: Path, variant: Variant, steps: int, scratch: Path) -> TrainJob:
    """The recipe's training job with the changes of a variant."""
    job = AdaptJob.model_validate_json((adaptation / "adapt.json").read_text())
    recipe, base = job.recipe, Places(adaptation).base
    model = base if (base / CONFIG_FILE).exists() else Path(job.model)
    held_out = adaptation / "held_out.jsonl"
    adapter = recipe.adapter.model_dump() | {"start_from": None} | variant.adapter
    is_gpu = torch.cuda.is_available()
    rate = variant.rate * recipe.optimizer.learning_rate
    steps *= variant.times
    stage = {
        "objective": recipe.objective.model_dump() | variant.objective,
        "adapter": {key: value for key, value in adapter.items() if value is not None},
        "optimizer": recipe.optimizer.model_dump() | {"learning_rate": rate},
        "steps": steps,
        "eval_every_steps": 10 * -(-steps // (10 * CURVE)),  # where losses are logged, too
        "global_batch_size": ROWS if is_gpu else 1,
        "eval_rows": sum(1 for _ in held_out.open()),
    }
    fast = is_gpu or multiplies_bfloat16()
    return TrainJob(
        name="adapter-parts",
        output_dir=str(scratch / "run"),
        model=PretrainedModel(path=str(model)),
        data=DataConfig(
            train=FilesSource(paths=(str(rows_of(adaptation, variant.prompts, scratch)),)),
            eval=FilesSource(paths=(str(held_out),)),
            max_length=recipe.max_length,
            packing=is_gpu,
        ),
        stages={"draft": StageConfig.model_validate(stage)},
        precision=recipe.precision or ("bfloat16" if fast else "float32"),
        seed=variant.seed,
    )


def train(job: TrainJob, keep: Path) -> dict[str, Any]:
    """Train, copy the adapter to `keep`, and return what the evaluations say. Raises MarsError."""
    job = with_absolute_paths(job)
    ranks = Ranks.current(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert isinstance(job.model, PretrainedModel)
    plan = stage_plan(job, "draft", Path(job.model.path))
    outcome = train_stage(plan, ranks, None, lambda *_: None)
    if isinstance(outcome, MarsError):
        raise outcome
    records = list(MetricsReader(plan.metrics_file).new())
    evaluated = [line for line in records if line["kind"] == "eval"]
    said, masks = evaluated[-1], {line["step"]: line for line in records if line["kind"] == "train"}
    shutil.copytree(outcome.checkpoint / MODEL, keep, dirs_exist_ok=True)
    survival = [said[key] for key in sorted(said) if key.startswith("acceptance_")]
    return {
        "mask_tokens": [line for line in records if line["kind"] == "train"][-1]["mask_tokens"],
        "seconds": outcome.seconds,
        "survival": survival,
        T_F: said[T_F],
        "rows_alone": said.get("row_tokens_per_forward"),
        # With masks behind all drafts only, a rejection costs a step without drafts.
        "one_group": 1 + sum(survival) / (2 - survival[-1]),
        "curve": [
            [masks[line["step"]]["mask_tokens"], masks[line["step"]]["seconds"], line[T_F]]
            for line in evaluated
            if line["step"] in masks
        ],
    }


def main() -> None:
    """Train all variants that are not done yet."""
    adaptation, output = Path(sys.argv[1]), Path(sys.argv[2])
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else STEPS
    names = sys.argv[4:] or list(VARIANTS)
    parts = output.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = parts / f"{name}.json"
        if path.exists():
            continue
        scratch = parts / f"{name}.training"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        job = job_of(adaptation, VARIANTS[name], steps, scratch)
        found = train(job, parts / f"{name}.adapter")
        shutil.rmtree(scratch)
        path.write_text(json.dumps(found))
        print(f"{name}: {found[T_F]:.3f} tokens per forward, {found['seconds']:.0f} s", flush=True)
    result = {
        "steps": steps,
        "held_out": sum(1 for _ in (adaptation / "held_out.jsonl").open()),
        "variants": {
            name: json.loads((parts / f"{name}.json").read_text())
            for name in VARIANTS
            if (parts / f"{name}.json").exists()
        },
        "provenance": provenance(),
    }
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
