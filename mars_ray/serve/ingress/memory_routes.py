"""An operator exports, resets and replaces what the autoscaling policy has learnt."""

import json

from fastapi import Request

from mars_ray.autoscale.policy import State
from mars_ray.config.serve import Limits
from mars_ray.errors import DataError
from mars_ray.serve.ingress.api_keys import ApiKeys
from mars_ray.serve.ingress.body import read_body
from mars_ray.serve.ingress.models import Model, Models
from mars_ray.serve.openai.request_models import ApiError, MemoryBody, parse
from mars_ray.serve.protocol import ErrorInfo
from mars_ray.serve.status import MemoryReply

# Enough for any memory, whatever requests may have.
_MOST_BYTES = 1_000_000


class MemoryRoutes:
    """The handlers of `/v1/mars/autoscaling`. With keys only an admin's is good for them."""

    def __init__(self, limits: Limits, models: Models, keys: ApiKeys) -> None:
        self._limits = limits.model_copy(update={"body_bytes": _MOST_BYTES})
        self._models = models
        self._keys = keys

    async def get(self, request: Request) -> MemoryReply:
        """What the policy has learnt, at most a minute old."""
        model = self._model(request, request.query_params.get("model"))
        memory = await model.backend.learnt()
        return {"model": model.name, "memory": None if memory is None else json.loads(memory)}

    async def delete(self, request: Request) -> MemoryReply:
        """Has the policy begin with an empty memory, within seconds."""
        model = self._model(request, request.query_params.get("model"))
        await model.backend.relearn(None)
        return {"model": model.name, "memory": None}

    async def put(self, request: Request) -> MemoryReply:
        """Has the policy go on from this memory, within seconds."""
        self._check_key(request)
        body = parse(MemoryBody, await read_body(request, self._limits))
        model = self._model(request, body.model)
        try:
            memory = State.from_json(json.dumps(body.memory)).to_json()
        except DataError as error:
            message = f"{error}; was it exported by another release?"
            raise ApiError(ErrorInfo(400, message, "memory", "invalid_value")) from error
        await model.backend.relearn(memory)
        return {"model": model.name, "memory": json.loads(memory)}

    def _check_key(self, request: Request) -> None:
        self._keys.admin(request.headers.get("authorization"))

    def _model(self, request: Request, name: str | None) -> Model:
        """The model that is meant. Raises ApiError, also if no policy scales it."""
        key = self._keys.admin(request.headers.get("authorization"))
        model = self._models.asked(name, key)
        if model.job.replicas != "auto":
            message = f"model {model.name!r} has a fixed number of replicas, so no policy learns"
            raise ApiError(ErrorInfo(400, message, "model", "invalid_value"))
        return model
