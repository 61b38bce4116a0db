"""Run all stages of a training job in this process, without Ray, on the GPU if there is one.

    python benchmarks/train_alone.py JOB.toml DIRECTORY [KEY=VALUE ...]

The last stage's model is written to DIRECTORY/model. For machines that have torch and not Ray.
Stages that are already in DIRECTORY are trained again.
"""

import shutil
import sys
from pathlib import Path

import torch

from mars_ray.config.demo import TinyDemoJob
from mars_ray.config.load import load_job
from mars_ray.config.train import TrainJob
from mars_ray.errors import MarsError
from mars_ray.train.checkpoint import MODEL
from mars_ray.train.plan import initial_model, stage_plan, with_absolute_paths
from mars_ray.train.ranks import Ranks
from mars_ray.train.worker import train_stage


def train_here(job: TrainJob) -> Path:
    """Train, and return the directory of the last stage's model. Raises MarsError if it fails."""
    shutil.rmtree(job.output_dir, ignore_errors=True)
    job = with_absolute_paths(job)
    ranks = Ranks.current(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    model = initial_model(job)
    for stage in job.stages:
        outcome = train_stage(stage_plan(job, stage, model), ranks, None, lambda *_: None)
        if isinstance(outcome, MarsError):
            raise outcome
        print(f"{stage}: {outcome.step} steps, {outcome.seconds:.0f} s, {outcome.metrics}")
        model = outcome.checkpoint / MODEL
    return model


def main() -> None:
    """Run the job's stages, then copy the model to its place."""
    source, directory, *overrides = sys.argv[1:]
    job = load_job(source, overrides)
    if isinstance(job, TinyDemoJob):
        job = job.train
    assert isinstance(job, TrainJob), f"{source} does not train"
    model = train_here(job.model_copy(update={"output_dir": directory}))
    shutil.copytree(model, Path(directory) / "model")


if __name__ == "__main__":
    main()
