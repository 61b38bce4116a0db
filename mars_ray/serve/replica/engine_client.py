"""The border between the service and an engine: all that `LLMServer` asks of one.

`decode/async_engine.py` has the engine of this process. Another one, such as vLLM's `AsyncLLM`,
comes in here; `tests/serve/test_engine_client.py` is what it must pass. This is no part of
`serve/protocol.py`, as the ingress has neither torch nor an engine.
"""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from mars_ray.decode.request import EngineFacts, Request, TokenEvent
from mars_ray.decode.stats import Snapshot


class EngineClient(Protocol):
    """An engine that works by itself. Every coroutine raises EngineError once it has ended."""

    @property
    def facts(self) -> EngineFacts:
        """What holds for every request. Raises ModelError if answers would never end."""
        ...

    @property
    def can_draft(self) -> bool:
        """Whether a request that is submitted now may be in a mode that needs drafts."""
        ...

    def start(self) -> None:
        """Begin to work."""
        ...

    def stop(self) -> None:
        """End; requests under way get an EngineError."""
        ...

    def check_health(self, limit_s: float) -> None:
        """Raises EngineError if the engine has ended, or has had work for so long and done none."""
        ...

    async def ended(self) -> None:
        """Returns once the engine has ended, whatever for, and its requests have their errors."""
        ...

    def stream(
        self, *requests: Request, interval_s: float = 0.0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """Events of all the requests, one per forward of each, until every request has its last.

        They are submitted together when the first events are asked for, before anything is
        awaited, each with its own threshold. What comes within `interval_s` of the events before
        comes together with them; only a request's first and last event do not wait. A request
        whose deadline has passed ends with a completion that says so. Closing the iterator cancels
        what is not over, and its pages are free then.

        An event with a failure is passed on, and then that failure is raised, before what came
        behind it: RequestError if the engine refuses the request, PoisonError if it fails on this
        one and on no other, EngineError if it has ended.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request of a stream that goes on for the others, even if this one fails before."""
        ...

    async def set_threshold(self, threshold: float) -> None:
        """Sets the threshold of requests that tolerate it, from the next step on."""
        ...

    async def snapshot(self) -> Snapshot:
        """What the engine does, and has done since its start, those tokens included that requests
        had before they were aborted."""
        ...

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Get a draft adapter ready; the one made ready before it is forgotten.

        Raises ModelError if it cannot be read or is not for this engine.
        """
        ...

    async def use_adapter(self, name: str | None) -> None:
        """The adapter made ready last makes drafts from the next step on, or with None the model
        itself, if it was trained to. Sequences under way go on. Raises ModelError, and then nothing
        has changed."""
        ...
