"""What a model's context limit makes of a trace, as the service does."""

from dataclasses import fields, replace

import numpy as np

from mars_ray.errors import DataError
from mars_ray.simulator.traces.trace import Trace


def within_context(trace: Trace, max_model_len: int | None) -> Trace:
    """The requests that a model of this context serves.

    A prompt without room for one token is refused with a 400 by the ingress or the engine, whatever
    the fleet, so it is left out. A longer answer ends where the context does
    (`LLMServer._made`, `decode/request.py: check_request`). Raises DataError if none is left.
    """
    if max_model_len is None:
        return trace
    kept = np.flatnonzero(trace.prompt_tokens < max_model_len)
    if not len(kept):
        raise DataError(f"{trace.name}: no prompt fits into a context of {max_model_len:,} tokens")
    columns = {each.name: getattr(trace, each.name)[kept] for each in fields(trace)[1:]}
    room = max_model_len - columns["prompt_tokens"]
    place = np.full(len(trace) + 1, -1, np.int64)  # the last entry is that of no parent
    place[kept] = np.arange(len(kept))
    parent = place[columns["parent"]]
    changed = {
        "output_tokens": np.minimum(columns["output_tokens"], room),
        "parent": parent,
        "shared_tokens": np.where(parent >= 0, columns["shared_tokens"], 0),
    }
    return replace(trace, **columns | changed)
