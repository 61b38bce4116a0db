"""Requests to this machine or to nodes of its cluster, without a proxy."""

import urllib.request
from typing import Any
from urllib.parse import urlsplit

_HERE = ("127.0.0.1", "::1", "localhost")
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def urlopen(request: urllib.request.Request, timeout_s: float) -> Any:
    """Opens a request as urllib does, which would send even one for loopback to `http_proxy`.

    Raises OSError, and ValueError for an invalid address.
    """
    if urlsplit(request.full_url).hostname in _HERE:
        return open_direct(request, timeout_s)
    return urllib.request.urlopen(request, timeout=timeout_s)


def open_direct(request: urllib.request.Request, timeout_s: float) -> Any:
    """Opens a request as urllib does, but never through a proxy.

    Raises OSError, and ValueError for an invalid address.
    """
    return _direct.open(request, timeout=timeout_s)
