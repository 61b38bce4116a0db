"""The page of metrics as HTTP brings it: those of a large cluster are megabytes.

Serve's proxy takes no message of over 4 MiB from a replica.
"""

import asyncio
import gzip
from collections.abc import AsyncIterator

from fastapi.responses import Response, StreamingResponse

PIECE_BYTES = 1 << 20
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# So that the proxy takes one piece before the next one comes.
_PAUSE_S = 0.01


async def page(text: str, accepted: str) -> Response:
    """The text, compressed for a client that says it takes gzip; in pieces if it is long."""
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
