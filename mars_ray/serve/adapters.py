"""The draft adapter of a replica's engine: fetched, checked against the model, swapped in."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from mars_ray.errors import ModelError
from mars_ray.model.draft_adapter import DraftAdapter, read_draft_adapter
from mars_ray.model.draft_source import adapter_name, local_adapter
from mars_ray.serve.messages import Prepared
from mars_ray.serve.text_engine import TextEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ready:
    """An adapter in memory that fits the model, or none."""

    place: str | None
    name: str | None = None
    adapter: DraftAdapter | None = None


class Adapters:
    """Of one engine. Getting one ready and taking it are apart, so that all replicas of a service
    can do the first before one does the second."""

    def __init__(self, engine: TextEngine, base: Path, cache: str, dtype: torch.dtype) -> None:
        self._engine = engine
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
        await self._engine.set_adapter(ready.adapter, ready.name)
        logger.info("draft adapter: %s", ready.name or "none")

    async def _made(self, place: str | None) -> _Ready:
        if place is None:
            return _Ready(None)
        name, adapter = await asyncio.to_thread(self._read, place)
        await self._engine.check_adapter(adapter)
        return _Ready(place, name, adapter)

    def _read(self, place: str) -> tuple[str, DraftAdapter]:
        directory = local_adapter(place, self._cache)
        adapter = read_draft_adapter(directory, self._base, self._dtype)
        return adapter_name(place, directory), adapter
