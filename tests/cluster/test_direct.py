"""Requests to this machine, where a proxy stands before all others."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request

import pytest

from mars_ray.cluster import local
from mars_ray.cluster.machine import free_port, urlopen
from mars_ray.errors import EngineError
from mars_ray.serve.chat_client import models
from mars_ray.serve.ingress import metrics


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a proxy was asked for that answers everything with a page of its own."""
    seen: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_address[1]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield seen
    server.shutdown()
    server.server_close()


def test_this_machine_is_asked_without_the_proxy(proxied: list[str]):
    """Guards a cluster that seems to be up, or never is, and its token in a proxy's log."""
    url = f"http://127.0.0.1:{free_port()}"
    assert not local._answers(f"{url}/x")
    assert local._registered(url, "secret") == 0
    with pytest.raises(EngineError, match="cannot be reached"):
        models(url, None)
    assert not proxied


def test_nodes_of_the_cluster_are_asked_without_the_proxy(proxied: list[str]):
    """Guards the proxy's page in the place of metrics; Ray's nodes have addresses like no other
    that is loopback, for which 127.0.0.2 stands here."""
    assert metrics._read(f"http://127.0.0.2:{free_port()}/metrics") is None
    assert not proxied


def test_other_machines_are_asked_through_it(proxied: list[str]):
    """`mars-ray chat` may want one."""
    with urlopen(Request("http://service.example.com/x"), 5) as reply:
        assert reply.read() == b"<html>"
    assert proxied == ["http://service.example.com/x"]
