"""Hostile requests to a deployed service, through Ray Serve's own proxy."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve
from serve.command import wait_until_free
from serve.fuzzing import SHARES, Fuzzed, fuzz
from serve.raw import CASES, CHAT, chat, connected, post, send_slowly, status_of

from mars_ray.cluster.machine import free_port
from mars_ray.config.decode import EngineConfig
from mars_ray.config.serve import Limits, ServeJob
from mars_ray.serve.deploy import APP_NAME, start
from mars_ray.serve.ingress import middleware
from mars_ray.serve.ingress.proxy import BoundedProtocol

pytestmark = pytest.mark.ray

FUZZED = 100
BODY_S = 1.0
# Serve decodes what it knows of them.
DECODED = ("x-request-id", "x-session-id", "serve_multiplexed_model_id", "authorization")


@pytest.fixture(scope="module")
def job(checkpoint) -> ServeJob:
    limits = Limits(body_bytes=4000, body_s=BODY_S, new_tokens=100, waiting_requests=64, choices=4)
    return ServeJob(
        checkpoint=str(checkpoint),
        port=free_port(),
        model_name="tiny",
        replicas=1,
        cpus_per_replica=0.5,
        engine=EngineConfig(max_batch=4, max_context=160, device="cpu", threads=1),
        limits=limits,
    )


@pytest.fixture(scope="module")
def url(ray_cluster, job) -> Iterator[str]:
    """Of a service in which nothing may be left, nor a fault be found in its logs, when all is
    over."""
    before = {log: log.stat().st_size for log in logs()}
    url = start(job)
    yield url
    wait_until_free(url)
    assert serve.get_deployment_handle("Ingress", APP_NAME).inside.remote().result() == 0
    assert httpx.get(f"{url}/readyz").status_code == 200
    # A task's exception is written once the task is collected.
    time.sleep(1)
    assert len(logs()) > len(before)
    for log in logs():
        added = log.read_bytes()[before.get(log, 0) :]
        assert b"Traceback" not in added, f"{log}: {added[-2000:]!r}"
        assert b"never retrieved" not in added, log
    serve.shutdown()


def logs() -> list[Path]:
    """What the processes of a service write."""
    directory = Path(ray._private.worker._global_node.get_logs_dir_path())
    return [*directory.glob("worker-*.err"), *directory.glob("serve/*.log")]


@pytest.fixture
def port(url) -> int:
    return int(url.rpartition(":")[2])


def test_the_page_and_its_files_arrive(url):
    """Guards files that a mount serves in tests and not behind Serve's proxy."""
    page = httpx.get(url)
    assert "script-src 'self'" in page.headers["content-security-policy"]
    names = re.findall(r'"(page/[\w.]+)"', page.text)
    assert len(names) == 2
    for name in names:
        file = httpx.get(f"{url}/{name}")
        assert file.content == (Path(middleware.__file__).parent / name).read_bytes()
    assert httpx.get(f"{url}/page/other.mjs").status_code == 404


def test_whatever_arrives_gets_its_status(port):
    """The same as without Serve's proxy, and never a 5xx."""
    told = []
    for request_bytes, status in CASES:
        with connected(port) as link:
            link.sendall(request_bytes)
            if (got := status_of(link)) != status:
                told.append((request_bytes[:200], got, status))
    assert not told


def test_headers_that_the_proxy_cannot_decode_are_no_fault_of_its_own(port):
    """Guards a 500 that any client can bring about, and headers by which it commands Serve."""
    body = json.dumps(CHAT).encode()
    for name in DECODED:
        with connected(port) as link:
            link.sendall(post(body, f"{name}: \xff\xfe"))
            assert status_of(link) == 200, name
    with connected(port) as link:
        link.sendall(post(body, "x-request-timeout-seconds: 0.000001"))
        assert status_of(link) == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"DELETE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"PURGE /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 200),
        (
            b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
            403,
        ),
    ],
)
def test_other_protocols_and_methods_are_refused(port, request_bytes, status):
    """Also those that Serve's proxy takes and hands on."""
    with connected(port) as link:
        link.sendall(request_bytes)
        assert status_of(link) == status


def test_what_never_ends_is_cut_off(port):
    """Headers without end, a request that is only begun, and a body without end behind a 413."""
    started = time.monotonic()
    with connected(port) as idle:
        idle.sendall(b"GET /v1/mod")
        with connected(port) as link, contextlib.suppress(ConnectionError):
            link.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(100):
                link.sendall(b"x-more: aaaaaaaaaaaaaaaa\r\n" * 40_000)
            pytest.fail("100 MB of headers were taken")
        with connected(port) as link:
            link.sendall(b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
            link.sendall((b"1000\r\n" + b"x" * 4096 + b"\r\n") * 20)
            assert status_of(link) == 413
        idle.settimeout(30)
        assert idle.recv(100) == b""
    assert time.monotonic() - started > BoundedProtocol.OWED_S * 0.9


def test_a_slow_sender_has_its_time_and_no_more(port):
    """Byte by byte is fine; half of it and then nothing is a 408."""
    request = chat()
    with connected(port) as link:
        send_slowly(link, request)
        assert status_of(link) == 200
    started = time.monotonic()
    with connected(port) as link:
        link.sendall(request[:-5])
        assert status_of(link) == 408
    assert BODY_S * 0.9 < time.monotonic() - started < 10


def test_those_who_leave_hold_nothing(url, port):
    """At any point: in the head, in the body, before the answer, in a stream; also those who ask
    Serve not to look whether they are there."""
    obstinate = "x-request-disconnect-disabled: ?1"
    body = json.dumps(CHAT | {"max_tokens": 100, "stream": True}).encode()
    for whole in (post(body), post(body, obstinate), chat(max_tokens=100)):
        for cut in (10, len(whole) // 2, len(whole)):
            for _ in range(3):
                with connected(port) as link:
                    link.sendall(whole[:cut])
    with connected(port) as link:
        link.sendall(post(body))
        assert status_of(link) == 200
        # With a reset instead of a good-bye.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until_free(url)
    with connected(port) as link:
        link.sendall(chat())
        assert status_of(link) == 200


def test_made_up_requests_break_nothing(url):
    """Some of what test_fuzz.py makes up by the thousand."""
    fuzzed = Fuzzed()
    for path, share in SHARES.items():
        fuzz(url, path, round(FUZZED * share), 0, fuzzed, every_kind=False)
    print(f"\n{fuzzed.table()}")
    assert not fuzzed.failures, "\n".join(fuzzed.failures[:20])
    assert fuzzed.requests >= FUZZED
    assert not [status for _, status in fuzzed.statuses if status >= 500]
