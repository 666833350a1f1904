"""TorchRL's service methods of buffers (a server between a buffer and its users). expstore needs no server.

`ReplayBuffer` and `ReplayBufferEnsemble` use these functions as methods. No process or thread is started.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

from expstore.errors import ArgumentError, StateError


class _Buffer(Protocol):
    @property
    def is_alive(self) -> bool: ...

    def close(self) -> None: ...


_Self = TypeVar("_Self", bound=_Buffer)


def service_backend(self: _Buffer) -> Literal["direct"]:
    """TorchRL's name for a buffer without a server."""
    return "direct"


def start(self: _Self) -> _Self:
    """Return the buffer, which need not be started.

    Raises:
        StateError: The buffer is closed.
    """
    if not self.is_alive:
        raise StateError("A shut down replay buffer cannot be restarted", hint="create or open it again")
    return self


def client(self: _Self) -> _Self:
    """Return the buffer; in another process it follows the store that this one writes."""
    return self


def share(self: _Self, shared: bool = True) -> _Self:
    """Return an ensemble if `shared` is False.

    Args:
        self: The ensemble.
        shared: Whether other processes need to write.

    Raises:
        StateError: `shared` is True: only one process can write to a store.
    """
    if shared:
        raise StateError(
            "other processes cannot write to an ensemble",
            hint="share() the buffer that they write to; or take Collector(..., replay_buffer=ensemble), "
            "which runs in this process",
        )
    return self


def synchronize(self: _Buffer) -> None:
    """Do nothing: updates are applied when they are requested, and prefetched batches stay in order.

    Raises:
        StateError: The buffer was closed.
    """
    start(self)


def shutdown(self: _Buffer, timeout: float | None = None) -> None:
    """Close the buffer; do nothing if it is closed.

    Args:
        self: The buffer.
        timeout: Must be None: closing writes all pending rows, however long that takes.

    Raises:
        ArgumentError: `timeout` is not None.
    """
    if timeout is not None:
        raise ArgumentError("closing cannot be interrupted, as rows would be lost; leave timeout out")
    self.close()
