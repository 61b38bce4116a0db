"""`mars-ray serve --haproxy`: Ray Serve with HAProxy in front, and no proxy of its own between."""

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import family, titled
from serve.command import (
    TOKENS,
    command,
    loses_nothing_at_sigterm,
    read,
    wait_until_free,
    with_room,
)
from serve.raw import CASES, CHAT, connected, post, status_of

from mars_ray.config.serve import Limits, ServeJob

pytestmark = [pytest.mark.ray, pytest.mark.long]

# Of Ray's, where HAProxy finds the ingress.
_INGRESS_PORTS = range(30000, 31001)
# Less than the 30 s of `haproxy_environment`, so that nobody waits for them here.
_CLIENT_S = 2
_MANY_TOKENS = 3000


@pytest.fixture(scope="module")
def served(job, tmp_path_factory) -> Iterator[tuple[subprocess.Popen, str, ServeJob]]:
    limits = Limits(body_bytes=4000, body_s=1.0, new_tokens=_MANY_TOKENS, choices=4)
    directory = tmp_path_factory.mktemp("haproxy")
    own = with_room(job, _MANY_TOKENS).model_copy(
        update={"limits": limits, "request_log": str(directory / "requests.jsonl")}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S", str(_CLIENT_S))
        begun = time.time()
        with command(own, directory, "--haproxy") as (process, url):
            yield process, url, own
    # Guards one that goes on holding the service's port.
    others = [each for each in psutil.process_iter() if each.create_time() > begun]
    assert not psutil.wait_procs(titled(others, "/haproxy -"), timeout=10)[1]


@pytest.fixture
def url(served) -> str:
    return served[1]


def test_haproxy_answers_and_nobody_on_other_addresses(served):
    """Guards an option that does nothing, and an ingress that strangers reach past HAProxy."""
    process, url, job = served
    own = family(process.pid)
    assert titled(own, "haproxy")
    links: list[Any] = psutil.net_connections("tcp")
    listening = {
        (link.laddr.port, link.laddr.ip)
        for link in links
        if link.status == psutil.CONN_LISTEN and link.pid in {each.pid for each in own}
    }
    assert {at for at in listening if at[0] == job.port} == {(job.port, "127.0.0.1")}
    ingress = {address for port, address in listening if port in _INGRESS_PORTS}
    assert ingress == {"127.0.0.1"}
    assert read(url, stream=True) == read(url, stream=False)


def test_whatever_arrives_gets_the_status_that_it_gets_otherwise(url):
    """But for a Host that is none, which HAProxy refuses by itself. Never a 5xx."""
    port, told = int(url.rpartition(":")[2]), []
    for request_bytes, status in CASES:
        with connected(port) as link:
            link.sendall(request_bytes)
            got = status_of(link)
            if got != status and not (b"[::1\r" in request_bytes and got == 400):
                told.append((request_bytes[:200], got, status))
    assert not told


def test_a_client_cannot_command_serve(url):
    """Its headers stay outside, and values that are no text."""
    body = json.dumps(CHAT).encode()
    for header in ("x-request-timeout-seconds: 0.000001", "x-request-id: \xff\xfe"):
        with connected(int(url.rpartition(":")[2])) as link:
            link.sendall(post(body, header))
            assert status_of(link) == 200


def test_those_who_leave_hold_nothing(url):
    """In a body, before an answer and in a stream."""
    whole = post(json.dumps(CHAT | {"max_tokens": TOKENS, "stream": True}).encode())
    for cut in (10, len(whole) - 5, len(whole)):
        for _ in range(3):
            with connected(int(url.rpartition(":")[2])) as link:
                link.sendall(whole[:cut])
    wait_until_free(url)


def test_what_never_ends_is_cut_off_and_what_takes_long_is_not(url):
    """HAProxy's clock is for clients that owe something, not for those who wait for an answer."""
    port = int(url.rpartition(":")[2])
    with ThreadPoolExecutor(1) as pool, connected(port) as idle, connected(port) as link:
        answer = pool.submit(read, url, stream=False, tokens=_MANY_TOKENS)
        idle.sendall(b"GET /v1/mod")
        link.sendall(b"GET / HTTP/1.1\r\n" + b"x-more: aaaaaaaaaaaaaaaa\r\n" * 1000)
        assert status_of(link) == 400
        assert status_of(idle) == 408
        assert answer.result(60)[0] == 200


def test_sigterm_under_load_loses_no_accepted_reply(served):
    """The last test here: it ends the service."""
    process, url, job = served
    loses_nothing_at_sigterm(process, url, Path(job.request_log or ""))
