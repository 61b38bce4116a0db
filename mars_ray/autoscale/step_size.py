"""How many rows a full step of an engine should have, for the time that a token may take.

An answer waits for every step that it shares with prompts, and while prompts wait every step is
full. In a burst that lasts as long as an answer, its time per token is therefore the seconds of a
full step, whatever the size of the fleet. Larger steps forward prompts faster, since a step's fixed
part is shared by more rows, but beyond the rows that are free anyway only by little. So

    rows = the most whose step takes at most 85% of the time per token,

and at least

- the rows that are as good as free: while a step waits for the weights, fewer save no time;
- what one sequence may take, with all of its drafts and masks.

The remaining 15% are for reading the cached context of the batch. `benchmarks/step_size.py` looks
for the smallest fixed fleet of a simulated 7B model (flash crowd, Azure's code, Mooncake's
conversations; 6, 15 and 30 ms a token; plain and `verified`): with shares of 70 to 90% it is the
smallest or has one replica more. Beyond 100% plain decoding needs up to twice as many replicas.
Half of the share costs little where 30 ms are owed, and much where 6 are.

Masks commit several tokens a step, so `verified` tolerates longer steps. It does not gain by them:
where there are so many sequences that replicas are short, few masks pay.
"""

import math

from mars_ray.autoscale.service_model import ServiceModel
from mars_ray.config.decode import PROMPTS_SHARE

# Of the time per token.
_SHARE = 0.85
# A step this much longer than that of one row counts as free.
_FREE = 1.05
# Most rows of a step: beyond, memory for activations grows and throughput does not.
_MOST_ROWS = 8192


def step_rows(model: ServiceModel, time_per_token_s: float, context_tokens: float = 0.0) -> int:
    """Rows of a full step, for this time per token and a batch with `context_tokens` cached."""
    context_s = model.cache_token_s * context_tokens
    budget_s = max(_SHARE * time_per_token_s - context_s, _FREE * model.step_s(1))
    low, high = least_rows(model), max(_MOST_ROWS, least_rows(model))
    while low < high:
        middle = (low + high + 1) // 2
        if model.step_s(middle) <= budget_s:
            low = middle
        else:
            high = middle - 1
    return low


def least_rows(model: ServiceModel) -> int:
    """The fewest rows of a step in which one sequence has room for all of its drafts and masks."""
    shapes = [shape for level in model.levels for shape in level.all_shapes]
    rows = math.ceil(max((shape.positions for shape in shapes), default=1.0))
    return max(8, math.ceil(rows * PROMPTS_SHARE / (PROMPTS_SHARE - 1)))


def contradiction(model: ServiceModel, rows: int, time_per_token_s: float) -> str | None:
    """What is wrong with a step of so many rows where this time per token is owed, and what to set
    instead; None if nothing is."""
    chosen, full_s = step_rows(model, time_per_token_s), model.step_s(rows)
    if rows > chosen and full_s > time_per_token_s:
        return (
            f"a full step of {rows:,} rows takes {1e3 * full_s:.3g} ms, but a token may take "
            f"{1e3 * time_per_token_s:.3g} ms, so answers are late whenever prompts wait: "
            f"set {chosen:,} rows"
        )
    if rows < least_rows(model):
        return (
            f"a step of {rows:,} rows has no room for all drafts and masks of one sequence: "
            f"set {chosen:,} rows"
        )
    return None
