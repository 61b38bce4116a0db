"""Finds the replicas that have seen the beginning of a prompt: the pure part of prefix routing.

A prompt is cut into blocks. The key of a block is a hash of it and of all before it, as in the
engine's own prefix cache, vLLM and SGLang. Replicas do not report their caches; the content is
estimated from the prompts that were sent to them.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from mars_ray.serve.protocol import Prompt, Turn

# About one page of the engine's cache. The ingress has no tokenizer.
BLOCK_CHARS = 64
BLOCK_TOKENS = 16
# Most blocks of one prompt; prompts that share this many go to the same replica, whatever follows.
MAX_BLOCKS = 512

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


def prefix_blocks(prompt: Prompt) -> tuple[int, ...]:
    """Hashes of the prompt's whole blocks, each over the prompt up to the block's end."""
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
    """The prompt as a text; that of a longer conversation begins with that of a shorter one."""
    if isinstance(prompt, str):
        return prompt
    turns = [part for part in prompt if isinstance(part, Turn)]
    said = [
        (turn.role, turn.content, *(f"{call.name} {call.arguments}" for call in turn.calls))
        for turn in turns
    ]
    return "".join(f"{part}\0" for parts in said for part in parts)


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
        """Forgets every other replica."""
        for block, holders in list(self._holders.items()):
            holders.intersection_update(replicas)
            if not holders:
                del self._holders[block]
