"""A replica as a Serve deployment: one process with one engine."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import AsyncGenerator

from mars_ray.config.serve import ServeJob
from mars_ray.errors import EngineError, ModelError
from mars_ray.serve.protocol import (
    ErrorInfo,
    GenerationRequest,
    Message,
    Prepared,
    Tokenized,
    TokenizeRequest,
    Used,
)
from mars_ray.serve.replica.adapters import Adapters
from mars_ray.serve.replica.engines import running_engine
from mars_ray.serve.replica.llm_server import LLMServer
from mars_ray.serve.replica.metrics import AnswerMetrics, EngineMetrics, replica_name
from mars_ray.serve.status import ReplicaStatus
from mars_ray.serve.threshold_actor import SetPoint, Setting, Swap, follow, swapped

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_WATCH_S = 0.5
_STDERR = 2  # what `sys.stderr` is changes, and may be no file
# Interval at which the fast loop checks this replica's queue.
_STEER_S = 0.1
# The engine's thread releases the GIL in every operation of a step. With Python's default of 5 ms,
# getting it back from the loop's thread could take as long as a step of a small model.
_SWITCH_S = 0.0005


class Replica:
    """Answers calls with its own copy of the model."""

    # Async because Serve then runs it in the event loop of the requests.
    async def __init__(self, job: ServeJob, setting: Setting) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self._swap = await swapped(job.name, setting.at_s)
        if self._swap:
            job = _with_adapter(job, self._swap.adapter)
        running = await running_engine(job)
        self._metrics = EngineMetrics(job.name)
        self._engine = LLMServer(
            running.client,
            running.tokenizer,
            job,
            AnswerMetrics(job.name),
            running.warning,
            replica_name(),
        )
        self._adapters = Adapters(running.client, job.model_cache)
        self._built_s = setting.at_s
        self._looking = asyncio.create_task(self._look())
        following = follow(job.name, setting, self._set, lambda: self._swap)
        self._following = asyncio.create_task(following)
        self._steering = asyncio.create_task(self._steer())
        self._leaving = asyncio.create_task(self._leave())
        self._watching = asyncio.create_task(self._watch(job.step_timeout_s))

    async def generate(self, call: GenerationRequest) -> AsyncGenerator[Message, None]:
        """Yields the messages of one call; Serve cancels the iteration when the caller is gone."""
        return self._engine.generate(call)

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        """A prompt's tokens."""
        return await self._engine.tokenize(asked)

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        """The text of tokens."""
        return await self._engine.detokenize(tokens)

    async def used(self, call_id: str) -> Used | None:
        """What a call has used whose end its ingress has not heard of."""
        return await self._engine.used(call_id)

    async def is_ready(self) -> bool:
        """Whether a request sent now would be answered."""
        return await self._engine.is_ready()

    async def status(self) -> ReplicaStatus:
        """The current status of this replica."""
        (status,) = await self._engine.status()
        return status

    async def prepare_adapter(self, place: str | None) -> Prepared:
        """Makes a draft adapter ready, so that putting it in force cannot fail."""
        return await self._adapters.prepare(place)

    async def _set(self, point: SetPoint) -> None:
        # A dead engine needs no adapter, and the replica after it asks for its own.
        with contextlib.suppress(EngineError):
            await self._engine.follow(point.threshold, point.shed, point.rungs)
            swap = point.swap
            if swap and swap.built_s == self._built_s and swap != self._swap:
                await self._take(swap)

    async def _take(self, swap: Swap) -> None:
        try:
            await self._adapters.take(swap.adapter)
        except ModelError:
            # All replicas made it ready before the swap, so this one has started since.
            logger.exception("the draft adapter stays as it was, and not %s", swap.name)
            return
        self._swap = swap

    async def _steer(self) -> None:
        """Run the fast loop for as long as the engine lives."""
        with contextlib.suppress(EngineError):
            while True:
                await asyncio.sleep(_STEER_S)
                await self._engine.steer()

    async def _look(self) -> None:
        """Export the engine's metrics for as long as it lives."""
        with contextlib.suppress(EngineError):
            while True:
                self._metrics.engine(await self._engine.seen())
                await asyncio.sleep(_LOOK_S)

    async def _leave(self) -> None:
        """Exit when the engine ends, so that callers go elsewhere and Serve starts another replica.

        Serve's own checks take seconds. Meanwhile a replica that refuses everything at once would
        be the least loaded one, and every second retry of a request would return to it.
        """
        await self._engine.ended()
        logger.error("the engine has ended, and its replica with it")
        os._exit(1)

    async def _watch(self, limit_s: float) -> None:
        """Exit when the engine or this process is stuck, with the stacks of all threads in the log.

        Serve's own checks would find it out too. But Serve then gives the replica time to finish
        what it cannot finish, while its clients wait and its GPU is not free for the next one.
        """
        while True:
            # A thread of C, which ends the process also if no Python runs any more.
            faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
            await asyncio.sleep(min(_WATCH_S, limit_s / 4))
            try:
                self._engine.check_health()
            except EngineError as error:
                logger.error("%s; its replica ends", error)
                faulthandler.dump_traceback(_STDERR)
                os._exit(1)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The sums that Serve passes to the autoscaling policy."""
        return await self._engine.sums()

    def check_health(self) -> None:
        """Raises if the engine is dead or stuck; Serve then replaces the replica."""
        self._engine.check_health()

    def open_answers(self) -> int:
        """Number of answers in progress or waiting."""
        return self._engine.open_answers


def _with_adapter(job: ServeJob, place: str | None) -> ServeJob:
    engine = job.engine.model_copy(update={"draft_adapter": place})
    return job.model_copy(update={"engine": engine})
