"""Buffers answer as TorchRL's do where a service could stand between: they are here, and start with nothing.

Mixed into the buffers. It holds nothing, and no process or thread is ever started by it.
"""

from __future__ import annotations

from typing import Literal, Self

from expstore.errors import StateError
from expstore.storages.read_view import ReadView

__all__ = ["Direct"]


class Direct:
    """Be the service and its client at once, as TorchRL's buffers are with `service_backend="direct"`.

    Threads, processes, crashes: as `close` and `flush` of the buffer.

    Example:
        >>> rb = ReplayBuffer(storage=MemoryStorage(10))
        >>> rb.client() is rb, rb.is_alive
        (True, True)
    """

    _storage: ReadView
    #: TorchRL's word for a buffer that other processes write to: none is.
    shared: bool

    def close(self) -> None:
        """Write what is pending, and let go of the storage."""
        raise NotImplementedError

    @property
    def service_backend(self) -> Literal["direct"]:
        """TorchRL's word for a buffer without a server."""
        return "direct"

    @property
    def is_alive(self) -> bool:
        """Whether it has not been closed."""
        return not self._storage.closed

    def start(self) -> Self:
        """Return the buffer, which needs no start.

        Raises:
            StateError: It was closed.
        """
        if not self.is_alive:
            raise StateError("A shut down replay buffer cannot be restarted", hint="make or open it again")
        return self

    def client(self) -> Self:
        """Return the buffer; in another process it follows what this one writes."""
        return self

    def share(self, shared: bool = True) -> Self:
        """Return the buffer if nothing is to be shared; collectors of several processes ask for more.

        Args:
            shared: Whether other processes are to write.

        Raises:
            StateError: They are.
        """
        if shared:
            raise StateError(
                "other processes cannot write to this buffer: a store has one writer, and a buffer that is "
                "handed to a collector's worker could only follow it",
                hint="make the collector without replay_buffer= and extend the buffer by each batch, or take "
                "Collector(..., replay_buffer=rb), which runs in this process",
            )
        return self

    def synchronize(self) -> None:
        """Do nothing: patches are applied when they are handed in, and batches made ahead stay in order.

        Raises:
            StateError: It was closed.
        """
        self.start()

    def shutdown(self, timeout: float | None = None) -> None:
        """Close the buffer; does nothing if it is closed.

        Args:
            timeout: None: what is pending is written, however long that takes.

        Raises:
            ValueError: There is a `timeout`.
        """
        if timeout is not None:
            raise ValueError("closing cannot be broken off: rows would be lost; leave timeout out")
        self.close()
