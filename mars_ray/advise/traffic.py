"""The traffic of a service, as a Prometheus server knows it: rates and histograms, not requests.

`measure` asks for requests and tokens by minute, lengths and latencies; `draw` makes a trace of
them. vLLM's metrics (docs.vllm.ai/en/latest/usage/metrics) and ours end alike, so
a family of metrics is its prefix. The HTTP API is that of prometheus.io/docs/prometheus/latest/
querying/api.
"""

import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import numpy as np

from mars_ray.cluster.machine import urlopen
from mars_ray.errors import ConfigError, DataError
from mars_ray.simulator.traces.trace import Floats, Ints, Trace

# Prefix of a family, and the label that names the model: vLLM's own, vLLM's on Ray, ours.
_VLLM, _OURS = "vllm:", "ray_mars_"
FAMILIES = {_VLLM: "model_name", "ray_vllm_": "model_name", _OURS: "deployment"}
_ANSWERS = "request_success_total"
# Answers that took no part in the load.
_REFUSED = 'finished_reason!="refused"'
# The mean over an answer where there is one; otherwise over steps, which is close to it.
_TIMES_PER_TOKEN = (
    "request_time_per_output_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
)
_REPLICA = "Replica-"  # before the model's name in our deployments
_QUANTILES = (0.5, 0.9, 0.99)
_MINUTE_S = 60
# A rate needs two samples; Grafana takes windows of four, in case some are late.
_SAMPLES = 4
_TIMEOUT_S = 60.0
ASSUMED = (
    "A request arrives in the minute in which its answer ended, at a random moment of it: bursts "
    "shorter than a minute are not in the counters.",
    "Requests that were refused, or never sent because the service was slow, are unknown: after "
    "an overload the load was larger than what is seen here.",
    "Mean lengths are those of the quarter of an hour around a minute. Their spread is that of the "
    "histogram of the whole time, evenly inside a bucket; where there is none it is log-normal "
    "with a standard deviation as large as the mean.",
    "Prompt and answer of a request are drawn independently, and every prompt is computed in full: "
    "which of them share a prefix is not in the counters.",
)
# Minutes over which mean lengths are taken: a counter of tokens runs ahead of that of answers.
_AROUND = 15


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values in buckets with these upper bounds; the last bound may be infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One model of a service, over M whole minutes; arrays of shape [M].

    They begin and end with a minute that Prometheus knows; those in between of which it knows
    nothing count as minutes without a request.
    """

    model: str
    family: str  # prefix of its metrics
    start_s: float  # of the first minute, in Unix time
    window_s: float  # over which rates were taken, a minute or more
    requests: Floats
    prompt_tokens: Floats
    generation_tokens: Floats
    unknown_minutes: int
    prompt_lengths: Histogram | None = None
    generation_lengths: Histogram | None = None
    # By metric and quantile, seconds.
    latencies: dict[str, dict[str, float]] = field(default_factory=dict)


class Prometheus:
    """A server's HTTP API. Calls raise DataError."""

    def __init__(self, url: str, token: str | None = None) -> None:
        """A token is sent as a bearer's."""
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def series(self, match: str, start_s: float, end_s: float) -> list[dict[str, str]]:
        """Labels of the series that match and have a sample in between."""
        return self._get("series", {"match[]": match, "start": start_s, "end": end_s})

    def at(self, query: str, time_s: float) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an instant query."""
        found = self._get("query", {"query": query, "time": time_s})["result"]
        return [(row["metric"], float(row["value"][1])) for row in found]

    def over(self, query: str, times_s: Floats) -> Floats:
        """Values of the query's only series at equally spaced times; NaN where it has none."""
        step_s = float(times_s[1] - times_s[0]) if len(times_s) > 1 else _MINUTE_S
        limits = {"start": times_s[0], "end": times_s[-1], "step": step_s}
        found = self._get("query_range", {"query": query} | limits)["result"]
        values = np.full(len(times_s), np.nan)
        for at_s, value in found[0]["values"] if found else []:
            values[round((at_s - times_s[0]) / step_s)] = float(value)
        return values

    def _get(self, path: str, parameters: Mapping[str, object]) -> Any:
        address = f"{self._url}/api/v1/{path}"
        try:
            request = urllib.request.Request(
                f"{address}?{urlencode(parameters)}", None, self._headers
            )
            with urlopen(request, _TIMEOUT_S) as reply:
                said = json.load(reply)
        except urllib.error.HTTPError as error:
            try:
                words = json.load(error)["error"]  # Prometheus's own
            except (ValueError, KeyError, TypeError):
                words = error.reason
            hint = "; give a token with --token" if error.code in (401, 403) else ""
            raise DataError(f"{address}: HTTP {error.code}: {words}{hint}") from None
        except json.JSONDecodeError:
            said = None
        except (OSError, ValueError) as error:
            raise DataError(
                f"{address} cannot be reached: {error}; is a Prometheus there, as `curl "
                f"{self._url}/-/ready` tells?"
            ) from None
        if not isinstance(said, dict) or said.get("status") != "success":
            raise DataError(f"{address}: this is no answer of Prometheus; is the URL its root?")
        return said["data"]


