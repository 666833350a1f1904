"""Methods of TorchRL's buffers for a service between a buffer and its users. Here there is no service.

`ReplayBuffer` and `ReplayBufferEnsemble` bind these functions as methods. No process or thread is started.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

from expstore.errors import StateError

__all__ = ["client", "service_backend", "share", "shutdown", "start", "synchronize"]


class _Buffer(Protocol):
    @property
    def is_alive(self) -> bool: ...

    def close(self) -> None: ...


_Self = TypeVar("_Self", bound=_Buffer)


def service_backend(self: _Buffer) -> Literal["direct"]:
    """TorchRL's word for a buffer without a server."""
    return "direct"


def start(self: _Self) -> _Self:
    """Return the buffer, which needs no start.

    Raises:
        StateError: It was closed.
    """
    if not self.is_alive:
        raise StateError("A shut down replay buffer cannot be restarted", hint="make or open it again")
    return self


def client(self: _Self) -> _Self:
    """Return the buffer; in another process it follows what this one writes."""
    return self


def share(self: _Self, shared: bool = True) -> _Self:
    """Return an ensemble if nothing is to be shared.

    Args:
        self: The ensemble.
        shared: Whether other processes are to write.

    Raises:
        StateError: They are.
    """
    if shared:
        raise StateError(
            "other processes cannot write to an ensemble",
            hint="share() the buffer that they write to; or take Collector(..., replay_buffer=ensemble), "
            "which runs in this process",
        )
    return self


def synchronize(self: _Buffer) -> None:
    """Do nothing: updates are applied when they are requested, and batches made ahead stay in order.

    Raises:
        StateError: The buffer was closed.
    """
    start(self)


def shutdown(self: _Buffer, timeout: float | None = None) -> None:
    """Close the buffer; does nothing if it is closed.

    Args:
        self: The buffer.
        timeout: Only None: what is pending is written, however long that takes.

    Raises:
        ValueError: There is a `timeout`.
    """
    if timeout is not None:
        raise ValueError("closing cannot be broken off: rows would be lost; leave timeout out")
    self.close()
