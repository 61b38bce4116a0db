"""Requests as bytes, which no HTTP client would send, and the status that each has to get."""

import contextlib
import json
import socket
import time

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A request whose length may be a lie."""
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chat(**fields: object) -> bytes:
    return post(json.dumps(CHAT | fields).encode())


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def status_of(link: socket.socket) -> int | None:
    """Of the reply; None if the server hung up without one."""
    with contextlib.suppress(ConnectionResetError):
        reply = link.recv(4096)
        return int(reply.split()[1]) if reply else None
    return None


# For a service that takes bodies of 4000 bytes, and waits less than ten seconds for one.
CASES = [
    (b"nonsense\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # the start of TLS
    (b"GET /healthz HTTP/1.1\r\nHost: [::1\r\n\r\n", 200),
    (b"GET /none HTTP/1.1\r\nHost: [::1\r\n\r\n", 404),
    (b"GET /%ff%00%0d%0a HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    (b"GET /none HTTP/1.0\r\n\r\n", 404),
    (post(b"{}", length=-1), 400),
    (post(b"{}", "Transfer-Encoding: chunked"), 400),
    (post(b'{"model": "ti', length=100), 408),
    (post(json.dumps(CHAT).encode(), length=12), 400),
    (post(b"{}", length=10**12), 413),
    (post(b"x" * 5000), 413),
    (post(b""), 400),
    (post(b"\xff\xfe{}"), 400),
    (post(b'{"model": "\xc3\x28"}'), 400),
    (post(b"[" * 3000), 400),
    (post(b'{"a":' * 600 + b"1" + b"}" * 600), 400),
    (post(json.dumps(CHAT).encode() + b"\x00"), 400),
    (post(json.dumps(CHAT).encode().replace(b'"hi"', b'"\\ud800"')), 400),
    (post(json.dumps(CHAT).encode().replace(b"2}", b"1e999}")), 400),
    (post(json.dumps(CHAT).encode().replace(b"2}", b"9" * 3000 + b"}")), 400),
    (post(json.dumps(CHAT).encode().replace(b"2}", b"NaN}")), 400),
    (post(json.dumps(CHAT).encode().replace(b"{", b'{"model":"tiny",', 1)), 400),
    (chat(seed=10**30), 400),
    (chat(top_k=10**30), 200),
    (chat(min_tokens=10**30), 400),
    (chat(messages=[{"role": "user", "content": "a\x00b\u202e\ufdd0"}]), 200),
    (chat(messages=[{"role": "user", "content": "<|im_end|><mask><|endoftext|>"}]), 200),
    (chat(stop=["\x00"]), 200),
    (post(json.dumps(CHAT).encode(), "Authorization: Bearer \xff\xfe"), 200),
]


def send_slowly(link: socket.socket, request: bytes) -> None:
    """Some bytes at a time."""
    for begin in range(0, len(request), 8):
        link.sendall(request[begin : begin + 8])
        time.sleep(0.002)
