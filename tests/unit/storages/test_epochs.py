"""Epochs: counters that change when caches over rows must be rebuilt."""

from __future__ import annotations

import pytest

from expstore.storages.memory import MemoryStorage
from expstore.storages.read_view import Epochs


def test_other_content_is_rows_that_left_as_well() -> None:
    epochs = Epochs()
    epochs.note_deleted()
    assert (epochs.content, epochs.deleted, epochs.fields) == (0, 1, 0)
    epochs.note_content()
    assert (epochs.content, epochs.deleted, epochs.fields) == (1, 2, 0)


def test_places_of_fields_are_odd_while_they_change() -> None:
    epochs = Epochs()
    with epochs.note_field_change():
        assert epochs.fields == 1
    with epochs.note_field_change(False):
        assert epochs.fields == 2
    with pytest.raises(KeyError), epochs.note_field_change():
        raise KeyError
    assert epochs.fields == 4  # even, or readers would wait for ever


def test_a_view_is_of_one_version_while_nothing_moves() -> None:
    storage = MemoryStorage(10)
    versions = [storage.version]
    for act in (
        storage.epochs.note_deleted,
        storage.epochs.note_content,
        storage.changes.begin,
        lambda: storage.changes.end(None),
    ):
        assert storage.version == versions[-1]
        act()
        versions.append(storage.version)
    assert len(set(versions)) == len(versions)
