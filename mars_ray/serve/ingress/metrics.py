"""`GET /metrics`: the service's metrics, gathered from the Prometheus endpoints of all nodes.

Each node of a Ray cluster exports the metrics of its own processes. A scraper that knows the nodes
should read them there; this page is for one that knows only the service. Serve's proxy refuses
messages above 4 MiB from a replica, so a page of a large cluster is compressed or sent in pieces.

    ray    the names of the nodes' endpoints, which this project's dashboard and alerts use
    vllm   vLLM's name where vLLM has the metric, summed over modes; otherwise as above

Ray exports much of its own and labels each series with its process, and it keeps what processes
that are gone have counted, for as long as the node lives. None of that is on this page: its size is
that of the living replicas.
"""

import asyncio
import gzip
import logging
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.request import Request

import ray
from fastapi.responses import Response, StreamingResponse
from ray.serve.metrics import Counter

from mars_ray.cluster.machine import open_direct
from mars_ray.serve.ingress.middleware import RequestLog
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import ErrorInfo

Names = Literal["vllm", "ray"]

_OURS = "ray_mars_"
# Serve's metrics of a service, as far as our dashboard and alerts use them.
SERVE_METRICS = frozenset(
    {
        "ray_serve_application_status",
        "ray_serve_deployment_replica_healthy",
        "ray_serve_deployment_replica_starts_total",
        "ray_serve_num_http_requests_total",
    }
)
# Metrics that vLLM has, too: docs.vllm.ai/en/latest/usage/metrics.
SAME_AS_VLLM = frozenset(
    {
        "e2e_request_latency_seconds",
        "generation_tokens_total",
        "inter_token_latency_seconds",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "prompt_tokens_total",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success_total",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "time_to_first_token_seconds",
    }
)
_NOT_VLLMS = frozenset({"application", "deployment", "mode"})
# Set by every living replica.
_ALIVE = "ray_mars_num_requests_running"
_REPLICAS = "Replica-"  # begins the name of their deployments
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Family:
    """A metric: its lines of comment, and the values of its series, which are a sample's name and
    labels."""

    help: str = ""
    kind: str = ""
    values: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Adds a sample; of several processes' counts of the same the sum is what was counted."""
        series = name, labels
        before = self.values.get(series, 0.0) if self.kind != "gauge" else 0.0
        self.values[series] = before + value


def page_of(texts: Iterable[str], names: Names) -> str:
    """The page of a cluster from the texts of its nodes."""
    families = _families(texts)
    alive = {
        replica
        for _, labels in families.get(_ALIVE, _Family()).values
        if (replica := dict(labels).get("replica"))
    }
    lines: list[str] = []
    for name, family in families.items():
        shown = _Family(family.help, family.kind)
        for series, value in family.values.items():
            of = dict(series[1])
            is_replicas = "model_name" in of and of.get("deployment", "").startswith(_REPLICAS)
            if not is_replicas or of.get("replica") in alive:
                shown.values[series] = value
        if names == "vllm" and name.removeprefix(_OURS) in SAME_AS_VLLM:
            name, shown = _as_vllm(name), _summed(shown)
        if shown.values:
            lines += _lines(name, shown)
    return "".join(f"{line}\n" for line in lines)


def _families(texts: Iterable[str]) -> dict[str, _Family]:
    """The families of this service, each once with the samples of all nodes, as the format
    requires."""
    families: dict[str, _Family] = {}
    for text in texts:
        family: _Family | None = None
        for line in text.splitlines():
            if line.startswith("#"):
                _, what, name, words = [*line.split(" ", 3), "", "", ""][:4]
                is_ours = name.startswith(_OURS) or name in SERVE_METRICS
                family = families.setdefault(name, _Family()) if is_ours else None
                if family and what in ("HELP", "TYPE"):
                    setattr(family, "help" if what == "HELP" else "kind", words)
            elif family and (sample := _SAMPLE.fullmatch(line)):
                # Without empty ones and Ray's: with a capital letter, or of its library.
                labels = tuple(
                    (label, word)
                    for label, word in _LABEL.findall(sample["labels"] or "")
                    if word and not label[0].isupper() and not label.startswith("otel_")
                )
                family.add(sample["name"], labels, float(sample["value"]))
    return families


