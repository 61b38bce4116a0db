"""The models of a service: selects the one a request names, and its backend."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mars_ray.config.serve import ServeJob
from mars_ray.serve.ingress.api_keys import ApiKey
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import (
    ErrorInfo,
    GenerationRequest,
    Message,
    Tokenized,
    TokenizeRequest,
    Used,
)
from mars_ray.serve.status import Decided, ReplicaStatus


class Backend(Protocol):
    """The server of a model: an engine in this process, or replicas behind a handle."""

    def generate(self, call: GenerationRequest) -> AsyncGenerator[Message, None]:
        """Yields deltas until every choice has finished, or an error; closing it ends the work."""
        ...

    async def tokenize(self, asked: TokenizeRequest) -> Tokenized | ErrorInfo:
        """A prompt's tokens."""
        ...

    async def detokenize(self, tokens: tuple[int, ...]) -> str | ErrorInfo:
        """The text of tokens, special ones included."""
        ...

    async def used(self, call_id: str) -> Used | None:
        """What a closed call has used; None if nobody knows."""
        ...

    async def is_ready(self) -> bool:
        """Whether a request sent now would be answered."""
        ...

    async def status(self) -> Sequence[ReplicaStatus]:
        """The status of each replica that answers."""
        ...

    async def decided(self) -> Decided | None:
        """The latest decision of the autoscaling policy, if one is in charge."""
        ...

    async def learnt(self) -> str | None:
        """What the autoscaling policy has learnt, as JSON; None: nothing yet. Raises ApiError."""
        ...

    async def relearn(self, memory: str | None) -> None:
        """Makes the policy go on from this memory, or from an empty one. Raises ApiError."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the service; `job` is the service's job with this model alone."""

    name: str
    job: ServeJob
    backend: Backend


class Models:
    """All models of a service, and which keys may use them."""

    def __init__(self, job: ServeJob, backends: Mapping[str, Backend]) -> None:
        jobs = job.each()
        assert set(jobs) == set(backends), "a model has no backend"
        self._models = {name: Model(name, jobs[name], backends[name]) for name in jobs}

    def of(self, key: ApiKey | None) -> list[Model]:
        """The models that the key may use."""
        allowed = None if key is None else key.models
        return [model for name, model in self._models.items() if allowed is None or name in allowed]

    def asked(self, name: str | None, key: ApiKey | None) -> Model:
        """The model of a request, which need not name it if there is only one.

        Raises ApiError; a model that the key may not use is reported as unknown.
        """
        models = {model.name: model for model in self.of(key)}
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        here = ", ".join(repr(model) for model in models)
        if name is None:
            message = f"'model' is missing, and there is more than one: {here}"
            raise ApiError(ErrorInfo(400, message, "model", "missing_required_parameter"))
        if name not in models:
            message = f"there is no model {name!r} here, only {here}"
            raise ApiError(ErrorInfo(404, message, "model", "model_not_found"))
        return models[name]
