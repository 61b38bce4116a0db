"""Minutes of mixed load on a live service: `python benchmarks/soak.py CHECKPOINT MINUTES [OUTPUT]`.

Starts `mars-ray serve` and sends requests from outside: every mode, streams, several answers at
once, clients that leave, invalid requests, bursts beyond the queue. Afterwards memory must be flat,
every page free and nothing open, and every answer of a lossless mode must equal transformers'
greedy one. Prints one JSON object; exits with 1 if a check fails.
"""

import asyncio
import collections
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mars_ray.cluster.machine import free_port
from mars_ray.data.corpus import problems
from mars_ray.provenance import provenance

_PROMPTS, _TOKENS = 24, 64
_CLIENTS = 6
_BURST, _BURST_EVERY_S = 60, 15.0
_LOOK_S = 5.0
# Share of the time in which allocators and caches fill; memory is judged after it.
_WARM_UP = 0.25
_MOST_GROWTH = 0.03  # share of a process's memory, over the rest of the time
# Ray names its processes after what runs in them.
_WATCHED = ("Replica-soak", "Ingress", "ProxyActor")
_LOSSLESS = ({"mode": "exact"}, {"mode": "verified"}, {"mode": "jacobi"}, {})
_WRONG: tuple[dict[str, Any], ...] = (
    {"model": "none"},
    {"temperature": 9},
    {"mode": "exact", "threshold": 0.5},
    {"unheard_of": 1},
    {"max_tokens": 10**6},
    {"messages": []},
    {"messages": [{"role": "user", "content": "x " * 20_000}]},
)


@dataclass(slots=True)
class Seen:
    """Counts of what happened, and everything that was wrong."""

    replies: collections.Counter[str] = field(default_factory=collections.Counter)
    checked: int = 0  # replies compared with transformers
    wrong: list[str] = field(default_factory=list)

    def reply(self, kind: str, status: int, *allowed: int) -> bool:
        """Whether the status is 200; records any status that is not allowed as wrong."""
        self.replies[f"{kind} {status}"] += 1
        if status not in allowed:
            self.wrong.append(f"{kind}: {status}")
        return status == 200

    def text(self, kind: str, text: str, expected: str) -> None:
        """Check the text of a lossless answer."""
        self.checked += 1
        if text != expected:
            self.wrong.append(f"{kind}: {text!r} instead of {expected!r}")


@dataclass(frozen=True, slots=True)
class Client:
    """A client that sends one kind of request after the other."""

    http: httpx.AsyncClient
    answers: dict[str, str]  # transformers' own, by prompt
    seen: Seen
    draw: random.Random

    async def lossless(self, *allowed: int) -> None:
        """A whole answer in a mode whose text must equal transformers'."""
        body, expected = self._asked()
        reply = await self._post(body | self.draw.choice(_LOSSLESS))
        if self.seen.reply("lossless", reply.status_code, 200, *allowed):
            self.seen.text("lossless", reply.json()["choices"][0]["message"]["content"], expected)

    async def streamed(self) -> None:
        """The same as a stream, read to its end."""
        body, expected = self._asked()
        body |= self.draw.choice(_LOSSLESS) | {"stream": True}
        text, last = "", ""
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if not self.seen.reply("streamed", reply.status_code, 200, 429):
                return
            async for line in reply.aiter_lines():
                last = line.removeprefix("data: ") or last
                if last.startswith("{") and line:
                    delta = json.loads(last)["choices"][0]["delta"]
                    text += delta.get("content") or ""
        self.seen.text("streamed", text if last == "[DONE]" else f"{text} (cut)", expected)

    async def abandoned(self) -> None:
        """A client that leaves: in the middle of a stream, or before any answer."""
        body, _ = self._asked()
        body |= {"mode": "exact", "max_tokens": 200}
        if self.draw.random() < 0.5:
            async with self.http.stream(
                "POST", "/v1/chat/completions", json=body | {"stream": True}
            ) as reply:
                self.seen.reply("abandoned", reply.status_code, 200, 429)
                async for _ in reply.aiter_lines():
                    if self.draw.random() < 0.3:
                        break
            return
        try:
            await asyncio.wait_for(self._post(body), self.draw.uniform(0.001, 0.2))
        except TimeoutError:
            self.seen.replies["abandoned unanswered"] += 1

    async def lossy(self) -> None:
        """Sampled or at a low threshold: several answers, with every optional field."""
        body, _ = self._asked()
        body |= {"n": self.draw.randint(1, 3), "logprobs": True, "return_forwards": True}
        body |= self.draw.choice(
            (
                {"mode": "confidence", "threshold": 0.3},
                {"temperature": 1.2, "top_p": 0.9},
                {"quality": "fast"},
                {"quality_budget": 0.05},
                {"response_format": {"type": "json_object"}},
            )
        )
        self.seen.reply("lossy", (await self._post(body)).status_code, 200, 429)

    async def wrong(self) -> None:
        """An invalid request, which must be refused with a reason."""
        body, _ = self._asked()
        reply = await self._post(body | self.draw.choice(_WRONG))
        # A full queue may refuse a request before its fault is found.
        self.seen.reply("wrong", reply.status_code, 400, 404, 429)

    async def late(self) -> None:
        """A request that cannot finish in its time."""
        body, _ = self._asked()
        body |= {"mode": "exact", "max_tokens": 200, "timeout_s": 0.005}
        self.seen.reply("late", (await self._post(body)).status_code, 200, 408, 429)

    async def on_and_on(self, until: float) -> None:
        """Send a mixture of requests, most of which are checked."""
        kinds = (self.streamed, self.abandoned, self.lossy, self.wrong, self.late)
        while time.monotonic() < until:
            if self.draw.random() < 0.4:
                await self.lossless(429)
            else:
                await self.draw.choice(kinds)()

    def _asked(self) -> tuple[dict[str, Any], str]:
        prompt = self.draw.choice(list(self.answers))
        messages = [{"role": "user", "content": prompt}]
        fields = {"temperature": 0, "max_tokens": _TOKENS}
        return {"model": "soak", "messages": messages} | fields, self.answers[prompt]

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=body)


