"""The same engine, step by step: slow, obvious, one replica. Tests compare the fast one to it."""

from collections.abc import Callable
from dataclasses import dataclass

from mars_ray.simulator.engine.arrays import Tables
from mars_ray.simulator.engine.engine import NONE_LEFT, step_s
from mars_ray.simulator.traces.trace import Trace


@dataclass(slots=True)
class _Sequence:
    number: int
    prompt: int
    output: int
    prompt_left: int
    output_left: float

    @property
    def cached(self) -> float:
        return self.prompt - self.prompt_left + self.output - self.output_left


def reference(
    trace: Trace, tables: Tables, max_batch: int, level_at: Callable[[float], int]
) -> tuple[list[float], list[float]]:
    """Times of each request's first token and of its end. `level_at` is called at each step."""
    firsts, ends = [0.0] * len(trace), [0.0] * len(trace)
    waiting = [
        _Sequence(i, prompt, output, prompt, output)
        for i, (prompt, output) in enumerate(
            zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
        )
    ]
    arrival_s = trace.arrival_s.tolist()
    batch: list[_Sequence] = []
    now = 0.0
    while waiting or batch:
        if not batch:
            now = max(now, arrival_s[waiting[0].number])
        level = level_at(now)
        decoding = [s for s in batch if s.prompt_left == 0]
        rows = len(decoding) * tables.rows_LB[level, len(decoding)]
        tokens = tables.tokens_LB[level, len(decoding)]
        room = max(0, int(tables.step_tokens - rows))
        while waiting and arrival_s[waiting[0].number] <= now and len(batch) < max_batch:
            if sum(s.prompt_left for s in batch) >= room:
                break
            batch.append(waiting.pop(0))
        chunk = min(room, sum(s.prompt_left for s in batch))
        context = sum(s.cached for s in batch)
        now += step_s(tables, rows + chunk) + tables.cache_token_s * context
        for sequence in batch:
            if sequence in decoding:
                sequence.output_left -= min(tokens, sequence.output_left)
            elif chunk:
                taken = min(chunk, sequence.prompt_left)
                chunk -= taken
                sequence.prompt_left -= taken
                if sequence.prompt_left == 0:
                    sequence.output_left -= 1
                    firsts[sequence.number] = now
        for sequence in batch:
            if sequence.prompt_left == 0 and sequence.output_left < NONE_LEFT:
                ends[sequence.number] = now
        batch = [s for s in batch if s.prompt_left or s.output_left >= NONE_LEFT]
    return firsts, ends
