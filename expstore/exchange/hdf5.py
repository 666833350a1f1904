"""Export rows to an HDF5 file with one dataset per field and D4RL's names, and import such files.

Used by `expstore export`, `expstore import` and programs. It needs h5py, the extra `h5`. Rows are written and
read one piece at a time.

Before anything in a file is read, `check_contents` checks that it reads no other file and that its sizes fit
its bytes: HDF5 follows external links, external storage and virtual datasets to any file that the process may
read, and a dataset of a few bytes may claim any number of rows. All readers open files by `reading_hdf5`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
    import_library,
    no_progress,
    open_to_read,
)
from expstore.exchange.fill import Target
from expstore.exchange.flat_files import ABOUT, import_flat, plan_columns, write_flat
from expstore.exchange.foreign_rows import Column, Lanes, describe_lanes, find_lanes, tianshou_lanes
from expstore.exchange.rows import Episodes, Exchanged, open_export

#: Approximate size of a packed chunk in bytes.
CHUNK_BYTES = 256 << 10
#: Name of the group with facts about the file in files of other programs; it contains no rows.
_METADATA = "metadata"
#: Most environments of a buffer of Tianshou.
_MANY_RINGS = 1 << 20


def export_hdf5(
    source: Exchanged,
    target: str | Path,
    *,
    fields: Sequence[str] | None = None,
    episodes: Episodes = None,
    version: int | str | None = None,
    progress: Progress = no_progress,
    disk: Disk | None = None,
) -> Exported:
    """Write the readable rows to an HDF5 file with D4RL's names, ordered by episode.

    The datasets have the names, dtypes and shapes of the arrays of `export_npz`; nested names are groups:
    `observations/pixels`.

    Args:
        source: A buffer, or the path of a store, a snapshot or a folder of snapshots.
        target: The file to create; it must not exist yet.
        fields: Names of the fields to export; None: all.
        episodes: Export only these episodes: ids, or an SQL condition over the relation `episodes`.
        version: Number or tag of a snapshot, if `source` is a path.
        progress: Called with the bytes done and the bytes in total.
        disk: Access to the file system.

    Raises:
        MissingExtraError: h5py is not installed.
        StateError: The target exists, or would be inside a store; or the store has no fields yet.
        NotFoundError: The target's parent folder does not exist; or no rows of these episodes are left.
        SchemaError: A field does not exist, holds objects or variable-length rows, or two fields would have
            the same name.
        LockedError: Another export writes to this target.
        StorageError: The disk failed or is full; nothing of the export is left.

    Example:
        >>> import h5py
        >>> from expstore.exchange import export_hdf5
        >>> done = export_hdf5(rb, "rows.hdf5")
        >>> h5py.File("rows.hdf5")["observations"].shape == (done.rows, 4)
        True
    """
    h5py = import_library("h5py")
    with open_export(
        "hdf5", source, target, fields=fields, episodes=episodes, version=version, disk=disk
    ) as export:
        columns = plan_columns(export.rows)
        with (
            export.build_target(single=True) as temporary,
            DiskFile(export.disk, temporary / export.target.name, write=True) as raw,
            h5py.File(raw, "w", libver="v110") as file,
        ):
            written = write_flat(export.rows, columns, _Writer(file, columns), progress)
    return export.summarize(written)


class _Writer:
    """Write datasets that grow.

    Args:
        file: The h5py file.
        columns: The columns to write.
    """

    def __init__(self, file: Any, columns: Sequence[Column]) -> None:
        self._file, self._rows = file, 0
        self._sets = [
            file.create_dataset(
                "/".join(column.path),
                shape=(0, *column.shape),
                maxshape=(None, *column.shape),
                chunks=(max(1, CHUNK_BYTES // max(1, column.row_bytes)), *column.shape),
                dtype=column.dtype,
                compression="gzip",
                compression_opts=1,
                shuffle=column.dtype.itemsize > 1,
            )
            for column in columns
        ]

    def add(self, columns: Sequence[Array]) -> None:
        """Append rows."""
        stop = self._rows + len(columns[0])
        for into, values in zip(self._sets, columns, strict=True):
            into.resize(stop, axis=0)
            into[self._rows : stop] = values
        self._rows = stop

    def finish(self, about: str) -> None:
        """Store the description of the fields."""
        self._file.attrs[ABOUT] = about


def write_hdf5(
    path: Path, values: Mapping[str, Any], attributes: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Write an HDF5 file.

    Args:
        path: The file; its folder must exist.
        values: Arrays, numbers and texts by path.
        attributes: Attributes by the path of their group, which must contain values.

    Raises:
        ModuleNotFoundError: h5py is not installed.
    """
    h5py = import_library("h5py")
    with DiskFile(Disk(), path, write=True) as raw, h5py.File(raw, "w") as file:
        for name, value in values.items():
            file[name] = value
        for name, own in (attributes or {}).items():
            file[name].attrs.update(own)


