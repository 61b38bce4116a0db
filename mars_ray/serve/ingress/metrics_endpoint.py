"""`GET /metrics`: the service's metrics, gathered from the Prometheus endpoints of all nodes.

Each node of a Ray cluster exports the metrics of its own processes. A scraper that knows the nodes
should read them there; this page is for one that knows only the service. Serve's proxy refuses
messages above 4 MiB from a replica, so a page of a large cluster is compressed or sent in pieces.
"""

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator
from urllib.request import Request

import ray
from fastapi.responses import Response, StreamingResponse

from mars_ray.cluster.machine import open_direct
from mars_ray.serve.ingress.exposition import Names, page_of

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
PIECE_BYTES = 1 << 20
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# A pause for the proxy to take one piece before the next one comes.
_PAUSE_S = 0.01


async def of_all_nodes(names: Names) -> str:
    """The metrics of all nodes under these names, in Prometheus's text format; a node that does not
    answer in time is left out and logged."""
    addresses = [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in await asyncio.to_thread(ray.nodes)
        if node["Alive"]
    ]
    texts = await asyncio.gather(*(asyncio.to_thread(_read, address) for address in addresses))
    return await asyncio.to_thread(page_of, texts, names)


def _read(address: str) -> str:
    try:
        # Never through a proxy: the node's address need not be reachable from there.
        with open_direct(Request(address), _TIMEOUT_S) as reply:
            return reply.read().decode()
    except OSError as error:
        logger.warning("%s does not answer: %s", address, error)
        return ""


async def page(text: str, accepted: str) -> Response:
    """The text, compressed if the client accepts gzip, and in pieces if it is long."""
    content, headers = text.encode(), {"vary": "accept-encoding"}
    if "gzip" in accepted.lower():
        content = await asyncio.to_thread(gzip.compress, content, 5)
        headers["content-encoding"] = "gzip"
    if len(content) <= PIECE_BYTES:
        return Response(content, media_type=_PROMETHEUS, headers=headers)
    return StreamingResponse(_pieces(content), media_type=_PROMETHEUS, headers=headers)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]
        await asyncio.sleep(_PAUSE_S)
