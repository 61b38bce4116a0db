"""Objectives to judge when none is given, around what the model can do."""

import math

import numpy as np

from mars_ray.autoscale.service_model import Mix, ServiceModel, step_rows
from mars_ray.config.scaling import Slo
from mars_ray.simulator.traces.trace import Trace

# Times what a token takes a lone sequence in plain decoding: where masks pay most, a usual pace,
# and one that leaves room for large batches.
_PACES = (1.25, 2.5, 5.0)
# A first token may take as long as so many of the others, which makes it some seconds, and so many
# times what the 99th percentile of the prompts takes alone.
_TOKENS, _ALONE = 250, 4


def objectives(model: ServiceModel, trace: Trace) -> tuple[Slo, ...]:
    """Three objectives, rounded to two digits, the strictest first."""
    mix = Mix(float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean()))
    prompt = float(np.quantile(trace.prompt_tokens, 0.99))
    found = []
    for pace in _PACES:
        token_s = pace * model.step_s(1, mix.context_tokens)
        rows = step_rows(model, token_s)
        prompt_s = math.ceil(prompt / rows) * model.step_s(rows, prompt / 2)
        first_s = max(_TOKENS * token_s, _ALONE * prompt_s)
        found.append(Slo(ttft_s=_rounded(first_s), time_per_token_s=_rounded(token_s)))
    return tuple(found)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.2g}")
