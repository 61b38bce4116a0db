"""The API on a real port, for clients that want one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def served(api: ASGIApp, http: str = "auto") -> Iterator[str]:
    """The URL, for as long as it is served; `http` is the protocol, as uvicorn names it."""
    server = uvicorn.Server(uvicorn.Config(api, port=0, log_level="critical", http=http))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
