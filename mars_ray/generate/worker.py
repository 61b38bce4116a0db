"""One decode engine that keeps its batch full while there is work. It does not use Ray."""

import math
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from mars_ray.config.decode import EngineConfig
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.decode.request import Completion, Request
from mars_ray.errors import EngineError
from mars_ray.model.stop import stop_ids

# So many requests are decoded however late it is: fewer answers cannot be divided into a part that
# trains and one that is held out.
LEAST = 10
# Finished answers are returned this often, so that the driver records them.
_RETURN_EVERY_S = 5.0


class Engines(Protocol):
    """Decodes requests with any number of engines, local or remote."""

    def start(self, requests: int) -> None:
        """Starts as many engines as so many requests need, and waits until one is ready. Raises
        MarsError."""
        ...

    def decode(
        self, requests: Iterable[Request], until: float = math.inf
    ) -> Iterator[list[Completion]]:
        """Yields all requests, for which engines were started, as they finish, in any order; after
        `until` (on the clock of `time.monotonic`) none is begun but the first `LEAST`. Raises
        MarsError."""
        ...


class Worker:
    """One engine that decodes the requests it is given, some seconds at a time."""

    def __init__(self, checkpoint: str, config: EngineConfig) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._engine: Engine | None = None
        self._stops: frozenset[int] = frozenset()

    def load(self) -> str:
        """Makes the engine ready; returns the type in which it computes. Raises MarsError."""
        with self._failing("loading the model"):
            self._engine, _ = load_engine(self._checkpoint, self._config)
            self._stops = stop_ids(self._engine.model)
        return str(self._engine.model.dtype).removeprefix("torch.")

    def advance(self, requests: Sequence[Request], leave: int) -> list[Completion]:
        """Adds requests and decodes until only `leave` of all its requests are left or some seconds
        are over. Requests end at the model's own stop tokens as well as at theirs.

        Raises MarsError; its requests are lost then.
        """
        engine = self._engine
        assert engine is not None, "load first"
        finished: list[Completion] = []
        due = time.monotonic() + _RETURN_EVERY_S
        with self._failing("decoding"):
            for request in requests:
                engine.submit(replace(request, stop_ids=request.stop_ids | self._stops))
            while engine.running + engine.waiting > leave and time.monotonic() < due:
                for event in engine.step():
                    if event.failure:
                        failure = f"request {event.request_id} failed: {event.failure}"
                        raise EngineError(failure) from event.failure
                    if event.completion:
                        finished.append(event.completion)
        return finished

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """Turns torch's errors, such as out-of-memory, into EngineErrors that say what to do."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise EngineError(
                f"{doing} failed on {platform.node()}: {error}. If memory is short there, lower "
                "workers, engine.max_batch or engine.max_context"
            ) from error