def measure(server: Prometheus, hours: float, model: str | None, now_s: float) -> Measured:
    """The last hours of the service with this model; of its only one if none is named.

    Raises ConfigError if there are several or the named one is not there, DataError if Prometheus
    has no answers of a service.
    """
    count = max(1, round(hours * 60))
    end_s = math.floor(now_s / _MINUTE_S) * _MINUTE_S
    start_s = end_s - count * _MINUTE_S
    family, name = _service(server, model, start_s, end_s)
    label = FAMILIES[family]
    value = _REPLICA + name if label == "deployment" else name
    chosen = f"{label}={json.dumps(value)}"
    span = f"{count}m"

    def rose(metric: str, window: str, more: str = "") -> str:
        return f'increase({{__name__="{family}{metric}",{chosen}{more}}}[{window}])'

    answers = f'{{__name__="{family}{_ANSWERS}",{chosen}}}'
    # A rate is over a minute, or over four scrapes where these are rare.
    query = f"max(max_over_time(count_over_time({answers}[5m])[{span}:1m]))"
    most = max((value for _, value in server.at(query, end_s)), default=1.0)
    window_s = max(_MINUTE_S, math.ceil(_SAMPLES * 300 / most))
    times_s = start_s + _MINUTE_S * np.arange(1, count + 1, dtype=float)

    def by_minute(metric: str, more: str = "") -> Floats:
        query = f"sum({rose(metric, f'{window_s}s', more)})"
        return server.over(query, times_s) * _MINUTE_S / window_s

    def histogram(metric: str) -> Histogram | None:
        return _histogram(server.at(f"sum by (le) ({rose(f'{metric}_bucket', span)})", end_s))

    requests = by_minute(_ANSWERS, f",{_REFUSED}")
    times = {
        "ttft_s": histogram("time_to_first_token_seconds"),
        "time_per_token_s": next(filter(None, map(histogram, _TIMES_PER_TOKEN)), None),
    }
    known = np.flatnonzero(~np.isnan(requests))
    # What was before the service, or after it, is no gap.
    whole = slice(known[0], known[-1] + 1) if len(known) else slice(0, 0)
    found = Measured(
        model=name,
        family=family,
        start_s=start_s + _MINUTE_S * (whole.start or 0),
        window_s=window_s,
        requests=np.nan_to_num(requests[whole]),
        prompt_tokens=np.nan_to_num(by_minute("prompt_tokens_total")[whole]),
        generation_tokens=np.nan_to_num(by_minute("generation_tokens_total")[whole]),
        unknown_minutes=int(np.isnan(requests[whole]).sum()),
        prompt_lengths=histogram("request_prompt_tokens"),
        generation_lengths=histogram("request_generation_tokens"),
        latencies={
            name: {f"p{100 * share:g}": quantile(each, share) for share in _QUANTILES}
            for name, each in times.items()
            if each
        },
    )
    if not found.requests.sum() or not found.generation_tokens.sum():
        raise DataError(f"{name} has answered no request in the last {hours:g} hours")
    return found


