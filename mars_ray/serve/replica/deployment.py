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
    Tokenized,
    TokenizeRequest,
    Used,
)
from mars_ray.serve.status import ReplicaStatus
from mars_ray.serve.threshold_actor import News, Setting, follow, swapped

logger = logging.getLogger(__name__)

_STDERR = 2  # what `sys.stderr` is changes, and may be no file
# Interval at which the fast loop checks this replica's queue.
_CONTROL_S = 0.1
# The engine's thread releases the GIL in every operation of a step. With Python's default of 5 ms,
# getting it back from the loop's thread could take as long as a step of a small model.
_SWITCH_S = 0.0005


class Replica:
    """Answers requests with its own copy of the model."""

    # Async because Serve then runs it in the event loop of the requests.
    async def __init__(self, job: ServeJob, setting: Setting) -> None:
        # Only here, because who deploys a replica imports this module too, and needs no torch.
        from mars_ray.serve.replica.engine_client import running_engine
        from mars_ray.serve.replica.llm_server import LLMServer
        from mars_ray.serve.replica.metrics import ReplicaMetrics, replica_name

        sys.setswitchinterval(_SWITCH_S)
        self._swap = await swapped(job.name, setting.at_s)
        if self._swap:
            engine = job.engine.model_copy(update={"draft_adapter": self._swap.adapter})
            job = job.model_copy(update={"engine": engine})
        self._client, tokenizer, warning = await running_engine(job)
        self._metrics = ReplicaMetrics(job.name)
        self._engine = LLMServer(
            self._client, tokenizer, job, self._metrics.answer, warning, replica_name()
        )
        self._built_s = setting.at_s
        loops = (
            self._export_metrics_loop(),
            follow(job.name, setting, self._on_news, lambda: self._swap),
            self._control_loop(),
            self._exit_with_engine(),
            self._watchdog(job.step_timeout_s),
        )
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Message, None]:
        """Yields the reply to a request; Serve cancels the iteration when the caller is gone."""
        return self._engine.generate(request)

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        return await self._engine.tokenize(asked)

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        return await self._engine.detokenize(tokens)

    async def used(self, request_id: str) -> Used | None:
        return await self._engine.used(request_id)

    async def is_ready(self) -> bool:
        return await self._engine.is_ready()

    async def status(self) -> ReplicaStatus:
        return await self._engine.status()

    async def prepare_adapter(self, place: str | None) -> str | ErrorInfo | None:
        """Makes a draft adapter ready, and returns its name, or the fault."""
        try:
            return await self._engine.prepare_adapter(place)
        except ModelError as error:
            return ErrorInfo(400, str(error))

    async def _on_news(self, news: News) -> None:
        # A dead engine needs no adapter, and the replica after it asks for its own.
        with contextlib.suppress(EngineError):
            await self._engine.follow(news.set_point)
            swap = news.swap
            if swap is None or swap.built_s != self._built_s or swap == self._swap:
                return
            try:
                await self._engine.take_adapter(swap.adapter)
                self._swap = swap
            except (ModelError, OSError):
                # All replicas made it ready before the swap, so this one has started since.
                logger.exception("the draft adapter stays as it was, and not %s", swap.name)

    async def _control_loop(self) -> None:
        with contextlib.suppress(EngineError):
            while True:
                await asyncio.sleep(_CONTROL_S)
                await self._engine.steer()

    async def _export_metrics_loop(self) -> None:
        with contextlib.suppress(EngineError):
            while True:
                self._metrics.engine(await self._engine.snapshot())
                await asyncio.sleep(1.0)

    async def _exit_with_engine(self) -> None:
        """Exit when the engine ends, so that callers go elsewhere and Serve starts another replica.

        Serve's own checks take seconds. Meanwhile a replica that refuses everything at once would
        be the least loaded one, and every second retry of a request would return to it.
        """
        await self._client.ended()
        logger.error("the engine has ended, and its replica with it")
        os._exit(1)

    async def _watchdog(self, limit_s: float) -> None:
        """Exit when the engine or this process is stuck, with the stacks of all threads in the log.

        Serve's own checks would find it out too. But Serve then gives the replica time to finish
        what it cannot finish, while its clients wait and its GPU is not free for the next one.
        """
        while True:
            # A thread of C, which ends the process also if no Python runs any more.
            faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
            await asyncio.sleep(min(0.5, limit_s / 4))
            try:
                self._engine.check_health()
            except EngineError as error:
                logger.error("%s; its replica ends", error)
                faulthandler.dump_traceback(_STDERR)
                os._exit(1)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The numbers that Serve passes to the autoscaling policy."""
        return await self._engine.report()

    def check_health(self) -> None:
        """Raises if the engine is dead or stuck; Serve then replaces the replica."""
        self._engine.check_health()

    def open_answers(self) -> int:
        return self._engine.open_answers