def _as_vllm(name: str) -> str:
    return "vllm:" + name.removeprefix(_OURS)


def _summed(family: _Family) -> _Family:
    """The family under vLLM's names, each series with vLLM's labels and the replica."""
    summed = _Family(family.help, family.kind)
    for (name, labels), value in family.values.items():
        kept = tuple((label, word) for label, word in labels if label not in _NOT_VLLMS)
        summed.add(_as_vllm(name), kept, value)
    return summed


def _lines(name: str, family: _Family) -> Iterator[str]:
    if family.help:
        yield f"# HELP {name} {family.help}"
    if family.kind:
        yield f"# TYPE {name} {family.kind}"
    for (sample, labels), value in family.values.items():
        words = ",".join(f'{label}="{word}"' for label, word in labels)
        yield f"{sample}{{{words}}} {value!r}" if words else f"{sample} {value!r}"


logger = logging.getLogger(__name__)

# Prometheus itself waits ten seconds for the page, unless it is told otherwise.
_TIMEOUT_S = 8.0
PIECE_BYTES = 1 << 20
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# A pause for the proxy to take one piece before the next one comes.
_PAUSE_S = 0.01


async def of_all_nodes(names: Names) -> str:
    """The metrics of all nodes under these names, in Prometheus's text format; a node that does not
    answer in time is left out and logged.

    Raises ApiError if none answers: to Prometheus, an empty page would be the end of all series.
    """
    addresses = [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in await asyncio.to_thread(ray.nodes)
        if node["Alive"]
    ]
    read = await asyncio.gather(*(asyncio.to_thread(_read, address) for address in addresses))
    texts = [text for text in read if text is not None]
    if not texts:
        message = "no node answers with its metrics; retry"
        raise ApiError(ErrorInfo(503, message, code="metrics_unavailable"))
    return await asyncio.to_thread(page_of, texts, names)


def _read(address: str) -> str | None:
    try:
        # Never through a proxy: the node's address need not be reachable from there.
        with open_direct(Request(address), _TIMEOUT_S) as reply:
            return reply.read().decode()
    except OSError as error:
        logger.warning("%s does not answer: %s", address, error)
        return None


async def metrics_reply(text: str, accepted: str) -> Response:
    """The text, compressed if the client accepts gzip, and in pieces if it is long."""
    content, headers = text.encode(), {"vary": "accept-encoding"}
    if "gzip" in accepted.lower():
        content = await asyncio.to_thread(gzip.compress, content, 5)
        headers["content-encoding"] = "gzip"
    if len(content) <= PIECE_BYTES:
        return Response(content, media_type=_PROMETHEUS, headers=headers)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES]
            await asyncio.sleep(_PAUSE_S)

    return StreamingResponse(pieces(), media_type=_PROMETHEUS, headers=headers)


# Ray's annotation allows only one tag, its code any number.
_WHOSE: Any = ("key", "model_name")
_HOW: Any = ("key", "model_name", "ending")
# Where no keys are asked for; Prometheus would drop an empty label.
_NO_KEY = "none"


class UsageMetrics:
    """Counters by key and model, from the log of each finished request."""

    def __init__(self) -> None:
        self._requests = Counter("mars_key_requests", "Requests by how they ended.", _HOW)
        self._prompt_tokens = Counter("mars_key_prompt_tokens", "Tokens of prompts.", _WHOSE)
        self._generation_tokens = Counter("mars_key_generation_tokens", "Tokens written.", _WHOSE)

    def count(self, log: RequestLog) -> None:
        """Adds a request that went to a replica."""
        if log.model is None or log.ending is None:
            return
        whose = {"key": log.key or _NO_KEY, "model_name": log.model}
        self._requests.inc(tags=whose | {"ending": log.ending})
        for counter, tokens in (
            (self._prompt_tokens, log.prompt_tokens),
            (self._generation_tokens, log.completion_tokens),
        ):
            # Ray refuses an increment of zero.
            if tokens:
                counter.inc(tokens, whose)
