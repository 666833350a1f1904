"""The errors of expstore. Each class calls for another reaction of the caller.

All modules raise these errors. This module does no I/O::

    ExpStoreError                       message, kind (stable, append-only), hint
    ├── SchemaError    (ValueError)     the batch does not fit the schema
    │   └── StackError (RuntimeError)   single rows have different shapes
    ├── ArgumentError  (TypeError, ValueError)  an argument is unknown, or its value is not allowed
    ├── MissingMemberError (AttributeError)  a class of TorchRL has this attribute, ours does not
    ├── PriorityError  (ValueError)     negative, NaN or infinite priority; no priority was set
    ├── QueryError     (ValueError)     the SQL is not one read-only SELECT that DuckDB accepts
    ├── NotFoundError  (KeyError)       no such id, episode or snapshot
    │   ├── NoRowError (IndexError)     no row with this index
    │   └── RowsChangedError            a recorded batch had rows that were changed or are gone
    ├── NotReadyError  (RuntimeError)   fewer rows than the call needs; try again later
    ├── StateError     (RuntimeError)   closed, poisoned, or not open for writing
    │   └── LockedError                 another process has the store open for writing
    ├── StorageError   (OSError)        reading or writing failed
    │   ├── CorruptionError             bytes on disk are not the bytes that were written
    │   └── RemoteError (ConnectionError)  a server does not answer, or refuses the request
    ├── MissingExtraError (ModuleNotFoundError)  a library that this part needs is not installed
    ├── MigrationError                  the store is newer than this library, or a step failed
    └── SnapshotError                   a snapshot is incomplete or in the way
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "ArgumentError",
    "CorruptionError",
    "ExpStoreError",
    "LockedError",
    "MigrationError",
    "MissingExtraError",
    "MissingMemberError",
    "NoRowError",
    "NotFoundError",
    "NotReadyError",
    "PriorityError",
    "QueryError",
    "RemoteError",
    "RowsChangedError",
    "SchemaError",
    "SnapshotError",
    "StackError",
    "StateError",
    "StorageError",
]


class ExpStoreError(Exception):
    """Base class of all errors of expstore.

    Args:
        message: What was asked and what was found.
        kind: Stable word for programs; by default the class's `default_kind`.
        hint: What to do about it; appended to the message.
    """

    default_kind = "error"
    default_hint = ""
    #: The HTTP status, if the error is a server's response.
    status: int | None = None

    def __init__(self, message: str, *, kind: str | None = None, hint: str = "") -> None:
        hint = hint or self.default_hint
        super().__init__(_join(message, hint))
        self.message = message
        self.kind = kind or self.default_kind
        self.hint = hint

    def at(self, place: object) -> Self:
        """Return the same error with the place where it happened before its message."""
        return self._copy(f"{place}: {self.message}", self.hint)

    def with_hint(self, hint: str) -> Self:
        """Return the same error with another hint."""
        return self._copy(self.message, hint)

    def _copy(self, message: str, hint: str) -> Self:
        found = type(self)(message, kind=self.kind, hint=hint)
        vars(found).update({**vars(self), "message": message, "hint": hint})
        return found

    def __str__(self) -> str:
        # KeyError would print the repr of its argument, OSError may print "None".
        return _join(self.message, self.hint)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.kind, self.hint)


def _join(message: str, hint: str) -> str:
    if not hint:
        return message
    # Messages that follow TorchRL's are sentences.
    return f"{message} {hint[0].upper()}{hint[1:]}" if message.endswith(".") else f"{message}; {hint}"


def _rebuild(cls: type[ExpStoreError], message: str, kind: str, hint: str) -> ExpStoreError:
    return cls(message, kind=kind, hint=hint)


class ArgumentError(ExpStoreError, TypeError, ValueError):
    """An argument has an unknown name, or its value is not allowed."""

    default_kind = "argument"


class MissingMemberError(ExpStoreError, AttributeError):
    """An object has no such attribute; the message says why, if TorchRL's class has it."""

    default_kind = "missing_member"


class SchemaError(ExpStoreError, ValueError):
    """The batch does not fit the schema; the message names the field."""

    default_kind = "schema"


class StackError(SchemaError, RuntimeError):
    """Rows that were added one by one have different shapes; torch raises a RuntimeError for this."""

    default_kind = "stack"


class PriorityError(ExpStoreError, ValueError):
    """A priority is negative, NaN or infinite; no priority was set."""

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


class RowsChangedError(NotFoundError):
    """A recorded batch had rows that were changed, deleted or overwritten since."""

    default_kind = "rows_changed"


class NotReadyError(ExpStoreError, RuntimeError):
    """The store holds fewer rows than the call needs; try again later."""

    default_kind = "not_ready"
    #: The policy version of a group that cannot be started yet, and how far it would lag; otherwise None.
    version: int | None = None
    lag: int | None = None


class StateError(ExpStoreError, RuntimeError):
    """The buffer is closed, poisoned (unusable after a disk failure), or not open for writing."""

    default_kind = "state"


class LockedError(StateError):
    """Another process or buffer has the store open for writing."""

    default_kind = "locked"


class StorageError(ExpStoreError, OSError):
    """Reading or writing failed.

    `errno` is the operating system's error number, if there is one.
    """

    default_kind = "storage"
    #: Whether a sync failed: rows written before may be lost, although they can still be read.
    lost = False


class CorruptionError(StorageError):
    """Bytes on disk are not the bytes that were written."""

    default_kind = "corruption"
    default_hint = "`expstore verify` says what is damaged, `expstore repair` what can be done"


class RemoteError(StorageError, ConnectionError):
    """A server does not answer or refuses the request, or the call is not available over a connection."""

    default_kind = "remote"


class MissingExtraError(ExpStoreError, ModuleNotFoundError):
    """A library that this part needs is not installed; the hint is the command that installs it."""

    default_kind = "missing_extra"


class MigrationError(ExpStoreError):
    """The store was made by a newer version, or a migration step failed."""

    default_kind = "migration"


class SnapshotError(ExpStoreError):
    """A snapshot is incomplete, or something else is in its place."""

    default_kind = "snapshot"
