"""Replica-seconds that no schedule can do without, whatever it knows.

Every replica-second that a fleet is paid for holds at most one second of steps, so the seconds of
all steps bound the cost. Share a step of n rows that takes t(n) seconds, without attention, out
among its rows: each costs t(n) / n, and each sequence what its own attention costs. Then a request
costs at least

- for each row of its prompt that no earlier request shares, the least of t(n) / n that any step can
  have, and its attention;
- for its answer of D tokens, what the D - 1 after the first one cost. A step in which it decodes
  with p rows commits f of them, at

      v = (p t(n) / n + c C) / f replica-seconds, and lasts u = (t(n) + c C) / f seconds at least,

  both per token, where C is its cached context and c a cached token's cost. It decodes in every
  step from its first token to its end, so if it is in time, the mean of u is at most the time per
  token that is owed. Small steps are fast and dear, large ones cheap and slow.

The least mean of v where the mean of u is at most T is, for any price w >= 0 of a second, at least
m(w) - w T with m(w) = min (v + w u) over all n and all windows (weak duality); the highest of some
prices is taken. m is a concave function of C, which grows evenly from the prompt to the end, so its
mean is at least that of its two ends.

An objective that a share of all requests be in time is kept most cheaply by the requests that cost
least, and the others can be refused.
"""

import math

import numpy as np

from mars_ray.autoscale.service_model import Level, Shape
from mars_ray.simulator.cases import Case
from mars_ray.simulator.engine.arrays import make_world
from mars_ray.simulator.traces.trace import Trace, within_context

# Prices of a second of a request's time, in replica-seconds; any price gives a bound.
_PRICES = (0.0, *np.geomspace(1e-4, 10, 41).tolist())


def lower_bound(case: Case, levels: tuple[Level, ...]) -> float:
    """Replica-seconds at these levels that have the wanted share of the requests in time."""
    costs = np.sort(request_costs(case, levels))
    wanted = math.ceil(case.slo.attainment * len(costs) - 1e-9)
    return float(costs[:wanted].sum())


def request_costs(case: Case, levels: tuple[Level, ...]) -> np.ndarray:
    """The least replica-seconds of each request that is in time, of shape [N]."""
    model = case.model
    trace = within_context(case.trace, model.max_model_len)
    steps = _Steps(case, levels, _gains(case, trace))
    tokens_N = np.maximum(0, trace.output_tokens - 1)
    # A step's context is that of its beginning: all but the tokens that it commits itself.
    begin_N = trace.prompt_tokens + 1 - steps.most_tokens
    least_N = np.zeros(len(trace))
    for price in _PRICES:
        ends = (steps.least(price, begin_N) + steps.least(price, begin_N + tokens_N)) / 2
        least_N = np.maximum(least_N, ends - price * case.slo.time_per_token_s)
    # The last token's row is computed even if it is shared.
    shared_N = np.minimum(trace.shared_tokens, trace.prompt_tokens - 1)
    pairs_N = (trace.prompt_tokens**2 - shared_N**2) / 2
    prompts = steps.row_s * (trace.prompt_tokens - shared_N) + steps.pair_s * pairs_N
    return prompts + least_N * tokens_N


def _gains(case: Case, trace: Trace) -> np.ndarray:
    """What masks bring to each request of the case, as a multiple of the mean, of shape [N]."""
    world = make_world(trace, [1.0], 1, 1, 0, case.seed, case.model.spread)
    return world.requests["gain"]


class _Steps:
    """All steps that an engine can take at some levels, by their rows and windows."""

    def __init__(self, case: Case, levels: tuple[Level, ...], gains_N: np.ndarray) -> None:
        model, cluster = case.model, case.cluster
        self._shapes = {shape for level in levels for shape in level.all_shapes}
        self._gains_N = gains_N
        fastest = min((1.0, *(change.slowness for change in cluster.slowdowns)))
        slowness = cluster.slowness * fastest
        # Seconds are linear between whole numbers of rows.
        self._rows = np.arange(1, model.step_rows + 1)
        seconds = [model.step_s(rows) for rows in self._rows.tolist()]
        self._seconds = slowness * np.array(seconds)
        self._context_s = slowness * model.cache_token_s
        self.row_s = float((self._seconds / self._rows).min())
        self.pair_s = slowness * model.prompt_attention_s
        self.most_tokens = max(float(self._tokens(shape).max()) for shape in self._shapes)

    def least(self, price: float, context_N: np.ndarray) -> np.ndarray:
        """The least of v + price * u for each context, of shape [N]."""
        return np.min([self._of_shape(shape, price, context_N) for shape in self._shapes], axis=0)

    def _of_shape(self, shape: Shape, price: float, context_N: np.ndarray) -> np.ndarray:
        """The least over all numbers of rows, of which the sequence has its own at least."""
        step = _least(self._rows, self._seconds, shape.positions, price)
        context = (1 + price) * self._context_s * context_N
        return (step + context) / self._tokens(shape)

    def _tokens(self, shape: Shape) -> np.ndarray:
        """Tokens that each request commits in a step, of shape [N]."""
        gained = 1 + self._gains_N * (shape.tokens_per_forward - 1)
        return np.minimum(shape.positions, gained)


def _least(rows: np.ndarray, seconds: np.ndarray, own_rows: float, price: float) -> float:
    """The least of (own_rows / n + price) t(n) for n from the own rows on.

    Between two whole numbers t is a line a + b n, so that this is own_rows (a / n + b) + price
    (a + b n), which is least at n = sqrt(own_rows a / (price b)), or at an end.
    """
    low, high = rows[:-1].astype(float), rows[1:].astype(float)
    slope = np.diff(seconds)
    start = seconds[:-1] - slope * low
    with np.errstate(divide="ignore", invalid="ignore"):
        turn = np.sqrt(np.maximum(0, own_rows * start) / (price * slope))
    inside = np.clip(np.where(np.isfinite(turn), turn, high), low, high)
    n = np.maximum(np.concatenate([low, high, inside]), own_rows)
    t = np.interp(n, rows, seconds)
    return float(((own_rows / n + price) * t).min())