def main() -> None:
    """The whole run."""
    checkpoint, minutes = sys.argv[1], float(sys.argv[2])
    answers = _greedy(checkpoint)
    with _service(checkpoint) as (process, url):
        result = asyncio.run(_soaked(url, process, answers, minutes * 60))
    result |= {"minutes": minutes, "provenance": provenance()}
    text = json.dumps(result, indent=1)
    print(text)
    if len(sys.argv) > 3:
        Path(sys.argv[3]).write_text(text + "\n")
    sys.exit(1 if result["wrong"] else 0)


def _greedy(checkpoint: str) -> dict[str, str]:
    """The greedy answer of plain transformers to each prompt."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers = {}
    for problem in problems("test", _PROMPTS, 7):
        chat = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**prompt, max_new_tokens=_TOKENS, do_sample=False)
        text = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        answers[problem.question] = text.rstrip("\ufffd")
    return answers


@contextmanager
def _service(checkpoint: str) -> Iterator[tuple[psutil.Process, str]]:
    """`mars-ray serve` with a small queue, so that bursts overflow it."""
    port = free_port()
    words = ["serve", checkpoint, f"port={port}", "model_name=soak", "cpus_per_replica=0.5"]
    # A fixed single replica, because memory is judged process by process.
    words += ["replicas=1", "engine.dtype=float32", "engine.threads=1", "engine.max_context=512"]
    words += ["engine.max_batch=8", "limits.waiting_requests=24", f"request_log={os.devnull}"]
    process = subprocess.Popen([sys.executable, "-m", "mars_ray", *words], stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            assert process.poll() is None, "the service did not start"
            time.sleep(0.2)
        yield psutil.Process(process.pid), url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


async def _soaked(
    url: str, process: psutil.Process, answers: dict[str, str], seconds: float
) -> dict[str, Any]:
    """Run the load for `seconds`, then check what the service still holds."""
    seen, until = Seen(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=2 * _BURST)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        clients = [Client(http, answers, seen, random.Random(n)) for n in range(_CLIENTS)]
        looks = asyncio.create_task(_watch(process, until))
        await asyncio.gather(
            *(client.on_and_on(until) for client in clients), _bursts(clients[0], until)
        )
        memory = {name: _judged(name, look, seen) for name, look in (await looks).items()}
        idle = await _idle(http, seen)
    return {
        "replies": dict(sorted(seen.replies.items())),
        "lossless_replies_checked": seen.checked,
        "memory": memory,
        "idle": idle,
        "wrong": seen.wrong[:20],
    }


async def _bursts(client: Client, until: float) -> None:
    """Send more requests at once than there are places: some are refused, the others are right."""
    while time.monotonic() + _BURST_EVERY_S < until:
        await asyncio.sleep(_BURST_EVERY_S)
        await asyncio.gather(*(client.lossless(429) for _ in range(_BURST)))


async def _watch(process: psutil.Process, until: float) -> dict[str, list[float]]:
    """MiB of each process of the service, sampled until `until`."""
    looks: dict[str, list[float]] = {name: [] for name in _WATCHED}
    while time.monotonic() < until:
        for child in process.children(recursive=True):
            # A process that has just ended has neither name nor memory.
            with suppress(psutil.Error):
                name = " ".join(child.cmdline()[:1])
                for part in _WATCHED:
                    if part in name:
                        looks[part].append(child.memory_info().rss / 2**20)
        await asyncio.sleep(_LOOK_S)
    return looks


def _judged(name: str, mib: list[float], seen: Seen) -> dict[str, float]:
    """Growth by a straight line through the samples after the warm-up; lack of them is a fault."""
    if len(mib) < 2:
        seen.wrong.append(f"{name} was not watched")
        return {}
    mib = mib[int(len(mib) * _WARM_UP) :]
    slope, _ = statistics.linear_regression(range(len(mib)), mib)
    growth = slope * len(mib)
    if growth > _MOST_GROWTH * mib[0]:
        seen.wrong.append(f"{name} grew by {growth:.1f} MiB")
    per_hour = slope * 3600 / _LOOK_S
    return {"first_mib": mib[0], "last_mib": mib[-1], "mib_per_hour": round(per_hour, 2)}


async def _idle(http: httpx.AsyncClient, seen: Seen) -> dict[str, Any]:
    """What the replica still holds once there are no requests."""
    left: dict[str, Any] = {}
    for _ in range(100):
        (model,) = (await http.get("/v1/mars/status")).json()["data"]
        left = {name: model[name] for name in ("running", "waiting", "kv_cache_usage")}
        if not any(left.values()):
            return left
        await asyncio.sleep(0.1)
    seen.wrong.append(f"left over: {left}")
    return left


if __name__ == "__main__":
    main()
