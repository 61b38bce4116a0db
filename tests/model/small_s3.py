"""So much of Amazon's S3 protocol as reading a bucket takes, over a directory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_CHANGED = "2026-01-01T00:00:00.000Z"


class _Bucket(BaseHTTPRequestHandler):
    directory: Path
    reads: list[str]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if "list-type" in parse_qs(url.query):
            self._send(200, self._listing(parse_qs(url.query).get("prefix", [""])[0]))
            return
        path = self.directory / url.path.lstrip("/").split("/", 1)[1]
        if not path.is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        self.reads.append(path.name)
        content = path.read_bytes()
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
        self._send(206 if "Range" in self.headers else 200, content)

    def do_HEAD(self) -> None:
        path = self.directory / urlsplit(self.path).path.lstrip("/").partition("/")[2]
        self._send(
            200 if path.is_file() else 404, b"", path.stat().st_size if path.is_file() else 0
        )

    def _listing(self, prefix: str) -> bytes:
        entries = "".join(
            f"<Contents><Key>{path.relative_to(self.directory)}</Key>"
            f"<LastModified>{_CHANGED}</LastModified><Size>{path.stat().st_size}</Size></Contents>"
            for path in sorted((self.directory / prefix).glob("*"))
        )
        entries += "<IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{entries}</ListBucketResult>".encode()

    def _send(self, status: int, content: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@contextmanager
def bucket(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """The options that make a URI s3://bucket/... lead to the directory, and what was read."""
    reads: list[str] = []
    handler = type("Bucket", (_Bucket,), {"directory": directory, "reads": reads})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    host = f"127.0.0.1:{server.server_address[1]}"
    yield f"?endpoint_override={host}&scheme=http&region=us-east-1", reads
    server.shutdown()
    server.server_close()
    thread.join(10)
