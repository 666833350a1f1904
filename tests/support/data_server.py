"""An HTTP file server for downloads of data sets: ranges, tags, listings of the Hugging Face Hub.

Used by tests of downloads. It can break connections after a number of bytes.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class DataServer:
    """Serve the files below a folder.

    `/REST` is the file REST; `/datasets/REPOSITORY/resolve/main/REST` and the listing
    `/api/datasets/REPOSITORY/tree/main/FOLDER` serve the files below `REPOSITORY`.

    Args:
        folder: The files.
        break_after: Numbers of body bytes after which the next responses break, in turn.
        ranges: Whether range requests are supported.
    """

    folder: Path
    break_after: list[int] = field(default_factory=list)
    ranges: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Respond to a request."""
        path = unquote(urlsplit(handler.path).path).lstrip("/")
        self.requests.append((path, handler.headers.get("Range")))
        if path.startswith("api/datasets/"):
            self._list(handler, path.removeprefix("api/datasets/"))
            return
        if path.startswith("datasets/"):
            repository, _, rest = path.removeprefix("datasets/").partition("/resolve/main/")
            path = f"{repository}/{rest}"
        file = self.folder / path
        if not file.is_file():
            handler.send_error(404)
            return
        self._send(handler, file.read_bytes())

    def _send(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        asked = handler.headers.get("Range") if self.ranges else None
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if handler.headers.get("If-Range") not in (None, tag):
            start = 0
        if start and start >= len(data):
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(data)}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.send_header("ETag", tag)
        handler.end_headers()
        if self.break_after:
            handler.wfile.write(data[start : start + self.break_after.pop(0)])
            handler.close_connection = True
            return
        handler.wfile.write(data[start:])

    def _list(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        repository, _, below = path.partition("/tree/main")
        base = self.folder / repository
        found = base / below.lstrip("/")
        if not found.is_dir():
            handler.send_error(404)
            return
        items = []
        for file in sorted(found.rglob("*")):
            item = {"type": "file" if file.is_file() else "directory", "path": str(file.relative_to(base))}
            if file.is_file():
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                item |= {"size": file.stat().st_size, "lfs": {"oid": digest}}  # type: ignore[dict-item]
            items.append(item)
        body = json.dumps(items).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def serving_files(folder: Path, **how: object) -> Iterator[DataServer]:
    """Serve a folder on a free port."""
    data = DataServer(folder, **how)  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    data.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield data
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
