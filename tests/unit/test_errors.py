"""The error tree: one class per reaction, messages with hints, and pickles that keep everything."""

from __future__ import annotations

import inspect
import pickle

import pytest

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


@pytest.mark.parametrize("name", BASES)
def test_each_error_has_its_bases_and_kind(name: str) -> None:
    cls = getattr(errors, name)
    parent, builtin, kind = BASES[name]
    error = cls("asked for 3, found 2", hint="ask for 2")
    assert isinstance(error, parent)
    assert isinstance(error, builtin)
    assert error.kind == kind
    assert str(error) == "asked for 3, found 2; ask for 2"
    hint = f"; {cls.default_hint}" if cls.default_hint else ""
    assert str(cls("found nothing")) == f"found nothing{hint}"
    assert bool(hint) == (name == "CorruptionError")


@pytest.mark.parametrize("name", [*BASES, "ExpStoreError"])
def test_pickle_keeps_message_kind_and_hint(name: str) -> None:
    error = getattr(errors, name)("what", kind="special", hint="do this")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.message, copy.kind, copy.hint, str(copy)) == ("what", "special", "do this", "what; do this")


@pytest.mark.parametrize("name", [*BASES, "ExpStoreError"])
def test_the_place_comes_before_the_message(name: str) -> None:
    error = getattr(errors, name)("what", kind="special", hint="do this")
    error.status = 503
    found = error.at("file.h5, episode 3")
    assert type(found) is type(error)
    assert (found.message, found.kind, found.hint) == ("file.h5, episode 3: what", "special", "do this")
    assert str(found) == "file.h5, episode 3: what; do this"
    assert found.status == 503
