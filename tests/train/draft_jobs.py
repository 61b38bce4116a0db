"""Jobs that train a draft adapter of a tiny plain model in seconds."""

from pathlib import Path
from typing import Any

from train.small_jobs import make_job, make_model, make_plan

from mars_ray.config.train import TrainJob
from mars_ray.model.directory import CARD_FILE
from mars_ray.train.plan import StagePlan

STEPS = 20


def make_plain_model(directory: Path) -> Path:
    """As it is downloaded: without a card."""
    (make_model(directory) / CARD_FILE).unlink()
    return directory


def draft_job(model: Path, output_dir: Path, /, **sections: Any) -> TrainJob:
    """One stage; `stage` in `sections` changes its keys, others replace whole top-level keys."""
    stage = {
        "objective": {"type": "draft"},
        "adapter": {"rank": 4},
        "steps": STEPS,
        "global_batch_size": 4,
        "eval_rows": 6,
        "optimizer": {"learning_rate": 5e-3, "warmup_share": 0.1},
    } | sections.pop("stage", {})
    content = make_job(model, output_dir).model_dump() | {"stages": {"draft": stage}} | sections
    return TrainJob.model_validate(content)


def draft_plan(model: Path, output_dir: Path, /, **sections: Any) -> StagePlan:
    """Its stage."""
    return make_plan(draft_job(model, output_dir, **sections), model, "draft")
