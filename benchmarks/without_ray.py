"""A job that trains, or one that adapts a model, without Ray, on this machine's GPU if it has one.

    python benchmarks/without_ray.py JOB.toml DIRECTORY [KEY=VALUE ...]

All runs in this process. DIRECTORY/model is the last stage's model, DIRECTORY/adapter the draft
adapter. When run again, it resumes an adaptation's answers, and trains from the beginning.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from rich.console import Console

from mars_ray.adapt.jobs import Devices, Places, generate_job, split, train_job
from mars_ray.config.adapt import AdaptJob
from mars_ray.config.demo import TinyDemoJob
from mars_ray.config.generate import GenerateJob
from mars_ray.config.load import load_job
from mars_ray.config.train import TrainJob
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import MarsError
from mars_ray.generate.run import Worker, run_generation
from mars_ray.model.draft_adapter import name_base
from mars_ray.model.load import multiplies_bfloat16
from mars_ray.train.checkpoint import MODEL
from mars_ray.train.plan import initial_model, stage_plan, with_absolute_paths
from mars_ray.train.ranks import Ranks
from mars_ray.train.worker import train_stage


class EngineHere:
    """One engine in this process, with the interface that `run_generation` expects."""

    def __init__(self, job: GenerateJob, say: Callable[[str], None]) -> None:
        self._worker = Worker(job.checkpoint, job.engine)
        self._most = 2 * job.engine.max_batch
        self._say: Callable[[str], None] | None = say

    def __enter__(self) -> "EngineHere":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, requests: int) -> None:
        """Load the engine at the first call: one is enough for any number."""
        if self._say:
            self._say(f"computes in {self._worker.load()}")
            self._say = None

    def decode(
        self, requests: Iterable[Request], until: float = math.inf
    ) -> Iterator[list[Completion]]:
        """Yields all requests as they finish; none is started after `until`."""
        waiting, held = list(requests)[::-1], 0
        while waiting or held:
            if time.monotonic() > until:
                waiting.clear()
            taken = [waiting.pop() for _ in range(min(len(waiting), self._most - held))]
            leave = self._most // 2 if waiting else 0
            done = self._worker.advance(taken, leave)
            held += len(taken) - len(done)
            yield done


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


def adapt_here(job: AdaptJob, directory: str) -> None:
    """Make answers and train the adapter. Raises MarsError if one of them fails."""
    places, base = Places(Path(directory).absolute()), Path(job.model).absolute()
    places.root.mkdir(parents=True, exist_ok=True)
    is_fast = torch.cuda.is_available() or multiplies_bfloat16()
    here = Devices(1, 1, 0, 1, 1, "bfloat16" if is_fast else "float32")
    generated = run_generation(
        generate_job(job, base, places, here), Console(stderr=True), EngineHere
    )
    parts = split(places.answers, places.root, job.recipe.held_out)
    minutes = job.minutes and max(1.0, job.minutes - generated.seconds / 60)
    trained = train_here(train_job(job, base, places, parts, here, minutes))
    shutil.rmtree(places.adapter, ignore_errors=True)
    shutil.copytree(trained, places.adapter)
    name_base(places.adapter, job.model)


def main() -> None:
    """Run the job. Raises MarsError if it fails."""
    source, directory, *overrides = sys.argv[1:]
    job = load_job(source, overrides)
    if isinstance(job, TinyDemoJob):
        job = job.train
    if isinstance(job, AdaptJob):
        adapt_here(job.model_copy(update={"output_dir": directory}), directory)
        return
    assert isinstance(job, TrainJob), f"{source} neither trains nor adapts"
    model = train_here(job.model_copy(update={"output_dir": directory}))
    shutil.copytree(model, Path(directory) / "model")


if __name__ == "__main__":
    main()
