"""Request routing that prefers the replica that holds the beginning of the prompt.

Prior work: Ray's `PrefixCacheAffinityRouter` (ray.llm), SGLang's cache-aware router, llm-d. This
one keeps its table in the router's own process, counts whole blocks, and needs no other actor.

A prompt is cut into blocks. The key of a block is a hash of it and of all before it, as in the
engine's own prefix cache, vLLM and SGLang. Replicas do not report their caches; the content is
estimated from the prompts that were sent to them.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Generic, TypeVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mars_ray.serve.protocol import GenerationRequest, Prompt, Turn

# About one page of the engine's cache. The ingress has no tokenizer.
BLOCK_CHARS = 64
BLOCK_TOKENS = 16
# Most blocks of one prompt; prompts that share this many go to the same replica, whatever follows.
MAX_BLOCKS = 512

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


def prefix_blocks(prompt: Prompt) -> tuple[int, ...]:
    """Hashes of the prompt's whole blocks, each over the prompt up to the block's end."""
    if isinstance(prompt, str):
        content, size = prompt, BLOCK_CHARS
    elif turns := [part for part in prompt if isinstance(part, Turn)]:
        # The text of a longer conversation begins with that of a shorter one.
        said = [
            (turn.role, turn.content, *(f"{call.name} {call.arguments}" for call in turn.calls))
            for turn in turns
        ]
        content, size = "".join(f"{part}\0" for parts in said for part in parts), BLOCK_CHARS
    else:
        content, size = prompt, BLOCK_TOKENS
    chain = 0
    chains = []
    for number in range(min(len(content) // size, MAX_BLOCKS)):
        chain = hash((chain, content[number * size : (number + 1) * size]))
        chains.append(chain)
    return tuple(chains)


class PrefixTable(Generic[ReplicaT]):
    """The blocks sent to each replica: at most `capacity`, the oldest are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # In order of their last use.
        self._holders: OrderedDict[int, set[ReplicaT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, blocks: Sequence[int], replica: ReplicaT) -> None:
        """Notes that the replica was sent a prompt of these blocks."""
        # The first block is added last, so that it is forgotten last: without it the later ones
        # are never found.
        for block in reversed(blocks):
            self._holders.setdefault(block, set()).add(replica)
            self._holders.move_to_end(block)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def longest(self, blocks: Sequence[int], replicas: Collection[ReplicaT]) -> set[ReplicaT]:
        """The replicas that share the longest beginning; empty if none shares a block."""
        best: set[ReplicaT] = set()
        for block in blocks:
            here = {replica for replica in self._holders.get(block, ()) if replica in replicas}
            # A replica with this block was also sent those before it, unless they are forgotten.
            here = here & best if best else here
            if not here:
                break
            best = here
        return best

    def keep(self, replicas: Collection[ReplicaT]) -> None:
        for block, holders in list(self._holders.items()):
            holders.intersection_update(replicas)
            if not holders:
                del self._holders[block]


# About 20 MB. A replica's own cache forgets much sooner.
_TABLE_BLOCKS = 65_536
# Requests that the preferred replica may have beyond the least loaded one.
MAX_IMBALANCE = 4


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that was sent the longest beginning of its first prompt.

    If that replica has more than MAX_IMBALANCE requests beyond the least loaded one, or the prompt
    is new to all, the less loaded of two random replicas gets it.
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
    """The blocks of a generation request's first prompt; empty for others."""
    if request and request.args and isinstance(asked := request.args[0], GenerationRequest):
        return prefix_blocks(asked.prompts[0])
    return ()
