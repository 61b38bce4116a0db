"""Writes the Grafana dashboard, deploy/monitoring/dashboard.json, from the declared metrics.

    python tools/dashboard.py            # writes it
    python tools/dashboard.py --check    # exit code 1 if the file is out of date

Queries use Prometheus's names of the metrics of mars_ray/serve/replica/metrics.py and
mars_ray/serve/ingress/metrics.py, which depend on their kind. A metric that no panel shows,
or that is not declared, is an error.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

from mars_ray.serve.ingress.metrics import SERVE_METRICS, UsageMetrics
from mars_ray.serve.replica.metrics import ReplicaMetrics

TARGET = Path(__file__).parents[1] / "deploy" / "monitoring" / "dashboard.json"
_SUFFIXES = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_sum", "_count")}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_RATE = "[$__rate_interval]"
# Each replica counts its start in a series of its own, which never rises. The starts of the last
# hour are therefore the series that did not exist before.
_STARTED = (
    "count by (deployment) (count_over_time(ray_serve_deployment_replica_starts_total[1h]) "
    "unless max_over_time(ray_serve_deployment_replica_starts_total[1h] offset 1h))"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph: its queries by the labels of their lines."""

    title: str
    unit: str
    description: str
    queries: dict[str, str]


def exported() -> frozenset[str]:
    """The names of all metrics that replicas and ingresses declare, as on the Prometheus
    endpoint."""
    declared = [
        *ReplicaMetrics("").by_name.values(),
        *vars(UsageMetrics()).values(),
    ]
    return frozenset(
        f"ray_{metric.info['name']}{suffix}"
        for metric in declared
        for suffix in _SUFFIXES[type(metric)]
    )


def metrics_of(query: str) -> set[str]:
    """The names of metrics in a query."""
    return set(re.findall(r"\bray_\w+", query))


def _chosen(metric: str) -> str:
    return f'{metric}{{deployment=~"$deployment"}}'


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({_chosen(metric)}{_RATE}))"


def _by_key(metric: str, by: str) -> str:
    """Of an ingress, which is in front of all deployments."""
    return f"sum by ({by}) (rate({metric}{_RATE}))"


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', 'le')})"


def _quantiles(metric: str) -> dict[str, str]:
    return {f"p{share * 100:g}": _quantile(share, metric) for share in (0.5, 0.9, 0.99)}


def _ratio(part: str, whole: str, by: str) -> str:
    return f"{_rate(part, by)} / {_rate(whole, by)}"


