"""The reply of `GET /v1/mars/status`: the current state of the models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mars_ray.decode.info import EngineInfo
from mars_ray.serve.openai.response_models import Part


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica now; tokens, forwards, disagreements and n-gram drafts are the last minute's."""

    mode: str  # mode of requests that name none
    threshold: float | None
    adapter: str | None  # the draft adapter in force
    running: int
    waiting: int
    cache_share: float
    tokens_per_second: float
    tokens: int
    forwards: int
    disagreed: int
    ngram_tokens: int
    engine: EngineInfo
    step_tokens: int  # most rows of a step
    set_point: float  # the threshold of requests whose quality tolerates it
    warning: str | None = None  # of settings that contradict each other


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of the autoscaling policy, and why."""

    at_s: float  # Unix time
    replicas: int
    threshold: float
    shed: float  # share refused of the new requests that pin nothing
    reason: str
    utilisation: float  # of a replica's modelled capacity, as far as it is believed
    floor_replicas: float  # kept by the record, with a fraction
    error_budget_spent: float  # share of it, by the last hour's late requests


class ModelStatus(Part):
    """A model's state now; null where nothing is known, as no replica or nothing lately."""

    id: str
    replicas: int
    running: int
    waiting: int
    kv_cache_usage: float | None
    tokens_per_second: float
    tokens_per_forward: float | None
    disagreement: float | None
    ngram_share: float | None  # of the tokens: drafts that the n-gram lookup proposed
    mode: str | None
    adapter: str | None
    threshold: float | None  # of requests that name nothing
    set_point: float | None  # of those whose quality tolerates it
    engine: EngineInfo | None
    step_tokens: int | None
    warning: str | None
    policy: Decided | None


class MarsStatusReply(Part):
    """All models at the moment."""

    object: Literal["list"]
    data: list[ModelStatus]


def model_status(
    name: str, replicas: Sequence[ReplicaStatus], decided: Decided | None
) -> ModelStatus:
    """One model's entry in the reply, from the replicas that have answered."""
    tokens = sum(replica.tokens for replica in replicas)
    forwards = sum(replica.forwards for replica in replicas)
    disagreed = sum(replica.disagreed for replica in replicas)
    looked_up = sum(replica.ngram_tokens for replica in replicas)
    thresholds = [replica.threshold for replica in replicas if replica.threshold is not None]
    adapters = [replica.adapter for replica in replicas]
    usage = [replica.cache_share for replica in replicas]
    return {
        "id": name,
        "replicas": len(replicas),
        "running": sum(replica.running for replica in replicas),
        "waiting": sum(replica.waiting for replica in replicas),
        "kv_cache_usage": sum(usage) / len(usage) if usage else None,
        "tokens_per_second": sum(replica.tokens_per_second for replica in replicas),
        "tokens_per_forward": tokens / forwards if forwards else None,
        "disagreement": disagreed / tokens if tokens else None,
        "ngram_share": looked_up / tokens if tokens else None,
        "mode": replicas[0].mode if replicas else None,
        # Both, while a new one spreads.
        "adapter": ", ".join(dict.fromkeys(filter(None, adapters))) or None,
        # While a new one spreads, a client may get the lower one.
        "threshold": min(thresholds, default=None),
        "set_point": min((replica.set_point for replica in replicas), default=None),
        # All replicas have the same job, but may run on different kinds of nodes.
        "engine": replicas[0].engine if replicas else None,
        "step_tokens": min((replica.step_tokens for replica in replicas), default=None),
        "warning": next(
            (replica.warning for replica in replicas if replica.warning), _mixed(replicas)
        ),
        "policy": decided,
    }


def _mixed(replicas: Sequence[ReplicaStatus]) -> str | None:
    """A warning if replicas may give different answers to one request: AMX sums bfloat16 in another
    order than the other instruction sets, which are alike, and so does torch."""
    engines = [replica.engine for replica in replicas]
    own = [engine for engine in engines if engine.device == "cpu" and engine.dtype == "bfloat16"]
    kinds = {engine.instructions or "torch" for engine in own}
    if len(kinds) <= 1 or not kinds & {"amx", "torch"}:
        return None
    return (
        f"replicas compute with {', '.join(sorted(kinds))}: their answers may differ where two "
        "tokens are nearly as likely; the same engine.cpu_instructions for all makes them equal"
    )
