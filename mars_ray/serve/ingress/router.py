"""Request routing that prefers the replica that holds the beginning of the prompt.

Prior work: Ray's `PrefixCacheAffinityRouter` (ray.llm), SGLang's cache-aware router, llm-d. This
one keeps its table in the router's own process, counts whole blocks, and needs no other actor.
"""

import asyncio
import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mars_ray.serve.ingress.prefixes import PrefixTable, prefix_blocks
from mars_ray.serve.protocol import GenerationRequest

# About 20 MB. A replica's own cache forgets much sooner.
_TABLE_BLOCKS = 65_536
# Requests that the preferred replica may have beyond the least loaded one.
MAX_IMBALANCE = 4


class PrefixRouter(RequestRouter):
    """Sends a call to the replica that was sent the longest beginning of its first prompt.

    If that replica has more than MAX_IMBALANCE requests beyond the least loaded one, or the prompt
    is new to all, the less loaded of two random replicas gets the call.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Called by Serve, in every process with a handle to the deployment."""
        super().__init__(*args, **kwargs)
        self._turn = asyncio.Lock()
        self._table: PrefixTable[ReplicaID] = PrefixTable(_TABLE_BLOCKS)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks, best first; Serve goes to the next rank if all replicas of one are full."""
        if pending_request:
            # Otherwise Serve would retry at once, and for ever, while all are full.
            pending_request.routing_context.should_backoff = True
        blocks = _blocks(pending_request)
        async with self._turn:
            # Let the previous request be sent and counted: Serve chooses for all waiting requests
            # at once, and they would all find the same replica free.
            await asyncio.sleep(0)
            preferred = self._preferred(candidate_replicas, blocks)
        fallback = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        return [preferred, fallback] if preferred else [fallback]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Notes that the replica has accepted the request."""
        self._table.add(_blocks(pending_request), replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Notes the current replicas."""
        super().update_replicas(replicas)
        self._table.keep(self.curr_replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forgets the replica before the controller has noticed its death."""
        super().on_replica_actor_died(replica_id)
        self._table.keep(self.curr_replicas)

    def _preferred(
        self, candidates: list[RunningReplica], blocks: tuple[int, ...]
    ) -> list[RunningReplica]:
        """The least loaded of those that share the longest beginning, if it is not overloaded."""
        # Serve's last known load plus what it sent since; a replica without recent news is idle.
        cache = self.replica_queue_len_cache
        loads = {replica.replica_id: cache.get(replica.replica_id) or 0 for replica in candidates}
        holding = self._table.longest(blocks, loads)
        if not holding:
            return []
        least = min(loads[replica_id] for replica_id in holding)
        if least > min(loads.values()) + MAX_IMBALANCE:
            return []
        return [
            replica
            for replica in candidates
            if replica.replica_id in holding and loads[replica.replica_id] == least
        ]


def _blocks(request: PendingRequest | None) -> tuple[int, ...]:
    """The blocks of a call's first prompt; empty for other requests."""
    if request and request.args and isinstance(call := request.args[0], GenerationRequest):
        return prefix_blocks(call.prompts[0])
    return ()
