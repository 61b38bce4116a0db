"""A live service, a real Prometheus: every query of the dashboard answers, and of the one that vLLM
publishes, and an alert fires."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dashboard
import httpx
import pytest
import yaml
from serve import vllm_queries

from mars_ray.cluster.machine import free_port

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus: apt-get install prometheus"
)
# Fewer pages than four long answers need, so that some are sent back.
PAGES = 24
# Of the page of metrics of one replica, in two modes.
PAGE_BYTES = 60_000
# Nobody lowers the threshold of this service, which has no adapter, and Ray exports a counter from
# its first count on.
NOT_COUNTED = ("ray_mars_degraded_requests_total", "ray_mars_draft_adapter_info")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Ray's sockets lie below it, and their names must be short."""
    with tempfile.TemporaryDirectory(prefix="mars") as directory:
        yield Path(directory)


@pytest.fixture
def service(checkpoint: Path, short_path: Path) -> Iterator[str]:
    """`mars-ray serve` of a tiny model with a small cache; its URL."""
    port = free_port()
    words = ["serve", str(checkpoint), f"port={port}", "cpus_per_replica=0.1", "drain_s=0"]
    # Every answer is late for this objective.
    words += ["replicas=1", "model_name=tiny", "scaling.slo.ttft_s=0.001"]
    engine = {
        "max_batch": 4,
        "max_context": 160,
        "threads": 1,
        "cache_bytes": PAGES * page(checkpoint),
    }
    words += [f"engine.{key}={value}" for key, value in engine.items()]
    words += ["engine.device=cpu", "engine.dtype=float32", "engine.window_control=false"]
    environment = environment_in(short_path)
    log = (short_path / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "mars_ray", *words], env=environment, stdout=log, stderr=log
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: answers(f"{url}/readyz"), 90, (short_path / "log").read_text)
        yield url
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def environment_in(directory: Path) -> dict[str, str]:
    """Of processes whose Ray cluster lies in the directory, and whose metrics are fresh."""
    environment = os.environ | {
        "RAY_TMPDIR": str(directory),
        "RAY_metrics_report_interval_ms": "500",
    }
    environment.pop("RAY_ADDRESS", None)
    return environment


def page(checkpoint: Path) -> int:
    """Bytes of a page of the KV cache: keys and values of 16 tokens in float32."""
    shape = json.loads((checkpoint / "config.json").read_text())
    head = shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * 16 * 4


@pytest.fixture
def prometheus(short_path: Path, service: str) -> Iterator[str]:
    """Of Debian, with the files of deploy/monitoring, only faster and on another port; beside Ray's
    nodes it scrapes the service, as users of vLLM do."""
    config = (MONITORING / "prometheus.yml").read_text()
    for name in ("scrape_interval", "evaluation_interval", "refresh_interval"):
        config = config.replace(f"{name}: 10s", f"{name}: 1s")
    config = config.replace("/tmp/ray/", f"{short_path}/ray/")
    described = yaml.safe_load(config)
    described["scrape_configs"].append(documented_scrape(service))
    (short_path / "prometheus.yml").write_text(yaml.safe_dump(described))
    alerts = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for rule in alerts["groups"][0]["rules"]:
        rule["for"] = "1s"
    (short_path / "alerts.yml").write_text(yaml.safe_dump(alerts))
    address = f"127.0.0.1:{free_port()}"
    with (short_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={short_path}/prometheus.yml",
                f"--storage.tsdb.path={short_path}/data",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: answers(f"http://{address}/-/ready"), 30)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def documented_scrape(service: str) -> dict[str, Any]:
    """Of the service under vLLM's names, as docs/operate/monitoring.md shows it."""
    fences = (ROOT / "docs" / "operate" / "monitoring.md").read_text().split("```yaml\n")
    text = fences[1].partition("```")[0].replace("127.0.0.1:8000", service.removeprefix("http://"))
    by_vllms, _ = yaml.safe_load(text)["scrape_configs"]
    return by_vllms


@pytest.mark.ray
@pytest.mark.long
@needs_prometheus
def test_a_live_service_fills_the_dashboard_and_an_alert_fires(service, prometheus):
    """Guards names, labels and units that only look right, and alerts that cannot fire."""
    use(service)
    wait_for(lambda: value(prometheus, "sum(ray_mars_num_requests_running)") is not None, 30)
    use(service)
    queries = {
        f"{panel.title}: {query}": query.replace("$deployment", ".*").replace(
            "$__rate_interval", "1m"
        )
        for panel in dashboard.PANELS
        for query in panel.queries.values()
        if not any(name in query for name in NOT_COUNTED)
    }
    empty = queries | {query: query for query in vllm_queries.QUERIES}

    def all_answer() -> bool:
        nonlocal empty
        empty = {name: query for name, query in empty.items() if value(prometheus, query) is None}
        return not empty

    wait_for(all_answer, 30, lambda: f"no data for {list(empty)}")
    assert 0 < len(httpx.get(f"{service}/metrics").content) < PAGE_BYTES
    # An answer that comes too late is one of the conditions that an alert tells.
    assert "MarsDeadlinesMissed" in firing(prometheus, within_s=30)
    assert "MarsServiceGone" not in firing(prometheus, within_s=0)


def use(url: str) -> None:
    """Answers in two modes, some at once so that pages run out, some with tokens behind a stop
    string, and one that is too slow."""
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "count from one to ten"}],
        "max_tokens": 120,
        "temperature": 0,
    }
    hasty = asked | {"mode": "confidence", "threshold": 0.1}
    bodies = [hasty, hasty | {"stop": [" ", "a", "e", "t"]}] * 2 + [asked] * 4
    with ThreadPoolExecutor(len(bodies)) as pool:
        replies = list(
            pool.map(
                lambda body: httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60), bodies
            )
        )
    assert {reply.status_code for reply in replies} == {200}
    late = httpx.post(f"{url}/v1/chat/completions", json=asked | {"timeout_s": 1e-6}, timeout=60)
    assert late.status_code == 408


def value(prometheus: str, query: str) -> float | None:
    """Of the first series that has a number."""
    reply = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}).json()
    assert reply["status"] == "success", reply
    numbers = [float(series["value"][1]) for series in reply["data"]["result"]]
    return next((number for number in numbers if number == number), None)


def firing(prometheus: str, within_s: float) -> set[str]:
    """Names of the alerts that fire, as soon as there is one."""
    deadline = time.monotonic() + within_s
    while True:
        alerts: list[dict[str, Any]] = httpx.get(f"{prometheus}/api/v1/alerts").json()["data"][
            "alerts"
        ]
        names = {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
        if names or time.monotonic() > deadline:
            return names
        time.sleep(0.3)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(is_so, limit_s: float, why=lambda: "not in time") -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.3)
