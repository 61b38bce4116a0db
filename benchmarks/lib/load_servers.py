"""Servers that a benchmark starts, and ends by their process ids."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mars_ray.cluster.machine import free_port

ROOT = Path(__file__).parents[2]
# vLLM compiles on its first start of a checkpoint.
_START_S = 600.0
_STOP_S = 40.0


@dataclass(frozen=True, slots=True)
class Command:
    """The command that starts a server on a port, and the route that reports readiness."""

    words: list[str]
    ready: str
    environment: dict[str, str] = field(default_factory=dict)


def mars_command(checkpoint: str, batch: int, replicas: int, *options: str) -> Command:
    """The service of jobs/serve-demo.toml."""
    words = [sys.executable, "-m", "mars_ray", "serve", *options]
    words += [str(ROOT / "jobs" / "serve-demo.toml")]
    words += [f"checkpoint={checkpoint}", "model_name=mars", f"replicas={replicas}"]
    words += [f"engine.max_batch={batch}", "port={port}"]
    return Command(words, "/readyz", {"RAY_USAGE_STATS_ENABLED": "0"})


def vllm_command(python: str, checkpoint: str, batch: int) -> Command:
    """vLLM's server on the CPU, at the same precision, batch and number of threads."""
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    words += ["--served-model-name", "mars", "--dtype", "float32", "--max-model-len", "256"]
    words += ["--max-num-seqs", str(batch), "--no-enable-prefix-caching"]
    words += ["--host", "127.0.0.1", "--port", "{port}"]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return Command(words, "/health", quiet)


class Server:
    """A server process that was started."""

    def __init__(self, command: Command, log: IO[str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._ready = self.url + command.ready
        self._log = log
        # A session of its own, so that its children can be ended with it.
        self.process = subprocess.Popen(
            [word.format(port=port) for word in command.words],
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | command.environment,
            start_new_session=True,
        )

    def wait(self) -> str:
        """The URL once the server is ready. Raises RuntimeError with the end of its log if not."""
        begin = time.monotonic()
        while time.monotonic() - begin < _START_S and self.process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(self._ready, timeout=5):
                return self.url
            time.sleep(0.5)
        self._log.seek(0)
        end = self._log.read()[-3000:]
        raise RuntimeError(f"a server was not ready after {time.monotonic() - begin:.0f} s:\n{end}")


@contextmanager
def started(command: Command) -> Iterator[Server]:
    """A server that runs for the length of the block; call `wait` before use."""
    with tempfile.TemporaryFile("w+") as log:
        server = Server(command, log)
        try:
            yield server
        finally:
            _end(server.process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
