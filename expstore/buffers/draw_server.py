"""How the workers of a DataLoader ask the process that holds a consumer for draws, over a local socket.

The rows do not pass through the socket: workers read the log and the store themselves.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from expstore.buffers.writing_messages import error_of, pack_error
from expstore.errors import StateError

#: What a worker asks for: that draws up to a number are recorded, or that a pass ended before a number.
Question = tuple[str, int]


class DrawServer:
    """Answer the workers of a DataLoader.

    Threads: one for each worker, and one that waits for more. Processes: workers connect with a `DrawClient`;
    a forked child drops its copy. Crashes: it has no state.

    Args:
        answer: A method that does what a worker asks for; its errors are raised in the worker. It does not
            keep its object alive.
    """

    def __init__(self, answer: Callable[[Question], None]) -> None:
        self._key, ended = secrets.token_bytes(16), threading.Event()
        listener = Listener(family="AF_UNIX", authkey=self._key)
        self._address = str(listener.address)
        self._end = weakref.finalize(self, _end, listener, self._address, ended, os.getpid())
        work = listener, weakref.WeakMethod(answer), ended
        threading.Thread(target=_accept, args=work, name="expstore-draws", daemon=True).start()

    @property
    def client(self) -> DrawClient:
        """What a worker asks by."""
        return DrawClient(self._address, self._key)

    def close(self) -> None:
        """Accept no more workers; a second call does nothing."""
        self._end()


class DrawClient:
    """Ask for draws; it connects when it is first used, in the worker.

    Args:
        address: Path of the socket.
        key: What the socket's owner knows, too.
    """

    def __init__(self, address: str, key: bytes) -> None:
        self._address, self._key = address, key
        self._connection: Connection | None = None

    def ask(self, kind: str, number: int) -> None:
        """Ask, and wait until it is done.

        Raises:
            ExpStoreError: What the process that holds the consumer raised.
            StateError: That process has closed the consumer, or has ended.
        """
        try:
            if self._connection is None:
                self._connection = Client(self._address, "AF_UNIX", self._key)
            self._connection.send((kind, number))
            answer = self._connection.recv()
        except (OSError, EOFError) as exc:
            raise StateError("the process that holds the consumer has closed it, or has ended") from exc
        if answer is not None:
            raise error_of(answer)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which connects anew."""
        return vars(self) | {"_connection": None}


_Answer = weakref.WeakMethod[Callable[[Question], None]]


def _accept(listener: Listener, answer: _Answer, ended: threading.Event) -> None:
    while not ended.is_set():
        # A process that does not know the key is no reason to stop.
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            connection = listener.accept()
            work = connection, answer
            threading.Thread(target=_serve, args=work, name="expstore-draws", daemon=True).start()


def _serve(connection: Connection, answer: _Answer) -> None:
    with connection, contextlib.suppress(OSError, EOFError):
        while True:
            question, method = connection.recv(), answer()
            if method is None:
                return
            try:
                method(question)
            except Exception as exc:
                connection.send(pack_error(exc))
            else:
                connection.send(None)
            del method


def _end(listener: Listener, address: str, ended: threading.Event, process: int) -> None:
    if os.getpid() != process:
        return
    ended.set()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as waking:
        waking.connect(address)  # closing a socket does not end a wait for it
    listener.close()
