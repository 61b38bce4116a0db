"""Metrics of a replica, on every Ray node's Prometheus endpoint under `ray_mars_...`.

Names end like those of vLLM, under which the service's own page shows them
(`serve/ingress/metrics.py`); metrics that only this service has use its own terms. Serve adds
the tags deployment, replica and application.
"""

from collections import Counter as Tally
from typing import Any

from ray import serve
from ray.serve.metrics import Counter, Gauge, Histogram

from mars_ray.decode.stats import Snapshot
from mars_ray.serve.replica.stats import AnswerStats

_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120]
_TOKENS = [1.0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000]
_PER_FORWARD = [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16]
# Ray's annotation allows only one tag, its code any number.
_MODEL: Any = ("model_name",)
_MODE: Any = (*_MODEL, "mode")
_SOURCE: Any = (*_MODEL, "source")
_ADAPTER: Any = (*_MODEL, "adapter")
_CLASS: Any = (*_MODEL, "quality_class")
_MODE_AND_REASON: Any = (*_MODE, "finished_reason")
_MODE_AND_THRESHOLD: Any = (*_MODE, "threshold")
_MODE_AND_POSITION: Any = (*_MODE, "position")


def replica_name() -> str:
    """The label `replica` of this process's metrics."""
    return serve.get_replica_context().replica_tag


class AnswerMetrics:
    """An observer of answers."""

    def __init__(self, model_name: str) -> None:
        self._requests = Counter(
            "mars_request_success", "Answers by how they ended.", _MODE_AND_REASON
        )
        self._prompt_tokens = Counter("mars_prompt_tokens", "Tokens of prompts.", _MODEL)
        self._generation_tokens = Counter("mars_generation_tokens", "Tokens written.", _MODE)
        self._forwards = Counter("mars_forwards", "Forwards that wrote tokens.", _MODE)
        self._disagreed = Counter(
            "mars_disagreed_tokens", "Tokens that AR decoding would not have chosen.", _MODE
        )
        self._degraded = Counter(
            "mars_degraded_requests",
            "Answers for which the threshold was lowered below the set-point at rest.",
            _MODE,
        )
        self._late = Counter("mars_late_requests", "Answers beyond a limit of the SLO.", _CLASS)
        self._first_token = _histogram("mars_time_to_first_token_seconds", _SECONDS)
        self._inter_token = _histogram("mars_inter_token_latency_seconds", _SECONDS)
        self._queue = _histogram("mars_request_queue_time_seconds", _SECONDS)
        self._prefill = _histogram("mars_request_prefill_time_seconds", _SECONDS)
        self._decode = _histogram("mars_request_decode_time_seconds", _SECONDS)
        self._per_token = _histogram("mars_request_time_per_output_token_seconds", _SECONDS)
        self._latency = _histogram("mars_e2e_request_latency_seconds", _SECONDS)
        self._prompts = _histogram("mars_request_prompt_tokens", _TOKENS)
        self._lengths = _histogram("mars_request_generation_tokens", _TOKENS)
        self._longest = _histogram("mars_request_max_num_generation_tokens", _TOKENS)
        self._per_forward = _histogram("mars_tokens_per_forward", _PER_FORWARD)
        _name_model(self, model_name)

    def answer(self, seen: AnswerStats) -> None:
        mode = {"mode": seen.mode}
        self._requests.inc(tags=mode | {"finished_reason": seen.ending})
        if seen.ending == "refused":
            return
        _add(self._prompt_tokens, seen.prompt_tokens)
        _add(self._generation_tokens, seen.completion_tokens, mode)
        _add(self._forwards, seen.forwards, mode)
        _add(self._disagreed, seen.disagreed, mode)
        _add(self._degraded, seen.degraded, mode)
        _add(self._late, seen.strain > 1, {"quality_class": seen.quality_class})
        if seen.prompt_tokens:
            self._prompts.observe(seen.prompt_tokens, mode)
        if seen.forwards:
            self._lengths.observe(seen.completion_tokens, mode)
            self._per_forward.observe(seen.completion_tokens / seen.forwards, mode)
        if seen.longest_tokens:
            self._longest.observe(seen.longest_tokens, mode)
        self._latency.observe(seen.total_s, mode)
        for seconds, tokens in seen.gaps:
            self._inter_token.observe(seconds / tokens, mode)
        if seen.first_token_s is None:
            return
        self._first_token.observe(seen.first_token_s, mode)
        self._decode.observe(seen.total_s - seen.first_token_s, mode)
        if seen.completion_tokens > 1:
            self._per_token.observe(seen.time_per_token_s, mode)
        if seen.queue_s is not None:
            self._queue.observe(seen.queue_s, mode)
            self._prefill.observe(max(0.0, seen.first_token_s - seen.queue_s), mode)


