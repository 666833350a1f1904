"""A server with S3's interface: moto in a separate process, behind a proxy that can spoil requests."""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: What a client sets to use the server.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


@contextlib.contextmanager
def start_moto() -> Iterator[int]:
    """Start moto; yield its port."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", line):
                    break
            else:
                raise AssertionError("moto did not start")
            reader = threading.Thread(target=process.stderr.read, daemon=True)  # a full pipe would stop it
            reader.start()
            yield int(found[1])
        finally:
            process.kill()


@dataclass(frozen=True)
class Request:
    """A request as the proxy sees it."""

    method: str
    path: str
    headers: dict[str, str]


class S3Server:
    """The proxy in front of moto, within a `with` block.

    Args:
        port: The port of moto.
        bucket: A bucket that is created.
    """

    def __init__(self, port: int, bucket: str) -> None:
        self._moto = port
        #: Called with each request; returns a status to answer with at once, or None to pass the request on.
        self.before: Callable[[Request], int | None] = lambda request: None
        #: Called with each answered request; returns a status to answer with instead.
        self.after: Callable[[Request], int | None] = lambda request: None
        self.requests: list[Request] = []
        #: Whether conditions are removed from requests, as by a server that does not know them.
        self.unconditional = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.url}
        assert self._forward(Request("PUT", f"/{bucket}", {}), b"")[0] == 200

    def __enter__(self) -> S3Server:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()

    def _forward(self, request: Request, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._moto, timeout=60)
        try:
            connection.request(request.method, request.path, body, request.headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, request: Request, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        self.requests.append(request)
        status = self.before(request)
        if status is not None:
            return status, [], b""
        if self.unconditional:
            kept = {
                k: v for k, v in request.headers.items() if k.lower() not in ("if-match", "if-none-match")
            }
            request = Request(request.method, request.path, kept)
        answer = self._forward(request, body)
        status = self.after(request)
        return answer if status is None else (status, [], b"")

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):  # a client that was killed
                    super().handle_one_request()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, self.path, dict(self.headers.items()))
                status, headers, data = server._answer(request, body)
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                        self.send_header(name, value)
                # The answer to HEAD has the length of the object.
                length = dict(headers).get("Content-Length", "0") if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def log_message(self, *_: object) -> None:
                pass

        return Handler
