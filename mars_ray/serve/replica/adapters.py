"""Fetches draft adapters, and swaps them in a replica's engine between two steps."""

import asyncio
import logging
from pathlib import Path

from mars_ray.errors import ModelError
from mars_ray.model.places import adapter_name, local_adapter
from mars_ray.serve.protocol import Prepared
from mars_ray.serve.replica.engine_client import EngineClient

logger = logging.getLogger(__name__)


class Adapters:
    """Swaps adapters in two operations, `prepare` and `take`, so that all replicas of a service can
    do the first before any does the second."""

    def __init__(self, engine: EngineClient, cache: str) -> None:
        self._engine = engine
        self._cache = cache
        self._ready: tuple[str, str] | None = None  # place and name of the adapter made ready

    async def prepare(self, place: str | None) -> Prepared:
        """Makes an adapter ready, or returns the fault. Raises EngineError for a dead engine."""
        try:
            return Prepared(await self._loaded(place))
        except ModelError as error:
            return Prepared(error=str(error))

    async def take(self, place: str | None) -> None:
        """Puts the adapter in force from the engine's next step on, or none without a place.

        Raises ModelError, and EngineError if the engine is dead.
        """
        ready, self._ready = self._ready, None
        name = ready[1] if ready and ready[0] == place else await self._loaded(place)
        self._ready = None
        await self._engine.use_adapter(name)
        logger.info("draft adapter: %s", name or "none")

    async def _loaded(self, place: str | None) -> str | None:
        """Loads the adapter into the engine; returns its name, or None without a place."""
        if place is None:
            return None
        name, directory = await asyncio.to_thread(self._fetched, place)
        await self._engine.load_adapter(name, directory)
        self._ready = place, name
        return name

    def _fetched(self, place: str) -> tuple[str, Path]:
        directory = local_adapter(place, self._cache)
        return adapter_name(place, directory), directory
