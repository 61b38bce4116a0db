"""The size of what one replica exports: `python benchmarks/metrics_size.py CHECKPOINT [OUTPUT]`.

Starts `mars-ray serve` with one replica, has it answer in four modes, and reads both forms of
`GET /metrics` and the endpoint of the Ray node that they are made of.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from load_servers import Command, started

from mars_ray.provenance import provenance

RESULT = Path(__file__).parent / "results" / "metrics_size.json"
# As many as a service with a default mode and the exceptions of a few clients sees.
_MODES = ("exact", "verified", "confidence", "jacobi")
_ANSWERS, _TOKENS = 10, 60
_REPORT_S = 1.0


def _ask(url: str) -> None:
    for number in range(_ANSWERS):
        for mode in _MODES:
            body = {"model": "mars", "prompt": f"{number} one two", "max_tokens": _TOKENS}
            reply = httpx.post(f"{url}/v1/completions", json=body | {"mode": mode}, timeout=60)
            reply.raise_for_status()


def _size(text: str) -> dict[str, int]:
    series = [line for line in text.splitlines() if not line.startswith("#")]
    return {"bytes": len(text.encode()), "series": len(series)}


def _pages(url: str, directory: Path) -> dict[str, Any]:
    """Sizes by the pages' names."""
    pages = {
        names: _size(httpx.get(f"{url}/metrics", params={"names": names}, timeout=60).text)
        for names in ("vllm", "ray")
    }
    found = directory / "ray" / "prom_metrics_service_discovery.json"
    targets = [target for group in json.loads(found.read_text()) for target in group["targets"]]
    # The node's is among those of other parts of Ray.
    texts = (httpx.get(f"http://{target}/metrics", timeout=60).text for target in targets)
    return pages | {"node": _size(next(text for text in texts if "ray_mars_" in text))}


def main() -> None:
    """Writes the result."""
    checkpoint, *output = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="mars") as directory:
        words = [sys.executable, "-m", "mars_ray", "serve", checkpoint, "port={port}"]
        words += ["model_name=mars", "replicas=1", "cpus_per_replica=0.5", "drain_s=5"]
        words += ["engine.dtype=float32", "engine.device=cpu", "engine.threads=1"]
        milliseconds = {"RAY_metrics_report_interval_ms": str(round(_REPORT_S * 1000))}
        environment = milliseconds | {"RAY_TMPDIR": directory}
        with started(Command(words, "/readyz", environment)) as server:
            url = server.wait()
            _ask(url)
            time.sleep(5 * _REPORT_S)
            pages = _pages(url, Path(directory))
    result = {"modes": _MODES, "pages": pages, "provenance": provenance()}
    text = json.dumps(result, indent=1)
    print(text)
    Path(*output or [RESULT]).write_text(text + "\n")


if __name__ == "__main__":
    main()
