"""The HTTP side of the service as a Serve deployment: it holds no model and imports none."""

import os
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mars_ray.config.serve import ServeJob
from mars_ray.serve.ingress.metrics_endpoint import of_all_nodes
from mars_ray.serve.ingress.middleware import Gate, write_to
from mars_ray.serve.ingress.replica_client import ReplicaClient
from mars_ray.serve.ingress.routes import build_api
from mars_ray.serve.swap import Running

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
        backends = {
            name: ReplicaClient(handle, each[name]) for name, handle in self._replicas.items()
        }
        api = build_api(self._job, backends, self._gate, of_all_nodes)
        api.add_middleware(_hung_up)
        return api


def _hung_up(app: ASGIApp) -> ASGIApp:
    """The app, told in ASGI's words that the client is gone.

    Serve's `receive` raises when the proxy gives up a request, which nobody above it expects: every
    client that left would be an unretrieved exception in the log.
    """

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        async def heard() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await app(scope, heard, send)

    return told
