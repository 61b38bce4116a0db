"""Tokens counted in three places: the log of requests, the metrics, and the engine itself."""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import ContextVar
from typing import cast

import httpx
import pytest
from docs.commands import runs
from fastapi.testclient import TestClient
from serve.asking import ASK, ask, error_of, wait_until_free
from serve.real_port import served
from serve.written import envelopes

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.decode.async_engine import AsyncEngine, works
from mars_ray.decode.engine import Engine
from mars_ray.decode.loading import load_engine
from mars_ray.serve.ingress.app import _settle, build_api
from mars_ray.serve.ingress.client import ReplicaClient
from mars_ray.serve.ingress.middleware import RequestLog
from mars_ray.serve.protocol import Finish, GenerationRequest, OutputDelta, Used
from mars_ray.serve.replica.llm_server import LLMServer
from mars_ray.serve.replica.stats import AnswerStats

KEYS = {"team-a": "a-secret-of-24-characters", "team-b": "b-secret-of-24-characters"}


class Counted:
    """An engine that is slow enough to be left, and all that is told of what it writes."""

    def __init__(self, job: ServeJob) -> None:
        self.engine, tokenizer = load_engine(job.checkpoint, job.engine)
        self.answers: list[AnswerStats] = []
        # As the metrics of a replica (`serve/replica/metrics.py`) hear of them.
        observe = self.answers.append
        self.server = LLMServer(AsyncEngine(self.engine), tokenizer, job, observe, name="one")
        self.entries: list[RequestLog] = []
        step = self.engine.step

        def slowly(*args):
            time.sleep(0.003)
            return step(*args)

        self.engine.step = slowly
        self.server.start()

    def in_metrics(self, name: str) -> int:
        return sum(getattr(seen, name) for seen in self.answers if seen.ending != "refused")

    def in_engine(self) -> tuple[int, int]:
        """The tokens that it has written, and those of them that no answer has."""
        wait_until_free(self.server)
        seen = asyncio.run(self.server.snapshot())
        assert not self.engine.has_work
        return seen.totals.output_tokens, seen.discarded_tokens


@pytest.fixture
def keyed(job: ServeJob, tmp_path) -> ServeJob:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items())
    )
    limits = Limits(new_tokens=100, waiting_requests=6)
    return job.model_copy(update={"keys_file": str(keys), "limits": limits})


@pytest.fixture
def counted(keyed: ServeJob) -> Iterator[Counted]:
    counted = Counted(keyed)
    yield counted
    counted.server.stop()
    counted.engine.check_integrity()


def body(number: int) -> dict:
    """One of several kinds of requests, with a prompt of its own."""
    kinds = (
        {},
        {"stream": True},
        {"n": 2, "stop": ["e", "n"]},
        {"stream": True, "stop": ["e"], "mode": "verified"},
        {"stream": True, "leave": 1},
        {"stream": True, "leave": 3, "n": 2, "mode": "verified"},
        {"timeout_s": 0.05},
        {"timeout_s": 0.1, "stream": True, "n": 2},
        {"prompt": "one " * 400},
        {"return_forwards": True, "stream": True, "ignore_eos": True},
        {"top_k": -7},
    )
    fields = {"model": "tiny", "prompt": f"{number} {ASK}", "max_tokens": 60, "seed": number}
    return fields | kinds[number % len(kinds)]


def send(url: str, number: int) -> str:
    """What became of the request."""
    asked = body(number)
    leave = asked.pop("leave", None)
    headers = {"Authorization": f"Bearer {list(KEYS.values())[number % 2]}"}
    path = f"{url}/v1/completions"
    if leave is None:
        reply = httpx.post(path, json=asked, headers=headers, timeout=60)
        late = b"deadline_exceeded" in reply.content
        return "late" if late else str(reply.status_code)
    with httpx.stream("POST", path, json=asked, headers=headers, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        for _ in range(leave):
            next(lines, None)
    return "left"


def test_sums_of_log_metrics_and_engine_are_equal(counted, keyed, caplog):
    """Whole answers, streams, clients that leave, time-outs, refusals and full queues. Guards a
    stream that was left and is billed as nothing, and tokens that somebody counts twice."""
    caplog.set_level(logging.INFO, "mars_ray.requests")
    api = build_api(keyed, {"tiny": counted.server}, observe=counted.entries.append)
    with served(api) as url, ThreadPoolExecutor(6) as threads:
        became = Counter(threads.map(lambda number: send(url, number), range(88)))
        written, discarded = counted.in_engine()
        for _ in range(100):
            if len(counted.entries) == 88:
                break
            time.sleep(0.05)
    lines = [json.loads(r.message) for r in caplog.records if r.name == "mars_ray.requests"]
    assert len(lines) == 88
    assert {"200", "400", "late", "left"} <= set(became)
    endings = Counter(line["ending"] for line in lines)
    assert min(endings[e] for e in ("abort", "deadline_exceeded", "context_length_exceeded")) > 0
    in_log = sum(line["completion_tokens"] for line in lines)
    assert in_log == counted.in_metrics("completion_tokens") == written - discarded
    assert sum(line["prompt_tokens"] for line in lines) == counted.in_metrics("prompt_tokens")
    assert sum(line["cached_tokens"] for line in lines) == counted.in_metrics("cached_tokens")
    for ending in ("abort", "deadline_exceeded"):
        tokens = [line["completion_tokens"] for line in lines if line["ending"] == ending]
        assert sum(tokens) > 0
    assert {line.get("replica") for line in lines if line["prompt_tokens"]} == {"one"}
    by_key = Counter[str]()
    for entry in counted.entries:
        by_key[entry.key or ""] += entry.completion_tokens
    assert set(by_key) == set(KEYS)
    assert by_key.total() == in_log


def test_the_documented_bill(counted, keyed, tmp_path, monkeypatch, capsys, caplog):
    """The lines of the log, added up as the page shows it."""
    (program,) = runs("test_the_documented_bill")
    caplog.set_level(logging.INFO, "mars_ray.requests")
    client = TestClient(build_api(keyed, {"tiny": counted.server}))
    for name, tokens in (("team-a", 7), ("team-b", 5), ("team-a", 4)):
        client.headers = {"Authorization": f"Bearer {KEYS[name]}"}
        assert ask(client, max_tokens=tokens).status_code == 200
        client.get("/v1/models")
    lines = [r.message for r in caplog.records if r.name == "mars_ray.requests"]
    (tmp_path / "requests.jsonl").write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    bill = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(key, int(written)) for key, _, written in bill] == [("team-a", 11), ("team-b", 5)]
    assert sum(int(read) for _, read, _ in bill) == counted.in_metrics("prompt_tokens")