class EngineMetrics:
    """An engine's metrics: call `engine` now and then with a new snapshot."""

    def __init__(self, model_name: str) -> None:
        self._written = Counter(
            "mars_engine_tokens", "Tokens that the engine wrote, discarded ones too.", _MODEL
        )
        self._discarded = Counter(
            "mars_discarded_tokens", "Tokens written behind the end of an answer.", _MODEL
        )
        self._running = Gauge("mars_num_requests_running", "Sequences in the batch.", _MODEL)
        self._waiting = Gauge("mars_num_requests_waiting", "Sequences that wait for room.", _MODEL)
        self._cache = Gauge(
            "mars_kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", _MODEL
        )
        self._window = Gauge(
            "mars_window", "Masks per forward, mean over the batch, 0 when idle.", _MODEL
        )
        self._preemptions = Counter("mars_num_preemptions", "Sequences sent back to wait.", _MODEL)
        self._prefix_queries = Counter(
            "mars_prefix_cache_queries", "Tokens of admitted sequences.", _MODEL
        )
        self._prefix_hits = Counter(
            "mars_prefix_cache_hits", "Tokens of admitted sequences that were in the cache.", _MODEL
        )
        self._counterfactual = Gauge(
            "mars_counterfactual_tokens_per_forward",
            "T/F that this threshold would have given on the same traffic.",
            _MODE_AND_THRESHOLD,
        )
        self._threshold = Gauge(
            "mars_threshold",
            "Threshold in force for requests that tolerate any and pin none.",
            _MODEL,
        )
        self._adapter = Gauge(
            "mars_draft_adapter_info",
            "1 for the draft adapter in force, 0 for those that were.",
            _ADAPTER,
        )
        self._accepted = Counter(
            "mars_spec_decode_num_accepted_tokens_per_pos",
            "Tokens that steps committed beyond their first, by place.",
            _MODE_AND_POSITION,
        )
        self._drafts = Counter(
            "mars_draft_tokens", "Drafts that were checked, by what proposed them.", _SOURCE
        )
        self._accepted_drafts = Counter(
            "mars_accepted_draft_tokens",
            "Drafts that were accepted, by what proposed them.",
            _SOURCE,
        )
        self._checked = Counter(
            "mars_checked_tokens", "Tokens seen again by a row of their own.", _MODE
        )
        _name_model(self, model_name)
        self._adapter_exported: str | None = None
        # Exported so far, by counter and tag values.
        self._exported: Tally[tuple[Any, ...]] = Tally()

    def engine(self, seen: Snapshot) -> None:
        """Sets the gauges, and adds what was counted since the last snapshot."""
        self._running.set(seen.running)
        self._waiting.set(seen.waiting)
        self._cache.set(seen.cache_share)
        self._threshold.set(seen.set_point)
        self._window.set(sum(seen.windows) / max(1, len(seen.windows)))
        if seen.adapter != self._adapter_exported:
            for name, value in ((self._adapter_exported, 0), (seen.adapter, 1)):
                if name is not None:
                    self._adapter.set(value, {"adapter": name})
            self._adapter_exported = seen.adapter
        self._since(seen.preemptions, self._preemptions)
        self._since(seen.totals.output_tokens, self._written)
        self._since(seen.discarded_tokens, self._discarded)
        self._since(seen.prefix_queries, self._prefix_queries)
        self._since(seen.prefix_hits, self._prefix_hits)
        totals = seen.totals
        self._since(totals.mask_drafts, self._drafts, {"source": "masks"})
        self._since(totals.ngram_drafts, self._drafts, {"source": "ngram"})
        self._since(totals.mask_accepted, self._accepted_drafts, {"source": "masks"})
        self._since(totals.ngram_accepted, self._accepted_drafts, {"source": "ngram"})
        for mode, measures in seen.by_mode.items():
            self._since(measures.checked, self._checked, {"mode": mode})
            for threshold, value in measures.tokens_per_forward().items():
                self._counterfactual.set(value, {"mode": mode, "threshold": f"{threshold:g}"})
        for mode, counts in seen.accepted_at.items():
            for place, count in enumerate(counts):
                tags = {"mode": mode, "position": str(place)}
                self._since(count, self._accepted, tags)

    def _since(self, count: int, counter: Counter, tags: dict[str, str] | None = None) -> None:
        """Adds the increase since the last snapshot."""
        series = (counter, *(tags or {}).values())
        _add(counter, count - self._exported[series], tags)
        self._exported[series] = count


def _name_model(metrics: object, model_name: str) -> None:
    for metric in vars(metrics).values():
        metric.set_default_tags({"model_name": model_name})


def _histogram(name: str, boundaries: list[float]) -> Histogram:
    return Histogram(name, name.replace("_", " "), boundaries, _MODE)


def _add(counter: Counter, count: int, tags: dict[str, str] | None = None) -> None:
    # Ray refuses an increment of zero.
    if count > 0:
        counter.inc(count, tags or {})
