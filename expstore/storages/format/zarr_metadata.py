"""Zarr metadata and shard indexes of a store's columns, written and read without zarr-python.

Used by `expstore.storages.columns`. Only small JSON files are written and read here, no rows.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.parsing import INVALID
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, StorageError
from expstore.schema.schema import Field
from expstore.storages.format.chunk_encoding import Packing

#: Rows of an inner chunk; a shard has a multiple of them.
CHUNK_ROWS = 4096
#: Separator of the numbers in a shard's name, in a store.
SEPARATOR = "/"


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array is split into shards.

    Args:
        rows: Rows per shard.
        length: Length of the array.
        separator: Separator of the numbers in a shard's name.
    """

    rows: int
    length: int
    separator: str


def make_metadata(
    fields: Sequence[Field],
    rows: Sequence[int],
    slots: int | None,
    attributes: dict[str, Any],
    *,
    separator: str = SEPARATOR,
    packings: Sequence[Packing | None] = (),
) -> dict[str, bytes]:
    """Return the files of the Zarr v3 group: relative name -> bytes.

    Args:
        fields: The field of each array.
        rows: Rows per shard of each array.
        slots: Length of the arrays; None: one shard; `grow_shape` increases it.
        attributes: Attributes of the group.
        separator: Separator of the numbers in a shard's name; packed arrays always use ".".
        packings: How each array is packed; None for an array that is not packed.
    """
    group = {"zarr_format": 3, "node_type": "group"}
    made = {"zarr.json": _to_json({"attributes": attributes} | group)}
    known: dict[tuple[Any, ...], bytes] = {}  # columns alike, of which a wide store has many
    for entry, shard, packing in zip(fields, rows, packings or [None] * len(fields), strict=True):
        alike = (entry.dtype, entry.shape, shard, packing and (packing, entry.key))
        if alike not in known:
            known[alike] = _to_json(_describe_array(entry, shard, slots, separator, packing))
        made["/".join((*entry.key, "zarr.json"))] = known[alike]
        for depth in range(1, len(entry.key)):
            made.setdefault("/".join((*entry.key[:depth], "zarr.json")), _to_json({"attributes": {}} | group))
    return made


def _to_json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, indent=2).encode()


def _describe_array(
    entry: Field, shard: int, slots: int | None, separator: str, packing: Packing | None
) -> dict[str, Any]:
    """Return the zarr.json of a column as zarr-python writes it, which takes a hundred times as long."""
    dtype = entry.numpy_dtype
    to_bytes: dict[str, Any] = {"name": "bytes"}
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    zero: Any = np.zeros((), dtype).item()
    length, chunk = (shard, CHUNK_ROWS) if packing is None else (packing.shard, packing.rows)
    return {
        "shape": [slots or length, *entry.shape],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [length, *entry.shape]}},
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": separator if packing is None else "."},
        },
        "fill_value": [zero.real, zero.imag] if dtype.kind == "c" else zero,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [chunk, *entry.shape],
                    "codecs": [
                        *([] if packing is None or packing.parts == 1 else [_swap_axes(entry)]),
                        to_bytes if dtype.itemsize == 1 else little,
                        *([] if packing is None else packing.zarr_codecs),
                    ],
                    "index_codecs": [little, {"name": "crc32c"}],
                    "index_location": "end",
                },
            }
        ],
        "attributes": {"expstore": _build_attributes(entry, packing)},
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _swap_axes(entry: Field) -> dict[str, Any]:
    """Return the codec that stores the first images of all stacks first."""
    return {"name": "transpose", "configuration": {"order": [1, 0, *range(2, 1 + len(entry.shape))]}}


def _build_attributes(entry: Field, packing: Packing | None) -> dict[str, Any]:
    """Return the attributes of an array that Zarr itself does not define."""
    if packing is None:
        return {"dtype": entry.dtype}
    # Files that other readers ignore: the shard that is being filled, and the rows of its last chunk.
    others = {"filling": "open.<shard>.<turn>", "rest": "partial"}
    about = {"dtype": entry.dtype, "layout": "packed", "beside": others}
    if packing.shares:
        # Rows, or images of stacks, that other readers see as zeros: the tables say in which earlier rows of
        # that array their bytes are.
        partner = "/".join(entry.key if packing.within else ("next", *entry.key))
        about["shared"] = {"with": partner, "table_bytes": packing.table_bytes}
    return about


#: Keys that Zarr may leave out if they are empty.
_OPTIONAL = ("attributes", "dimension_names", "storage_transformers")


def parse_metadata(data: bytes) -> Any:
    """Parse a zarr.json, and omit empty entries.

    Raises:
        ValueError: The data is not JSON.
        RecursionError: It has too many lists in lists.
    """
    found = json.loads(data)
    if isinstance(found, dict):
        for name in _OPTIONAL:
            if name in found and not found[name]:
                del found[name]
    return found


