"""A TCP proxy that can lose parts of the traffic."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

_RESET = struct.pack("ii", 1, 0)  # makes `close` send a reset


class Proxy:
    """Forward the traffic between clients and a server, within a `with` block.

    Args:
        port: Port of the server.
        trouble: Called for each connection with its number from 0 on: "" forwards everything, "refuse" resets
            at once, "answer" resets when the response begins, "half" after half of its first part, "hold"
            keeps the response until `release` is set.
    """

    def __init__(self, port: int, trouble: Callable[[int], str]) -> None:
        self._target, self._trouble = ("127.0.0.1", port), trouble
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self.release = threading.Event()
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.release.set()
        self.cut()

    def cut(self) -> None:
        """Reset all connections."""
        for sock in self._open:
            _reset(sock)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            trouble = self._trouble(self.connections)
            self.connections += 1
            if trouble == "refuse":
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:  # it was killed, and may come back
                _reset(client)
                continue
            self._open += [client, server]
            threading.Thread(target=_pump, args=(client, server, "", self.release), daemon=True).start()
            back = (server, client, trouble, self.release)
            threading.Thread(target=_pump, args=back, daemon=True).start()


class BreakableProxy(Proxy):
    """A proxy that refuses connections between `stop` and `resume`.

    Args:
        port: Port of the server.
    """

    def __init__(self, port: int) -> None:
        self._refuses = threading.Event()
        super().__init__(port, lambda _: "refuse" if self._refuses.is_set() else "")

    def stop(self) -> None:
        """Reset all connections, and refuse new ones."""
        self._refuses.set()
        self.cut()

    def resume(self) -> None:
        self._refuses.clear()


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _pump(source: socket.socket, sink: socket.socket, trouble: str, release: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if trouble == "half":
                sink.sendall(data[: len(data) // 2])
            if trouble == "hold":
                release.wait()
            elif trouble:
                break
            sink.sendall(data)
    for sock in (source, sink):
        _reset(sock)
