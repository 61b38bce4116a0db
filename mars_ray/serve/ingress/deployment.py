"""The HTTP side of the service as a Serve deployment: it holds no model and imports none."""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from mars_ray.config.serve import ServeJob
from mars_ray.serve.ingress.gate import Gate
from mars_ray.serve.ingress.metrics_endpoint import of_all_nodes
from mars_ray.serve.ingress.recent import Recent
from mars_ray.serve.ingress.request_log import write_to
from mars_ray.serve.ingress.retry import answered, insisted
from mars_ray.serve.ingress.routes import build_api
from mars_ray.serve.protocol import ErrorInfo, GenerationRequest, Message, Prompt, Tokenized
from mars_ray.serve.status import Decided, ReplicaStatus
from mars_ray.serve.swap import Running
from mars_ray.serve.threshold_actor import newest_decision

# A replica that takes longer to say that it is ready, is not.
_READY_S = 5.0
# However many pages are open, replicas are not asked more often.
_STATUS_S = 0.5
_STATUS_TIMEOUT_S = 2.0
# Above Ray's own for workers: where cores are few, a step of the engine must not wait for text.
_NICENESS = 4


# Without an app: FastAPI resolves the routes of one given here only after Serve has pickled it, and
# then wrongly. The method below builds the app in the ingress's own process.
@serve.ingress()
class Ingress:
    """Checks requests, forwards them to a replica, and writes the replies."""

    def __init__(
        self, job: ServeJob, replicas: dict[str, DeploymentHandle], built_s: float
    ) -> None:
        os.nice(_NICENESS)
        self._job = job
        self._built_s = built_s
        self._replicas = replicas
        self._gate = Gate()
        write_to(job.request_log)

    def running(self) -> Running:
        """What was deployed, and when it was built."""
        return Running(self._job, self._built_s)

    async def tell_all(self, model: str, method: str, *args: Any) -> list[Any]:
        """What each of a model's replicas says to this; none if there are no replicas."""
        try:
            replies = self._replicas[model].broadcast(method, *args)
            return await replies.results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []

    def close(self) -> None:
        """Let no request in any more."""
        self._gate.close()

    def inside(self) -> int:
        """Accepted requests that are not finished."""
        return self._gate.inside

    def __serve_build_asgi_app__(self) -> FastAPI:
        each = self._job.each()
        backends = {name: _Replicas(handle, each[name]) for name, handle in self._replicas.items()}
        api = build_api(self._job, backends, self._gate, of_all_nodes)
        api.add_middleware(_hung_up)
        return api


def _hung_up(app: ASGIApp) -> ASGIApp:
    """The app, told in ASGI's words that the client is gone.

    Serve's `receive` raises when the proxy gives up a request, which nobody above it expects: every
    client that left would be an unretrieved exception in the log.
    """

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        async def heard() -> AsgiMessage:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await app(scope, heard, send)

    return told


class _Replicas:
    """The backend behind a handle: one model's replicas."""

    def __init__(self, handle: DeploymentHandle, job: ServeJob) -> None:
        self._job = job
        # Messages, not Ray's objects. A handle has the options of the process that made it, so this
        # one's environment has no say.
        self._handle = handle.options(_by_reference=False)
        self._status = Recent(self._asked_for_status, _STATUS_S)
        self._decided = Recent(lambda: newest_decision(job.name), _STATUS_S)
        self._streaming = self._handle.options(stream=True)

    def answer(self, call: GenerationRequest) -> AsyncGenerator[Message, None]:
        return answered(self._once, call)

    async def _once(self, call: GenerationRequest) -> AsyncGenerator[Message, None]:
        messages = self._streaming.answer.remote(call)
        assert isinstance(messages, DeploymentResponseGenerator)
        finished = False
        try:
            async for message in messages:
                yield message
            finished = True
        finally:
            if not finished:
                messages.cancel()

    async def tokenize(self, prompt: Prompt) -> Tokenized | ErrorInfo:
        return await insisted(lambda: self._handle.tokenize.remote(prompt))

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        return await insisted(lambda: self._handle.detokenize.remote(tokens))

    async def is_ready(self) -> bool:
        try:
            # A model at zero answers when it is asked; to ask it for its health would wake it.
            if self._job.scaling.scale_to_zero and await self._status.get() is None:
                return True
            return await asyncio.wait_for(self._asked(), _READY_S)
        except Exception:  # noqa: BLE001 - whatever keeps a replica from answering
            return False

    async def _asked(self) -> bool:
        return await self._handle.is_ready.remote()

    async def status(self) -> Sequence[ReplicaStatus]:
        return await self._status.get() or ()

    async def decided(self) -> Decided | None:
        return await self._decided.get() if self._job.replicas == "auto" else None

    async def _asked_for_status(self) -> Sequence[ReplicaStatus] | None:
        """None where there are no replicas at all."""
        try:
            replies = await self._handle.broadcast("status").results_async(
                timeout_s=_STATUS_TIMEOUT_S, return_exceptions=True
            )
        except DeploymentUnavailableError:
            return None
        except TimeoutError:
            return ()
        return [reply for reply in replies if isinstance(reply, ReplicaStatus)]
