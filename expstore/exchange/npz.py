"""Export rows to an NPZ file for NumPy, with one array per field and D4RL's names, and import such files.

Used by `expstore export`, `expstore import` and programs. Arrays are written and read side by side, one piece
of rows at a time; nothing is ever unpickled. Sizes are checked before memory is allocated for them.
"""

from __future__ import annotations

import io
import math
import tokenize
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.parsing import reading
from expstore.core.values import Array, Key
from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import SchemaError, StorageError
from expstore.exchange.base import (
    DiskFile,
    Exported,
    Imported,
    Progress,
    Tell,
    check_size,
    ignore_notes,
    no_progress,
    open_to_read,
)
from expstore.exchange.fill import Target
from expstore.exchange.flat_files import ABOUT, import_flat, plan_columns, write_flat
from expstore.exchange.foreign_rows import (
    Column,
    Lanes,
    SplitEnvironments,
    describe_lanes,
    find_lanes,
    has_environments,
    split_name,
)
from expstore.exchange.rows import Episodes, Exchanged, open_export

#: Number of bytes that are copied at a time.
_COPIED = 1 << 20


def export_npz(
    source: Exchanged,
    target: str | Path,
    *,
    fields: Sequence[str] | None = None,
    episodes: Episodes = None,
    version: int | str | None = None,
    progress: Progress = no_progress,
    disk: Disk | None = None,
) -> Exported:
    """Write the readable rows to an NPZ file with D4RL's names, ordered by episode.

    The arrays are `observations, actions, rewards, terminals, timeouts, next_observations`; nested names are
    joined by slashes, as in `observations/pixels`. Rewards and flags have the shape `(rows,)`. `terminals`
    and `timeouts` are written even if the store has no such fields. bfloat16 is written as float32.
    `_episode` is the episode of each row. The file is complete, or does not exist.

    Args:
        source: A buffer, or the path of a store, a snapshot or a folder of snapshots.
        target: The file to create; it must not exist yet.
        fields: Names of the fields to export; None: all.
        episodes: Export only these episodes: ids, or an SQL condition over the relation `episodes`.
        version: Number or tag of a snapshot, if `source` is a path.
        progress: Called with the bytes done and the bytes in total.
        disk: Access to the file system.

    Raises:
        StateError: The target exists, or would be inside a store; or the store has no fields yet.
        NotFoundError: The target's parent folder does not exist; or no rows of these episodes are left.
        SchemaError: A field does not exist, holds objects or variable-length rows, or two fields would have
            the same name.
        LockedError: Another export writes to this target.
        StorageError: The disk failed or is full; nothing of the export is left.

    Example:
        >>> from expstore.exchange import export_npz
        >>> done = export_npz(rb, "rows.npz")
        >>> np.load("rows.npz")["observations"].shape == (done.rows, 4)
        True
    """
    with open_export(
        "npz", source, target, fields=fields, episodes=episodes, version=version, disk=disk
    ) as export:
        columns = plan_columns(export.rows)
        with export.build_target(single=True) as temporary, ExitStack() as stack:
            writer = _Writer(export.disk, temporary, temporary / export.target.name, columns, stack)
            written = write_flat(export.rows, columns, writer, progress)
    return export.summarize(written)


class _Writer:
    """Write each array to its own file, and finally combine the files.

    Args:
        disk: Access to the file system.
        folder: Folder for the files of the arrays.
        target: The NPZ file.
        columns: The arrays.
        stack: Closes files.
    """

    def __init__(
        self, disk: Disk, folder: Path, target: Path, columns: Sequence[Column], stack: ExitStack
    ) -> None:
        self._disk, self._target, self._columns = disk, target, columns
        self._rows = 0
        self._parts = [folder / f"{number}.part" for number in range(len(columns))]
        self._files = [stack.enter_context(DiskFile(disk, path, write=True)) for path in self._parts]

    def add(self, columns: Sequence[Array]) -> None:
        """Append rows."""
        for file, values in zip(self._files, columns, strict=True):
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        self._rows += len(columns[0])

    def finish(self, about: str) -> None:
        """Write the arrays into one NPZ file."""
        for part in self._files:
            part.close()
        with (
            DiskFile(self._disk, self._target, write=True) as whole,
            zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        ):
            for column, path in zip(self._columns, self._parts, strict=True):
                with (
                    file.open("/".join(column.path) + ".npy", "w", force_zip64=True) as out,
                    DiskFile(self._disk, path) as part,
                ):
                    out.write(_header(column, self._rows))
                    while data := part.read(_COPIED):
                        out.write(data)
                self._disk.unlink(path)
            with file.open(ABOUT + ".npy", "w") as out:
                np.lib.format.write_array(out, np.array(about), allow_pickle=False)


