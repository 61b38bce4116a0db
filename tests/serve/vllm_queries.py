"""The queries of the Grafana dashboard that vLLM publishes, for a model called `tiny`.

It is examples/observability/prometheus_grafana/grafana.json of vllm-project/vllm at 4b5c627.
"""

_MODEL = '{model_name="tiny"}'
_RATE = f"{_MODEL}[1m]"
_SHARES = (0.99, 0.95, 0.9, 0.5)
_LATENCIES = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "time_to_first_token_seconds",
)


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by(le) (rate(vllm:{metric}_bucket{_RATE})))"


def _mean(metric: str) -> str:
    return f"rate(vllm:{metric}_sum{_RATE}) / rate(vllm:{metric}_count{_RATE})"


QUERIES = (
    *(_quantile(share, metric) for metric in _LATENCIES for share in _SHARES),
    *map(_mean, _LATENCIES),
    f"rate(vllm:prompt_tokens_total{_RATE})",
    f"rate(vllm:generation_tokens_total{_RATE})",
    f"vllm:num_requests_running{_MODEL}",
    f"vllm:num_requests_waiting{_MODEL}",
    f"vllm:kv_cache_usage_perc{_MODEL}",
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{_RATE}))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{_RATE}))",
    f"sum by(finished_reason) (increase(vllm:request_success_total{_RATE}))",
    f"rate(vllm:request_queue_time_seconds_sum{_RATE})",
    f"rate(vllm:request_prefill_time_seconds_sum{_RATE})",
    f"rate(vllm:request_decode_time_seconds_sum{_RATE})",
    f"rate(vllm:request_max_num_generation_tokens_sum{_RATE})",
)
