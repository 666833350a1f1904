"""The error tree: one class per reaction, messages with hints, and pickles that keep everything."""

from __future__ import annotations

import inspect
import pickle

from expstore import errors

BASES = {
    "ArgumentError": (errors.ExpStoreError, TypeError, "argument"),
    "MissingMemberError": (errors.ExpStoreError, AttributeError, "missing_member"),
    "SchemaError": (errors.ExpStoreError, ValueError, "schema"),
    "StackError": (errors.SchemaError, RuntimeError, "stack"),
    "PriorityError": (errors.ExpStoreError, ValueError, "priority"),
    "QueryError": (errors.ExpStoreError, ValueError, "query"),
    "NotFoundError": (errors.ExpStoreError, KeyError, "not_found"),
    "NoRowError": (errors.NotFoundError, IndexError, "no_row"),
    "RowsChangedError": (errors.NotFoundError, KeyError, "rows_changed"),
    "NotReadyError": (errors.ExpStoreError, RuntimeError, "not_ready"),
    "StateError": (errors.ExpStoreError, RuntimeError, "state"),
    "LockedError": (errors.StateError, RuntimeError, "locked"),
    "StorageError": (errors.ExpStoreError, OSError, "storage"),
    "CorruptionError": (errors.StorageError, OSError, "corruption"),
    "RemoteError": (errors.StorageError, ConnectionError, "remote"),
    "MissingExtraError": (errors.ExpStoreError, ModuleNotFoundError, "missing_extra"),
    "MigrationError": (errors.ExpStoreError, errors.ExpStoreError, "migration"),
    "SnapshotError": (errors.ExpStoreError, errors.ExpStoreError, "snapshot"),
}


def test_the_table_above_is_the_whole_tree() -> None:
    found = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.ExpStoreError)
    }
    assert found == {*BASES, "ExpStoreError"}
    assert found == set(errors.__all__)
    for name in found:
        assert name in (errors.__doc__ or ""), f"the drawing lacks {name}"


def test_each_error_has_its_bases_and_kind() -> None:
    for name, (parent, builtin, kind) in BASES.items():
        cls = getattr(errors, name)
        error = cls("asked for 3, found 2", hint="ask for 2")
        assert isinstance(error, parent), name
        assert isinstance(error, builtin), name
        assert error.kind == kind
        assert str(error) == "asked for 3, found 2; ask for 2"
        hint = f"; {cls.default_hint}" if cls.default_hint else ""
        assert str(cls("found nothing")) == f"found nothing{hint}"
        assert bool(hint) == (name == "CorruptionError")


def test_pickles_and_places_keep_kind_and_hint() -> None:
    """The place comes before the message."""
    for name in errors.__all__:
        error = getattr(errors, name)("what", kind="special", hint="do this")
        error.status = 503
        at = error.at("file.h5, episode 3")
        for found, message in ((pickle.loads(pickle.dumps(error)), "what"), (at, "file.h5, episode 3: what")):
            assert type(found) is type(error)
            assert (found.message, found.kind, found.hint) == (message, "special", "do this")
            assert str(found) == f"{message}; do this"
        assert at.status == 503
