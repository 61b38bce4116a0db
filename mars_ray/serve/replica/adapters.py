"""Who makes drafts in a replica's engine: a draft adapter, swapped between two steps, or nobody."""

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mars_ray.config.modes import ExactMode
from mars_ray.decode.async_engine import AsyncEngine
from mars_ray.decode.engine import Engine
from mars_ray.decode.request import Request
from mars_ray.errors import ModelError
from mars_ray.model.draft_adapter import DraftAdapter, read_draft_adapter
from mars_ray.model.places import adapter_name, local_adapter
from mars_ray.serve.protocol import GenerationRequest, Prepared

logger = logging.getLogger(__name__)


class Drafting:
    """Whether an engine has drafts at the moment, and whose."""

    def __init__(self, thread: AsyncEngine, engine: Engine) -> None:
        self._thread = thread
        self._drafts_itself = engine.drafts_itself
        self._can_draft = engine.card.block_size > 0

    def decodable(self, call: GenerationRequest, request: Request) -> Request:
        """The request; without drafts, one that leaves the mode open takes a forward a token.

        What comes of it must go to the engine before anything else is awaited.
        """
        if self._can_draft or not call.is_mode_open or not request.mode.needs_masks:
            return request
        return replace(request, mode=ExactMode(), quality=None)

    async def check(self, adapter: DraftAdapter) -> None:
        """Raises ModelError if it does not fit the model, EngineError if the engine is dead."""
        await self._thread.ask(lambda engine: engine.check_adapter(adapter))

    async def set(self, adapter: DraftAdapter | None, name: str | None) -> None:
        """From the next step on. Raises as `check`, and then nothing has changed."""

        def change(engine: Engine) -> None:
            engine.set_adapter(adapter, name)

        # Before the engine is asked, with nothing in between: what is submitted until then comes to
        # it first, with drafts, and what is submitted later comes as the next step can decode it.
        before, self._can_draft = self._can_draft, adapter is not None or self._drafts_itself
        try:
            await self._thread.ask(change)
        except ModelError:
            self._can_draft = before
            raise


@dataclass(frozen=True, slots=True)
class _Ready:
    """An adapter in memory that fits the model, or none."""

    place: str | None
    name: str | None = None
    adapter: DraftAdapter | None = None


class Adapters:
    """Fetches them and swaps them in. Getting one ready and taking it are apart, so that all
    replicas of a service can do the first before one does the second."""

    def __init__(self, drafting: Drafting, base: Path, cache: str, dtype: torch.dtype) -> None:
        self._drafting = drafting
        self._base = base
        self._cache = cache
        self._dtype = dtype
        self._ready: _Ready | None = None

    async def prepare(self, place: str | None) -> Prepared:
        """Gets one ready, or says why that cannot be. Raises EngineError if the engine is dead."""
        try:
            self._ready = await self._made(place)
        except ModelError as error:
            return Prepared(error=str(error))
        return Prepared(self._ready.name)

    async def take(self, place: str | None) -> None:
        """From the engine's next step on. Raises ModelError, and EngineError if it is dead."""
        ready, self._ready = self._ready, None
        if ready is None or ready.place != place:
            ready = await self._made(place)
        await self._drafting.set(ready.adapter, ready.name)
        logger.info("draft adapter: %s", ready.name or "none")

    async def _made(self, place: str | None) -> _Ready:
        if place is None:
            return _Ready(None)
        name, adapter = await asyncio.to_thread(self._read, place)
        await self._drafting.check(adapter)
        return _Ready(place, name, adapter)

    def _read(self, place: str) -> tuple[str, DraftAdapter]:
        directory = local_adapter(place, self._cache)
        adapter = read_draft_adapter(directory, self._base, self._dtype)
        return adapter_name(place, directory), adapter
