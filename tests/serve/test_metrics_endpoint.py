"""The page of metrics of a cluster that counts a lot."""

import asyncio
import gzip
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import ray
from fastapi.responses import Response
from fastapi.testclient import TestClient
from serve.asking import error_of
from serve.saying import Saying

from mars_ray.serve.ingress.app import build_api
from mars_ray.serve.ingress.metrics import PIECE_BYTES, metrics_reply, of_all_nodes

LINES = "".join(
    f'ray_mars_requests{{replica="{i}"}} {random.Random(i).random()}\n' for i in range(90_000)
)


def sent(reply: Response) -> list[bytes]:
    """The bodies of the messages that a server is given."""
    bodies: list[bytes] = []

    async def send(message) -> None:
        bodies.append(message.get("body", b""))

    async def receive():
        await asyncio.Event().wait()

    asyncio.run(reply({"type": "http", "method": "GET", "headers": []}, receive, send))
    return bodies


@pytest.mark.parametrize("accepted", ["gzip", "deflate, GZIP;q=0.5", "", "identity"])
def test_no_message_is_larger_than_a_proxy_takes(accepted):
    """Guards a page that ends in the proxy as an internal error once a cluster counts megabytes."""
    assert len(LINES) > 4 * PIECE_BYTES
    reply = asyncio.run(metrics_reply(LINES, accepted))
    bodies = sent(reply)
    assert max(map(len, bodies)) <= PIECE_BYTES
    whole = b"".join(bodies)
    if "gzip" in accepted.lower():
        assert reply.headers["content-encoding"] == "gzip"
        whole = gzip.decompress(whole)
    assert whole.decode() == LINES
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_small_page_is_one_message():
    """With its length, as clients of old want it."""
    reply = asyncio.run(metrics_reply("ray_mars_requests 1\n", ""))
    assert reply.headers["content-length"] == "20"


def test_names_are_vllms_unless_rays_are_asked_for(job):
    """And others are refused by name."""

    async def metrics(names: str) -> str:
        return f"{names} 1\n"

    client = TestClient(build_api(job, {"tiny": Saying()}, metrics=metrics))
    assert client.get("/metrics").text == "vllm 1\n"
    assert client.get("/metrics?names=ray").text == "ray 1\n"
    assert error_of(client.get("/metrics?names=mine"), 400)["param"] == "names"


@pytest.mark.parametrize("answering", [0, 1])
def test_no_page_is_better_than_an_empty_one(job, answering, monkeypatch):
    """A node that does not answer is left out; if none does, the scrape fails and keeps its past.

    Guards a busy node's empty page, which told Prometheus that all series had ended.
    """

    class Node(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'# TYPE ray_mars_drafts counter\nray_mars_drafts{model="a"} 3.0\n')

    with HTTPServer(("127.0.0.1", 0), Node) as node, HTTPServer(("127.0.0.1", 0), Node) as silent:
        silent.server_close()
        threading.Thread(target=node.serve_forever, daemon=True).start()
        ports = [silent.server_port, *[node.server_port] * answering]
        nodes = [
            {"Alive": True, "NodeManagerAddress": "127.0.0.1", "MetricsExportPort": port}
            for port in ports
        ]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        reply = TestClient(build_api(job, {"tiny": Saying()}, metrics=of_all_nodes)).get("/metrics")
        node.shutdown()
    if answering:
        assert 'ray_mars_drafts{model="a"} 3.0' in reply.text
    else:
        assert error_of(reply, 503)["code"] == "metrics_unavailable"
