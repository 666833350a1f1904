"""The part of the checks that knows flat columns of which rows lie with the next ones.

Used by the checks of columns. It reads with pread, so that a file that is cut short meanwhile ends in a
finding and not in a signal.
"""

from __future__ import annotations

import itertools

import google_crc32c
import numpy as np

from expstore.core.values import Array, IntArray, key_name
from expstore.disk.files import Disk
from expstore.maintenance.findings import Finding, Inspection, runs_of
from expstore.storages.columns.checksums import BLOCK_ROWS
from expstore.storages.columns.dedup import SharedColumn
from expstore.storages.columns.dedup import runs_of as own_runs
from expstore.storages.columns.flat import Column

__all__ = ["check_shared", "own_ids", "read_shared", "read_slots", "sum_shared"]


def read_slots(disk: Disk, column: Column, slot: int, count: int) -> Array | None:
    """Read a run of slots as they stand in the files; None: a shard is not whole. Shape `(count, ...)`."""
    parts, done = [], 0
    while done < count:
        number, row = divmod(slot + done, column.rows)
        rows = min(count - done, column.rows - row)
        path = column.shard_path(number)
        if disk.size(path) != column.file_bytes:
            return None
        file = disk.open(path, write=False)
        try:
            parts.append(file.read(row * column.row_bytes, rows * column.row_bytes))
        finally:
            file.close()
        done += rows
    values: Array = np.frombuffer(b"".join(parts), column.entry.numpy_dtype)
    return values.reshape(count, *column.entry.shape)


def read_shared(disk: Disk, column: SharedColumn, slot: int, count: int) -> Array | None:
    """Read a run of slots, each row from where it lies; None: some of that is not whole."""
    found = read_slots(disk, column, slot, count)
    distances = read_slots(disk, column.distances, slot, count)
    if found is None or distances is None:
        return None
    rows, places = found.copy(), _places(column, slot, distances)
    cuts = np.flatnonzero((np.diff(places) != 1) | (np.diff(distances > 0) != 0)) + 1
    for start, stop in itertools.pairwise([0, *cuts.tolist(), count]):
        if stop > start and distances[start]:
            first = int(places[start])
            lent = None if first < 0 else _read_lent(disk, column, first, stop - start)
            if lent is None:
                return None
            rows[start:stop] = lent
    return rows


def _read_lent(disk: Disk, column: SharedColumn, slot: int, count: int) -> Array | None:
    return None if column.partner is None else read_slots(disk, column.partner, slot, count)


def _places(column: SharedColumn, slot: int, distances: Array) -> IntArray:
    """Return the slots of the rows with which those of a run lie."""
    places: IntArray = slot + np.arange(len(distances)) - distances
    return places if column.slots is None else places % column.slots


def sum_shared(disk: Disk, column: SharedColumn, block: int) -> int | None:
    """Return the crc32c of a block in which rows that lie elsewhere count as zeros; None: some is missing."""
    first = block * BLOCK_ROWS
    distances = read_slots(disk, column.distances, first, BLOCK_ROWS)
    if distances is None:
        return None
    crc, each = 0, max(1, (1 << 20) // column.row_bytes)
    for start, n, own in own_runs(distances, first):
        for at in range(start, start + n, each):
            some = min(each, start + n - at)
            rows = read_slots(disk, column, at, some) if own else None
            if own and rows is None:
                return None
            data = bytes(some * column.row_bytes) if rows is None else rows.tobytes()
            crc = google_crc32c.extend(crc, data)
    return crc


def own_ids(inspection: Inspection, column: SharedColumn, ids: IntArray) -> IntArray:
    """Return those of some rows that lie in their own slots; all where nobody can say. Ascending."""
    slots = ids - 1 if inspection.slots is None else (ids - 1) % inspection.slots
    if not slots.size:
        return ids
    first = int(slots.min())
    distances = read_slots(inspection.disk, column.distances, first, int(slots.max()) + 1 - first)
    return ids if distances is None else ids[distances[slots - first] == 0]


def check_shared(inspection: Inspection) -> None:
    """Note rows that lie with next ones whose bytes are damaged."""
    group = inspection.group
    for place, column in {} if group is None else group.shared.items():
        if column.partner is None or group is None:
            continue
        damaged = np.array(sorted(inspection.damaged.get(group.pairs[place], ())), np.int64)
        lost: dict[int, list[IntArray]] = {}
        for first, count in inspection.settled_runs() if damaged.size else ():
            for slot, offset, n in inspection.pieces(first, count):
                distances = read_slots(inspection.disk, column.distances, slot, n)
                if distances is None:
                    continue  # which has been noted
                ids = first + offset + np.arange(n)
                blocks = np.where(distances > 0, _places(column, slot, distances) // BLOCK_ROWS, -1)
                for block in damaged.tolist():
                    lost.setdefault(block, []).append(ids[blocks == block])
        for block, parts in lost.items():
            _note_lost(inspection, column, column.partner, block, np.sort(np.concatenate(parts)))


def _note_lost(
    inspection: Inspection, column: SharedColumn, partner: Column, block: int, ids: IntArray
) -> None:
    if not ids.size:
        return
    slots = block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS - 1
    path = inspection.relative(partner.shard_path(slots[0] // partner.rows))
    name = key_name(column.entry.key)
    inspection.note(
        Finding(
            kind="payload",
            path=path,
            message=f"{path}: {ids.size} rows of {name} lie in slots {slots[0]} to {slots[1]}, and are lost",
            column=name,
            shard=slots[0] // partner.rows,
            slots=slots,
            ids=runs_of(ids),
        )
    )