def test_what_a_client_left_is_told_afterwards(counted):
    """By the id of the call, once. Guards a number that only comes with the end of an answer."""
    call = GenerationRequest("c", (ASK,), ExactMode(), Sampling(), 50, 99, n=2)

    async def leave() -> tuple[Used | None, Used | None, Used | None]:
        server = counted.server
        async with aclosing(server.generate(call)) as messages:
            hearing = asyncio.ensure_future(anext(messages))
            while not counted.engine.totals.output_tokens > 5:
                await asyncio.sleep(0.001)
            hearing.cancel()
            await asyncio.wait([hearing])
        return await server.used("c"), await server.used("c"), await server.used("other")

    used, again, other = asyncio.run(leave())
    assert used is not None
    assert (again, other) == (None, None)
    assert used.completion_tokens == counted.in_metrics("completion_tokens") > 0
    assert used.prompt_tokens == counted.in_metrics("prompt_tokens") > 0
    written, discarded = counted.in_engine()
    assert written == used.completion_tokens + discarded


def test_the_longest_answer_to_a_prompt_is_told_once(counted, keyed):
    """As vLLM tells it. Guards a count for each answer, and the one of another prompt."""
    client = TestClient(build_api(keyed, {"tiny": counted.server}))
    client.headers = {"Authorization": f"Bearer {KEYS['team-a']}"}
    prompts = {"model": "tiny", "prompt": ["one two", "six"], "n": 3, "max_tokens": 30}
    reply = client.post("/v1/completions", json=prompts | {"seed": 1, "stop": ["e"]})
    assert reply.status_code == 200
    told = [seen.longest_tokens for seen in counted.answers if seen.longest_tokens is not None]
    assert len(counted.answers) == 6
    assert len(told) == 2
    assert max(told) == max(seen.completion_tokens for seen in counted.answers)


@pytest.mark.parametrize("left", [True, False])
def test_a_model_is_asked_only_for_what_it_has_not_told(job, left):
    """Guards a question to all replicas for every request."""

    class Breaking:
        def __init__(self) -> None:
            self.asked: list[str] = []

        async def generate(self, request: GenerationRequest):
            first = OutputDelta("x", tokens=3, prompt_tokens=5, forward=2)
            last = OutputDelta("", Finish("stop", 5, 8, 4))
            for message in envelopes(request, (first, last)):
                yield message
                if left:
                    raise RuntimeError("the stream breaks off")

        async def used(self, call_id: str) -> Used:
            self.asked.append(call_id)
            return Used(5, 1, 9, 4)

    entries: list[RequestLog] = []
    handle = Breaking()
    client = TestClient(build_api(job, {"tiny": handle}, observe=entries.append))
    ask(client, stream=True)
    (entry,) = entries
    assert len(handle.asked) == left
    assert entry.completion_tokens == (9 if left else 8)


def test_a_request_that_is_cancelled_still_hears_what_it_has_used(job):
    """However often, and beside its own context. Guards a count that Serve cuts off along with the
    request that it cancels."""
    place: ContextVar[str] = ContextVar("place", default="outside")
    entry = RequestLog(None, "POST", "/v1/completions")
    asked = []

    class Left:
        async def used(self, _call_id: str) -> Used:
            asked.append(place.get())
            await asyncio.sleep(0.2)
            return Used(5, 1, 9, 4)

    async def leave() -> None:
        place.set("the request's")
        settling = asyncio.create_task(_settle(entry, cast(ReplicaClient, Left()), "c"))
        for _ in range(2):
            await asyncio.sleep(0.02)
            settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling

    asyncio.run(leave())
    assert asked == ["outside"]
    assert (entry.completion_tokens, entry.is_settled) == (9, True)


def test_a_full_queue_asks_nobody_what_it_has_used(counted, keyed):
    """The refusal says itself that it is nothing."""
    server = counted.server
    server.open_answers = 1000
    server.used = None  # type: ignore[assignment]
    client = TestClient(build_api(keyed, {"tiny": server}, observe=counted.entries.append))
    client.headers = {"Authorization": f"Bearer {KEYS['team-a']}"}
    assert error_of(ask(client), 429)
    server.open_answers = 0
    assert [entry.completion_tokens for entry in counted.entries] == [0]


def test_a_probe_of_the_engine_is_nobodys_token(counted):
    """Guards a sum that is wrong after a fault of one request."""
    engine: Engine = counted.engine
    counted.server.stop()
    before = engine.totals.output_tokens
    assert works(engine)
    assert engine.totals.output_tokens == before
