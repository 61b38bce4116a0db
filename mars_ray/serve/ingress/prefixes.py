"""Which replica has seen the beginning of a prompt: the pure part of prefix-aware routing.

A prompt is cut into blocks, and a block is known by a hash of itself and all before it, as in the
engine's own prefix cache and in the caches of vLLM and SGLang. Replicas tell nothing: what they
hold is guessed from what was sent to them.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from mars_ray.serve.protocol import Prompt, Turn

# About one page of the engine's cache. The ingress has no tokenizer.
BLOCK_CHARS = 64
BLOCK_TOKENS = 16
# Of one prompt; who shares so much is sent to the same replica, whatever follows.
MAX_BLOCKS = 512

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


def prefix_blocks(prompt: Prompt) -> tuple[int, ...]:
    """Hashes of the prompt's whole blocks, each of everything up to its end."""
    chain = 0
    chains = []
    for block in _blocks(prompt):
        chain = hash((chain, block))
        chains.append(chain)
    return tuple(chains)


def _blocks(prompt: Prompt) -> Iterator[Hashable]:
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], int):
        content, size = prompt, BLOCK_TOKENS
    else:
        content, size = _text(prompt), BLOCK_CHARS
    for number in range(min(len(content) // size, MAX_BLOCKS)):
        yield content[number * size : (number + 1) * size]


def _text(prompt: Prompt) -> str:
    """A conversation as a text that its continuation begins with."""
    if isinstance(prompt, str):
        return prompt
    turns = [part for part in prompt if isinstance(part, Turn)]
    said = [
        (turn.role, turn.content, *(f"{call.name} {call.arguments}" for call in turn.calls))
        for turn in turns
    ]
    return "".join(f"{part}\0" for parts in said for part in parts)


class PrefixTable(Generic[ReplicaT]):
    """The blocks that each replica was sent, as many as `capacity`; the oldest are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # In order of their last use.
        self._holders: OrderedDict[int, set[ReplicaT]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, blocks: Sequence[int], replica: ReplicaT) -> None:
        """The replica was sent a prompt of these blocks."""
        # The first block last: without it those behind it are never found.
        for block in reversed(blocks):
            self._holders.setdefault(block, set()).add(replica)
            self._holders.move_to_end(block)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def longest(self, blocks: Sequence[int], replicas: Collection[ReplicaT]) -> set[ReplicaT]:
        """Those of `replicas` that share the longest beginning; none if nobody shares a block."""
        best: set[ReplicaT] = set()
        for block in blocks:
            here = {replica for replica in self._holders.get(block, ()) if replica in replicas}
            # Who was sent this block was also sent those before, unless they are forgotten.
            here = here & best if best else here
            if not here:
                break
            best = here
        return best

    def keep(self, replicas: Collection[ReplicaT]) -> None:
        """Forgets every other replica."""
        for block, holders in list(self._holders.items()):
            holders.intersection_update(replicas)
            if not holders:
                del self._holders[block]
