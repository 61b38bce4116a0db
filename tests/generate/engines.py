"""Jobs of a small model, and one engine in this process in place of a cluster's."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from mars_ray.config.decode import EngineConfig, Sampling
from mars_ray.config.generate import GenerateJob
from mars_ray.config.inputs import CorpusSource
from mars_ray.decode.request import Completion, Request
from mars_ray.generate.run import LEAST, Worker, run_generation

QUIET = Console(quiet=True)


class InProcess:
    """The real worker, called where it is. `asked` counts what all of them have been asked."""

    asked = 0

    def __init__(self, job: GenerateJob, say: Callable[[str], None]) -> None:
        self._job = job
        self._worker = Worker(job.checkpoint, job.engine)
        self._loaded = False

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, requests: int) -> None:
        """Loads, if there is something to do."""
        if requests and not self._loaded:
            self._worker.load()
            self._loaded = True

    def decode(
        self, requests: Iterable[Request], until: float = math.inf
    ) -> Iterator[list[Completion]]:
        """Two at a time, the later half first: who asks must not count on an order."""
        waiting = list(requests)[::-1]
        count = len(waiting)
        InProcess.asked += len(waiting)
        left = len(waiting)
        while left:
            if time.monotonic() > until:
                kept = waiting[: max(0, LEAST - (count - len(waiting)))]
                count -= len(waiting) - len(kept)
                left -= len(waiting) - len(kept)
                waiting = kept
                if not left:
                    return
            taken, waiting = waiting[:2], waiting[2:]
            completions = self._worker.advance(taken, leave=1 if waiting else 0)
            left -= len(completions)
            yield completions


run = partial(run_generation, start=InProcess)


def make_job(model: Path, output: Path, **changes: Any) -> GenerateJob:
    """Six questions; `changes` replace top-level keys."""
    job = {
        "checkpoint": str(model),
        "prompts": CorpusSource(count=6),
        "output": str(output),
        # A random model ends its answers now and then if every token is about as likely.
        "sampling": Sampling(temperature=2.0, seed=1),
        "max_new_tokens": 40,
        "engine": EngineConfig(max_batch=2, max_context=160, threads=1),
    }
    return GenerateJob.model_validate(job | changes)
