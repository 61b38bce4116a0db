"""So much of Amazon's S3 protocol as reading and writing a bucket takes, over a directory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

_CHANGED = "2026-01-01T00:00:00.000Z"


class _Bucket(BaseHTTPRequestHandler):
    # Amazon's client waits a second for a server that does not know `Expect: 100-continue`.
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    directory: Path
    reads: list[str]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            self._send(200, self._listing(prefix, flat="delimiter" not in query))
            return
        path = self._path()
        if not path.is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        self.reads.append(path.name)
        content = path.read_bytes()
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
        self._send(206 if "Range" in self.headers else 200, content)

    def do_PUT(self) -> None:
        content, path = self._body(), self._path()
        part = parse_qs(urlsplit(self.path).query).get("partNumber")
        if part:
            path = _part(path, int(part[0]))
        path.parent.mkdir(parents=True, exist_ok=True)
        if urlsplit(self.path).path.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)
        self._send(200, b"")

    def do_POST(self) -> None:
        """Of an upload in parts: its start, or its end."""
        self._body()
        path = self._path()
        if "uploads" in parse_qs(urlsplit(self.path).query, keep_blank_values=True):
            name, content = "InitiateMultipartUploadResult", "<UploadId>1</UploadId>"
        else:
            name, content = "CompleteMultipartUploadResult", "<ETag>1</ETag>"
            parts = sorted(path.parent.glob(_part(path, 0).name[:-5] + "*"))
            path.write_bytes(b"".join(part.read_bytes() for part in parts))
            for part in parts:
                part.unlink()
        self._send(200, f"<{name}>{content}</{name}>".encode())

    def do_DELETE(self) -> None:
        self._path().unlink(missing_ok=True)
        self._send(204, b"")

    def do_HEAD(self) -> None:
        path = self._path()
        self._send(
            200 if path.is_file() else 404, b"", path.stat().st_size if path.is_file() else 0
        )

    def _path(self) -> Path:
        return self.directory / unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def _listing(self, prefix: str, *, flat: bool) -> bytes:
        paths = [path for path in sorted(self.directory.rglob("*")) if path.is_file()]
        keys = {path.relative_to(self.directory).as_posix(): path for path in paths}
        rests = {key: key[len(prefix) :] for key in keys if key.startswith(prefix)}
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>{_CHANGED}</LastModified>"
            f"<Size>{keys[key].stat().st_size}</Size></Contents>"
            for key, rest in rests.items()
            if flat or "/" not in rest
        )
        if not flat:
            folders = {rest.partition("/")[0] for rest in rests.values() if "/" in rest}
            entries += "".join(
                f"<CommonPrefixes><Prefix>{prefix}{folder}/</Prefix></CommonPrefixes>"
                for folder in sorted(folders)
            )
        count = f"<KeyCount>{len(rests)}</KeyCount><IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{entries}{count}</ListBucketResult>".encode()

    def _body(self) -> bytes:
        """What was sent; clients of today wrap it in chunks of their own, with checksums."""
        if "Content-Length" in self.headers:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        else:
            body = _unwrapped(self.rfile)
            self.rfile.readline()
        wrapped = "aws-chunked" in self.headers.get("Content-Encoding", "")
        return _unwrapped(BytesIO(body)) if wrapped else body

    def _send(self, status: int, content: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


def _unwrapped(stream: BinaryIO) -> bytes:
    """Chunks, each after a line with its length and before an empty one; the last is empty."""
    content = b""
    while size := int(stream.readline().split(b";")[0], 16):
        content += stream.read(size)
        stream.readline()
    return content


def _part(path: Path, number: int) -> Path:
    return path.with_name(f".{path.name}.part{number:05d}")


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
