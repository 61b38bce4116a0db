"""Train a draft adapter for a model directory without Ray, on this machine's GPU if it has one.

    python benchmarks/adapt_alone.py JOB.toml DIRECTORY [KEY=VALUE ...]

Prompts, answers and training of an adapt job run in this process; the adapter is written to
DIRECTORY/adapter. For machines that have torch and not Ray. When run again, it resumes the answers
and starts the training from the beginning.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from train_alone import train_here

from mars_ray.adapt.jobs import Devices, Places, generate_job, split, train_job
from mars_ray.config.adapt import AdaptJob
from mars_ray.config.generate import GenerateJob
from mars_ray.config.load import load_job
from mars_ray.decode.request import Completion, Request
from mars_ray.generate.run import Worker, run_generation
from mars_ray.model.draft_adapter import name_base
from mars_ray.model.load import multiplies_bfloat16


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


def main() -> None:
    """Run the adaptation. Raises MarsError if it fails."""
    source, directory, *overrides = sys.argv[1:]
    job = load_job(source, [*overrides, f"output_dir={directory}"])
    assert isinstance(job, AdaptJob), f"{source} adapts no model"
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


if __name__ == "__main__":
    main()
