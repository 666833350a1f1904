"""Export rows as a plain Zarr v3 group, which every Zarr reader can open.

Used by `expstore export`. It holds one piece of the rows in memory at a time, and never changes a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core import tuning
from expstore.core.values import Array
from expstore.disk.bulk_files import sync_paths
from expstore.disk.files import Disk
from expstore.disk.threads import Threads
from expstore.exchange.base import Exported, Progress, no_progress
from expstore.exchange.export import Tally, open_export
from expstore.exchange.row_pieces import read_pieces
from expstore.exchange.rows import Episodes, Exchanged, Rows
from expstore.schema.schema import Field

#: Size of a packed chunk in bytes. A piece of rows is one shard of each array.
CHUNK_BYTES = 128 * 1024


def export_zarr(
    source: Exchanged,
    target: str | Path,
    *,
    fields: Sequence[str] | None = None,
    episodes: Episodes = None,
    version: int | str | None = None,
    progress: Progress = no_progress,
    disk: Disk | None = None,
) -> Exported:
    """Write the readable rows as a plain Zarr group, the oldest first.

    Every field is an array below its name, `next/reward` for instance, of shape `(rows, *row shape)`;
    the group `_row` also holds `id`, `episode`, `step`, `time` (us since 1970) and `priority`. bfloat16 is
    written as its uint16 bit pattern. Only codecs of the Zarr v3 core are used. Rows written during the
    export are not in it; a row that another process overwrites during the export is left out of all arrays.
    The group is complete, or does not exist.

    Args:
        source: A buffer, or the path of a store, a snapshot or a folder of snapshots.
        target: Folder of the group; it must not exist yet.
        fields: Names of the fields to export; None: all.
        episodes: Export only these episodes: ids, or an SQL condition over the relation `episodes`.
        version: Number or tag of a snapshot, if `source` is a path.
        progress: Called with the bytes done and the bytes in total.
        disk: Access to the file system.

    Raises:
        StateError: The target exists, or would be inside a store; or the store has no fields yet.
        NotFoundError: The target's parent folder does not exist; or no rows of these episodes are left.
        SchemaError: A field does not exist, or fields hold objects.
        LockedError: Another export writes to this target.
        StorageError: The disk failed or is full; nothing of the export is left.

    Example:
        >>> import zarr
        >>> from expstore.exchange import export_zarr
        >>> done = export_zarr(rb, "plain.zarr", fields=["observation", "next.reward"])
        >>> zarr.open_group("plain.zarr", mode="r")["next/reward"].shape == (done.rows, 1)
        True
    """
    with open_export(
        "zarr", source, target, fields=fields, episodes=episodes, version=version, disk=disk
    ) as export:
        with export.build_target(sync=False) as temporary:
            writer = _Group(export.disk, temporary, export.rows)
            _copy(export.rows, writer, progress)
            writer.finish()
            sync_paths(export.disk, writer.written, sorted(writer.folders), Threads())
    return export.summarize(writer.rows)


def _copy(rows: Rows, writer: _Group, progress: Progress) -> None:
    """Pass all readable rows to the writer."""
    tally = Tally(rows, progress)
    for piece in read_pieces(rows, rows.by_id(writer.piece)):
        for start in range(0, piece.ids.size, writer.piece):
            writer.add([column[start : start + writer.piece] for column in piece.columns])
        tally.add(piece)


class _Group:
    """Write arrays piece by piece. zarr-python encodes them in memory.

    Threads: one. Crashes: the files are incomplete until `finish` has returned.

    Args:
        disk: Access to the file system.
        folder: The group's folder.
        rows: The rows that will be written.
    """

    def __init__(self, disk: Disk, folder: Path, rows: Rows) -> None:
        import zarr
        from zarr.storage import MemoryStore

        self._disk, self._folder = disk, folder
        self.rows = 0
        self.written: list[Path] = []
        self.folders = {folder}
        fields = rows.fields.values()
        self.piece = _power(tuning.EXCHANGE_BYTES // rows.row_bytes, tuning.EXCHANGE_ROWS)
        self._held = [np.empty((self.piece, *e.shape), e.numpy_dtype) for e in fields]
        self._count = 0
        self._made: dict[str, Any] = {}  # files that zarr-python has written, by name
        manifest = rows.storage.manifest
        about = {"uuid": None if manifest is None else manifest.uuid}
        group = zarr.create_group(store=MemoryStore(self._made), attributes={"expstore": about})
        self._arrays = [self._make(group, entry) for entry in fields]

    def _make(self, group: Any, entry: Field) -> Any:
        from zarr.codecs import BloscCodec

        chunk = min(self.piece, _power(CHUNK_BYTES // max(1, entry.row_bytes), tuning.EXCHANGE_ROWS))
        size = entry.numpy_dtype.itemsize
        return group.create_array(
            entry.path,
            shape=(0, *entry.shape),
            chunks=(chunk, *entry.shape),
            shards=(self.piece, *entry.shape),
            dtype=entry.numpy_dtype,
            filters=None,
            compressors=BloscCodec(
                typesize=size, cname="zstd", clevel=3, shuffle="shuffle" if size > 1 else "noshuffle"
            ),
            attributes={"expstore": {"dtype": entry.dtype}},
            config={"write_empty_chunks": True},  # otherwise -0.0 would be read back as 0.0
        )

    def add(self, columns: Sequence[Array]) -> None:
        """Append rows, at most `piece`; one array per field. Shapes `(n, *row shape)`."""
        count, head = len(columns[0]), self.piece - self._count
        self._keep([column[:head] for column in columns])
        if count >= head:
            self._write()
            if count > head:
                self._keep([column[head:] for column in columns])

    def _keep(self, columns: Sequence[Array]) -> None:
        stop = self._count + len(columns[0])
        for held, values in zip(self._held, columns, strict=True):
            held[self._count : stop] = values
        self._count = stop

    def _write(self) -> None:
        first, self.rows = self.rows, self.rows + self._count
        for array, held in zip(self._arrays, self._held, strict=True):
            array.resize((self.rows, *held.shape[1:]))
            array[first : self.rows] = held[: self._count]
            for name in [name for name in self._made if not name.endswith("zarr.json")]:
                self._put(name)
        self._count = 0

    def finish(self) -> None:
        """Write the remaining rows, which fill no whole piece, and the metadata."""
        if self._count:
            self._write()
        for name in list(self._made):
            self._put(name)

    def _put(self, name: str) -> None:
        path = self._folder / name
        self._disk.make_dir(path.parent)
        self.folders.update(folder for folder in path.parents if folder.is_relative_to(self._folder))
        self._disk.put(path, self._made.pop(name).to_bytes())
        self.written.append(path)


def _power(most: int, limit: int) -> int:
    """Return the largest power of two up to `most` (at least 1), or `limit` if that is smaller."""
    return min(limit, 1 << (max(1, most).bit_length() - 1))
