"""What arrives on a socket that no HTTP client would send."""

import time
from collections.abc import Iterator

import pytest
from serve.asking import wait_until_free
from serve.raw import CASES, chat, connected, post, send_slowly, status_of
from serve.real_port import served

from mars_ray.serve.ingress.app import build_api


@pytest.fixture(scope="module")
def port(job, text_engine) -> Iterator[int]:
    limits = job.limits.model_copy(update={"body_s": 0.3})
    api = build_api(job.model_copy(update={"limits": limits}), {"tiny": text_engine})
    with served(api) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize(("request_bytes", "status"), CASES)
def test_whatever_arrives_gets_its_status(port, request_bytes, status):
    """A fault of the client's is told as such, and never as one of the server."""
    with connected(port) as link:
        link.sendall(request_bytes)
        assert status_of(link) == status


def test_a_slow_body_is_read_while_its_time_lasts(port):
    """Byte by byte is fine; half of it and then nothing is a 408."""
    request = chat()
    with connected(port) as link:
        send_slowly(link, request)
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
