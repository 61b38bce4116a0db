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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
        """`count` independent token counts."""
        place = np.searchsorted(self.cumulated, rng.random(count) * self.cumulated[-1], "right")
        return self.tokens[np.minimum(place, len(self.tokens) - 1)]


# Token counts of prompts and outputs, by client.
Lengths = dict[int, tuple[Counts, Counts]]


def servegen(source: ServeGenTrace, rng: np.random.Generator) -> Trace:
    """All clients merged, in the source's own slice and rate. Raises DataError.

    A client without its own token counts draws from those of the others, weighted by their rates.
    """
    windows = [
        window
        for window in read_windows(source.rates_path)
        if window.start_s + source.window_s > source.start_s
        and window.start_s < source.start_s + source.duration_s
    ]
    if not windows:
        raise DataError(f"{source.rates_path}: no client between the chosen seconds")
    lengths = read_lengths(source.lengths_path)
    known = _rates(windows, lengths)
    if not known:
        raise DataError(f"{source.lengths_path}: no token counts of the clients of these windows")
    times, prompts, outputs = [], [], []
    for window in windows:
        arrivals = window_arrivals(window, source.window_s, source.rate_factor, rng)
        owners = _owners(window.client, known, len(arrivals), rng)
        for client in sorted(set(owners.tolist())):
            mine = arrivals[owners == client] - source.start_s
            times.append(mine)
            prompts.append(lengths[client][0].draw(len(mine), rng))
            outputs.append(lengths[client][1].draw(len(mine), rng))
    if not any(map(len, times)):
        raise DataError(f"{source.rates_path}: no request at rate_factor {source.rate_factor:g}")
    merged = np.concatenate(times)
    order = np.argsort(merged, kind="stable")
    trace = Trace(
        Path(source.rates_path).name.split("_")[0],
        merged[order],
        np.concatenate(prompts)[order],
        np.concatenate(outputs)[order],
    )
    return trace.part(0, source.duration_s)


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
    prompts: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    outputs: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for line, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
            for key, sums in (("input_tokens", prompts), ("output_tokens", outputs)):
                for tokens, share in row[key].items():
                    sums[row["client_id"]][int(tokens)] += float(share)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path}:{line}: no token counts of ServeGen: {error!r}") from None
    both = sorted(prompts.keys() & outputs.keys())
    return {client: (_counts(prompts[client]), _counts(outputs[client])) for client in both}


def _counts(shares: Mapping[int, float]) -> Counts:
    tokens = np.array(sorted(shares))
    return Counts(np.maximum(tokens, 1), np.cumsum([shares[t] for t in tokens.tolist()]))


def _rates(windows: list[Window], lengths: Lengths) -> dict[int, float]:
    """Rates of the clients with token counts."""
    rates: dict[int, float] = defaultdict(float)
    for window in windows:
        if window.client in lengths:
            rates[window.client] += window.rate_rps
    return dict(rates)


def _owners(
    client: int, known: dict[int, float], count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The client whose token counts are used, for each of a client's requests."""
    if client in known:
        return np.full(count, client)
    rates = np.array(list(known.values()))
    return rng.choice(np.array(list(known)), count, p=rates / rates.sum())


def _lines(path: str | Path) -> list[str]:
    try:
        data = Path(path).expanduser().read_bytes()
        text = gzip.decompress(data) if str(path).endswith(".gz") else data
        return text.decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise DataError(missing(path)) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
