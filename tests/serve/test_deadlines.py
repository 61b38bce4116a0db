"""How long a request may take, and a client to read its answer."""

import json
import socket
import time

import httpx
from fastapi.testclient import TestClient
from serve.asking import ask, error_of, text_of
from serve.real_port import served
from serve.saying import Saying
from starlette.types import ASGIApp

from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.ingress.proxy import LIMIT_HEADER, SlowReaders
from mars_ray.serve.protocol import Envelope, ErrorInfo, Finish, OutputDelta, Used


def test_an_answer_that_is_late_is_an_error_not_half_an_answer(client, text_engine):
    """And not one that OpenAI's clients would ask for again by themselves."""
    late = ask(client, max_tokens=100, timeout_s=1e-6)
    error = error_of(late, 408)
    assert (error["code"], error["param"]) == ("deadline_exceeded", "timeout_s")
    assert late.headers["x-should-retry"] == "false"
    assert text_engine.open_answers == 0
    assert text_of(ask(client, timeout_s=60)) == text_of(ask(client))


def test_a_stream_that_is_late_keeps_what_it_has_and_says_so(job, text_engine):
    """The last event is the error, and there is no [DONE]."""
    first, late = OutputDelta("half"), ErrorInfo(408, "late", code="deadline_exceeded")
    client = TestClient(build_api(job, {"tiny": Saying(first, late)}))
    *_, chunk, error = ask(client, stream=True).text.removesuffix("\n\n").split("\n\n")
    assert json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"]["content"] == "half"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_a_request_may_not_give_itself_more_time_than_there_is(client, job, text_engine):
    """The server's limit holds for those that name none, too."""
    refused = error_of(ask(client, timeout_s=601), 400)
    assert (refused["param"], "600 s" in refused["message"]) == ("timeout_s", True)
    assert error_of(ask(client, timeout_s=0), 400)["param"] == "timeout_s"
    hurried = job.model_copy(update={"limits": Limits(request_s=1e-6)})
    assert error_of(ask(TestClient(build_api(hurried, {"tiny": text_engine}))), 408)


class Endless(Saying):
    """Far more than the buffers on the way hold; it remembers that it was closed."""

    closed = False

    async def generate(self, request):
        try:
            for _ in range(2000):
                yield Envelope(f"data: {'x' * 100_000}\n\n", Used())
            yield Envelope("", Used(), "stop")
        finally:
            self.closed = True


def streaming(url: str) -> socket.socket:
    """A connection that has asked for a stream and read a little of it."""
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": "m", "stream": True, "messages": messages}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    connection.sendall(head.encode() + body)
    assert connection.recv(300).startswith(b"HTTP/1.1 200")
    return connection


def read_all(connection: socket.socket) -> bytes:
    """The last part of what is still on its way, until the connection ends."""
    last = b""
    while part := connection.recv(1_000_000):
        last = last[-100:] + part
    return last


def api_with(backend: Saying, slow_reader_s: float) -> ASGIApp:
    """As behind Serve's proxy."""
    job = ServeJob(checkpoint="m", limits=Limits(slow_reader_s=slow_reader_s))
    return SlowReaders(build_api(job, {"m": backend}))


def test_a_client_that_does_not_read_is_dropped():
    """Guards connections, and what waits in them, that a few idle clients can pile up."""
    backend = Endless()
    with served(api_with(backend, slow_reader_s=0.3)) as url, streaming(url) as connection:
        begin = time.monotonic()
        while not backend.closed:
            assert time.monotonic() - begin < 10
            time.sleep(0.01)
        assert time.monotonic() - begin > 0.25
        connection.settimeout(10)
        assert b"[DONE]" not in read_all(connection)


def test_a_client_that_reads_slowly_but_reads_is_served():
    """The limit is for a client that reads nothing at all; its header is for the proxy only."""
    backend = Saying(
        *(OutputDelta("x" * 100_000) for _ in range(60)), OutputDelta("", Finish("stop", 1, 1, 1))
    )
    read = b""
    with served(api_with(backend, slow_reader_s=1.0)) as url, streaming(url) as connection:
        while b"[DONE]" not in read:
            read = read[-10:] + connection.recv(200_000)
            time.sleep(0.02)
    with served(api_with(backend, 1.0)) as url:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
            assert LIMIT_HEADER not in reply.headers
            assert reply.headers["cache-control"] == "no-cache"
