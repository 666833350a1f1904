"""Run the application in uvicorn, from opening the socket to closing the stores.

Used by `expstore serve`. It reads no command line and prints nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI

from expstore.api.app import create_app
from expstore.api.auth import is_loopback
from expstore.api.connections import connections_of
from expstore.api.settings import Settings
from expstore.api.stores import Stores
from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import NotFoundError, StateError, StorageError

_log = logging.getLogger("expstore.api")
#: Lock of the server that writes to the stores of a folder, in this folder.
_LOCK = ".expstore-server"
#: Python's thread switch interval.
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Listening:
    """The address and the stores of a running server."""

    url: str
    stores: list[str]


def serve(
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 8420,
    ready: Callable[[Listening], None] = lambda listening: None,
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serve stores until a signal arrives.

    SIGTERM or SIGINT shuts the server down: it accepts no more requests, running requests have
    `settings.shutdown_seconds` to finish, then stores are flushed and closed. A second signal ends the
    process at once, without losing an acknowledged write. Call it in the main thread, because only that
    thread receives signals.

    Args:
        settings: What is served.
        host: A name or an address of this machine.
        port: The port; 0: a free one.
        ready: Called when the server accepts requests.
        stopping: Called when the shutdown begins.

    Raises:
        StateError: Other machines could reach the address and there is no token, or the address is in use.
        NotFoundError: There is neither a store nor a folder of stores.
        LockedError: Another process writes to the store, if a single store is served; or another server that
            writes serves the folder.
    """
    _check_path(settings)
    settings = _allow(settings, host)
    run(create_app(settings), settings, host=host, port=port, ready=ready, stopping=stopping)


def run(
    app: FastAPI,
    settings: Settings,
    *,
    host: str,
    port: int,
    ready: Callable[[Listening], None],
    stopping: Callable[[], None],
) -> None:
    """Run an application until a signal arrives, as `serve` does.

    Args:
        app: The application; `app.state.stores` has its stores.
        settings: The settings that it was made with.
        host: A name or an address of this machine.
        port: The port; 0: a free one.
        ready: Called when the server accepts requests.
        stopping: Called when the shutdown begins.

    Raises:
        StateError: Other machines could reach the address and there is no token, or the address is in use.
    """
    listener, listening = _listen(app, settings, host, port)
    with contextlib.closing(listener), _claim(app, settings, listening), _use_one_thread():
        server = _Server(configure(app, settings), app, lambda: ready(listening), stopping)
        server.run(sockets=[listener])


def _check_path(settings: Settings) -> None:
    disk = ReadingDisk()
    if not disk.is_dir(settings.path):
        raise NotFoundError(
            f"{settings.path} is neither a store nor a folder of stores", hint="create it first"
        )


def _allow(settings: Settings, host: str) -> Settings:
    """Return settings that let clients use the name that the server was told to listen on.

    An address needs no entry: the server accepts the address that a connection arrived at.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return settings
    return replace(settings, hosts=(*settings.hosts, host))


def local_url(url: str) -> str:
    """Return the URL at which this machine reaches a server: one of all addresses has no address itself."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _listen(app: FastAPI, settings: Settings, host: str, port: int) -> tuple[socket.socket, Listening]:
    family, address = _resolve(host, port)
    _check_token(settings, address)
    _allow_many_files()
    listener = _bound(family, address, port)
    where = f"[{host}]" if ":" in host else host
    return listener, Listening(f"http://{where}:{listener.getsockname()[1]}", app.state.stores.names())


