"""Memory without a name that two processes map: what is passed, what is refused, and what a fork inherits."""

from __future__ import annotations

import fcntl
import os
import socket

import numpy as np
import pytest

from expstore.disk.message_socket import MESSAGE_BYTES, Listener, Waiter, connect
from expstore.disk.shared_memory import SharedMemory
from expstore.errors import RemoteError, StorageError


def test_both_sides_see_the_same_bytes() -> None:
    mine = SharedMemory.create(8192)
    other = SharedMemory(os.dup(mine.pass_descriptor()))
    mine.forget_descriptor()
    assert other.memory.size == 8192
    mine.memory[8000] = 7
    assert other.memory[8000] == 7


def test_memory_that_can_shrink_is_refused() -> None:
    """Otherwise who has made it could kill who reads it, by SIGBUS."""
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(StorageError, match="could truncate"):
        SharedMemory(fd)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)  # closed nevertheless
    mine = SharedMemory.create(4096)
    assert fcntl.fcntl(mine.pass_descriptor(), fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(mine.pass_descriptor(), 0)


def test_what_is_no_memory_is_refused() -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(StorageError, match="cannot map"):
        SharedMemory(read_end)
    os.close(write_end)


def connection() -> tuple[Listener, object, object]:
    listener = Listener()
    near = connect(listener.address)
    far = listener.accept()
    return listener, near, far


def test_messages_arrive_whole_and_in_order_with_their_descriptors() -> None:
    listener, near, far = connection()
    assert far.receive_now() is None
    first, second = bytes(range(MESSAGE_BYTES)), bytes(MESSAGE_BYTES)
    memory = SharedMemory.create(4096)
    near.send(first)
    near.send(second, memory.pass_descriptor())
    assert far.receive_now() == (first, None)
    message, descriptor = far.receive_now()
    assert message == second
    memory.memory[5] = 9
    assert SharedMemory(descriptor).memory[5] == 9
    near.send(first)
    assert far.receive_now() == (first, None)
    assert far.send_now(second)
    assert near.receive() == second
    for end in (near, far, listener):
        end.close()


def test_each_side_sees_that_the_other_one_is_closed() -> None:
    listener, near, far = connection()
    assert not far.is_closed()
    waiter = Waiter()
    waiter.watch([far.descriptor])
    assert waiter.look() == []
    near.close()
    assert waiter.wait() == waiter.look() == [far.descriptor]
    assert far.is_closed()
    assert far.receive_now() == (b"", None)
    assert not far.send_now(bytes(MESSAGE_BYTES))
    far.close()

    near = connect(listener.address)
    listener.accept().close()
    assert near.receive() == b""
    with pytest.raises(BrokenPipeError):
        near.send(bytes(MESSAGE_BYTES))
    near.close()
    listener.close()
    with pytest.raises(RemoteError, match="does not answer"):
        connect(listener.address)


def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(RemoteError, match="another user"):
            connect(listener.address)
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.connect(f"\0{listener.address}")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert [listener.accept(), listener.accept()] == [None, None]  # the first one has gone already
    raw.close()
    listener.close()


def names_in_memory() -> set[str]:
    """Return the names of files in memory, except those of other tests."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("tests-")}


def test_nothing_is_left_on_the_disk() -> None:
    before = names_in_memory()
    listener, near, far = connection()
    memory = SharedMemory.create(1 << 20)
    memory.memory[:] = np.uint8(1)
    assert names_in_memory() == before
    for end in (near, far, listener):
        end.close()
