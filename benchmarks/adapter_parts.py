"""Measures the gain of each part of a draft adapter by short trainings with one part left out.

    python benchmarks/adapter_parts.py ADAPTATION OUTPUT.json [STEPS [VARIANT ...]]

ADAPTATION is the directory of a `mars-ray adapt` run: its model, its answers and its recipe. Every
variant is trained from scratch on one rank for STEPS conversations, with a schedule that ends
there. All see the same answers in the same order, except the two variants that train on own or on
real prompts alone. The result is teacher-forced over the held-out answers: the tokens per forward
with masks behind every outcome, and with masks behind all drafts only. Finished variants are in
OUTPUT.parts/; a run that was stopped continues with the next one. Needs no Ray.
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
from mars_ray.config.data import DataConfig, FilesSource
from mars_ray.config.model import PretrainedModel
from mars_ray.config.train import StageConfig, TrainJob
from mars_ray.errors import MarsError
from mars_ray.generate.prompts import OWN_ORIGIN
from mars_ray.model.directory import CONFIG_FILE
from mars_ray.model.load import multiplies_bfloat16
from mars_ray.provenance import provenance
from mars_ray.train.metrics import MetricsReader
from mars_ray.train.plan import stage_plan, with_absolute_paths
from mars_ray.train.ranks import Ranks
from mars_ray.train.worker import train_stage

STEPS = 280  # about 50,000 mask tokens with two grids


@dataclass(frozen=True, slots=True)
class Variant:
    """The changes of one variant to the recipe."""

    adapter: dict[str, Any] = field(default_factory=dict)
    prompts: str | None = None  # only answers to these prompts: own or real
    seed: int = 0
    times: int = 1  # factor on the number of steps


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
    stage = {
        "objective": recipe.objective,
        "adapter": {key: value for key, value in adapter.items() if value is not None},
        "optimizer": recipe.optimizer,
        "steps": steps * variant.times,
        "global_batch_size": 1,
        "eval_rows": sum(1 for _ in held_out.open()),
    }
    fast = torch.cuda.is_available() or multiplies_bfloat16()
    return TrainJob(
        name="adapter-parts",
        output_dir=str(scratch / "run"),
        model=PretrainedModel(path=str(model)),
        data=DataConfig(
            train=FilesSource(paths=(str(rows_of(adaptation, variant.prompts, scratch)),)),
            eval=FilesSource(paths=(str(held_out),)),
            max_length=recipe.max_length,
            packing=False,
        ),
        stages={"draft": StageConfig.model_validate(stage)},
        precision=recipe.precision or ("bfloat16" if fast else "float32"),
        seed=variant.seed,
    )


def train(job: TrainJob) -> dict[str, Any]:
    """Train, and return the metrics of the last evaluation. Raises MarsError."""
    job = with_absolute_paths(job)
    ranks = Ranks.current(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert isinstance(job.model, PretrainedModel)
    plan = stage_plan(job, "draft", Path(job.model.path))
    outcome = train_stage(plan, ranks, None, lambda *_: None)
    if isinstance(outcome, MarsError):
        raise outcome
    records = list(MetricsReader(plan.metrics_file).new())
    said = [line for line in records if line["kind"] == "eval"][-1]
    survival = [said[key] for key in sorted(said) if key.startswith("acceptance_")]
    return {
        "mask_tokens": [line for line in records if line["kind"] == "train"][-1]["mask_tokens"],
        "seconds": outcome.seconds,
        "survival": survival,
        "tokens_per_forward": said["tokens_per_forward"],
        "rows_alone": said.get("row_tokens_per_forward"),
        # With masks behind all drafts only, a rejection costs a step without drafts.
        "one_group": 1 + sum(survival) / (2 - survival[-1]),
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
        scratch = parts / "training"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        found = train(job_of(adaptation, VARIANTS[name], steps, scratch))
        path.write_text(json.dumps(found))
        print(f"{name}: {found['tokens_per_forward']:.3f} tokens per forward", flush=True)
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
