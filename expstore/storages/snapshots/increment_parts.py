"""Parts: the immutable objects of which the state of a store can be built, and the list of them.

Used by `engine/increment.py`, which writes parts, and by `snapshots/rebuild.py`, which reads them. A part has
sections; docs/format.md specifies both. This module does not know what sections mean, and uses no files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from expstore.core.parsing import parsing
from expstore.core.values import IntArray
from expstore.errors import CorruptionError

#: Format of a state.
FORMAT = 1
#: Largest part, bytes before compression; a single row may be longer.
PART_BYTES = 8 << 20
_MAGIC = b"EXPPART1"
#: Magic, crc32c of what follows, codec, length of the content.
_HEAD = struct.Struct("<8sIIQ")
_CHECKED = 12
_PLAIN, _ZSTD = 0, 1
_LENGTH = struct.Struct("<I")
#: Entries of a list that are joined to a page: once there are twice as many of one level.
PAGE_ENTRIES = 256


class Section(NamedTuple):
    """A piece of a part.

    Args:
        kind: What it has.
        about: JSON values that describe it.
        data: Its bytes.
    """

    kind: str
    about: dict[str, Any]
    data: bytes


class Entry(NamedTuple):
    """A part in the list of parts with rows.

    Args:
        level: 0: a part with rows; more: a page, which lists entries of the level below.
        name: Its name.
        first: The first id that it has.
        last: The last id that counts of it: rows after it have other values in later parts.
        size: Its length, bytes; of a page, that of all its parts.
    """

    level: int
    name: str
    first: int
    last: int
    size: int


#: Returns the bytes of a part, given its name.
Fetch = Callable[[str], bytes]


def pack_part(sections: Sequence[Section]) -> bytes:
    """Return the bytes of a part, compressed if that makes it smaller."""
    import pyarrow as pa  # a store without variable-length fields need not load it before

    about = json.dumps([[one.kind, one.about, len(one.data)] for one in sections]).encode()
    content = b"".join([_LENGTH.pack(len(about)), about, *(one.data for one in sections)])
    packed: bytes = pa.Codec("zstd", 1).compress(content, asbytes=True)
    codec, body = (_ZSTD, packed) if len(packed) < len(content) else (_PLAIN, content)
    rest = _HEAD.pack(_MAGIC, 0, codec, len(content))[_CHECKED:]
    crc = google_crc32c.extend(google_crc32c.value(rest), body)
    return b"".join((_MAGIC, _LENGTH.pack(crc), rest, body))


def unpack_part(name: str, data: bytes) -> list[Section]:
    """Return the sections of a part.

    Raises:
        CorruptionError: The bytes are no part, or are damaged.
    """
    import pyarrow as pa

    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEAD.size:
        raise CorruptionError(f"{name} is not a part of a shipped store")
    _, crc, codec, size = _HEAD.unpack_from(data)
    if google_crc32c.value(data[_CHECKED:]) != crc:
        raise CorruptionError(f"{name} is damaged: its checksum does not match")
    with parsing(name):
        body = memoryview(data)[_HEAD.size :]
        content = pa.Codec("zstd").decompress(body, size, asbytes=True) if codec == _ZSTD else bytes(body)
        at = _LENGTH.size + _LENGTH.unpack_from(content)[0]
        sections = []
        for kind, about, length in json.loads(content[_LENGTH.size : at]):
            sections.append(Section(kind, about, content[at : at + length]))
            at += length
    return sections


def pack_ids(ids: IntArray) -> bytes:
    """Return ids, runs of them ascending, as bytes that can be compressed well."""
    return np.diff(ids, prepend=0).astype("<i8").tobytes()


def unpack_ids(data: bytes) -> IntArray:
    """Return the ids that `pack_ids` packed."""
    return np.cumsum(np.frombuffer(data, "<i8"), dtype=np.int64)


def fold(entries: list[Entry], put: Callable[[Section], str]) -> list[Entry]:
    """Return a list of entries of which old ones were moved into pages, so that it stays short.

    Args:
        entries: The entries; those of higher levels come first.
        put: Makes a part of a section, and returns its name.
    """
    level = 0
    while any(one.level >= level for one in entries):
        mine = [one for one in entries if one.level == level]
        if len(mine) >= 2 * PAGE_ENTRIES:
            old = mine[:PAGE_ENTRIES]
            name = put(Section("page", {}, json.dumps(old).encode()))
            span = min(one.first for one in old), max(one.last for one in old)
            page = Entry(level + 1, name, *span, sum(one.size for one in old))
            at = entries.index(old[0])
            entries = [*entries[:at], page, *entries[at + PAGE_ENTRIES :]]
        level += 1
    return entries


def cut(entries: Iterable[Entry], low: int, last: int) -> list[Entry]:
    """Return the entries with ids above `low`, without what they have of ids above `last`."""
    return [one._replace(last=min(one.last, last)) for one in entries if one.last > low and one.first <= last]


def walk(entries: Iterable[Entry], low: int, fetch: Fetch) -> Iterator[Entry]:
    """Yield all entries of a list and of its pages in order; each page comes before its entries.

    Entries whose ids are all up to `low` are left out.

    Raises:
        CorruptionError: A page is damaged.
    """
    for one in entries:
        if one.last <= low:
            continue
        yield one
        if one.level:
            with parsing(one.name):
                (section,) = unpack_part(one.name, fetch(one.name))
                listed = [Entry(*values) for values in json.loads(section.data)]
            yield from walk(cut(listed, low, one.last), low, fetch)
