"""A simulated service's metrics, as vLLM's or ours expose them, and a Prometheus that has them."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from mars_ray.cluster.machine import free_port
from mars_ray.config.scaling import Slo
from mars_ray.simulator.engine.observe import token_times
from mars_ray.simulator.engine.run import Outcome
from mars_ray.simulator.traces.trace import Trace

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus: apt-get install prometheus"
)
LABELS = {
    "vllm:": 'model_name="{}",engine="0"',
    "ray_vllm_": 'model_name="{}",WorkerId="w"',
    "ray_mars_": 'deployment="Replica-{0}",model_name="{0}",mode="verified"',
}
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SLO = Slo(ttft_s=2, time_per_token_s=0.05)


def requests(per_minute: list[float], seed: int = 0) -> Trace:
    """Poisson arrivals at these rates, with short prompts and answers."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(per_minute)
    at = np.sort((np.repeat(np.arange(len(counts)), counts) + rng.random(counts.sum())) * 60)
    prompts, answers = rng.geometric(1 / 100, len(at)), rng.geometric(1 / 30, len(at))
    return Trace("played", at, prompts, answers)


def exposition(
    played: Outcome, at_s: float, family: str = "vllm:", model: str = "tiny", stamp: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Family, type and one line of the metrics at this second; a stamp stands behind the value."""
    done = played.requests[played.requests["end_s"] <= at_s]
    labels = LABELS[family].format(model)
    for reason, share in (("stop", 0), ("length", 1)):
        count = int((np.arange(len(done)) % 10 == 0).sum()) if share else 0
        count = count if share else len(done) - int((np.arange(len(done)) % 10 == 0).sum())
        name = f"{family}request_success"
        line = f'{name}_total{{{labels},finished_reason="{reason}"}} {count}{stamp}'
        yield name, "counter", line
    for name, tokens in (("prompt_tokens", "prompt"), ("generation_tokens", "output")):
        line = f"{family}{name}_total{{{labels}}} {done[tokens].sum()}{stamp}"
        yield f"{family}{name}", "counter", line
    pace = token_times(done, np.arange(len(done)))
    histograms = {
        "time_to_first_token_seconds": (_SECONDS, done["first_s"] - done["arrival_s"]),
        "inter_token_latency_seconds": (_SECONDS, pace[pace > 0]),
        "request_generation_tokens": (_TOKENS, done["output"]),
        "request_prompt_tokens": (_TOKENS, done["prompt"]),
    }
    for name, (bounds, values) in histograms.items():
        for bound in (*map(float, bounds), np.inf):
            le = "+Inf" if np.isinf(bound) else f"{bound}"
            count = int((values <= bound).sum())
            line = f'{family}{name}_bucket{{{labels},le="{le}"}} {count}{stamp}'
            yield family + name, "histogram", line
        yield family + name, "histogram", f"{family}{name}_count{{{labels}}} {len(values)}{stamp}"
        yield family + name, "histogram", f"{family}{name}_sum{{{labels}}} {values.sum()}{stamp}"


def page(played: Outcome, at_s: float, family: str = "vllm:") -> str:
    """What a scrape gets."""
    lines, last = [], ""
    for name, kind, line in exposition(played, at_s, family):
        if name != last:
            lines.append(f"# TYPE {name}{'_total' if kind == 'counter' else ''} {kind}")
        lines.append(line)
        last = name
    return "\n".join(lines) + "\n"


def backfill(
    played: Outcome, until_s: float, every_s: float, begin_s: float, family: str, folder: Path
) -> None:
    """Writes what scrapes would have found, into the folder of a Prometheus that does not run."""
    lines: dict[str, list[str]] = {}
    for at_s in np.arange(0, until_s + 1e-6, every_s):
        stamp = f" {begin_s + at_s:.3f}"
        for name, kind, line in exposition(played, float(at_s), family, stamp=stamp):
            lines.setdefault(f"# TYPE {name} {kind}", []).append(line)
    text = "\n".join(line for kind, each in lines.items() for line in (kind, *each))
    (folder / "metrics").write_text(text + "\n# EOF\n")
    done = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", "metrics", "data"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@contextmanager
def prometheus(folder: Path, target: str | None = None) -> Iterator[str]:
    """A server on the folder's data, which scrapes the target every second; its URL."""
    jobs = f"[{{job_name: x, static_configs: [{{targets: ['{target}']}}]}}]" if target else "[]"
    config = f"global: {{scrape_interval: 1s}}\nscrape_configs: {jobs}\n"
    (folder / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    words += ["--storage.tsdb.retention.time=100y", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *words], cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not ready(f"http://{address}/-/ready"):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "Prometheus is not ready"
            time.sleep(0.2)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def ready(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
