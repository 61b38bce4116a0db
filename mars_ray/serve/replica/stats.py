"""What is counted of answers and engines, as plain values (exported by `metrics.py` here)."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from mars_ray.decode.engine import Engine
from mars_ray.decode.info import EngineInfo

Ending = Literal["stop", "length", "tool_calls", "abort", "error", "deadline", "refused"]


@dataclass(slots=True)
class AnswerStats:
    """One answer from its submission to its end; times in seconds."""

    mode: str
    prompt_tokens: int
    ending: Ending = "abort"
    completion_tokens: int = 0
    forwards: int = 0
    disagreed: int = 0
    degraded: bool = False  # a threshold below the service's set-point at rest was in force
    queue_s: float | None = None  # until its first rows were forwarded
    first_token_s: float | None = None
    total_s: float = 0.0
    # Between two steps of it, and how many tokens the later one brought.
    gaps: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine between two steps. Counts are since its start."""

    running: int
    waiting: int
    cache_share: float  # of the pages, those that sequences hold
    preemptions: int
    prefix_queries: int  # tokens of admitted sequences
    prefix_hits: int  # those of them that were in the cache
    windows: tuple[int, ...]  # of the sequences in the batch
    adapter: str | None  # the draft adapter in force
    can_draft: bool  # by it, or by the model itself
    set_point: float  # threshold of requests that pin none, as far as they tolerate it
    # By mode: checked tokens; T/F that each threshold would have given.
    checked: dict[str, int]
    tokens_per_forward_at: dict[str, dict[float, float]]
    accepted_at: dict[str, list[int]]  # by place beyond the first
    info: EngineInfo


class Observer(Protocol):
    """Is told of every answer."""

    def answer(self, seen: AnswerStats) -> None:
        """At its end, whatever that was."""
        ...


def engine_stats(engine: Engine) -> EngineStats:
    """For the engine's own thread."""
    by_mode = engine.measures.by_mode
    return EngineStats(
        running=engine.running,
        waiting=engine.waiting,
        cache_share=engine.pool.in_use / engine.pool.count,
        preemptions=engine.preemptions,
        prefix_queries=engine.prefix_queries,
        prefix_hits=engine.prefix_hits,
        windows=engine.windows,
        adapter=engine.adapter_name,
        can_draft=engine.card.block_size > 0,
        set_point=engine.thresholds.set_point,
        checked={mode: measures.checked for mode, measures in by_mode.items()},
        tokens_per_forward_at={
            mode: measures.tokens_per_forward() for mode, measures in by_mode.items()
        },
        accepted_at=engine.measures.accepted_at,
        info=engine.info,
    )