def import_hdf5(
    source: str | Path,
    target: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    capacity: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Imported:
    """Create a store from an HDF5 file with one row per transition, such as D4RL's.

    Names become fields, and episodes end, as described for `import_npz`. In files of other programs, the
    group `metadata` and single values describe the file and are left out. A file with one group per episode
    is rejected.

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
        MissingExtraError: h5py is not installed.
        NotFoundError: The file, or the parent folder of the store, does not exist.
        StorageError: The file cannot be read; or the disk failed or is full. Nothing is left behind.
        SchemaError: Datasets have different lengths, a dataset cannot be a field, or the file has a group per
            episode.
        StateError: The target exists, or would be inside a store.
        LockedError: Another process creates the store at the same time.

    Example:
        >>> from expstore.datasets import make_sample
        >>> from expstore.exchange import import_hdf5
        >>> done = import_hdf5(make_sample("d4rl", "hopper_medium-v2.hdf5"), "hopper.exp")
    """
    path, target = local_path(source), local_path(target)
    with _open_hdf5(path) as file:
        with _parsing(path):
            reader = _Reader(file, path)
        return import_flat(
            reader,
            names or {},
            Target(target, capacity, progress, tell, disk or Disk(), path, [path]),
        )


@contextmanager
def _open_hdf5(path: Path) -> Iterator[Any]:
    """Open an HDF5 file for reading; yield the h5py.File. Errors of the block are raised unchanged."""
    h5py = import_library("h5py")
    with open_to_read(path) as raw, ExitStack() as stack:
        with _parsing(path):
            file = stack.enter_context(h5py.File(raw, "r"))
            check_contents(file, path)
        yield file


def _parsing(path: Path) -> AbstractContextManager[None]:
    """Convert errors of h5py to StorageError."""
    return reading(f"{path} as HDF5", OSError, RuntimeError)


@contextmanager
def reading_hdf5(path: Path) -> Iterator[Any]:
    """Open an HDF5 file for reading; yield the h5py.File. The block only reads: its errors are the file's.

    Raises:
        NotFoundError: The file does not exist.
        SchemaError: Something in it is in another file (kind "outside").
        StorageError: It is not an HDF5 file, is damaged, or claims more bytes than it can have.
    """
    with _open_hdf5(path) as file, _parsing(path):
        yield file


class _Reader:
    """Read the datasets of a file side by side.

    Args:
        file: The h5py file.
        path: Its path, for error messages.
    """

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path = file, path
        self.about = str(file.attrs.get(ABOUT, ""))
        self.notes: list[str] = []
        self.columns: list[Column] = []
        self.lengths: list[int] = []
        self._sets: dict[Key, Any] = {}
        single: list[str] = []
        scalars: dict[str, float] = {name: file.attrs[name] for name in ("size",) if name in file.attrs}
        group = _find_tianshou(file)
        if not self.about and group is None:
            _refuse_groups_of_episodes(file, path)
            if alike := _find_alike(file):
                self.notes.append(
                    f"{', '.join(alike[:3])}{', ...' if alike[3:] else ''} are read as fields of the same "
                    "rows, such as agents; if each group is an episode, rename it: episode_0, episode_1, ..."
                )
        for name, dataset in datasets_in(file if group is None else group):
            if name.split("/")[0] == _METADATA and not self.about:
                if "'metadata' is about the file, and left out" not in self.notes:
                    self.notes.append("'metadata' is about the file, and left out")
            elif not dataset.shape:
                if dataset.shape is not None and dataset.dtype.kind in "biuf":
                    scalars[name] = float(dataset[()])
                single.append(name)
            else:
                column = Column(tuple(name.split("/")), dataset.dtype, dataset.shape[1:])
                self.columns.append(column)
                self.lengths.append(dataset.shape[0])
                self._sets[column.path] = dataset
        rows = max(self.lengths, default=0)
        if group is None:
            self.lanes: Lanes = [] if self.about else find_lanes(scalars, rows)
        else:
            self.lanes = tianshou_lanes(_read_facts(file), rows)
        self.notes += describe_lanes(self.lanes, single)

    def read(self, wanted: Sequence[Column], first: int, count: int) -> list[Array]:
        """Return rows, from row `first` of the file."""
        part = slice(first, first + count)
        with _parsing(self._path):
            return [np.asarray(self._sets[column.path][part]) for column in wanted]


def _find_tianshou(file: Any) -> Any:
    """Return the group with the rows of a buffer that Tianshou saved; None for another file."""
    group = dict(members(file)).get("_meta")
    if group is None or not hasattr(group, "items"):
        return None
    is_batch = str(group.attrs.get("__data_type__", "")) == "Batch"
    return group if is_batch else None


def _read_facts(file: Any) -> dict[str, Any]:
    """Return the attributes of a buffer that Tianshou saved, and the small arrays about its rings."""
    found = dict(file.attrs)
    for name in ("_offset", "_lengths", "last_index"):
        if name in file and file[name].dtype.kind in "iu" and file[name].size <= _MANY_RINGS:
            found[name] = file[name][()]
    return found


#: Group names that consist of a word and a number; a word of `_EPISODES` marks episodes even if there is only
#: one such group.
_NUMBERED = re.compile(r"(\D*?)[_-]?\d+")
_EPISODES = {"trial", "episode", "ep", "demo", "traj", "trajectory", "rollout", "run"}
_ACTIONS = {"actions", "action"}


def find_episodes(file: Any) -> list[str]:
    """Return the groups of an HDF5 file that contain one episode each, at the top or in one group there.

    Groups named by plain numbers are episodes if each has actions and no array outside has a row for each
    action: such an array, for example rewards that agents share, would belong to all groups.

    Args:
        file: The h5py file.

    Raises:
        StorageError: A group is damaged.
    """
    places = [("", file), *((f"{name}/", item) for name, item in members(file) if hasattr(item, "items"))]
    for above, place in places:
        found: dict[str, list[str]] = {}
        for name, item in members(place):
            if hasattr(item, "items") and datasets_in(item) and (parts := _NUMBERED.fullmatch(name)):
                found.setdefault(parts[1], []).append(name)
        for word, names in found.items():
            if word.lower() in _EPISODES or (len(names) > 1 and _differ(place, names)):
                return [above + name for name in names]
            if not word and _act_alone(file, place, names):
                return [above + name for name in names]
    return []


def _find_alike(file: Any) -> list[str]:
    """Return groups that may be episodes or agents: they are the whole file and have the same datasets.

    The datasets include actions. The file does not tell whether the groups are episodes, or agents that act
    at the same time.

    Args:
        file: The h5py file.
    """
    groups = {name: item for name, item in members(file) if name != _METADATA}
    if len(groups) < 2 or not all(hasattr(one, "items") and _ACTIONS & set(one) for one in groups.values()):
        return []
    held = {tuple(name for name, _ in datasets_in(group)) for group in groups.values()}
    return list(groups) if len(held) == 1 else []


def _refuse_groups_of_episodes(file: Any, path: Path) -> None:
    """Reject a file that has one group per episode.

    Raises:
        SchemaError: The file has one group per episode.
    """
    if names := find_episodes(file):
        listed = ", ".join(names[:3]) + (", ..." if names[3:] else "")
        raise SchemaError(
            f"{path} has a group per episode ({listed}: {len(names)} of them), but import_hdf5 reads one "
            "dataset per field, with the rows of all episodes one after another",
            kind="layout",
            hint="use `expstore import`, or import_dataset(Hdf5EpisodesReader(path), target)",
        )


def _differ(place: Any, names: Sequence[str]) -> bool:
    """Return whether groups have the same datasets but different lengths."""
    held = [datasets_in(place[name]) for name in names]
    if len({tuple(name for name, _ in one) for one in held}) > 1:
        return False
    return len({dataset.shape[0] for one in held for _, dataset in one if dataset.shape}) > 1


def _act_alone(file: Any, place: Any, names: Sequence[str]) -> bool:
    """Return whether each group has actions, and no array outside the groups has as many rows."""
    if not all(_ACTIONS & set(place[name]) for name in names):
        return False
    lengths = {
        dataset.shape[0]
        for name in names
        for path, dataset in datasets_in(place[name])
        if path.split("/")[0] in _ACTIONS and dataset.shape
    }
    outside = [item for group in (file, place) for _, item in members(group) if hasattr(item, "shape")]
    return not any(dataset.shape and dataset.shape[0] in lengths for dataset in outside)


def members(group: Any) -> list[tuple[str, Any]]:
    """Return the groups and datasets in a group, by name; links to objects that are not there are left out.

    `group.items()` has None in place of a damaged object, which would then be missing without an error.

    Raises:
        StorageError: The group, or a member of it, is damaged.
    """
    found: list[tuple[str, Any]] = []
    name = ""
    try:
        for name in group:
            try:
                found.append((name, group[name]))
            except KeyError:
                if not hasattr(group.get(name, getlink=True), "path"):  # only links to names have a path
                    raise
    except (KeyError, RuntimeError, OSError) as exc:
        place = f"{group.name.rstrip('/')}/{name}"
        raise StorageError(f"cannot read {place!r} in the HDF5 file: {exc.args[0]}") from exc
    return found


def datasets_in(group: Any, above: str = "") -> list[tuple[str, Any]]:
    """Return all datasets below a group, by name.

    Raises:
        StorageError: An object below the group is damaged.
    """
    found: list[tuple[str, Any]] = []
    for name, item in members(group):
        if hasattr(item, "shape"):
            found.append((above + name, item))
        elif hasattr(item, "items"):
            found += datasets_in(item, f"{above}{name}/")
    return found


# -- checks -------------------------------------------------------------------------------------------


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
