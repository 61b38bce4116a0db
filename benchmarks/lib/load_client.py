"""A light client for measurements: it streams over plain sockets and so takes little CPU time.

A public load tool takes more of two cores than the service does. Close comparisons are therefore
measured with this client, and the public tool is run as well.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer; times in seconds."""

    first_s: float  # until the first text
    total_s: float
    tokens: int
    chunks: int
    threshold: float | None  # the lowest in force; None for other servers


@dataclass(frozen=True, slots=True)
class Load:
    """Many answers, given at one level of concurrency."""

    concurrency: int
    seconds: float
    answers: tuple[Streamed, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    def figures(self) -> dict[str, float]:
        """Throughput, and latencies in milliseconds."""
        firsts = [1e3 * answer.first_s for answer in self.answers]
        gaps = [
            1e3 * (answer.total_s - answer.first_s) / (answer.tokens - 1)
            for answer in self.answers
            if answer.tokens > 1
        ]
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "first_token_ms_p50": statistics.median(firsts),
            "first_token_ms_p95": percentile(firsts, 0.95),
            "per_token_ms_p50": statistics.median(gaps),
            "chunks": sum(answer.chunks for answer in self.answers),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Client:
    """One connection, kept open."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self._address = (parts.hostname, parts.port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def chat(self, body: dict[str, Any]) -> Streamed:
        """Streams one answer. Raises RuntimeError unless the stream is whole."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        options = {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps(body | options).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: loopback\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        begin = time.perf_counter()
        writer.write(head.encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read(2000)).decode(errors="replace"))
        first, usage, chunks = 0.0, b"", 0
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if not line:
                raise RuntimeError("the stream broke off")
            # Some servers send a first chunk with only a role.
            if line.startswith(b"data: "):
                if not first and b'"content":""' not in line:
                    first = time.perf_counter()
                chunks, usage = chunks + 1, line
        total = time.perf_counter()
        # The chunk that ends the body.
        await reader.readuntil(b"0\r\n\r\n")
        told = json.loads(usage.removeprefix(b"data: "))["usage"]
        threshold = told.get("mars", {}).get("threshold")
        tokens = told["completion_tokens"]
        return Streamed(first - begin, total - begin, tokens, chunks, threshold)

    def close(self) -> None:
        """Close the connection."""
        if self._streams:
            self._streams[1].close()


async def load(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> Load:
    """Sends all requests; each client sends the next as soon as it has its answer."""
    clients = [Client(url) for _ in range(concurrency)]
    waiting = iter(bodies)
    answers: list[Streamed] = []

    async def ask(client: Client) -> None:
        for body in waiting:
            answers.append(await client.chat(body))

    begin = time.perf_counter()
    await asyncio.gather(*(ask(client) for client in clients))
    seconds = time.perf_counter() - begin
    for client in clients:
        client.close()
    return Load(concurrency, seconds, tuple(answers))
