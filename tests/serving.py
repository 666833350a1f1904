"""A real server in a thread of the test, on a free port."""

from __future__ import annotations

import threading
from typing import Self

import uvicorn

from expstore.api import Settings, create_app
from expstore.api.server import configure


class Serving:
    """Serve within a `with` block.

    Args:
        settings: The server's.
    """

    def __init__(self, settings: Settings) -> None:
        self.app = create_app(settings)
        config = configure(self.app, settings)
        config.port = 0
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        startup = self._server.startup

        async def started(sockets: object = None) -> None:
            await startup()
            self._started.set()

        self._server.startup = started  # type: ignore[method-assign,assignment]
        self._server.run()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(30), "the server did not start"
        (server,) = self._server.servers
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server does not end"