PANELS = (
    Panel(
        "Answers per second",
        "reqps",
        "By how they ended.",
        {"{{finished_reason}}": _rate("ray_mars_request_success_total", "finished_reason")},
    ),
    Panel(
        "HTTP requests per second",
        "reqps",
        "All that Serve's proxies got, refusals among them.",
        {
            "{{status_code}}": "sum by (status_code) "
            f"(rate(ray_serve_num_http_requests_total{_RATE}))"
        },
    ),
    Panel(
        "Tokens per second",
        "short",
        "Written and read; engines write also what is discarded, behind the end of an answer.",
        {
            "engines": _rate("ray_mars_engine_tokens_total", "application"),
            "discarded": _rate("ray_mars_discarded_tokens_total", "application"),
            "written, {{mode}}": _rate("ray_mars_generation_tokens_total", "mode"),
            "prompts": _rate("ray_mars_prompt_tokens_total", "application"),
        },
    ),
    Panel(
        "Tokens per second by key",
        "short",
        "As in the log of requests.",
        {
            "written, {{key}}": _by_key("ray_mars_key_generation_tokens_total", "key"),
            "prompts, {{key}}": _by_key("ray_mars_key_prompt_tokens_total", "key"),
        },
    ),
    Panel(
        "Requests per second by key",
        "reqps",
        "By how they ended, those refused for want of room among them.",
        {"{{key}}, {{ending}}": _by_key("ray_mars_key_requests_total", "key, ending")},
    ),
    Panel(
        "Time to first token",
        "s",
        "From arrival at the replica.",
        _quantiles("ray_mars_time_to_first_token_seconds"),
    ),
    Panel(
        "Time per token",
        "s",
        "After the first: between steps, and as the mean over an answer.",
        _quantiles("ray_mars_inter_token_latency_seconds")
        | {"p50 of answers": _quantile(0.5, "ray_mars_request_time_per_output_token_seconds")},
    ),
    Panel(
        "Time in the queue",
        "s",
        "Until the first rows were forwarded.",
        _quantiles("ray_mars_request_queue_time_seconds"),
    ),
    Panel(
        "Time of the prompt and of the answer",
        "s",
        "From the first rows to the first token, and from there to the last.",
        {
            "p50 of prompts": _quantile(0.5, "ray_mars_request_prefill_time_seconds"),
            "p99 of prompts": _quantile(0.99, "ray_mars_request_prefill_time_seconds"),
            "p50 of answers": _quantile(0.5, "ray_mars_request_decode_time_seconds"),
            "p99 of answers": _quantile(0.99, "ray_mars_request_decode_time_seconds"),
        },
    ),
    Panel(
        "Time of an answer",
        "s",
        "From arrival to the last token.",
        _quantiles("ray_mars_e2e_request_latency_seconds"),
    ),
    Panel(
        "Length of answers",
        "short",
        "Tokens written; longest: of those to one prompt.",
        _quantiles("ray_mars_request_generation_tokens")
        | {"p50 of the longest": _quantile(0.5, "ray_mars_request_max_num_generation_tokens")},
    ),
    Panel(
        "Length of prompts",
        "short",
        "Tokens read.",
        _quantiles("ray_mars_request_prompt_tokens"),
    ),
    Panel(
        "Tokens per forward",
        "short",
        "What multi-token decoding brings: 1 is plain decoding.",
        {
            "{{mode}}": _ratio(
                "ray_mars_generation_tokens_total", "ray_mars_forwards_total", "mode"
            ),
            "p10 of answers": _quantile(0.1, "ray_mars_tokens_per_forward"),
        },
    ),
    Panel(
        "Tokens per forward at other thresholds",
        "short",
        "What each threshold would have given on the same traffic.",
        {
            "{{mode}} {{threshold}}": "avg by (mode, threshold) "
            f"({_chosen('ray_mars_counterfactual_tokens_per_forward')})"
        },
    ),
    Panel(
        "Disagreement",
        "percentunit",
        "Share of the tokens seen again that the model alone would not have chosen.",
        {
            "{{mode}}": _ratio(
                "ray_mars_disagreed_tokens_total", "ray_mars_checked_tokens_total", "mode"
            )
        },
    ),
    Panel(
        "Threshold in force",
        "percentunit",
        "For requests that tolerate any and pin none: 1 never deviates from the model.",
        {"{{deployment}}": f"avg by (deployment) ({_chosen('ray_mars_threshold')})"},
    ),
    Panel(
        "Degraded answers",
        "percentunit",
        "Share of the answers written at a threshold below the one at rest.",
        {
            "share": _ratio(
                "ray_mars_degraded_requests_total",
                "ray_mars_request_success_total",
                "application",
            )
        },
    ),
    Panel(
        "Late answers per second",
        "reqps",
        "Beyond a limit of the SLO, by quality class.",
        {"{{quality_class}}": _rate("ray_mars_late_requests_total", "quality_class")},
    ),
    Panel(
        "Accepted beyond the first, by place",
        "short",
        "Tokens per second that steps commit at each place of their drafts.",
        {
            "{{mode}}, {{position}}": _rate(
                "ray_mars_spec_decode_num_accepted_tokens_per_pos_total", "mode, position"
            )
        },
    ),
    Panel(
        "Drafts, by what proposed them",
        "short",
        "Per second, and how many of them are accepted.",
        {
            "{{source}}": _rate("ray_mars_draft_tokens_total", "source"),
            "{{source}}, accepted": _rate("ray_mars_accepted_draft_tokens_total", "source"),
        },
    ),
    Panel(
        "Masks per forward",
        "short",
        "The window that pays at this load.",
        {"{{replica}}": _chosen("ray_mars_window")},
    ),
    Panel(
        "Draft adapters",
        "short",
        "Replicas in which each is in force.",
        {"{{adapter}}": f"sum by (adapter) ({_chosen('ray_mars_draft_adapter_info')})"},
    ),
    Panel(
        "Requests at replicas",
        "short",
        "Running, and waiting for a place.",
        {
            "running": f"sum({_chosen('ray_mars_num_requests_running')})",
            "waiting": f"sum({_chosen('ray_mars_num_requests_waiting')})",
        },
    ),
    Panel(
        "KV cache in use",
        "percentunit",
        "Share of the pages that sequences hold.",
        {"{{replica}}": _chosen("ray_mars_kv_cache_usage_perc")},
    ),
    Panel(
        "Prefix cache hits",
        "percentunit",
        "Share of admitted tokens that were in the cache.",
        {
            "hits": _ratio(
                "ray_mars_prefix_cache_hits_total",
                "ray_mars_prefix_cache_queries_total",
                "application",
            )
        },
    ),
    Panel(
        "Pre-emptions per second",
        "short",
        "Sequences sent back to wait because pages ran out.",
        {"all": _rate("ray_mars_num_preemptions_total", "application")},
    ),
    Panel(
        "Healthy replicas",
        "short",
        "By deployment, as Serve sees them.",
        {"{{deployment}}": "sum by (deployment) (ray_serve_deployment_replica_healthy)"},
    ),
    Panel(
        "Replicas started",
        "short",
        "Within the last hour; more than scaling and updates explain is replicas that die.",
        {"{{deployment}}": _STARTED},
    ),
    Panel(
        "State of the application",
        "short",
        "6 is running; 5 deploying, 2 unhealthy, 1 failed.",
        {"{{application}}": "max by (application) (ray_serve_application_status)"},
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it. Raises ValueError if panels and declared metrics do not
    match."""
    declared = exported()
    named = {
        name for panel in PANELS for query in panel.queries.values() for name in metrics_of(query)
    }
    if unknown := named - declared - SERVE_METRICS:
        raise ValueError(f"panels name metrics that nobody declares: {sorted(unknown)}")
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in declared - named}
    if unseen := {name for name in families if not any(name in other for other in named)}:
        raise ValueError(f"no panel shows {sorted(unseen)}")
    return {
        "uid": "mars-ray",
        "title": "mars-ray",
        "tags": ["mars-ray", "ray"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), _deployment_variable()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _deployment_variable() -> dict[str, Any]:
    query = "label_values(ray_mars_num_requests_running, deployment)"
    return {
        "name": "deployment",
        "type": "query",
        "label": "Model",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": {
            "h": _HEIGHT,
            "w": _WIDTH,
            "x": number % _COLUMNS * _WIDTH,
            "y": number // _COLUMNS * _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": source,
                "expr": query,
                "legendFormat": legend,
            }
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def main() -> int:
    """Writes the file, or checks whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if not parser.parse_args().check:
        TARGET.write_text(text)
        return 0
    if TARGET.read_text() == text:
        return 0
    print(f"{TARGET.name} is not up to date: run python tools/dashboard.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
