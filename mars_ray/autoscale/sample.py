"""What the policy sees of a fleet at one tick.

Rates are means since the tick before, as they are: the policy smooths. Counts and sums are of the
whole fleet. None is "not known"; numbers that cannot be (NaN, negative, beyond all measure) become
None in `checked`, which `decide` calls first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# A class share under this name: requests that pin their own mode or threshold.
PINNED = "pinned"
# No rate, count or time of a fleet is larger.
_MOST = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """One replica that answered: its engine between two steps."""

    running: int = 0  # sequences in the batch
    waiting: int = 0
    # Of its newest steps, means: seconds, and rows of sequences that decode.
    step_s: float | None = None
    decode_rows: float | None = None
    # Rows of prompts in a step that has any, and the share of the steps that do.
    prompt_rows: float | None = None
    prompt_share: float | None = None
    positions: float | None = None  # rows of a decoding sequence
    threshold: float | None = None  # in force here; None: the policy's


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One tick. Requests that were refused (429) are no arrivals: `refused_per_s` has them."""

    running: int  # replicas that take requests
    target: int  # replicas that were last asked for
    starting_ages_s: tuple[float, ...] = ()  # of each replica on its way
    arrivals_per_s: float | None = None
    refused_per_s: float | None = None
    prompt_tokens: float | None = None  # of a request, mean; without what the prefix cache had
    output_tokens: float | None = None  # of a request, mean
    # Of how many these are means; None: of as many as arrived.
    prompts_per_s: float | None = None
    answers_per_s: float | None = None
    waiting: int | None = None  # requests that have no token yet and are in no batch
    loads: tuple[ReplicaLoad, ...] = ()
    ttft_p90_s: float | None = None  # newest
    time_per_token_p90_s: float | None = None  # newest
    # Threshold -> T/F that it would have given on the same steps (decode/stats.py).
    tokens_per_forward: Mapping[float, float] = field(default_factory=dict)
    # Share of the requests by quality class, and of those that pin their own (`PINNED`); the rest
    # follows the set-point.
    class_shares: Mapping[str, float] = field(default_factory=dict)
    cold_start_s: float | None = None  # newest measured
    age_s: float | None = None  # of the oldest metric in here; None: there are no metrics

    def checked(self) -> "Sample":
        """Without numbers that cannot be."""
        return replace(
            self,
            running=_count(self.running) or 0,
            target=_count(self.target) or 0,
            starting_ages_s=tuple(_number(age) or 0.0 for age in self.starting_ages_s),
            arrivals_per_s=_number(self.arrivals_per_s),
            refused_per_s=_number(self.refused_per_s),
            prompt_tokens=_number(self.prompt_tokens),
            output_tokens=_number(self.output_tokens),
            prompts_per_s=_number(self.prompts_per_s),
            answers_per_s=_number(self.answers_per_s),
            waiting=_count(self.waiting),
            loads=tuple(map(_checked_load, self.loads)),
            ttft_p90_s=_number(self.ttft_p90_s),
            time_per_token_p90_s=_number(self.time_per_token_p90_s),
            tokens_per_forward=_checked_table(self.tokens_per_forward),
            class_shares=_checked_shares(self.class_shares),
            cold_start_s=_number(self.cold_start_s),
            age_s=_number(self.age_s),
        )


def _checked_load(load: ReplicaLoad) -> ReplicaLoad:
    return ReplicaLoad(
        running=_count(load.running) or 0,
        waiting=_count(load.waiting) or 0,
        step_s=_number(load.step_s),
        decode_rows=_number(load.decode_rows),
        prompt_rows=_number(load.prompt_rows),
        prompt_share=_share(load.prompt_share),
        positions=_number(load.positions),
        threshold=None if load.threshold is None else _share(load.threshold),
    )


def _number(value: float | None) -> float | None:
    return None if value is None or not 0 <= value <= _MOST else float(value)


def _count(value: float | None) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _share(value: float | None) -> float | None:
    number = _number(value)
    return None if number is None else min(1.0, number)


def _checked_table(table: Mapping[float, float]) -> dict[float, float]:
    """T/F is at least 1 by construction."""
    return {
        threshold: max(1.0, value)
        for threshold, value in table.items()
        if _number(value) is not None and 0 <= threshold <= 1
    }


def _checked_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """At most 1 in all."""
    kept = {name: share for name, value in shares.items() if (share := _share(value))}
    total = max(1.0, sum(kept.values()))
    return {name: share / total for name, share in kept.items()}
