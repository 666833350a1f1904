"""Read and write TFRecord files, and the `tf.train.Example` messages in them, without TensorFlow.

Source of the format: tensorflow/core/lib/io/record_writer.h (a record is its length as u64, the masked
CRC-32C of these 8 bytes, its data, the masked CRC-32C of the data; all little-endian) and
tensorflow/core/example/{example,feature}.proto. Repeated numbers are read packed and unpacked.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import Array
from expstore.disk.files import ReadingDisk
from expstore.errors import StorageError
from expstore.exchange.base import open_to_read

#: Values of a feature: byte strings, float32 or int64 numbers, or nothing.
Values = list[bytes] | Array | None

#: The features of a message by name.
Example = dict[str, Values]

_READ_BYTES = 1 << 20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, each checked against its checksum.

    Raises:
        NotFoundError: The file does not exist.
        StorageError: A record does not match its checksum, or the file ends in the middle of one.
    """

    def check(data: bytes, stored: bytes, at: int) -> None:
        if _mask_checksum(data) != stored:
            raise StorageError(
                f"{path.name} is damaged: the record at byte {at} does not match its checksum",
                hint="copy the file again",
            )

    with open_to_read(path) as raw, io.BufferedReader(raw, _READ_BYTES) as file:
        at, total = 0, ReadingDisk().size(path)
        while head := file.read(12):
            # The length is used, and memory allocated for it, only after its own checksum matched.
            if len(head) == 12:
                check(head[:8], head[8:], at)
                size = int.from_bytes(head[:8], "little")
                fits = at + 16 + size <= total
                data, tail = (file.read(size), file.read(4)) if fits else (b"", b"")
            if len(head) < 12 or len(data) < size or len(tail) < 4:
                raise StorageError(
                    f"{path.name} ends in the middle of the record at byte {at}", hint="copy the file again"
                )
            check(data, tail, at)
            yield data
            at += 16 + size


def _mask_checksum(data: bytes) -> bytes:
    from google_crc32c import value as crc32c

    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def parse_example(data: bytes) -> Example:
    """Return the features of a message.

    Raises:
        StorageError: The bytes are not a `tf.train.Example`.
    """
    try:
        return _parse(memoryview(data))
    except (IndexError, ValueError) as exc:
        raise StorageError(f"a record is not a tf.train.Example: {exc}") from exc


def _parse(data: memoryview) -> Example:
    found: Example = {}
    for number, features in _messages(data):
        if number != 1:
            continue
        for entry_number, entry in _messages(features):
            if entry_number != 1:
                continue
            name, values = "", None
            for part, content in _messages(entry):
                if part == 1:
                    name = bytes(content).decode()
                elif part == 2:
                    values = _feature(content)
            found[name] = values
    return found


def _feature(data: memoryview) -> Values:
    for kind, content in _messages(data):
        if kind == 1:
            return [bytes(item) for _, item in _messages(content)]
        if kind == 2:
            return _floats(content)
        if kind == 3:
            return _integers(content)
    return None


def _floats(data: memoryview) -> Array:
    pieces = []
    for _, wire, value in _fields(data):
        if wire not in (_FIXED32, _BYTES):
            raise ValueError(f"a list of floats has wire type {wire}")
        pieces.append(np.frombuffer(value, "<f4"))
    return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, "<f4"), *pieces])


def _integers(data: memoryview) -> Array:
    pieces = []
    for _, wire, value in _fields(data):
        if wire == _VARINT:
            pieces.append(np.array([value], np.uint64))
        elif wire == _BYTES:
            pieces.append(_varints(value))
        else:
            raise ValueError(f"a list of integers has wire type {wire}")
    joined = pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.uint64), *pieces])
    return joined.view(np.int64)


def _varints(data: memoryview) -> Array:
    """Decode packed varints to uint64: 7 bits per byte, lowest first; the high bit marks more bytes."""
    coded = np.frombuffer(data, np.uint8)
    if not coded.size:
        return np.zeros(0, np.uint64)
    ends = np.flatnonzero(coded < 128)
    if not ends.size or ends[-1] != coded.size - 1:
        raise ValueError("a varint is cut off")
    if ends.size == coded.size:
        return coded.astype(np.uint64)
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a varint has more than 10 bytes")
    places = np.arange(coded.size) - np.repeat(starts, lengths)
    found: Array = np.add.reduceat((coded & 127).astype(np.uint64) << (7 * places).astype(np.uint64), starts)
    return found


def _messages(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the fields of a message that are byte strings or messages."""
    for number, wire, value in _fields(data):
        if wire == _BYTES:
            yield number, value


def _fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield the fields of a message: number, wire type, and an int or bytes."""
    at, size = 0, len(data)
    while at < size:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, wire, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"unknown wire type {wire}")
        if at + length > size:
            raise ValueError("a field is cut off")
        yield key >> 3, wire, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
        if shift > 63:
            raise ValueError("a varint has more than 10 bytes")


# -- writing ---------------------------------------------------------------------------------------------


def encode_records(records: Iterable[bytes]) -> bytes:
    """Return the content of a file of records."""
    parts: list[bytes] = []
    for data in records:
        size = struct.pack("<Q", len(data))
        parts += [size, _mask_checksum(size), data, _mask_checksum(data)]
    return b"".join(parts)


def encode_example(features: Mapping[str, Values]) -> bytes:
    """Return a `tf.train.Example`."""
    entries = (
        _encode_field(1, name.encode()) + _encode_field(2, _encode_feature(values))
        for name, values in features.items()
    )
    return _encode_field(1, b"".join(_encode_field(1, entry) for entry in entries))


def _encode_feature(values: Values) -> bytes:
    if isinstance(values, list):
        return _encode_field(1, b"".join(_encode_field(1, value) for value in values))
    flat = np.asarray(values).reshape(-1)
    if flat.dtype.kind == "f":
        return _encode_field(2, _encode_field(1, flat.astype("<f4").tobytes()))
    return _encode_field(3, _encode_field(1, b"".join(map(_encode_varint, flat.astype(np.uint64).tolist()))))


def _encode_field(number: int, data: bytes) -> bytes:
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(data)) + data


def _encode_varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _encode_varint(number >> 7)