def _service(
    server: Prometheus, model: str | None, start_s: float, end_s: float
) -> tuple[str, str]:
    """Family of the metrics and name of the model. Raises ConfigError, DataError."""
    names = "|".join(f"{family}{_ANSWERS}" for family in FAMILIES)
    series = [
        (
            family,
            labels.get(FAMILIES[family], "").removeprefix(_REPLICA if family == _OURS else ""),
            labels,
        )
        for labels in server.series(f'{{__name__=~"{names}"}}', start_s, end_s)
        for family in FAMILIES
        if labels["__name__"] == family + _ANSWERS
    ]
    # A service of ours has vLLM's names on its own page, and others on those of Ray's nodes.
    twice = {
        (_OURS, name) for family, name, labels in series if family == _VLLM and "replica" in labels
    }
    there = {(family, name) for family, name, _ in series} - twice
    if not there:
        raise DataError(
            f"Prometheus knows none of {names.replace('|', ', ')} in this time: does it scrape the "
            "service, and has that answered a request?"
        )
    wanted = [service for service in there if model in (None, service[1])]
    if len(wanted) != 1:
        known = ", ".join(sorted(name for _, name in there))
        raise ConfigError(f"choose one of these models with --model-name: {known}")
    return wanted[0]


def _histogram(rows: list[tuple[dict[str, str], float]]) -> Histogram | None:
    """The histogram of cumulative buckets; None if nothing is in them."""
    pairs = sorted((float(labels["le"]), value) for labels, value in rows if "le" in labels)
    if not pairs or not pairs[-1][1] > 0:
        return None
    bounds, cumulated = zip(*pairs, strict=True)
    # Extrapolation to the ends of the span may leave a bucket a little above the next one.
    counts = np.maximum(0.0, np.diff(np.maximum.accumulate(cumulated), prepend=0.0))
    return Histogram(bounds, tuple(counts.tolist()))


def quantile(histogram: Histogram, share: float) -> float:
    """The value below which this share lies, linear inside a bucket as Prometheus does it; in the
    last bucket, its lower bound if it has no upper one."""
    cumulated = np.cumsum(histogram.counts)
    rank = share * cumulated[-1]
    place = int(np.searchsorted(cumulated, rank))
    low = histogram.bounds[place - 1] if place else 0.0
    high = histogram.bounds[place]
    if math.isinf(high):
        return low
    below = cumulated[place] - histogram.counts[place]
    return low + (high - low) * (rank - below) / histogram.counts[place]


def draw(measured: Measured, seed: int) -> Trace:
    """A trace with the measured requests and tokens; the same seed gives the same one. Raises
    DataError if it has no request."""
    rng = np.random.default_rng([seed, 1])
    whole = np.floor(measured.requests)
    # A fraction of a request becomes a request with that probability.
    counts = (whole + (rng.random(len(whole)) < measured.requests - whole)).astype(np.int64)
    minute = np.repeat(np.arange(len(counts)), counts)
    if not len(minute):
        raise DataError(f"{measured.model}: less than one request was measured")
    arrival_s = np.sort((minute + rng.random(len(minute))) * _MINUTE_S)
    prompts = _means(measured.prompt_tokens, measured.requests)[minute]
    answers = _means(measured.generation_tokens, measured.requests)[minute]
    return Trace(
        measured.model,
        arrival_s,
        _lengths(prompts, measured.prompt_lengths, rng),
        _lengths(answers, measured.generation_lengths, rng),
    )


def _means(tokens: Floats, requests: Floats) -> Floats:
    """Tokens per request around each minute; where there are no requests, the mean of all."""
    near, sums = (
        np.convolve(values, np.ones(_AROUND))[_AROUND // 2 :][: len(values)]
        for values in (requests, tokens)
    )
    mean = tokens.sum() / requests.sum()
    return np.where(near >= 1, sums / np.maximum(near, 1), mean)


def _lengths(means: Floats, histogram: Histogram | None, rng: np.random.Generator) -> Ints:
    """Token counts with these means."""
    if histogram:
        high = np.array(histogram.bounds)
        low = np.concatenate(([0.0], high[:-1]))
        # Nobody knows how far an open bucket goes.
        high = np.where(np.isinf(high), np.maximum(1.0, 2 * low), high)
        share = np.array(histogram.counts) / np.sum(histogram.counts)
        place = rng.choice(len(share), len(means), p=share)
        values = low[place] + (high - low)[place] * rng.random(len(means))
        spread = values / np.dot(share, (low + high) / 2)
    else:  # of mean 1 and standard deviation 1
        variance = np.log(2)
        spread = rng.lognormal(-variance / 2, np.sqrt(variance), len(means))
    return np.maximum(1, np.round(means * spread)).astype(np.int64)
