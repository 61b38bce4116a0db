"""The HTTP side of the service as a Serve deployment, without a model or imports for one."""

import os
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.config.serve import ServeJob
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.ingress.client import ReplicaClient
from mars_ray.serve.ingress.metrics import UsageMetrics, of_all_nodes
from mars_ray.serve.ingress.middleware import Gate, write_to

# Above the niceness of Ray's workers: on few cores, an engine's step must not wait for text.
_NICENESS = 4


# No app is given here: Serve would pickle it before FastAPI resolves its routes, which then goes
# wrong. The method below builds the app in the ingress's own process.
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

    def running(self) -> tuple[ServeJob, float]:
        """The job of the service, and when it was deployed."""
        return self._job, self._built_s

    async def tell_all(self, model: str, method: str, *args: Any) -> list[Any]:
        """Calls a method of each replica of a model; their replies, empty without replicas."""
        try:
            replies = self._replicas[model].broadcast(method, *args)
            return await replies.results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []

    def close(self) -> None:
        """Refuses new requests from now on."""
        self._gate.is_open = False

    def inside(self) -> int:
        """Number of accepted requests that are not finished."""
        return self._gate.inside

    def __serve_build_asgi_app__(self) -> FastAPI:
        each = self._job.each()
        handles = {
            name: ReplicaClient(handle, each[name]) for name, handle in self._replicas.items()
        }
        api = build_api(self._job, handles, self._gate, of_all_nodes, UsageMetrics().count)
        api.add_middleware(_hung_up)
        return api


def _hung_up(app: ASGIApp) -> ASGIApp:
    """The app, with a client's disconnect reported as ASGI defines it.

    Serve's `receive` raises when the proxy gives up a request, which its callers do not expect:
    every client that left would appear in the log as an unretrieved exception.
    """

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        async def heard() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await app(scope, heard, send)

    return told
