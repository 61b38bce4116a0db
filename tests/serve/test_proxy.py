"""What stands in Serve's proxy, without Ray: the same protocol class under a plain uvicorn."""

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest
from serve.raw import CASES, connected, status_of
from serve.real_port import served

from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.ingress.proxy import BoundedProtocol, CleanHeaders

HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


class Hurried(BoundedProtocol):
    """The same within a second."""

    OWED_S = 0.5


HURRIED = f"{__name__}:{Hurried.__name__}"


@pytest.fixture(scope="module")
def port(job, text_engine) -> Iterator[int]:
    limits = job.limits.model_copy(update={"body_s": 1.0})
    api = build_api(job.model_copy(update={"limits": limits}), {"tiny": text_engine})
    with served(api, http=HURRIED) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize(("request_bytes", "status"), CASES)
def test_whatever_arrives_gets_the_same_status(port, request_bytes, status):
    """Guards a protocol that is stricter than uvicorn's where nobody means harm."""
    with connected(port) as link:
        link.sendall(request_bytes)
        assert status_of(link) == status


def sent_before_the_end(link: socket.socket, part: bytes, most: int) -> int:
    """Bytes that the server let in before it hung up; up to `most`."""
    sent = 0
    try:
        while sent < most:
            link.sendall(part)
            sent += len(part)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return sent


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (HEAD, b"x-more: aaaaaaaaaaaaaaaa\r\n" * 1000),
        (HEAD + b"x: ", b"a" * 10_000),
        (b"GET /", b"a" * 10_000),
        (b"", b"\r\n" * 5000),
        (CHUNKED + b"2\r\n{}\r\n0\r\n", b"x-more: aaaaaaaaaaaaaaaa\r\n" * 1000),
        (CHUNKED + b"2;x=", b"a" * 10_000),
    ],
    ids=["headers", "header", "url", "blank-lines", "trailers", "chunk-extension"],
)
def test_what_never_becomes_a_request_ends(port, begin, part):
    """Guards a process that grows until it is killed: 239 MiB of headers took 1.4 GiB of it."""
    with connected(port) as link:
        link.sendall(begin)
        # Buffers of the connection hold a few MiB.
        assert sent_before_the_end(link, part, 100_000_000) < 20_000_000
    with connected(port) as link:
        link.sendall(HEAD + b"\r\n")
        assert status_of(link) == 200


@pytest.mark.parametrize("begin", [b"", b"GET /he", HEAD, HEAD + b"\r\n" + HEAD])
def test_a_client_that_does_not_go_on_is_dropped(port, begin):
    """Guards connections that pile up: without a request, or with a part of one, also of a second
    one on a connection that is in use."""
    started = time.monotonic()
    with connected(port) as link:
        link.sendall(begin)
        while link.recv(4096):
            pass
    assert 0.4 < time.monotonic() - started < 60


def test_a_head_that_trickles_has_no_more_time(port):
    """Guards the one that sends a byte whenever it would be dropped."""
    started = time.monotonic()
    with connected(port) as link:
        while sent_before_the_end(link, b"G", 1):
            assert time.monotonic() - started < 60, "it may go on for ever"
            time.sleep(0.05)


def test_a_body_that_nobody_reads_ends(port):
    """Guards a client that is told 413 and goes on for ever."""
    started = time.monotonic()
    with connected(port) as link:
        link.sendall(CHUNKED)
        sent_before_the_end(link, b"1000\r\n" + b"x" * 4096 + b"\r\n", 1 << 40)
    assert time.monotonic() - started < 60


def test_a_long_answer_and_the_next_request_take_their_time():
    """Guards the limit from ending what is in order: an answer longer than it, while the beginning
    of the next request waits behind it."""

    async def slow(scope, receive, send) -> None:
        await asyncio.sleep(1.2)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with served(slow, http=HURRIED) as url, connected(int(url.rpartition(":")[2])) as link:
        link.sendall(HEAD + b"\r\n" + HEAD)
        assert status_of(link) == 200
        link.sendall(b"\r\n")
        assert status_of(link) == 200


def test_headers_that_serve_obeys_or_cannot_read_stay_outside():
    """Guards a 500, as Serve decodes what it knows; and a client that is served on when it left."""
    seen = []

    async def app(scope, receive, send) -> None:
        seen.extend(scope["headers"])

    kept = [(b"authorization", b"Bearer x"), (b"x-request-id", "é".encode())]
    given = [
        *kept,
        (b"x-request-id", b"\xff"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"x-request-timeout-seconds", b"-1"),
        (b"serve_multiplexed_model_id", b"x"),
    ]
    scope = {"type": "http", "headers": given}

    async def nothing(*_) -> dict:
        raise AssertionError

    asyncio.run(CleanHeaders(app)(scope, nothing, nothing))
    assert seen == kept
