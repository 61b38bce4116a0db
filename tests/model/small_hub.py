"""So much of the Hugging Face hub's protocol as `huggingface_hub` needs for one model's files."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34
NAME = "org/name"


class _Hub(BaseHTTPRequestHandler):
    directory: Path

    def do_GET(self) -> None:
        self._send(with_body=True)

    def do_HEAD(self) -> None:
        self._send(with_body=False)

    def _send(self, *, with_body: bool) -> None:
        content = self._content()
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("ETag", f'"{self.path.rsplit("/", 1)[1]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(content or b"")

    def _content(self) -> bytes | None:
        files = [path for path in self.directory.iterdir() if path.is_file()]
        name = self.path.rsplit("/", 1)[1]
        if self.path in (f"/api/models/{NAME}/revision/{ref}" for ref in ("main", COMMIT)):
            siblings = [{"rfilename": path.name} for path in files]
            return json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
        if self.path.startswith(f"/api/models/{NAME}/tree/{COMMIT}?"):
            tree = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
                for path in files
            ]
            return json.dumps(tree).encode()
        if self.path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            return next((path.read_bytes() for path in files if path.name == name), None)
        return None

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@contextmanager
def hub(directory: Path) -> Iterator[str]:
    """The endpoint of a hub whose only model, NAME, is in the directory."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"directory": directory}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)
