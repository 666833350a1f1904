"""A real server on a free port, in a thread of the test or in a separate process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import uvicorn
from fastapi import FastAPI

from expstore.api import Settings, create_app
from expstore.api.server import configure
from tests.support import warm_processes


class _Server(uvicorn.Server):
    """A server that says when it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()


class Serving:
    """Serve within a `with` block.

    Args:
        settings: Settings of the server.
        app: The application; None: one that serves stores.
    """

    def __init__(self, settings: Settings, app: FastAPI | None = None) -> None:
        self.root = settings.path
        self.app = create_app(settings) if app is None else app
        config = configure(self.app, settings)
        config.port = 0
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._server.has_started.wait(60), "the server did not start"
        (server,) = self._server.servers
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    @property
    def connections(self) -> set[Any]:
        """The open connections."""
        return self._server.server_state.connections

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not end"


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run `expstore serve` with arguments; it is stopped at the end of the block."""
    command = [sys.executable, "-m", "expstore", "serve", *map(str, arguments)]
    with warm_processes.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Serve on a free port; yield the process and the server's description of itself."""
    with process(*arguments, "--port", 0, "--json") as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, child.stderr and child.stderr.read()
        yield child, json.loads(line)


class KillableServer:
    """`expstore serve`, which can be killed and comes back on the same port."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._command = [sys.executable, "-m", "expstore", "serve", str(folder), "--port", str(self.port)]
        self.begin()

    def begin(self) -> None:
        self._child = warm_processes.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    @property
    def most_memory(self) -> int:
        """Return the most memory that it had, in KiB."""
        text = Path(f"/proc/{self._child.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0])
