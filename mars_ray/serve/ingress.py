"""The HTTP side of the service as a Serve deployment: it holds no model and imports none."""

from collections.abc import AsyncGenerator

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from mars_ray.config.serve import ServeJob
from mars_ray.serve.app import build_api
from mars_ray.serve.messages import ChatCall, Message


# Without an app: FastAPI resolves the routes of one given here only after Serve has pickled it, and
# then wrongly. The method below builds the app in the ingress's own process.
@serve.ingress()
class Ingress:
    """Checks requests, forwards them to a replica, and writes the replies."""

    def __init__(self, job: ServeJob, model: str, replica: DeploymentHandle) -> None:
        self._job = job
        self._model = model
        self._replica = replica.options(stream=True)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._job, self._model, self._generate)

    async def _generate(self, call: ChatCall) -> AsyncGenerator[Message, None]:
        messages = self._replica.generate.remote(call)
        assert isinstance(messages, DeploymentResponseGenerator)
        finished = False
        try:
            async for message in messages:
                yield message
            finished = True
        finally:
            if not finished:
                messages.cancel()