def check_metadata(disk: Disk, folder: Path, fields: Sequence[Field], rows: Sequence[int]) -> None:
    """Check that each zarr.json exists and describes its column, as rows and other programs require.

    Args:
        disk: Access to files.
        folder: The group's folder.
        fields: The field of each array.
        rows: Rows per shard of each array.

    Raises:
        CorruptionError: A zarr.json is missing or describes something else.
    """
    for entry, shard in zip(fields, rows, strict=True):
        path = folder.joinpath(*entry.key, "zarr.json")
        if (
            read_packing(disk, path.parent, entry) is None
            and read_layout(disk, path.parent, entry).rows != shard
        ):
            raise CorruptionError(f"{path} does not describe a column in shards of {shard} rows")
    groups = {parent for entry in fields for parent in Path(*entry.key).parents}
    for group in sorted(groups):
        path = folder / group / "zarr.json"
        try:
            fits = _read_json(disk, path)["node_type"] == "group"
        except INVALID as exc:
            raise CorruptionError(f"{path} cannot be read: {exc}") from exc
        if not fits:
            raise CorruptionError(f"{path} does not describe a group")


def _read_json(disk: Disk, path: Path) -> Any:
    """Parse a JSON file; raise CorruptionError if it is missing, StorageError if the disk fails."""
    try:
        return json.loads(disk.read_whole(path))
    except StorageError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise
        raise CorruptionError(f"{path} cannot be read: {exc}") from exc


def read_packing(disk: Disk, folder: Path, entry: Field) -> Packing | None:
    """Return how an array is packed; None if it is not packed.

    Raises:
        CorruptionError: zarr.json cannot be read, or does not describe a column of this field.
    """
    path = folder / "zarr.json"
    try:
        data = _read_json(disk, path)
        about = data["attributes"].get("expstore", {})
        if about.get("layout") != "packed":
            return None
        shard, *rest = data["chunk_grid"]["configuration"]["chunk_shape"]
        inner = data["codecs"][0]["configuration"]
        codecs, shared = inner["codecs"], about.get("shared")
        packing = Packing.of(
            codecs,
            rows=int(inner["chunk_shape"][0]),
            shard=int(shard),
            shares=shared is not None,
            parts=entry.shape[0] if codecs[0]["name"] == "transpose" else 1,
            within=shared is not None and shared["with"] == "/".join(entry.key),
        )
        fits = tuple(rest) == entry.shape and data["data_type"] == entry.numpy_dtype.name
    except INVALID as exc:
        raise CorruptionError(f"{path} cannot be read: {exc}") from exc
    if not fits:
        raise CorruptionError(f"{path} does not describe a column of {entry}")
    return packing


def read_layout(disk: Disk, folder: Path, entry: Field) -> Layout:
    """Return how an array is split into shards.

    Args:
        disk: Access to files.
        folder: The array's folder.
        entry: The field of the array.

    Raises:
        CorruptionError: zarr.json is missing or does not describe a column of this field.
    """
    path = folder / "zarr.json"
    try:
        data = _read_json(disk, path)
        rows, *rest = data["chunk_grid"]["configuration"]["chunk_shape"]
        keys = data["chunk_key_encoding"]
        layout = Layout(int(rows), int(data["shape"][0]), keys["configuration"]["separator"])
        fits = data["node_type"] == "array" and tuple(rest) == entry.shape and rows % CHUNK_ROWS == 0
        fits = fits and keys["name"] == "default" and layout.separator in ("/", ".")
        fits = fits and data["data_type"] == entry.numpy_dtype.name and data["shape"][1:] == rest
    except INVALID as exc:
        raise CorruptionError(f"{path} cannot be read: {exc}") from exc
    if not fits or rows < 1:
        raise CorruptionError(f"{path} does not describe a column of {entry}")
    return layout


def shard_name(number: int, dims: int, separator: str) -> str:
    """Return the path of a shard in its array's folder.

    >>> from expstore.storages.format.zarr_metadata import shard_name
    >>> shard_name(3, 1, "/"), shard_name(3, 0, ".")
    ('c/3/0', 'c.3')
    """
    return separator.join(["c", str(number), *["0"] * dims])


def grow_shape(disk: Disk, folder: Path, rows: int) -> None:
    """Extend an array to at least `rows` rows."""
    path = folder / "zarr.json"
    data = json.loads(disk.read_whole(path))
    if data["shape"][0] < rows:
        data["shape"][0] = rows
        disk.write_whole(path, json.dumps(data, indent=1).encode())


@lru_cache(maxsize=64)
def shard_footer(rows: int, row_bytes: int) -> bytes:
    """Return the chunk index at the end of a shard, which is known in advance: chunks in their order."""
    chunk = CHUNK_ROWS * row_bytes
    index = np.empty((rows // CHUNK_ROWS, 2), "<u8")
    index[:, 0] = np.arange(index.shape[0]) * chunk
    index[:, 1] = chunk
    data = index.tobytes()
    crc: int = google_crc32c.value(data)
    return data + crc.to_bytes(4, "little")
