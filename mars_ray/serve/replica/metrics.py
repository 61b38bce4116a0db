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
# Name, description, and tags besides the model's name.
_COUNTERS = (
    ("mars_request_success", "Answers by how they ended.", "mode", "finished_reason"),
    ("mars_prompt_tokens", "Tokens of prompts."),
    ("mars_generation_tokens", "Tokens written.", "mode"),
    ("mars_forwards", "Forwards that wrote tokens.", "mode"),
    ("mars_disagreed_tokens", "Tokens that AR decoding would not have chosen.", "mode"),
    (
        "mars_degraded_requests",
        "Answers for which the threshold was lowered below the set-point at rest.",
        "mode",
    ),
    ("mars_late_requests", "Answers beyond a limit of the SLO.", "quality_class"),
    ("mars_engine_tokens", "Tokens that the engine wrote, discarded ones too."),
    ("mars_discarded_tokens", "Tokens written behind the end of an answer."),
    ("mars_num_preemptions", "Sequences sent back to wait."),
    ("mars_prefix_cache_queries", "Tokens of admitted sequences."),
    ("mars_prefix_cache_hits", "Tokens of admitted sequences that were in the cache."),
    (
        "mars_spec_decode_num_accepted_tokens_per_pos",
        "Tokens that steps committed beyond their first, by place.",
        "mode",
        "position",
    ),
    ("mars_draft_tokens", "Drafts that were checked, by what proposed them.", "source"),
    ("mars_accepted_draft_tokens", "Drafts that were accepted, by what proposed them.", "source"),
    ("mars_checked_tokens", "Tokens seen again by a row of their own.", "mode"),
)
_GAUGES = (
    ("mars_num_requests_running", "Sequences in the batch."),
    ("mars_num_requests_waiting", "Sequences that wait for room."),
    ("mars_kv_cache_usage_perc", "Share of the pages in use, 0 to 1."),
    ("mars_window", "Masks per forward, mean over the batch, 0 when idle."),
    (
        "mars_counterfactual_tokens_per_forward",
        "T/F that this threshold would have given on the same traffic.",
        "mode",
        "threshold",
    ),
    ("mars_threshold", "Threshold in force for requests that tolerate any and pin none."),
    (
        "mars_draft_adapter_info",
        "1 for the draft adapter in force, 0 for those that were.",
        "adapter",
    ),
)
# All by mode.
_HISTOGRAMS = {
    "mars_time_to_first_token_seconds": _SECONDS,
    "mars_inter_token_latency_seconds": _SECONDS,
    "mars_request_queue_time_seconds": _SECONDS,
    "mars_request_prefill_time_seconds": _SECONDS,
    "mars_request_decode_time_seconds": _SECONDS,
    "mars_request_time_per_output_token_seconds": _SECONDS,
    "mars_e2e_request_latency_seconds": _SECONDS,
    "mars_request_prompt_tokens": _TOKENS,
    "mars_request_generation_tokens": _TOKENS,
    "mars_request_max_num_generation_tokens": _TOKENS,
    "mars_tokens_per_forward": _PER_FORWARD,
}


def replica_name() -> str:
    """The label `replica` of this process's metrics."""
    return serve.get_replica_context().replica_tag