class ServerThread:
    """Serve stores in a thread of this process, from the constructor until `stop`.

    Threads: any number may use it. Processes: it is not copied. Crashes: as for `serve`.

    Args:
        settings: What is served.
        host: A name or an address of this machine.
        port: The port; 0: a free one.
        failed: Called in the thread if the server ends by itself.

    Raises:
        StateError: Other machines could reach the address and there is no token, or the address is in use.
        NotFoundError: There is neither a store nor a folder of stores.
        LockedError: Another process writes to the store, if a single store is served; or another server that
            writes serves the folder.
    """

    def __init__(
        self, settings: Settings, *, host: str, port: int, failed: Callable[[], None] = lambda: None
    ) -> None:
        _check_path(settings)
        settings = _allow(settings, host)
        self._app = create_app(settings)
        self._listener, self.listening = _listen(self._app, settings, host, port)
        self._started, self._failed = threading.Event(), failed
        self._errors: list[BaseException] = []
        self._settings = settings
        config = configure(self._app, settings)
        self._server = _Server(config, self._app, self._started.set, lambda: None)
        self._thread = threading.Thread(target=self._run, name="expstore-server", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._errors:
            self._thread.join()
            raise self._errors[0]

    def _run(self) -> None:
        with contextlib.closing(self._listener):
            try:
                with _claim(self._app, self._settings, self.listening), _use_one_thread():
                    self._server.run(sockets=[self._listener])
            except BaseException as exc:
                self._errors.append(exc)
        if not self._started.is_set():
            self._started.set()
        elif not self._server.should_exit:
            self._failed()

    @property
    def stores(self) -> Stores:
        """The stores that it serves."""
        found: Stores = self._app.state.stores
        return found

    def stop(self) -> None:
        """Accept no more requests, finish running ones, flush and close the stores."""
        self._server.should_exit = True
        self._thread.join()


@contextlib.contextmanager
def _claim(app: FastAPI, settings: Settings, listening: Listening) -> Iterator[None]:
    """Keep other servers that write from a folder of stores, and let other processes know the address.

    A single store is locked when it is opened. A lock file in its parent would keep servers of other stores
    from starting.

    Raises:
        LockedError: Another server that writes serves the folder; the message names its process and address.
    """
    stores = app.state.stores
    if settings.read_only or not isinstance(stores, Stores):
        yield
        return
    stores.address = local_url(listening.url)
    if stores.single:
        yield
        return
    try:
        lock = WriterLock(Disk(), settings.path / _LOCK)
    except StorageError as exc:  # stores in a folder that cannot be written can be served nevertheless
        _log.warning("another server may serve the same folder: %s", exc)
        yield
        return
    try:
        lock.announce(local_url(listening.url))
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _use_one_thread() -> Iterator[None]:
    """Use one thread per request: requests run in parallel, and thread pools would wait for one another.

    This draws batches of images four times as fast on two busy cores. Python's thread switch interval is
    shortened from 5 ms: a thread that sends a response would wait that long for one that computes the next.
    """
    former = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        torch.set_num_threads(former[0])
        sys.setswitchinterval(former[1])


def configure(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return the configuration of uvicorn for an application."""
    return uvicorn.Config(
        app,
        http=connections_of(settings),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        log_level="error",  # errors of clients are in their responses
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(settings.idle_seconds),
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
    )


class _Server(uvicorn.Server):
    """A uvicorn server that ends at once at a second signal, and exits normally after the first."""

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, ready: Callable[[], None], stopping: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._app, self._ready, self._stopping = app, ready, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        stores = self._app.state.stores
        if stores.single:
            stores.get(stores.names()[0])
        if (proxy := getattr(self._app.state, "proxy", None)) is not None:
            proxy.start()
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        self._app.state.stores.end()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals in the block; uvicorn's handler would raise the first signal again at its end.

        Only the main thread can: in another one, `ServerThread.stop` ends the server.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        former = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise StateError(
            f"{host!r} is not an address of this machine: {exc.strerror}", kind="address"
        ) from exc
    family, _, _, _, where = found[0]
    return family, str(where[0])


def _check_token(settings: Settings, address: str) -> None:
    if is_loopback(address) or settings.token or (settings.read_only and settings.read_token):
        return
    raise StateError(
        f"other machines can reach {address}, and the server has no token",
        kind="unprotected",
        hint="pass --token-file, or listen on 127.0.0.1",
    )


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    try:
        return socket.create_server((address, port), family=family, backlog=2048)
    except OSError as exc:
        raise StateError(
            f"cannot listen on {address} port {port}: {exc.strerror}",
            kind="address", hint="use another --port; 0 finds a free one",
        ) from exc  # fmt: skip


def _allow_many_files() -> None:
    """Raise the limit of open files to the maximum, for connections and stores."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS reports a limit that it does not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
