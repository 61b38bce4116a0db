"""What arrives on a socket that no HTTP client would send."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest
from serve.asking import wait_until_free
from serve.real_port import served

from mars_ray.serve.app import build_api

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A request whose length may be a lie."""
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chat(**fields: object) -> bytes:
    return post(json.dumps(CHAT | fields).encode())


@pytest.fixture(scope="module")
def port(job, text_engine) -> Iterator[int]:
    limits = job.limits.model_copy(update={"body_s": 0.3})
    api = build_api(job.model_copy(update={"limits": limits}), {"tiny": text_engine})
    with served(api) as url:
        yield int(url.rpartition(":")[2])


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def status_of(link: socket.socket) -> int | None:
    """Of the reply; None if the server hung up without one."""
    with contextlib.suppress(ConnectionResetError):
        reply = link.recv(4096)
        return int(reply.split()[1]) if reply else None
    return None


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # the start of TLS
        (b"GET /healthz HTTP/1.1\r\nHost: [::1\r\n\r\n", 200),
        (b"GET /none HTTP/1.1\r\nHost: [::1\r\n\r\n", 404),
        (b"GET /%ff%00%0d%0a HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET /none HTTP/1.0\r\n\r\n", 404),
        (post(b"{}", length=-1), 400),
        (post(b"{}", "Transfer-Encoding: chunked"), 400),
        (post(b'{"model": "ti', length=100), 408),
        (post(json.dumps(CHAT).encode(), length=12), 400),
        (post(b"{}", length=10**12), 413),
        (post(b"x" * 5000), 413),
        (post(b""), 400),
        (post(b"\xff\xfe{}"), 400),
        (post(b'{"model": "\xc3\x28"}'), 400),
        (post(b"[" * 3000), 400),
        (post(b'{"a":' * 600 + b"1" + b"}" * 600), 400),
        (post(json.dumps(CHAT).encode() + b"\x00"), 400),
        (post(json.dumps(CHAT).encode().replace(b'"hi"', b'"\\ud800"')), 400),
        (post(json.dumps(CHAT).encode().replace(b"2}", b"1e999}")), 400),
        (post(json.dumps(CHAT).encode().replace(b"2}", b"9" * 3000 + b"}")), 400),
        (post(json.dumps(CHAT).encode().replace(b"2}", b"NaN}")), 400),
        (post(json.dumps(CHAT).encode().replace(b"{", b'{"model":"tiny",', 1)), 400),
        (chat(seed=10**30), 400),
        (chat(top_k=10**30), 200),
        (chat(min_tokens=10**30), 400),
        (chat(messages=[{"role": "user", "content": "a\x00b\u202e\ufdd0"}]), 200),
        (chat(messages=[{"role": "user", "content": "<|im_end|><mask><|endoftext|>"}]), 200),
        (chat(stop=["\x00"]), 200),
        (post(json.dumps(CHAT).encode(), "Authorization: Bearer \xff\xfe"), 200),
    ],
)
def test_whatever_arrives_gets_its_status(port, request_bytes, status):
    """A fault of the client's is told as such, and never as one of the server."""
    with connected(port) as link:
        link.sendall(request_bytes)
        assert status_of(link) == status


def test_a_slow_body_is_read_while_its_time_lasts(port):
    """Byte by byte is fine; half of it and then nothing is a 408."""
    request = chat()
    with connected(port) as link:
        for start in range(0, len(request), 8):
            link.sendall(request[start : start + 8])
            time.sleep(0.002)
        assert status_of(link) == 200
    begin = time.monotonic()
    with connected(port) as link:
        link.sendall(request[:-5])
        assert status_of(link) == 408
    assert time.monotonic() - begin < 5


def test_two_requests_on_one_connection(port):
    """Sent at once, they are answered in their order."""
    with connected(port) as link:
        link.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + post(b"{}"))
        replies = b""
        while replies.count(b"HTTP/1.1 ") < 2 or not replies.endswith(b"}"):
            replies += link.recv(4096)
    assert replies.index(b"200 OK") < replies.index(b"400 Bad Request")


def test_those_who_leave_hold_nothing(port, text_engine):
    """At any point: in the head, in the body, before the answer, in a stream."""
    whole = chat(max_tokens=100, stream=True)
    for cut in (10, len(whole) // 2, len(whole)):
        for _ in range(4):
            with connected(port) as link:
                link.sendall(whole[:cut])
    with connected(port) as link:
        link.sendall(whole)
        assert status_of(link) == 200
    wait_until_free(text_engine)
    with connected(port) as link:
        link.sendall(chat())
        assert status_of(link) == 200
