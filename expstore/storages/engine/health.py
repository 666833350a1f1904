"""Whether a store can be written to, and why not.

Used by everything in the engine that touches files. It touches none itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from expstore.errors import StateError, StorageError

__all__ = ["Health"]


class Health:
    """What failures have left.

    Invariants: after a failed fsync nothing is written any more, because the page cache may call lost bytes
    clean (`failure`). After an act that was interrupted between its record and memory, memory may lag behind
    the journal (`needs_recovery`): the journal must be read again before the next write.

    Threads: any may note a failure. Crashes: nothing here survives the process; an opening begins sound.

    Args:
        path: The store's folder, for messages.
    """

    __slots__ = ("_path", "failure", "needs_recovery", "noting")

    def __init__(self, path: Path) -> None:
        self._path = path
        #: A context manager: if its block raises, an interruption is noted.
        self.noting = _Noting(self)
        #: The fsync that failed; None: none has.
        self.failure: StorageError | None = None
        #: Whether the journal may hold records that memory does not know.
        self.needs_recovery = False

    @property
    def is_sound(self) -> bool:
        """Whether memory and disk agree, as far as is known."""
        return self.failure is None and not self.needs_recovery

    def check(self) -> None:
        """Raise StateError if an fsync has failed before."""
        if self.failure is not None:
            raise StateError(
                f"{self._path} can no longer be written: {self.failure}",
                kind="poisoned",
                hint="close it and open it again",
            )

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Refuse the block if an fsync has failed before; note if one fails in it.

        Other failures leave everything as it was: the next attempt finds the same to do.
        """
        self.check()
        try:
            yield
        except StorageError as exc:
            self.note_failure(exc)
            raise

    def note_failure(self, exc: BaseException | None) -> None:
        """Refuse all writes from now on if this is an fsync that failed."""
        if isinstance(exc, StorageError) and exc.lost and self.failure is None:
            self.failure = exc

    def note_interruption(self) -> None:
        """Note that memory may lag behind the journal, because of the exception that is being raised."""
        self.note_failure(sys.exception())
        self.needs_recovery = True

    def note_recovered(self) -> None:
        """Note that memory has been brought up to the journal."""
        self.needs_recovery = False


class _Noting:
    """Note an interruption if an exception leaves the block; it may be entered again inside itself.

    Args:
        health: Where it is noted.
    """

    __slots__ = ("_health",)

    def __init__(self, health: Health) -> None:
        self._health = health

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None:
            self._health.note_interruption()
