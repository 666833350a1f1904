"""The records of annotations: values of rows that were written after the rows.

Used by the columns of annotated fields. A record has the values of one call for one or more fields, or
declares a field. Its head has everything but the values, so that an opening need not read them.
docs/format.md specifies the files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.parsing import INVALID
from expstore.core.values import Array, IntArray, Key
from expstore.disk.files import Disk, File
from expstore.schema.schema import DTYPES

#: A record begins in a new file once the newest file is longer, bytes.
FILE_BYTES = 256 << 20
#: An address is the number of a file, and an offset in the file in the lower bits.
FILE_SHIFT = 40
#: Length of the head, checksum of what follows in the head, number of the record, time, length and checksum
#: of the values, rows, and length of the description.
_HEAD = struct.Struct("<IIQqQIIII")
_FRONT = struct.Struct("<II")
_LONGEST = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The values of one field in a record.

    Args:
        key: The field.
        dtype: Dtype of the values, one of `DTYPES`.
        shape: Shape of a row's value; None: the field is ragged.
        values: The values of all rows, one after another. C-contiguous.
        lengths: The number of values of each row of a ragged field. Shape `(n,)`.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...] | None
    values: Array
    lengths: IntArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Heading:
    """What a record says of one field.

    Args:
        key: The field.
        dtype: Dtype of the values.
        shape: Shape of a row's value; None: the field is ragged.
        items: Number of values of each row. Shape `(n,)`.
        starts: Where each row's values begin, bytes from the end of the head. Shape `(n,)`.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...] | None
    items: IntArray
    starts: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The head of a record.

    Args:
        number: Number of the record, from 1.
        time: When it was written, microseconds since 1970.
        by: Who wrote the values; None: unknown.
        declared: The field that it declares; older values of the field do not count. None: it has values.
        ids: Ids of the rows. Shape `(n,)`.
        fields: The fields with values.
        size: Length of the head, bytes.
        body: Length of the values, bytes.
        crc: crc32c of the values.
    """

    number: int
    time: int
    by: str | None
    declared: Key | None
    ids: IntArray
    fields: tuple[Heading, ...]
    size: int
    body: int
    crc: int


def pack(
    number: int, time: int, by: str | None, ids: IntArray, parts: Sequence[Part], declared: Key | None = None
) -> tuple[bytes, bytes]:
    """Return the head and the values of a record.

    Args:
        number: Number of the record.
        time: The time, microseconds since 1970.
        by: Who wrote the values; None: unknown.
        ids: Ids of the rows. Shape `(n,)`.
        parts: The values by field.
        declared: The field that is declared, by a record without rows.
    """
    described: dict[str, Any] = {"by": by, "fields": [(part.key, part.dtype, part.shape) for part in parts]}
    if declared is not None:
        described["declares"] = declared
    text = json.dumps(described, ensure_ascii=False).encode()
    tables = [_pad(text), ids.astype("<i8").tobytes()]
    tables += [_pad(part.lengths.astype("<u4").tobytes()) for part in parts if part.lengths is not None]
    body = b"".join(_pad(part.values.tobytes()) for part in parts)
    size = _HEAD.size + sum(map(len, tables))
    numbers = number, time, len(body), google_crc32c.value(body), ids.size, len(text), 0
    rest = b"".join((_HEAD.pack(size, 0, *numbers)[_FRONT.size :], *tables))
    return _FRONT.pack(size, google_crc32c.value(rest)) + rest, body


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def read_head(file: File, at: int) -> Head | None:
    """Return the head of the record at an offset; None if no whole head is there."""
    front = file.read(at, _HEAD.size)
    if len(front) < _HEAD.size:
        return None
    size = _FRONT.unpack_from(front)[0]
    if not _HEAD.size <= size < _LONGEST:
        return None
    return parse_head(front + file.read(at + _HEAD.size, size - _HEAD.size))


def parse_head(data: bytes) -> Head | None:
    """Return the head with these bytes; None if they do not have its checksum."""
    size, crc, number, time, body, body_crc, rows, described, _ = _HEAD.unpack_from(data)
    if len(data) < size or google_crc32c.value(data[_FRONT.size : size]) != crc:
        return None
    try:
        about = json.loads(data[_HEAD.size : _HEAD.size + described])
        place = _HEAD.size + described + -described % 8
        ids = np.frombuffer(data, "<i8", rows, place)
        place, start, fields = place + 8 * rows, 0, []
        for key, dtype, shape in about["fields"]:
            if shape is None:
                items = np.frombuffer(data, "<u4", rows, place).astype(np.int64)
                place += 4 * rows + -4 * rows % 8
            else:
                items = np.full(rows, int(np.prod(shape)), np.int64)
            ends = np.cumsum(items) * DTYPES[dtype].itemsize
            starts = start + np.concatenate([np.zeros(min(1, rows), np.int64), ends[:-1]])
            form = None if shape is None else tuple(shape)
            fields.append(Heading(tuple(key), dtype, form, items, starts))
            start += int(ends[-1]) + -int(ends[-1]) % 8 if rows else 0
        declared = tuple(about["declares"]) if "declares" in about else None
        return Head(number, time, about["by"], declared, ids, tuple(fields), size, body, body_crc)
    except INVALID:
        return None  # its checksum is that of other bytes


def parse_own(packed: bytes) -> Head:
    """Return the head that `pack` has just returned."""
    head = parse_head(packed)
    assert head is not None, "its checksum fits"
    return head


def file_path(folder: Path, number: int) -> Path:
    """Return the path of a file of records."""
    return folder / f"{number:08d}"


def find_files(disk: Disk, folder: Path) -> list[int]:
    """Return the numbers of the files of records, ascending."""
    return sorted(int(name) for name in disk.names(folder) if name.isdigit()) if disk.is_dir(folder) else []


def read_heads(disk: Disk, folder: Path) -> Iterator[tuple[int, Head]]:
    """Yield the heads of all whole records in order, each with the address of its record."""
    number = 0
    for name in find_files(disk, folder):
        file = disk.open(file_path(folder, name), write=False)
        try:
            at = 0
            while (head := read_head(file, at)) is not None and number in (0, head.number - 1):
                if at + head.size + head.body > file.size():
                    return
                yield (name << FILE_SHIFT) + at, head
                at, number = at + head.size + head.body, head.number
            if at < FILE_BYTES:
                return
        finally:
            file.close()
