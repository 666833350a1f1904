"""Previews of storages: a few rows as values, and the HTML that a notebook shows.

Used by storages, buffers and the command line. A preview reads a few rows and of these no wide fields, so its
cost does not depend on the size of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.tables import Table, build_table, render_card, size_text
from expstore.core.values import IntArray, key_name
from expstore.errors import ExpStoreError
from expstore.schema.schema import OBJECT, Field
from expstore.storages.read_view import ReadView, read_present, read_stable

_ROWS = 5
#: Fields with more bytes per row are not read; a cell has their dtype and shape.
_WIDE = 256


def preview_rows(view: ReadView, ids: IntArray) -> tuple[IntArray, list[str], list[list[Any]]]:
    """Return a few rows as Python values.

    Args:
        view: The storage, which has fields.
        ids: Ids of the rows. Shape `(n,)`.

    Returns:
        Ids of those rows that are still in the store, names of the fields, and one value per field of each
        row: numbers, lists and texts. A wide field, or an object, is described by a text.

    Raises:
        StateError: The storage is closed; or a writer in another process overwrites the rows too fast.
        CorruptionError: The rows are in a damaged file.
    """
    fields = view.require_schema().fields
    narrow = [place for place, entry in enumerate(fields) if entry.row_bytes <= _WIDE]
    ids, columns = read_present(view, ids, narrow)
    values = {place: _to_list(fields[place], column) for place, column in zip(narrow, columns, strict=True)}
    cells = [values.get(place, [str(entry)] * ids.size) for place, entry in enumerate(fields)]
    names = [key_name(entry.key) for entry in fields]
    return ids, names, [list(row) for row in zip(*cells, strict=True)]


def render_view(view: ReadView, title: str, facts: Sequence[str] = ()) -> str:
    """Return the HTML that a notebook shows for a storage, or for a buffer over it.

    Args:
        view: The storage; it may be closed.
        title: The class of the object.
        facts: Texts to add to those about the storage.
    """
    schema, rows = view.schema, len(view)
    told = [] if view.path is None else [str(view.path)]
    told.append("closed" if view.closed else f"{rows:,} rows")
    told.append("unbounded" if view.capacity is None else f"capacity {view.capacity:,}")
    if schema is None:
        return render_card(title, [*told, *facts], note="no fields yet")
    told += [f"{view.episodes.next_episode - 1:,} episodes", f"{size_text(rows * schema.row_bytes)} unpacked"]
    tables, note = [schema.tabulate()], ""
    if rows and not view.closed:
        try:
            tables.append(read_stable(view, lambda: _tabulate_rows(view)))
        except ExpStoreError as exc:  # damaged files, or a writer that is faster: the fields are still right
            note = f"the first rows cannot be read: {exc}"
    return render_card(title, [*told, *facts], tables, note)


def _tabulate_rows(view: ReadView) -> Table:
    window = view.window
    ids, names, rows = preview_rows(view, window.nth(np.arange(min(_ROWS, window.rows))))
    listed = [[number, *row] for number, row in zip(ids.tolist(), rows, strict=True)]
    return build_table(["_id", *names], listed, total=window.rows)


def _to_list(entry: Field, column: Any) -> list[Any]:
    if entry.dtype == OBJECT:  # an object's own text may be long, and it may run any code
        return [f"<{type(value).__name__}>" for value in column]
    if entry.variable:
        return list(column.to_pylist())
    if entry.dtype == "bfloat16":
        column = widen_bfloat16(column)
    values = np.asarray(column)
    return list((values.reshape(len(values)) if entry.row_items == 1 else values).tolist())
