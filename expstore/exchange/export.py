"""The steps that all exports share: select rows, build the target under a temporary name, report the result.

Used by the modules of the formats, which write the rows. This module knows no format.
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

#: Names of the formats in messages.
_TITLES = {
    "arrow": "Arrow",
    "hdf5": "HDF5",
    "minari": "Minari",
    "npz": "NPZ",
    "parquet": "Parquet",
}


@dataclass(frozen=True)
class Export:
    """An export in progress: its rows and its target.

    Threads, processes: one. Crashes: an unfinished target keeps its temporary name; the next export to the
    same target removes it.

    Args:
        name: Name of the format.
        rows: The rows to export.
        target: The file or folder to create.
        disk: Access to the file system.
    """

    name: str
    rows: Rows
    target: Path
    disk: Disk

    @contextmanager
    def build_target(self, *, single: bool = False, sync: bool = True) -> Iterator[Path]:
        """Build the target under a temporary name; it is renamed at the end of the block.

        Args:
            single: Whether the target is a file: the file of its name inside the yielded folder.
            sync: Sync the files in the folder at the end; False: the caller does so.

        Yields:
            The temporary folder.

        Raises:
            StateError: The target exists, or would be inside a store.
            NotFoundError: The target's parent folder does not exist.
            LockedError: Another process creates the target at the same time.
        """
        check_target(self.disk, self.target)
        with build_atomically(self.disk, self.target, single=single) as temporary:
            yield temporary
            if sync:
                sync_tree(self.disk, temporary)

    def summarize(self, written: int, *, episodes: int | None = None) -> Exported:
        """Return the result of the export.

        Args:
            written: Number of rows written.
            episodes: Number of episodes written; None: all selected episodes.
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
    """Select the rows of an export, and keep their storage open.

    Args:
        name: Name of the format.
        source: A buffer, or the path of a store, a snapshot or a folder of snapshots.
        target: The file or folder to create.
        fields: Names of the fields to export; None: all.
        episodes: Export only these episodes: ids, or an SQL condition over the relation `episodes`; None:
            all.
        version: Number or tag of a snapshot, if `source` is a path.
        disk: Access to the file system; None: the default.
        any_length: Whether the format supports variable-length rows.

    Raises:
        SchemaError: A field does not exist, or the format cannot store it.
        ExpStoreError: An error of `rows.open_source` or `Rows.choose`.
    """
    path = local_path(target)
    with open_source(source, version) as storage:
        rows = Rows.choose(storage, fields=fields, episodes=episodes)
        rows.refuse_objects(_TITLES[name], any_length=any_length)
        yield Export(name, rows, path, disk or Disk())


class Tally:
    """Count the rows that are written and report the progress.

    Args:
        rows: All rows of the export.
        progress: Called with the bytes done and the bytes in total.
    """

    def __init__(self, rows: Rows, progress: Progress) -> None:
        self.written = self._asked = 0
        self.row_bytes, self._count, self._progress = mean_bytes(rows), rows.count, progress

    def add(self, piece: Piece) -> None:
        """Count a piece that was written, and report the progress."""
        self.written += piece.ids.size
        self._asked += piece.asked
        self._progress(self._asked * self.row_bytes, self._count * self.row_bytes)
