"""The part of `verify` that checks the columns: metadata, lengths, shard indexes, checksums of blocks.

It reads with pread, so that a file that is truncated meanwhile causes a finding and not a signal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.parsing import INVALID
from expstore.core.values import Array, key_name
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError, StorageError
from expstore.maintenance.findings import Finding, Inspection, Progress, runs_of
from expstore.maintenance.packed import PackedFiles
from expstore.storages.columns.checksums import (
    BLOCK_ROWS,
    GIVEN_UP,
    NOTHING,
    SUMMED,
    blocks_of,
    no_entries,
    read_entries,
    state_of,
)
from expstore.storages.columns.flat import FlatColumn, zeros_sum
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.format.paths import CHECKSUMS, VERSION
from expstore.storages.format.swap import current_path
from expstore.storages.format.zarr_metadata import SEPARATOR, make_metadata, parse_metadata, shard_footer

_PIECE_BYTES = 4 << 20


def check_metadata(inspection: Inspection) -> None:
    """Check every zarr.json against the schema."""
    group = inspection.group
    if group is None:
        return
    folder = group.folder
    arrays = {f"{column.entry.path}/zarr.json": column for column in inspection.arrays}
    for name, wanted in metadata_of(inspection).items():
        path, array = folder / name, arrays.get(name)
        try:
            trouble = _metadata_trouble(inspection, path, parse_metadata(wanted), array)
        except (StorageError, *INVALID) as exc:  # lists in lists end not only the parser, but comparing, too
            trouble = f"cannot be read: {exc}"
        if trouble:
            inspection.note(
                Finding(
                    kind="missing" if trouble == "is missing" else "metadata",
                    path=inspection.relative(path),
                    message=f"{inspection.relative(path)} {trouble}",
                    column=key_name(array.entry.key) if array else None,
                )
            )


def metadata_of(inspection: Inspection) -> dict[str, bytes]:
    """Return the Zarr metadata files that the schema requires: relative name -> bytes."""
    group = inspection.group
    if group is None:
        return {}
    sound = [column.separator for column in inspection.flat if column.fault is None]
    separator = max(sound, key=sound.count, default=SEPARATOR)
    for column in inspection.flat:
        if column.fault is not None:
            _find_shard_rows(inspection, column, separator)
    arrays = inspection.arrays
    attributes = {"expstore": {"capacity": inspection.manifest.capacity, "slots": inspection.slots}}
    fields, shards = [array.entry for array in arrays], [array.rows for array in arrays]
    how: dict[str, Any] = {"separator": separator, "packings": [array.packing for array in arrays]}
    return make_metadata(fields, shards, inspection.slots, attributes, **how)


def _metadata_trouble(
    inspection: Inspection, path: Path, wanted: dict[str, Any], column: FlatColumn | PackedRows | None
) -> str | None:
    disk = inspection.disk
    if not disk.exists(path):
        return "is missing"
    found = parse_metadata(disk.read_whole(path))
    if not isinstance(found, dict):
        return "does not describe anything"
    group = inspection.group
    if column is not None and group is not None and inspection.slots is None:
        # The length grows with the shards; after a power cut some of these may be missing.
        length = found.get("shape", [0])[0] if isinstance(found.get("shape"), list) else 0
        synced = 0 if inspection.past is None else inspection.past.synced
        last = min(inspection.stored.last, synced)  # the journal may contain all later rows
        # In a version, packed arrays are as long as the flat ones, whose shards are shorter.
        unit = group.row_fields[0] if disk.exists(inspection.path / VERSION) else column
        least = max(1, unit.least_shards(last)) * unit.rows
        if isinstance(length, int) and length >= least and length % unit.rows == 0:
            wanted["shape"][0] = length
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            return f"has {name} {found.get(name)!r}, the schema requires {wanted.get(name)!r}"
    return None


def rows_of_file(size: int, row_bytes: int) -> int:
    """Return the number of rows of a shard file of this length; 0 if no shard can have this length."""
    blocks, rest = divmod(size - 4, BLOCK_ROWS * row_bytes + 16)
    return blocks * BLOCK_ROWS if blocks > 0 and rest == 0 else 0


def _find_shard_rows(inspection: Inspection, column: FlatColumn, separator: str) -> None:
    """Derive the rows per shard from the length of the first shard, because zarr.json is damaged."""
    column.separator = separator
    size = inspection.disk.size(column.shard_path(0))
    column.rows = rows_of_file(size, column.row_bytes) or column.rows
    column.fault = None


def check_blocks(inspection: Inspection, unsettled: set[int], progress: Progress | None) -> None:
    """Read every shard of every column.

    Args:
        inspection: The check.
        unsettled: Blocks whose checksums may be wrong, because they were written to since the last
            checkpoint.
        progress: Called with the number of bytes checked so far, and the number of bytes to check.
    """
    group = inspection.group
    if group is None:
        return
    columns = group.summed
    entries = _entries(inspection, len(columns), unsettled)
    states = [state_of(entry) for entry in entries]
    for block, state in enumerate(states):
        if state not in (SUMMED, GIVEN_UP, NOTHING):
            _note_entry(inspection, block, "cannot be read: the entry itself is damaged")
    needed = _find_needed_blocks(inspection)
    for block in sorted(needed - unsettled):
        if len(states) and (block >= len(states) or states[block] in (NOTHING, GIVEN_UP)):
            _note_entry(inspection, block, "are missing")
    held = {block for block, state in enumerate(states) if state == SUMMED} - unsettled
    stop = max(needed | held, default=-1) + 1
    jobs = [
        (place, column, number)
        for place, column in group.flat.items()
        if place < len(columns)
        for number in _shard_numbers(inspection, column, stop)
    ]
    total = sum(column.rows * column.row_bytes for _, column, _ in jobs)
    done = 0
    for place, column, number in jobs:
        _check_shard(inspection, place, column, number, entries, states, unsettled)
        done += column.rows * column.row_bytes
        if progress is not None:
            progress(done, total)
    for files in inspection.packed.values():
        _check_packed(inspection, files)
    for column in [group.row_fields[-1], *([] if inspection.sampled is None else [inspection.sampled])]:
        # The column of counts has no shard before rows are sampled or synced.
        due = needed if column is not inspection.sampled else needed - unsettled
        for number in _shard_numbers(inspection, column, max(due, default=-1) + 1):
            _check_shard(inspection, -1, column, number, entries, [], unsettled)


def _check_packed(inspection: Inspection, files: PackedFiles) -> None:
    """Record which files of a packed column are damaged, and which rows are lost."""
    column = files.column
    lost: dict[Path, list[int]] = {}
    files.note_hidden(inspection.find_settled_runs())
    # Later rows, or their checksums, are in the journal.
    for first, count in inspection.find_settled_runs():
        for slot, offset, n in inspection.pieces(first, count):
            lap = 0 if inspection.slots is None else (first + offset - 1) // inspection.slots
            for at in np.flatnonzero(~files.find(lap, slot, n)).tolist():
                chunk = (slot + at) // column.packing.rows
                path = files.lender_of(lap, chunk) or files.file_of(lap, chunk)
                lost.setdefault(path, []).append(first + offset + at)
    for path in sorted({fault.path for fault in files.faults} | lost.keys()):
        faults = [fault for fault in files.faults if fault.path == path]
        costly = {fault.text for fault in faults if fault.kind == "payload"}
        gone = not inspection.disk.exists(path)
        for fault in faults:
            if fault.kind == "footer":
                _note_packed(inspection, column, path, "footer", fault.text, [])
        if gone or lost.get(path) or costly:
            text = "is missing" if gone else "; ".join(sorted(costly)) or "has lost rows"
            ids = lost.get(path, [])
            _note_packed(inspection, column, path, "missing" if gone else "payload", text, ids)


def _note_packed(
    inspection: Inspection, column: PackedRows, path: Path, kind: str, text: str, lost: list[int]
) -> None:
    name, ids = inspection.relative(path), runs_of(np.sort(np.array(lost, np.int64)))
    first = lost[0] - 1 if lost else 0
    numbers = path.name.split(".")[1:2]
    shard = first % (inspection.slots or first + 1) // column.rows
    inspection.note(
        Finding(
            kind=kind,
            path=name,
            message=f"{name}{_of_ids(ids)} {text}",
            column=key_name(column.entry.key),
            shard=int(numbers[0]) if numbers else shard,
            ids=ids,
        )
    )


def _find_needed_blocks(inspection: Inspection) -> set[int]:
    """Return the blocks of the rows that must be in the columns; the journal has the bytes of other rows."""
    past, low, runs = inspection.past, inspection.stored.low, inspection.find_settled_runs()
    for publish in () if past is None else past.find_unsynced():
        first = max(publish.first_id + publish.skipped, low + 1)
        if not publish.payload and first <= publish.last_id:
            runs.append((first, publish.last_id + 1 - first))
    return {block for first, n in runs if n for block in blocks_of(inspection.pieces(first, n))}


def _entries(inspection: Inspection, columns: int, unsettled: set[int]) -> Array:
    path = current_path(inspection.disk, inspection.path, CHECKSUMS)
    size = inspection.disk.size(path)
    try:
        if size >= 0:
            return read_entries(inspection.disk.read_whole(path), columns, path)
        if inspection.stored.size == 0 or _find_needed_blocks(inspection) <= unsettled:
            return no_entries(columns)
        text = "is missing: the columns cannot be checked until the store was opened and closed"
    except CorruptionError as exc:
        text = exc.message.removeprefix(f"{path} ")
    inspection.note(
        Finding(kind="missing" if size < 0 else "checksums", path=CHECKSUMS, message=f"{CHECKSUMS} {text}")
    )
    return no_entries(columns)


def _note_entry(inspection: Inspection, block: int, text: str) -> None:
    first = block * BLOCK_ROWS
    ids = runs_of(inspection.ids_in(first, BLOCK_ROWS))
    inspection.note(
        Finding(
            kind="checksums",
            path=CHECKSUMS,
            message=f"the checksums of slots {first} to {first + BLOCK_ROWS - 1}{_of_ids(ids)} {text}",
            slots=(first, first + BLOCK_ROWS - 1),
            ids=ids,
        )
    )


def _of_ids(ids: tuple[tuple[int, int], ...]) -> str:
    return f" (ids {', '.join(f'{a} to {b}' for a, b in ids)})" if ids else " (no readable row)"


def _shard_numbers(inspection: Inspection, column: FlatColumn, blocks: int) -> Iterator[int]:
    """Yield the numbers of the shards that blocks 0 to `blocks` - 1 need, and of later shards that exist."""
    number = 0
    while number * column.rows < blocks * BLOCK_ROWS or inspection.disk.exists(column.shard_path(number)):
        yield number
        number += 1


def _check_shard(
    inspection: Inspection,
    place: int,
    column: FlatColumn,
    number: int,
    entries: Array,
    states: list[int],
    unsettled: set[int],
) -> None:
    path = column.shard_path(number)
    first = number * column.rows
    blocks = range(first // BLOCK_ROWS, (first + column.rows) // BLOCK_ROWS)
    note = partial(_note_shard, inspection, column, number)
    size = inspection.disk.size(path)
    if size != column.file_bytes:
        kind, text = ("missing", "is missing") if size < 0 else ("length", f"has {size} bytes")
        note(kind, f"{text}, {column.file_bytes} are expected", first, column.rows)
        inspection.damaged.setdefault(place, set()).update(blocks)
        return
    file = inspection.disk.open(path, write=False)
    try:
        footer = file.read(column.rows * column.row_bytes, column.file_bytes)
        if footer != shard_footer(column.rows, column.row_bytes):
            note("footer", "has a damaged index (the bytes after its rows)", first, column.rows)
        for block in blocks if place >= 0 else ():
            state = states[block] if block < len(states) else NOTHING
            if block in unsettled or state not in (SUMMED, NOTHING):
                continue
            start = (block - blocks[0]) * BLOCK_ROWS * column.row_bytes
            stop = start + BLOCK_ROWS * column.row_bytes
            found = _sum(file, start, stop)
            if state == SUMMED and found != int(entries[block]["sums"][place]):
                kind, text = "payload", "does not have its checksum"
            elif state == NOTHING and len(states) and found != zeros_sum(stop - start):
                kind, text = "unwritten", "has data in slots that were never written"
            else:
                continue
            note(kind, text, block * BLOCK_ROWS, BLOCK_ROWS)
            inspection.damaged.setdefault(place, set()).add(block)
    finally:
        file.close()


def _note_shard(
    inspection: Inspection, column: FlatColumn, number: int, kind: str, text: str, first: int, count: int
) -> None:
    path = inspection.relative(column.shard_path(number))
    ids = runs_of(inspection.ids_in(first, count))
    where = f", slots {first} to {first + count - 1}{_of_ids(ids)}"
    inspection.note(
        Finding(
            kind=kind,
            path=path,
            message=f"{path}{where} {text}" if count < column.rows else f"{path}{_of_ids(ids)} {text}",
            column=key_name(column.entry.key),
            shard=number,
            slots=(first, first + count - 1),
            ids=ids,
        )
    )


def _sum(file: File, start: int, stop: int) -> int:
    """Return the crc32c of a part of a file; holes are not read."""
    if file.next_data(start) >= stop:
        return zeros_sum(stop - start)
    crc = 0
    for at in range(start, stop, _PIECE_BYTES):
        crc = google_crc32c.extend(crc, file.read(at, min(_PIECE_BYTES, stop - at)))
    return crc


def read_column(inspection: Inspection, place: int, first_id: int, count: int) -> Iterator[tuple[int, Array]]:
    """Yield (first id, values) of a run of rows of a column, without incomplete shards.

    Args:
        inspection: The check.
        place: The column's number; negative ones count from the end.
        first_id: First id of the run.
        count: Number of rows.
    """
    if inspection.group is None:
        return
    place %= len(inspection.group.columns)
    if place in inspection.packed:
        yield from _read_packed(inspection, inspection.packed[place], first_id, count)
        return
    column = inspection.group.flat[place]
    for slot, offset, n in inspection.pieces(first_id, count):
        done = 0
        while done < n:
            row = (slot + done) % column.rows
            rows = min(n - done, column.rows - row, max(1, _PIECE_BYTES // column.row_bytes))
            values = _read_slots(inspection.disk, column, slot + done, rows)
            if values is not None:
                yield first_id + offset + done, values.reshape(-1)
            done += rows


def _read_slots(disk: Disk, column: FlatColumn, slot: int, count: int) -> Array | None:
    """Read a run of slots from the files; None if a shard is incomplete. Shape `(count, ...)`."""
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


def _read_packed(
    inspection: Inspection, files: PackedFiles, first_id: int, count: int
) -> Iterator[tuple[int, Array]]:
    """Yield (first id, values) of a run of rows of a packed column, without lost rows."""
    each = files.column.row_bytes
    for slot, offset, n in inspection.pieces(first_id, count):
        lap = 0 if inspection.slots is None else (first_id + offset - 1) // inspection.slots
        step = max(1, _PIECE_BYTES // each)
        for done in range(0, n, step):
            rows, whole = files.rows(lap, slot + done, min(step, n - done))
            if whole.all():
                yield first_id + offset + done, rows.reshape(-1).view(files.column.entry.numpy_dtype)
