"""What all exports do: choose rows, make the target aside, say what was made.

Used by the modules of the formats, which say how rows are written. It knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expstore.disk.atomic_build import build_atomically
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.exchange.base import Exported, Progress, names_of, sync_tree
from expstore.exchange.format_limits import describe_losses
from expstore.exchange.row_pieces import Piece, mean_bytes
from expstore.exchange.rows import Episodes, Exchanged, Rows, open_source
from expstore.storages.format.manifest import check_target

__all__ = ["Export", "Tally", "open_export"]

#: What formats are called in messages.
_TITLES = {
    "arrow": "Arrow",
    "hdf5": "HDF5",
    "minari": "Minari",
    "npz": "NPZ",
    "parquet": "Parquet",
    "zarr": "Zarr",
}


@dataclass(frozen=True)
class Export:
    """Hold what is exported, and where to.

    Threads, processes: one. Crashes: what `expstore.disk.atomic_build` has not ended is a scrap.

    Args:
        name: Of the format.
        rows: Which rows.
        target: What is made.
        disk: Access to the file system.
    """

    name: str
    rows: Rows
    target: Path
    disk: Disk

    @contextmanager
    def build_target(self, *, single: bool = False, sync: bool = True) -> Iterator[Path]:
        """Build the target in a temporary folder, and rename it at the end.

        Args:
            single: It is to be a file: the one of its name in the folder.
            sync: Bring what is in the folder to the disk at the end; otherwise that must be done.

        Yields:
            The folder.

        Raises:
            StateError: The target is there, or would lie inside a store.
            NotFoundError: There is no folder for it.
            LockedError: Another process makes it at the same time.
        """
        check_target(self.disk, self.target)
        with build_atomically(self.disk, self.target, single=single) as temporary:
            yield temporary
            if sync:
                sync_tree(self.disk, temporary)

    def summarize(self, written: int, *, episodes: int | None = None) -> Exported:
        """Return a description of what was exported.

        Args:
            written: How many rows.
            episodes: Of how many; None: of all that were asked for.
        """
        rows = self.rows
        return Exported(
            path=self.target,
            rows=written,
            left_out=rows.count - written,
            fields=names_of([entry.key for entry in rows.user_fields]),
            disk_bytes=self.disk.measure_space(self.target),
            episodes=rows.episode_ids.size if episodes is None else episodes,
            lost=describe_losses(self.name),
        )


@contextmanager
def open_export(
    name: str,
    source: Exchanged,
    target: str | Path,
    *,
    fields: Sequence[str] | None,
    episodes: Episodes,
    version: int | str | None,
    disk: Disk | None,
    any_length: bool = False,
) -> Iterator[Export]:
    """Choose the rows of an export, and hold their storage open.

    Args:
        name: Of the format.
        source: A buffer, or the path of a store, a version or a folder of versions.
        target: What is to be made.
        fields: Only these, by name; None: all.
        episodes: Only of these episodes; None: of all.
        version: Number or tag of a version, where `source` is a path.
        disk: Where files are touched; None: as ever.
        any_length: The format takes rows without a fixed size.

    Raises:
        SchemaError: There is no such field, or one that the format has no form for.
        ExpStoreError: As `rows.open_source` and `Rows.choose`.
    """
    path = local_path(target)
    with open_source(source, version) as storage:
        rows = Rows.choose(storage, fields=fields, episodes=episodes)
        rows.refuse_objects(_TITLES[name], any_length=any_length)
        yield Export(name, rows, path, disk or Disk())


class Tally:
    """Count the rows that are written, and report the progress.

    Args:
        rows: All rows of the export.
        progress: Called with the bytes done and the bytes in all.
    """

    def __init__(self, rows: Rows, progress: Progress) -> None:
        self.written = self._asked = 0
        self.row_bytes, self._count, self._progress = mean_bytes(rows), rows.count, progress

    def add(self, piece: Piece) -> None:
        """Count a piece that was written, and report the progress."""
        self.written += piece.ids.size
        self._asked += piece.asked
        self._progress(self._asked * self.row_bytes, self._count * self.row_bytes)
