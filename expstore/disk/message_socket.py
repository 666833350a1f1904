"""Connections between processes of one machine and one user: short messages, and descriptors.

Used by a buffer that other processes write through. The sockets have names in Linux's abstract namespace, so
that no file is left behind. A message of a connection arrives whole, in order, or not at all, and each side
sees at once that the other one has died.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from expstore.errors import RemoteError, StateError

#: Bytes of a message of a shared buffer.
MESSAGE_BYTES = 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_POLL = np.dtype([("fd", "i4"), ("events", "i2"), ("revents", "i2")])
_POLLIN = 1

# Calls by _waits give up the GIL, calls by _keeps do not: a thread that gives it up gets it back only after
# the switch interval (5 ms) if another thread runs Python code, and a worker would wait for that several
# times in each call.
_waits = ctypes.CDLL(None, use_errno=True)
_keeps = ctypes.PyDLL(None, use_errno=True)
for _library in (_waits, _keeps):
    _library.poll.argtypes = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int]
_keeps.send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_keeps.send.restype = ctypes.c_ssize_t
_keeps.recvmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_keeps.recvmsg.restype = ctypes.c_ssize_t


class _Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Control(ctypes.Structure):
    """A control message with one descriptor."""

    _fields_ = (
        ("length", ctypes.c_size_t),
        ("level", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("descriptor", ctypes.c_int),
        ("padding", ctypes.c_int),
    )


class _Header(ctypes.Structure):
    """struct msghdr of Linux with glibc or musl on 64-bit machines."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("parts", ctypes.POINTER(_Part)),
        ("part_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class MessageSocket:
    """One end of a connection.

    Threads: one at a time receives, one at a time sends. After a fork the child must call `close`: otherwise
    the other end does not learn that this process has died.

    Args:
        sock: A connected socket of type SOCK_SEQPACKET.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.descriptor = sock.fileno()
        self._data = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._part = _Part(ctypes.addressof(self._data), MESSAGE_BYTES)
        self._control = _Control()
        self._header = _Header(parts=ctypes.pointer(self._part), part_count=1)
        self._header.control = ctypes.addressof(self._control)
        self._address = ctypes.addressof(self._header)

    def send(self, message: bytes, descriptor: int | None = None) -> None:
        """Send a message, and a descriptor with it.

        Raises:
            OSError: The other end is closed.
        """
        if descriptor is None:
            self._sock.send(message, socket.MSG_NOSIGNAL)
        else:
            socket.send_fds(self._sock, [message], [descriptor])

    def receive(self, most: int = MESSAGE_BYTES) -> bytes:
        """Wait for a message of at most so many bytes; b"": the other end is closed."""
        try:
            return self._sock.recv(most)
        except ConnectionError:
            return b""

    def send_now(self, message: bytes) -> bool:
        """Send a message without giving up the GIL; return False if the other end does not take it."""
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        return int(_keeps.send(self.descriptor, message, len(message), flags)) == len(message)

    def receive_now(self) -> tuple[bytes, int | None] | None:
        """Receive a message and its descriptor without giving up the GIL.

        Returns:
            The message, b"" if the other end is closed; and the descriptor, if it has one. None: there is no
            message now.
        """
        self._header.control_length = ctypes.sizeof(self._control)
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        size = _keeps.recvmsg(self.descriptor, self._address, flags)
        if size < 0:
            return None if ctypes.get_errno() in (errno.EAGAIN, errno.EINTR) else (b"", None)
        descriptor = self._control.descriptor if self._header.control_length else None
        return self._data.raw[:size], descriptor

    def is_closed(self) -> bool:
        """Return whether the other end is closed."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close this end."""
        self._sock.close()

    def __del__(self) -> None:
        self.close()


class Listener:
    """Accept connections of the processes of this user.

    Raises:
        StateError: The system has no such sockets.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise StateError(
                "a process that has a store open takes calls of other processes on Linux only",
                hint="serve the store with `expstore serve`, and expstore.connect() in the other processes",
            )
        #: Where to connect to: random, so that no program finds it that was not told.
        self.address = f"expstore-{secrets.token_hex(16)}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.bind(f"\0{self.address}")
        self._sock.listen(128)
        self.descriptor = self._sock.fileno()

    def accept(self) -> MessageSocket | None:
        """Return the connection that is waiting; None: it is gone, or another user's."""
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return None
        if not _is_own(sock):
            sock.close()
            return None
        return MessageSocket(sock)

    def close(self) -> None:
        """Accept no more connections."""
        self._sock.close()


def connect(address: str) -> MessageSocket:
    """Connect to a `Listener` of this machine.

    Raises:
        RemoteError: Nothing of this user listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(f"\0{address}")
        if not _is_own(sock):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "another user listens there")
    except OSError as exc:
        sock.close()
        raise RemoteError(
            f"the process that shares the store does not answer: {exc.strerror or exc}",
            kind="owner_gone",
            hint="it has closed the store, has died, or runs in another container",
        ) from exc
    return MessageSocket(sock)


def _is_own(sock: socket.socket) -> bool:
    """Return whether the process at the other end is this user's."""
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())


class Waiter:
    """Wait until one of several sockets can be read."""

    def __init__(self) -> None:
        self.watch(())

    def watch(self, descriptors: Sequence[int]) -> None:
        """Wait for these from now on."""
        self._descriptors = tuple(descriptors)
        fds = np.zeros(len(descriptors), _POLL)
        fds["fd"], fds["events"] = descriptors, _POLLIN
        self._found: NDArray[np.int16] = fds["revents"]
        self._address = fds.ctypes.data

    def wait(self) -> list[int]:
        """Wait; return the descriptors that can be read, or whose other end is closed.

        None are returned if a signal ended the wait.
        """
        count = _waits.poll(self._address, len(self._descriptors), -1)
        return self._ready() if count > 0 else []

    def look(self) -> list[int]:
        """Return what `wait` would return, without waiting and without giving up the GIL."""
        count = _keeps.poll(self._address, len(self._descriptors), 0)
        return self._ready() if count > 0 else []

    def _ready(self) -> list[int]:
        found = self._found.tolist()
        return [number for number, events in zip(self._descriptors, found, strict=True) if events]


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor that came with a message and is not used."""
    os.close(descriptor)
