"""Segments that are opened for reading only, while a writer appends to them or after it has closed.

Used by followers and readers of snapshots. A reader finds what the writer has written so far, and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk, File
from expstore.errors import StorageError
from expstore.schema.schema import Field
from expstore.storages.columns.arrow.ipc import encode, read_header
from expstore.storages.columns.arrow.segments import Locations, Segment, Segments
from expstore.storages.columns.column import FollowedPart
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.writer_probe import Watch


class SegmentReader(Segments, FollowedPart):
    """Read variable-length rows.

    Threads: one thread calls the `look` methods, any number take rows. Crashes: a reader changes nothing.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder `segments/`.
        fields: The variable-length fields, in the order of the schema.
        slots: Number of slots of a ring; None: the store is unbounded.
        compression: How the store's settings compress rows.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        *,
        compression: str | None = None,
    ) -> None:
        super().__init__(disk, folder, fields, slots, compression=compression)
        self._looked = False
        self._last: tuple[File, Segment] | None = None  # the newest segment, which may get more batches
        self._live = False
        self._closed = False

    def look(self, slots: int = 0, *, due: bool = True) -> None:
        """Find all rows that exist, on the first call only; `look_to` finds later ones."""
        if not self._looked:
            with self.changing:
                self.show_all(self._scan_all())
            self._looked = True

    def _scan_all(self) -> list[Segment]:
        """Find all batches again from scratch; batches merged into another segment count once."""
        self._close_last()
        found: list[Segment] = []
        top = 0
        for path in self.paths():
            try:
                file = self._disk.open(path, write=False)
            except StorageError:
                if self._disk.exists(path):
                    raise
                continue  # its rows were deleted, or merged into a segment that was read before
            segment = self.scan(path, file, size=file.size())
            if segment.last > top:
                found.append(segment)
                top = segment.last
                self._close_last()
                self._last = file, segment
            else:
                file.close()
        if self._closed:
            self._close_last()
        return found

    def look_to(self, last: int) -> None:
        """Find the rows up to this id, which a writer has written."""
        self._live = True
        with self.changing:
            if last > self.top and not self._read_on(last):
                self._show_committed(self._scan_all(), last)
            else:
                self._let_go_behind(last)
            self._set_top(max(self.top, last))

    def have_left(self, ids: IntArray) -> Array:
        """Return which rows were removed; the writer records this before it removes files. Shapes `(n,)`."""
        store = self.folder.parent
        left: Array = Manifest.load(self._disk, store).deleted.holds(ids)
        # Read after the manifest: deleted ids that the manifest no longer lists are below `retired` by then.
        view = Watch(self._disk, store).look() if self._live else None
        return left if view is None else left | (ids <= view.retired)

    def _read_on(self, last: int) -> bool:
        """Find more batches of the newest segment, up to the row `last`; return whether they reach it."""
        if self._last is None:
            return False
        file, segment = self._last
        known = len(segment.headers)
        mapped = segment.addresses.size
        self.scan(segment.path, file, size=min(mapped, file.size()), segment=segment)
        _drop_behind(segment, last)
        if len(segment.headers) > known:
            self.show(segment, segment.headers[known:], segment.offsets[known:])
        return segment.last >= last

    def lay(self, first_id: int, columns: Sequence[pa.Array]) -> None:
        """Make rows that are only in memory readable, after all others. Nothing is written."""
        rows = [self.store_whole(first_id, number, column) for number, column in enumerate(columns)]
        message = encode(self.schema, rows, first=first_id, generation=0, compression=None)
        header = read_header(message.tobytes())
        assert header is not None
        segment = Segment(self.path_of(first_id), message)
        segment.add(header, 0)
        with self.changing:
            self._let_go_behind(first_id - 1)
            self.segments.append(segment)
            self.show(segment, [header], [0])

    def _let_go_behind(self, last: int) -> None:
        """Forget rows after this one, which the writer has not committed."""
        if self.segments and self.segments[-1].last > last:
            self._show_committed(self.segments, last)

    def _show_committed(self, segments: Sequence[Segment], last: int) -> None:
        """Make the rows of these segments up to this id readable, and no others."""
        for segment in segments:
            _drop_behind(segment, last)
        kept = [segment for segment in segments if segment.headers]
        if not kept or (self._last is not None and kept[-1] is not self._last[1]):
            self._close_last()
        self.show_all(kept, top=last)

    def end_at(self, last: int) -> None:
        """Make only rows up to this id readable. Called when there is no writer any more."""
        with self.changing:
            self._let_go_behind(last)
            self._close_last()
            self._set_top(last)

    def _locate(self, ids: IntArray) -> tuple[Locations, IntArray, IntArray]:
        """Find rows; while a writer is active, look for missing rows again."""
        found = super()._locate(ids)
        if self._live and (found[1] < 0).any():
            with self.changing:
                self._show_committed(self._scan_all(), self.top)
            found = super()._locate(ids)
        return found

    def _close_last(self) -> None:
        if self._last is not None:
            self._last[0].close()
            self._last = None

    def close(self) -> None:
        """Close the files; maps are removed with the last array over them.

        A thread that is still taking rows may read the files again; no file stays open even then.
        """
        with self.changing:
            self._closed = True
            self._close_last()
            super().close()


def _drop_behind(segment: Segment, last: int) -> None:
    """Drop batches after this row: the writer has not committed them and may write other rows instead."""
    while segment.headers and segment.headers[-1].first > last:
        segment.headers.pop()
        segment.end = segment.offsets.pop()
        segment.sealed = False