def _header(column: Column, rows: int) -> bytes:
    head = io.BytesIO()
    facts = {"descr": column.dtype.str, "fortran_order": False, "shape": (rows, *column.shape)}
    np.lib.format.write_array_header_1_0(head, facts)
    return head.getvalue()


def import_npz(
    source: str | Path,
    target: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    capacity: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Imported:
    """Create a store from an NPZ file with one row per transition.

    Usual names become fields: `obs` and `observations` observation, `act` and `actions` action, `rew` and
    `rewards` next.reward, `terminals` and `terminated` next.terminated, `timeouts` and `truncated`
    next.truncated, `done` next.done, `next_obs` and `obs2` next.observation, `eps_id` episode;
    `expstore.exchange.foreign_rows` has all of them. Other names do not change. Fields of an exported store
    get their own names again, unless `names` is given.

    An episode begins at another `episode`; after an end flag (0 or 1 of any dtype); where a column `t` or
    `step` begins again; and, without ids of episodes, where the next observation of a row is not the
    observation of the following row. A ring buffer of Spinning Up's form (`ptr`, `size`) is read from its
    oldest row. The store is complete, or does not exist.

    Args:
        source: The file.
        target: The store's folder, which must not exist yet.
        names: Mapping from names, or groups, in the file to fields, as in `{"obs_next": "next.observation"}`;
            a name that is mapped to "" is left out.
        capacity: Maximum number of readable rows; None: that of the exported store, otherwise unbounded.
        progress: Called with the rows done and the rows in total.
        tell: Called with descriptions of what is left out or changed, before any row is written.
        disk: Access to the file system.

    Raises:
        NotFoundError: The file, or the parent folder of the store, does not exist.
        StorageError: The file cannot be read; or the disk failed or is full. Nothing is left behind.
        SchemaError: Arrays have different lengths, or an array cannot be a field.
        StateError: The target exists, or would be inside a store.
        LockedError: Another process creates the store at the same time.

    Example:
        >>> from expstore.exchange import export_npz, import_npz
        >>> done = export_npz(rb, "rows.npz")
        >>> import_npz("rows.npz", "again.exp").rows
        200
    """
    path, target = local_path(source), local_path(target)
    with ExitStack() as stack:
        with reading_npz(path):
            reader = _Reader(path, stack)
        split = not reader.about and has_environments(reader.scalars, reader.columns)
        return import_flat(
            SplitEnvironments(reader) if split else reader,
            names or {},
            Target(target, capacity, progress, tell, disk or Disk(), path, [path]),
        )


class _Reader:
    """Read the arrays of a file side by side.

    Args:
        path: The file.
        stack: Closes files.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path, self._stack = path, stack
        self._file: zipfile.ZipFile = stack.enter_context(
            zipfile.ZipFile(stack.enter_context(open_to_read(path)))
        )
        check_archive(self._file, path)
        self.about = ""
        self.notes: list[str] = []
        self.columns: list[Column] = []
        self.lengths: list[int] = []
        self._names: dict[Key, str] = {}
        self.scalars: dict[str, float] = {}
        single: list[str] = []
        exported = ABOUT + ".npy" in self._file.namelist()
        for name in self._file.namelist():
            plain = name.removesuffix(".npy")
            if name == plain:
                raise SchemaError(f"{path} holds {name!r}, which is not an array")
            shape, kind, part = self._begin(name)
            if plain == ABOUT and not shape and kind.kind == "U":
                self.about = str(np.frombuffer(part.read(), kind).reshape(shape)[()])
            elif not shape:
                if kind.kind in "biuf":
                    self.scalars[plain] = float(np.frombuffer(part.read(kind.itemsize), kind)[0])
                single.append(plain)
            else:
                # Other programs also join groups and names by dots; ours may be part of a name.
                key = tuple(plain.split("/"))
                key = key if exported else split_name(key)
                self.columns.append(Column(key, kind, shape[1:]))
                self.lengths.append(shape[0])
                self._names[key] = name
        if single and not any(column.dtype.kind in "biuf" for column in self.columns):
            raise SchemaError(
                f"{path} has no array of numbers with a row per step, and pickled objects are not read",
                hint="save the arrays themselves: numpy.savez(path, **arrays)",
            )
        rows = max(self.lengths, default=0)
        self.lanes: Lanes = [] if self.about else find_lanes(self.scalars, rows)
        self.notes += describe_lanes(self.lanes, single)
        self._parts: dict[Key, tuple[Any, int]] = {}  # a reader of each array, and its next row

    def _begin(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any], Any]:
        """Open an array; return its shape, its dtype and a reader of its values."""
        part = self._stack.enter_context(self._file.open(name))
        size = self._file.getinfo(name).file_size
        shape, fortran, kind = read_header(part, size, f"{name} in {self._path}")
        if fortran and len(shape) > 1:
            raise SchemaError(
                f"{name!r} is stored column by column", hint="save it in C order: numpy.ascontiguousarray"
            )
        return shape, kind, part

    def read(self, wanted: Sequence[Column], first: int, count: int) -> list[Array]:
        """Return rows, from row `first` of the file."""
        with reading_npz(self._path):
            return [self._read(column, first, count) for column in wanted]

    def _read(self, column: Column, first: int, count: int) -> Array:
        if column.dtype.hasobject:
            raise SchemaError(
                f"{column.name!r} holds Python objects, which are never unpickled",
                hint=f"leave it out with --map {column.name}=",
            )
        part, row = self._parts.get(column.path, (None, 0))
        if part is None or first < row:
            part, row = self._begin(self._names[column.path])[2], 0
        self._parts[column.path] = part, first + count
        skipped = (first - row) * column.row_bytes
        while skipped > 0:
            skipped -= len(self._take(part, column, min(skipped, _COPIED)))
        data = self._take(part, column, count * column.row_bytes)
        return np.frombuffer(data, column.dtype).reshape(count, *column.shape)

    def _take(self, part: Any, column: Column, size: int) -> bytes:
        data: bytes = part.read(size)
        if len(data) != size:
            raise StorageError(f"cannot read {column.name} in {self._path}: it ends early")
        return data


# -- members of an archive ----------------------------------------------------------------------------

#: Other compressions have no bound on what a byte becomes; NumPy writes these.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def check_archive(file: zipfile.ZipFile, path: Path) -> None:
    """Check the sizes that the directory of a zip file claims.

    Raises:
        SchemaError: A member is compressed in a way that NumPy does not write.
        StorageError: A member claims more bytes than it can have.
    """
    left = ReadingDisk().size(path)
    for member in file.infolist():
        what = f"{member.filename!r} in {path}"
        if member.compress_type not in _METHODS:
            raise SchemaError(f"{what} has compression {member.compress_type}; only deflate is read")
        check_size(what, "uncompressed", claimed=member.file_size, stored=min(left, member.compress_size))
        left -= member.compress_size  # members that overlap would be read several times
        if left < 0:
            raise StorageError(f"{path} is damaged: its members have more bytes than the file")


def read_header(part: Any, size: int, what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array.

    Args:
        part: The open member, at its beginning.
        size: Its uncompressed length in bytes.
        what: Its name, for messages.

    Returns:
        Shape, whether it is in Fortran order, and dtype.

    Raises:
        StorageError: The header is damaged, or its shape needs more bytes than the member has. The size of
            objects, which are pickled, is not checked.
    """
    with reading(what, tokenize.TokenError, zipfile.BadZipFile):
        version = np.lib.format.read_magic(part)
        read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(part)
        is_valid = all(type(side) is int and side >= 0 for side in shape)
    needed = math.prod(shape) * (0 if dtype.hasobject else dtype.itemsize) if is_valid else -1
    if not 0 <= needed <= size - part.tell():
        raise StorageError(
            f"{what} claims the shape {list(shape)} of {dtype}, but has {size - part.tell():,} bytes"
        )
    return shape, fortran, dtype


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of a file.

    Raises:
        StorageError: The file is not an NPZ file, is damaged, or claims more bytes than it can have.
        SchemaError: An array holds objects, or a member is no array.
    """
    found: dict[str, Array] = {}
    with open_to_read(path) as raw, reading_npz(path), zipfile.ZipFile(raw) as file:
        check_archive(file, path)
        for member in file.infolist():
            with file.open(member) as part:
                what = f"{member.filename!r} in {path}"
                shape, fortran, dtype = read_header(part, member.file_size, what)
                if dtype.hasobject:
                    raise SchemaError(f"{what} holds Python objects, which are never unpickled")
                values = np.frombuffer(bytearray(part.read(math.prod(shape) * dtype.itemsize)), dtype)
                order = values.reshape(shape[::-1]).T if fortran else values.reshape(shape)
                found[member.filename.removesuffix(".npy")] = order
    return found


def reading_npz(path: Path) -> AbstractContextManager[None]:
    """Convert what zipfile raises for damaged files, unknown compressions and encryptions to StorageError."""
    return reading(f"{path} as .npz", zipfile.BadZipFile, zipfile.LargeZipFile, OSError, RuntimeError)
