"""Engines as actors on a Ray cluster: the only file of this package that imports Ray.

An actor has a batch to decode and another one queued, so that it never waits for the driver. An
actor that dies is replaced, and its requests are decoded again.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from mars_ray.cluster.connection import cluster_gpus, gpus_each
from mars_ray.config.generate import GenerateJob
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import EngineError, MarsError
from mars_ray.generate.run import LEAST, Worker
from mars_ray.model.directory import weight_files
from mars_ray.train.plan import absolute_path

# Time that the other engines get once the first is ready; it would otherwise take work that they
# could do at the same time.
_GRACE_S = 5.0
_LOOK_S = 0.5
# Most actors that one engine's start or one request may kill.
_MOST_DEATHS = 3
# Memory of a process with torch; weights stored in 2 bytes may be computed with in 4.
_PROCESS_BYTES, _WEIGHTS_FACTOR = 1 << 30, 2


@dataclass(slots=True, eq=False)
class _Actor:
    handle: Any
    died_before: int = 0  # number of predecessors that died before they were ready
    ready: bool = False
    held: dict[str, Request] = field(default_factory=dict)


class RayEngines:
    """Workers, each in an actor of its own, from the first `start` to the end of the context."""

    def __init__(self, job: GenerateJob, say: Callable[[str], None]) -> None:
        self._job = job
        self._say = say
        self._actors: list[_Actor] = []
        self._pending: dict[Any, _Actor] = {}
        self._deaths: Counter[str] = Counter()
        self._ready_since: float | None = None
        self._gpus = 0.0

    def __enter__(self) -> "RayEngines":
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            ray.kill(actor.handle)

    def start(self, requests: int) -> None:
        """Starts as many engines as are useful, besides those that exist, and waits until one is
        ready. Raises EngineError if engines do not start."""
        self._add(requests)
        none: deque[Request] = deque()
        while self._actors and self._ready_since is None:
            done, _ = ray.wait(list(self._pending), timeout=_LOOK_S)
            for ref in done:
                self._result(ref, none)

    def decode(
        self, requests: Iterable[Request], until: float = math.inf
    ) -> Iterator[list[Completion]]:
        """Yields all requests as they finish; their ids must differ. After `until` none is handed
        out but the first `LEAST`.

        Raises EngineError if engines die repeatedly, and any MarsError that one of them raises.
        """
        waiting = deque(requests)
        count = len(waiting)
        self._deaths.clear()
        while waiting or any(actor.held for actor in self._actors):
            while waiting and count > LEAST and time.monotonic() > until:
                waiting.pop()
                count -= 1
            self._hand_out(waiting)
            done, _ = ray.wait(list(self._pending), timeout=_LOOK_S)
            for ref in done:
                if completions := self._result(ref, waiting):
                    yield completions

    def _add(self, requests: int) -> None:
        job, nodes = self._job, [node["Resources"] for node in ray.nodes() if node["Alive"]]
        may = cluster_gpus() if job.engine.device != "cpu" else 0
        self._gpus = gpus_each(job.gpus_per_worker, may)
        needed = {"CPU": job.cpus_per_worker, "GPU": self._gpus}
        most = room(nodes, needed)
        if not self._gpus:
            directory = Path(job.checkpoint)
            stored = sum((directory / name).stat().st_size for name in weight_files(directory))
            needed |= {"memory": stored * _WEIGHTS_FACTOR + _PROCESS_BYTES}
        count = min(job.workers or max(1, room(nodes, needed)), requests)
        if count <= len(self._actors):
            return
        each = ", ".join(f"{n:g} {kind}" for kind, n in needed.items() if n and kind != "memory")
        self._say(f"{count} engine{'s' * (count > 1)}, each with {each}")
        if count > most:
            self._say(f"the cluster has room for {most} of them: the others wait until it grows")
        self._actors += [self._new() for _ in range(len(self._actors), count)]

    def _new(self, died_before: int = 0) -> _Actor:
        job = self._job
        engine = job.engine
        changes: dict[str, Any] = {"threads": engine.threads or max(1, int(job.cpus_per_worker))}
        if engine.draft_adapter:
            changes["draft_adapter"] = absolute_path(engine.draft_adapter)
        remote = ray.remote(Worker).options(
            num_cpus=job.cpus_per_worker,
            num_gpus=self._gpus,
            scheduling_strategy="SPREAD",
        )
        handle: Any = remote.remote(
            absolute_path(job.checkpoint), engine.model_copy(update=changes)
        )
        actor = _Actor(handle, died_before)
        self._pending[handle.load.remote()] = actor
        return actor

    def _hand_out(self, waiting: deque[Request]) -> None:
        ready = [actor for actor in self._actors if actor.ready]
        if self._ready_since is None:
            return
        is_early = time.monotonic() < self._ready_since + _GRACE_S
        if not ready or (is_early and len(ready) < len(self._actors)):
            return
        batch = self._job.engine.max_batch
        share = math.ceil(len(waiting) / len(ready))
        busy = list(self._pending.values())
        for actor in ready:
            if actor in busy:
                continue
            count = min(2 * batch - len(actor.held), share, len(waiting))
            taken = [waiting.popleft() for _ in range(count)]
            actor.held |= {request.id: request for request in taken}
            if actor.held:
                # While more requests wait, it returns before its batch has gaps.
                leave = min(batch, len(actor.held) // 2) if waiting else 0
                self._pending[actor.handle.advance.remote(taken, leave)] = actor

    def _result(self, ref: Any, waiting: deque[Request]) -> list[Completion]:
        actor = self._pending.pop(ref)
        try:
            result = ray.get(ref)
        except RayTaskError as error:
            # Raise the cause: Ray's error has its message after the worker's whole traceback.
            if isinstance(error.cause, MarsError):
                raise error.cause from None
            raise
        except RayError as error:
            self._replace(actor, error, waiting)
            return []
        if not actor.ready:
            actor.ready = True
            if self._ready_since is None:
                self._ready_since = time.monotonic()
                self._say(f"they compute in {result}")
            return []
        for completion in result:
            del actor.held[completion.request_id]
        return result

    def _replace(self, actor: _Actor, error: RayError, waiting: deque[Request]) -> None:
        """Starts another actor in this one's place; its requests go to the front of the queue.

        Raises EngineError if that has been tried often enough.
        """
        if isinstance(error, RayActorError) and error.actor_init_failed:
            # For example, this package is not installed there: another try would fail, too.
            raise EngineError(f"an engine cannot be made: {str(error).strip().splitlines()[-1]}")
        why = " ".join(str(error).split())
        if not actor.ready and actor.died_before + 1 >= _MOST_DEATHS:
            raise EngineError(
                f"an engine died {_MOST_DEATHS} times before it was ready, most likely for want of "
                f"memory: lower workers, engine.max_batch or engine.max_context. Ray says: {why}"
            )
        self._deaths.update(actor.held.keys())
        worst = max(actor.held, key=lambda name: self._deaths[name], default=None)
        if worst is not None and self._deaths[worst] >= _MOST_DEATHS:
            raise EngineError(
                f"{_MOST_DEATHS} engines died over the same {len(actor.held)} requests, {worst} "
                "among them: lower engine.max_batch or engine.max_context if memory is short; run "
                f"the same command again to resume. Ray says: {why}"
            )
        self._say(f"an engine died and is replaced: {why}")
        ray.kill(actor.handle)
        waiting.extendleft(reversed(actor.held.values()))
        died_before = 0 if actor.ready else actor.died_before + 1
        self._actors[self._actors.index(actor)] = self._new(died_before)


def room(nodes: Iterable[dict[str, float]], needed: dict[str, float]) -> int:
    """Number of engines with the resources `needed` that fit on the nodes at the same time."""
    wanted = {name: amount for name, amount in needed.items() if amount}
    return sum(
        min(int(node.get(name, 0) / amount + 1e-9) for name, amount in wanted.items())
        for node in nodes
    )
