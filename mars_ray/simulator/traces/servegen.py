"""Requests of ServeGen's clients, each with its own rate, burstiness and token counts.

ServeGen (github.com/alibaba/ServeGen) publishes no requests, but a rate and a fitted distribution
(`law`) of the gaps between arrivals, by client and window of ten minutes. The laws do not keep the
rate, so the gaps of a window are scaled to give the rate's number of requests, as in ServeGen.
"""

import csv
import gzip
import json
import zlib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mars_ray.errors import DataError
from mars_ray.simulator.config import ServeGenTrace
from mars_ray.simulator.traces.read import missing
from mars_ray.simulator.traces.trace import Floats, Ints, Trace


@dataclass(frozen=True, slots=True)
class Window:
    """Rate and gaps of one client in one window."""

    client: int
    start_s: float
    rate_rps: float
    law: str  # distribution of the gaps: Gamma or Weibull
    shape: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Token counts with their cumulative probabilities."""

    tokens: Ints
    cumulated: Floats

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        place = np.searchsorted(self.cumulated, rng.random(count) * self.cumulated[-1], "right")
        return self.tokens[np.minimum(place, len(self.tokens) - 1)]


# Token counts of prompts and outputs, by client.
Lengths = dict[int, tuple[Counts, Counts]]
# Token counts and their shares, window by window, by client.
_Shares = dict[int, list[tuple[Ints, Floats]]]


def servegen(source: ServeGenTrace, resample: bool, rng: np.random.Generator) -> Trace:
    """The clients' requests in the source's own slice and rate. Raises DataError.

    With `resample` the clients are drawn. A client without its own token counts draws from those
    of the others, weighted by their rates (as published, whoever was drawn).
    """
    windows = [
        window
        for window in read_windows(source.rates_path)
        if window.start_s + source.window_s > source.start_s
        and window.start_s < source.start_s + source.duration_s
    ]
    if not windows:
        raise DataError(f"{source.rates_path}: no client between the chosen seconds")
    times, clients = [], []
    for window in drawn_clients(windows, rng) if resample else windows:
        arrivals = window_arrivals(window, source.window_s, source.rate_factor, rng)
        times.append(arrivals - source.start_s)
        clients.append(np.full(len(arrivals), window.client))
    merged = np.concatenate(times)
    if not len(merged):
        raise DataError(f"{source.rates_path}: no request at rate_factor {source.rate_factor:g}")
    order = np.argsort(merged, kind="stable")
    prompts, outputs = _token_counts(source, windows, np.concatenate(clients)[order], rng)
    name = Path(source.rates_path).name.split("_")[0]
    return Trace(name, merged[order], prompts, outputs).part(0, source.duration_s)


def drawn_clients(windows: list[Window], rng: np.random.Generator) -> list[Window]:
    """As many draws of clients as there are clients, by their mean rates, with replacement.

    Every draw brings an equal share of the total rate, so the total stays while its parts change:
    a client's rate is multiplied by how often it was drawn over how often that was to be expected.
    """
    rates = _rates(windows)
    share = np.array(list(rates.values())) / sum(rates.values())
    weight = rng.multinomial(len(rates), share) / (len(rates) * share)
    weights = dict(zip(rates, weight.tolist(), strict=True))
    return [
        replace(window, rate_rps=window.rate_rps * weights[window.client])
        for window in windows
        if weights[window.client]
    ]


def window_arrivals(
    window: Window, window_s: float, rate_factor: float, rng: np.random.Generator
) -> Floats:
    """Arrivals of one client in one window: the number given by its rate, with its law's gaps.

    A fraction of a request becomes a request with that probability.
    """
    expected = window.rate_rps * rate_factor * window_s
    count = int(expected) + (rng.random() < expected - int(expected))
    if window.law == "Weibull":
        gaps = rng.weibull(window.shape, count + 1)
    else:
        gaps = rng.gamma(window.shape, size=count + 1)
    # A very bursty law may draw only gaps that are 0 in floating point.
    ends = np.cumsum(gaps + 1e-12)
    return window.start_s + window_s * ends[:-1] / ends[-1]


def read_windows(path: str | Path) -> list[Window]:
    """The merged rates file, gzipped or not. Raises DataError."""
    windows = []
    for line, row in enumerate(csv.DictReader(_lines(path)), start=2):
        try:
            windows.append(
                Window(
                    int(row["client_id"]),
                    float(row["window_start_s"]),
                    float(row["rate_rps"]),
                    row["pattern"],
                    float(row["param1"]),
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(f"{path}:{line}: not a window of ServeGen: {error!r}") from None
        if windows[-1].law not in ("Gamma", "Weibull") or windows[-1].shape <= 0:
            raise DataError(f"{path}:{line}: a law that is neither Gamma nor Weibull")
    return windows


def read_lengths(path: str | Path) -> Lengths:
    """The merged token counts, all windows of a client together. Raises DataError."""
    columns = ("input_tokens", "output_tokens")
    found: tuple[_Shares, _Shares] = (defaultdict(list), defaultdict(list))
    for line, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            for key, shares in zip(columns, found, strict=True):
                tokens = np.array(list(map(int, row[key])), np.int64)
                shares[row["client_id"]].append((tokens, np.array([*row[key].values()], float)))
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(f"{path}:{line}: no token counts of ServeGen: {error!r}") from None
    prompts, outputs = ({who: _counts(parts) for who, parts in own.items()} for own in found)
    usable = [who for who in sorted(prompts) if len(prompts[who].tokens) * len(outputs[who].tokens)]
    return {client: (prompts[client], outputs[client]) for client in usable}


def _counts(parts: list[tuple[Ints, Floats]]) -> Counts:
    """The sum of a client's windows."""
    tokens, place = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    shares = np.bincount(place, np.concatenate([part[1] for part in parts]), len(tokens))
    return Counts(np.maximum(tokens, 1), np.cumsum(shares, dtype=np.float64))


def _token_counts(
    source: ServeGenTrace, windows: list[Window], clients: Ints, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Prompt and output tokens of requests of these clients [N]."""
    lengths = read_lengths(source.lengths_path)
    known = {client: rate for client, rate in _rates(windows).items() if client in lengths}
    if not known:
        raise DataError(f"{source.lengths_path}: no token counts of the clients of these windows")
    rates = np.array(list(known.values()))
    strange = ~np.isin(clients, list(known))
    owners = clients.copy()
    owners[strange] = rng.choice(list(known), int(strange.sum()), p=rates / rates.sum())
    prompts, outputs = np.empty_like(clients), np.empty_like(clients)
    for client in np.unique(owners).tolist():
        own = owners == client
        for tokens, counts in zip((prompts, outputs), lengths[client], strict=True):
            tokens[own] = counts.draw(int(own.sum()), rng)
    return prompts, outputs


def _rates(windows: list[Window]) -> dict[int, float]:
    """The rate of each client, added up over its windows."""
    rates: dict[int, float] = defaultdict(float)
    for window in windows:
        rates[window.client] += window.rate_rps
    return dict(rates)


def _lines(path: str | Path) -> list[str]:
    try:
        data = Path(path).expanduser().read_bytes()
        text = gzip.decompress(data) if str(path).endswith(".gz") else data
        return text.decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise DataError(missing(path)) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