class ReplicaMetrics:
    """Told of each answer at its end, and now and then of the engine."""

    def __init__(self, model_name: str) -> None:
        self.by_name: dict[str, Any] = {}
        tags: Any  # Ray's annotation allows only one, its code any number
        for kind, declared in ((Counter, _COUNTERS), (Gauge, _GAUGES)):
            for name, text, *more in declared:
                tags = ("model_name", *more)
                self.by_name[name] = kind(name, text, tags)
        tags = ("model_name", "mode")
        for name, boundaries in _HISTOGRAMS.items():
            self.by_name[name] = Histogram(name, name.replace("_", " "), boundaries, tags)
        for metric in self.by_name.values():
            metric.set_default_tags({"model_name": model_name})
        self._adapter: str | None = None
        # Exported so far of an engine's counts, by name and tags.
        self._exported: Tally[tuple[str, ...]] = Tally()

    def answer(self, seen: AnswerStats) -> None:
        """Counts an answer that is over."""

        def observe(name: str, value: float) -> None:
            self.by_name[name].observe(value, {"mode": seen.mode})

        mode = seen.mode
        self._count("mars_request_success", 1, mode=mode, finished_reason=seen.ending)
        if seen.ending == "refused":
            return
        self._count("mars_prompt_tokens", seen.prompt_tokens)
        self._count("mars_generation_tokens", seen.completion_tokens, mode=mode)
        self._count("mars_forwards", seen.forwards, mode=mode)
        self._count("mars_disagreed_tokens", seen.disagreed, mode=mode)
        self._count("mars_degraded_requests", seen.degraded, mode=mode)
        self._count("mars_late_requests", seen.strain > 1, quality_class=seen.quality_class)
        if seen.prompt_tokens:
            observe("mars_request_prompt_tokens", seen.prompt_tokens)
        if seen.forwards:
            observe("mars_request_generation_tokens", seen.completion_tokens)
            observe("mars_tokens_per_forward", seen.completion_tokens / seen.forwards)
        if seen.longest_tokens:
            observe("mars_request_max_num_generation_tokens", seen.longest_tokens)
        observe("mars_e2e_request_latency_seconds", seen.total_s)
        for seconds, tokens in seen.gaps:
            observe("mars_inter_token_latency_seconds", seconds / tokens)
        if seen.first_token_s is None:
            return
        observe("mars_time_to_first_token_seconds", seen.first_token_s)
        observe("mars_request_decode_time_seconds", seen.total_s - seen.first_token_s)
        if seen.completion_tokens > 1:
            observe("mars_request_time_per_output_token_seconds", seen.time_per_token_s)
        if seen.queue_s is not None:
            observe("mars_request_queue_time_seconds", seen.queue_s)
            prefill_s = max(0.0, seen.first_token_s - seen.queue_s)
            observe("mars_request_prefill_time_seconds", prefill_s)

    def engine(self, seen: Snapshot) -> None:
        """Sets the gauges, and adds what was counted since the last snapshot."""
        self._set("mars_num_requests_running", seen.running)
        self._set("mars_num_requests_waiting", seen.waiting)
        self._set("mars_kv_cache_usage_perc", seen.cache_share)
        self._set("mars_threshold", seen.set_point)
        self._set("mars_window", sum(seen.windows) / max(1, len(seen.windows)))
        if seen.adapter != self._adapter:
            for name, value in ((self._adapter, 0), (seen.adapter, 1)):
                if name is not None:
                    self._set("mars_draft_adapter_info", value, adapter=name)
            self._adapter = seen.adapter
        totals = seen.totals
        self._since("mars_num_preemptions", seen.preemptions)
        self._since("mars_engine_tokens", totals.output_tokens)
        self._since("mars_discarded_tokens", seen.discarded_tokens)
        self._since("mars_prefix_cache_queries", seen.prefix_queries)
        self._since("mars_prefix_cache_hits", seen.prefix_hits)
        self._since("mars_draft_tokens", totals.mask_drafts, source="masks")
        self._since("mars_draft_tokens", totals.ngram_drafts, source="ngram")
        self._since("mars_accepted_draft_tokens", totals.mask_accepted, source="masks")
        self._since("mars_accepted_draft_tokens", totals.ngram_accepted, source="ngram")
        for mode, measures in seen.by_mode.items():
            self._since("mars_checked_tokens", measures.checked, mode=mode)
            for threshold, value in measures.tokens_per_forward().items():
                name = "mars_counterfactual_tokens_per_forward"
                self._set(name, value, mode=mode, threshold=f"{threshold:g}")
        for mode, counts in seen.accepted_at.items():
            for place, count in enumerate(counts):
                name = "mars_spec_decode_num_accepted_tokens_per_pos"
                self._since(name, count, mode=mode, position=str(place))

    def _set(self, name: str, value: float, **tags: str) -> None:
        self.by_name[name].set(value, tags)

    def _count(self, name: str, count: int, **tags: str) -> None:
        # Ray refuses an increment of zero.
        if count > 0:
            self.by_name[name].inc(count, tags)

    def _since(self, name: str, count: int, **tags: str) -> None:
        """Counts the increase since the last snapshot."""
        series = name, *tags.values()
        self._count(name, count - self._exported[series], **tags)
        self._exported[series] = count
