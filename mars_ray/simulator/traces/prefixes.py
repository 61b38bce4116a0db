"""Which earlier request each prompt shares its longest beginning with."""

from collections.abc import Hashable, Sequence

import numpy as np

from mars_ray.simulator.traces.trace import Ints


def from_blocks(
    blocks: Sequence[Sequence[Hashable]], prompt_tokens: Ints, block_tokens: int
) -> tuple[Ints, Ints]:
    """`parent` and `shared_tokens` [N] from the ids of each prompt's blocks.

    A block's id stands for it and all before it (as Mooncake's hash_ids do), so two prompts share
    what is before their first unequal id. Only whole blocks count, as in a cache of pages.
    """
    latest: dict[Hashable, int] = {}
    parent = np.full(len(blocks), -1, np.int64)
    shared = np.zeros(len(blocks), np.int64)
    for index, ids in enumerate(blocks):
        whole = ids[: int(prompt_tokens[index]) // block_tokens]
        for depth, block in enumerate(whole, start=1):
            if block not in latest:
                break
            parent[index], shared[index] = latest[block], depth * block_tokens
        latest.update(dict.fromkeys(whole, index))
    return parent, shared


def from_sessions(
    sessions: Sequence[str], prompt_tokens: Ints, output_tokens: Ints
) -> tuple[Ints, Ints]:
    """`parent` and `shared_tokens` [N] from the names of sessions; "" is a session of its own.

    A prompt begins with the whole context of the session's request before it: prompt and answer,
    or as much of it as the prompt is long.
    """
    latest: dict[str, int] = {}
    parent = np.full(len(sessions), -1, np.int64)
    for index, session in enumerate(sessions):
        if session:
            parent[index] = latest.get(session, -1)
            latest[session] = index
    context = prompt_tokens[parent] + output_tokens[parent]
    return parent, np.where(parent < 0, 0, np.minimum(context, prompt_tokens))
