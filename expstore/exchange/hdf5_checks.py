"""Check an HDF5 file before anything in it is read: it reads no other file, and its sizes fit its bytes.

HDF5 follows external links, external storage and virtual datasets to any file that the process may read, and
a dataset of a few bytes may claim any number of rows. Used by `reading_hdf5`, through which all readers open
files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from expstore.disk.files import ReadingDisk
from expstore.errors import SchemaError, StorageError
from expstore.exchange.base import import_library
from expstore.exchange.claimed_sizes import check_size


def check_contents(file: Any, path: Path) -> None:
    """Check all links and datasets of a file; links to other files are not followed.

    Args:
        file: The h5py.File.
        path: Its path.

    Raises:
        SchemaError: An object is, or refers to, something in another file; or links lead around in circles.
        StorageError: The file is damaged, or a dataset claims more bytes than it can have.
    """
    h5py = import_library("h5py")
    open_object = h5py.h5o.open
    groups, size = {_address(h5py, file.id)}, ReadingDisk().size(path)
    aliases: list[tuple[bytes, Any]] = []
    left: list[tuple[bytes, Any]] = [(b"", file.id)]
    while left:
        above, group = left.pop()
        for name, kind in _read_links(group, above):
            place = above + b"/" + name
            if kind not in (h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT):
                raise _refuse(path, place, "is a link to another file")
            try:
                found = open_object(group, name)
            except (KeyError, RuntimeError, OSError) as exc:
                if kind == h5py.h5l.TYPE_SOFT:  # a link to nothing
                    continue
                raise _unreadable(place, exc) from exc
            if isinstance(found, h5py.h5d.DatasetID):
                _check_dataset(h5py, found, path, place, size)
            elif isinstance(found, h5py.h5g.GroupID) and kind == h5py.h5l.TYPE_SOFT:
                aliases.append((place, found))
            elif isinstance(found, h5py.h5g.GroupID):
                if (address := _address(h5py, found)) in groups:
                    raise SchemaError(
                        f"{_text(place)!r} in {path} is a second name of a group",
                        hint="copy the file with h5repack",
                    )
                groups.add(address)
                left.append((place, found))
    _check_aliases(h5py, file, path, aliases)


def _read_links(group: Any, above: bytes) -> list[tuple[bytes, int]]:
    """Return the names in a group and the kinds of their links."""
    name = b""
    try:
        found = []
        for name in group:
            found.append((name, group.links.get_info(name).type))
    except (KeyError, RuntimeError, OSError) as exc:
        raise _unreadable(above + b"/" + name, exc) from exc
    return found


def _check_aliases(h5py: Any, file: Any, path: Path, aliases: list[tuple[bytes, Any]]) -> None:
    """Refuse a link to a group in which there are links to groups: it might be a circle."""
    with_links = {_address(h5py, file.id)} if aliases else set()
    open_object = h5py.h5o.open
    for name, _ in aliases:
        parts = name.split(b"/")[:-1]
        for count in range(2, len(parts) + 1):
            with_links.add(_address(h5py, open_object(file.id, b"/".join(parts[:count]))))
    for name, target in aliases:
        if _address(h5py, target) in with_links:
            raise SchemaError(
                f"{_text(name)!r} in {path} is a link to a group that contains links to groups",
                hint="replace the link by a copy of the group",
            )


def _check_dataset(h5py: Any, dataset: Any, path: Path, name: bytes, size: int) -> None:
    made = dataset.get_create_plist()
    if made.get_external_count():
        raise _refuse(path, name, f"has its values in another file, {_text(made.get_external(0)[0])!r},")
    if made.get_layout() == h5py.h5d.VIRTUAL:
        raise _refuse(path, name, "is a virtual dataset, which may read other files")
    shape, item = dataset.shape or (), dataset.get_type().get_size()
    what = f"{_text(name)!r} in {path}"
    stored = min(size, dataset.get_storage_size())
    check_size(what, f"shape {list(shape)}", claimed=math.prod(shape) * item, stored=stored)
    if shape and made.get_layout() == h5py.h5d.CHUNKED:
        chunk = made.get_chunk()
        check_size(what, f"chunks of {list(chunk)}", claimed=math.prod(chunk) * item, stored=stored)


def _address(h5py: Any, object_: Any) -> tuple[int, int]:
    about = h5py.h5o.get_info(object_)
    return about.fileno, about.addr


def _refuse(path: Path, name: bytes, what: str) -> SchemaError:
    return SchemaError(
        f"{_text(name)!r} in {path} {what} and is not read",
        kind="outside",
        hint="if you trust the file, copy it with `h5repack` or h5py into one file",
    )


def _unreadable(name: bytes, exc: Exception) -> StorageError:
    return StorageError(f"cannot read {_text(name)!r} in the HDF5 file: {exc}")


def _text(name: bytes | str) -> str:
    return name if isinstance(name, str) else name.decode(errors="replace")
