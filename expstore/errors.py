"""The errors of expstore, one class per reaction of the caller.

Every module raises from this tree; nothing here reads or writes anything::

    ExpStoreError                       message, kind (stable, append-only), hint
    ├── SchemaError    (ValueError)     the batch does not fit the schema
    │   └── StackError (RuntimeError)   rows one by one are of different shapes
    ├── ArgumentError  (TypeError, ValueError)  an argument is unknown, or has no such value
    ├── PriorityError  (ValueError)     negative, NaN or infinite priority; none was applied
    ├── QueryError     (ValueError)     the SQL is not one read-only SELECT that DuckDB accepts
    ├── NotFoundError  (KeyError)       no such id, episode or snapshot
    │   └── NoRowError (IndexError)     no row with this index
    ├── NotReadyError  (RuntimeError)   fewer rows than the call needs; try again later
    ├── StateError     (RuntimeError)   closed, poisoned, or not open for writing
    │   └── LockedError                 another process has the store open for writing
    ├── StorageError   (OSError)        reading or writing failed
    │   ├── CorruptionError             bytes on disk are not what was written
    │   └── RemoteError (ConnectionError)  a server does not answer, or refuses who asks
    ├── MigrationError                  the store is newer than this library, or a step failed
    └── SnapshotError                   a snapshot is incomplete or in the way
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CorruptionError",
    "ExpStoreError",
    "LockedError",
    "MigrationError",
    "NoRowError",
    "NotFoundError",
    "NotReadyError",
    "PriorityError",
    "QueryError",
    "RemoteError",
    "SchemaError",
    "SnapshotError",
    "StackError",
    "StateError",
    "StorageError",
]


class ExpStoreError(Exception):
    """Report a failure of expstore.

    Args:
        message: What was asked and what was found.
        kind: Stable word for programs; the class's own word by default.
        hint: What to do about it; appended to the message.
    """

    default_kind = "error"
    default_hint = ""
    #: Of an error that a server has answered with, the HTTP status.
    status: int | None = None

    def __init__(self, message: str, *, kind: str | None = None, hint: str = "") -> None:
        hint = hint or self.default_hint
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.kind = kind or self.default_kind
        self.hint = hint

    def __str__(self) -> str:
        # KeyError would print the repr of its argument, OSError may print "None".
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.kind, self.hint)


def _rebuild(cls: type[ExpStoreError], message: str, kind: str, hint: str) -> ExpStoreError:
    return cls(message, kind=kind, hint=hint)


class ArgumentError(ExpStoreError, TypeError, ValueError):
    """An argument has an unknown name, or a value that it does not take."""

    default_kind = "argument"


class SchemaError(ExpStoreError, ValueError):
    """The batch does not fit the schema; the message names the field."""

    default_kind = "schema"


class StackError(SchemaError, RuntimeError):
    """Rows that came one by one have different shapes; torch's error for it is a RuntimeError."""

    default_kind = "stack"


class PriorityError(ExpStoreError, ValueError):
    """A priority is negative, NaN or infinite; none was applied."""

    default_kind = "priority"


class QueryError(ExpStoreError, ValueError):
    """The SQL is not one read-only SELECT that DuckDB accepts."""

    default_kind = "query"


class NotFoundError(ExpStoreError, KeyError):
    """No such id, episode or snapshot."""

    default_kind = "not_found"


class NoRowError(NotFoundError, IndexError):
    """No row has this index."""

    default_kind = "no_row"


class NotReadyError(ExpStoreError, RuntimeError):
    """The store holds fewer rows than the call needs; try again later."""

    default_kind = "not_ready"


class StateError(ExpStoreError, RuntimeError):
    """The buffer is closed, poisoned, or not open for writing."""

    default_kind = "state"


class LockedError(StateError):
    """Somebody else has the store open for writing."""

    default_kind = "locked"


class StorageError(ExpStoreError, OSError):
    """Reading or writing failed.

    `errno` is the system's, where it said one.
    """

    default_kind = "storage"
    #: Whether a sync failed: what was written before may be lost, although it reads well.
    lost = False


class CorruptionError(StorageError):
    """Bytes on disk are not what was written."""

    default_kind = "corruption"
    default_hint = "`expstore verify` says what is damaged, `expstore repair` what can be done"


class RemoteError(StorageError, ConnectionError):
    """A server does not answer, or refuses the request as such; or a connection cannot do what was asked."""

    default_kind = "remote"


class MigrationError(ExpStoreError):
    """The store was made by a newer version, or a migration step failed."""

    default_kind = "migration"


class SnapshotError(ExpStoreError):
    """A snapshot is incomplete, or something else is in its place."""

    default_kind = "snapshot"
