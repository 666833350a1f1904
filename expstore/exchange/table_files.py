"""Read Parquet and Arrow files of rows, batch by batch.

Used by imports, which combine the rows. This module knows the files and their statistics, but no fields.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from expstore.core.parsing import INVALID
from expstore.errors import ExpStoreError, StorageError
from expstore.exchange.base import DiskFile, open_to_read

__all__ = ["ArrowPart", "ParquetPart", "Part", "reading_arrow"]


@contextmanager
def reading_arrow(path: Path) -> Iterator[None]:
    """Convert Arrow's errors to StorageError."""
    try:
        yield
    except ExpStoreError:
        raise
    except (pa.ArrowException, OSError, *INVALID) as exc:
        raise StorageError(f"cannot read {path}: {str(exc).partition(chr(10))[0]}") from exc


class Part(ABC):
    """A file of rows, read batch by batch. It is open only while it is read: an import may have thousands.

    Threads, processes: one.

    Args:
        path: The file.
    """

    #: Number of rows; 0 if unknown.
    rows = 0
    #: Its schema.
    schema: Any

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_to_read(path) as file, reading_arrow(path):
            self._read_metadata(file)

    @abstractmethod
    def _read_metadata(self, file: DiskFile) -> None:
        """Read the file's metadata."""

    @abstractmethod
    def batches(self, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """Yield record batches. `columns` names the needed columns, if reading only those is faster."""

    def first_id(self) -> int | None:
        """Return the smallest id, or None if unknown."""
        return None

    def row_bytes(self) -> int:
        """Return the approximate number of bytes of a row, or 0 if unknown."""
        return 0

    def is_full(self, name: str) -> bool:
        """Return whether a column is known to have no lists and no missing values."""
        return False


class ParquetPart(Part):
    """A Parquet file."""

    def _read_metadata(self, file: DiskFile) -> None:
        found = pq.ParquetFile(file)
        self.schema, self._metadata = found.schema_arrow, found.metadata
        self.rows = self._metadata.num_rows

    def batches(self, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """Yield record batches, as `Part.batches`."""
        with open_to_read(self.path) as raw, reading_arrow(self.path):
            file = pq.ParquetFile(raw, metadata=self._metadata)
            yield from file.iter_batches(batch_size=rows, columns=columns, use_threads=False)

    def first_id(self) -> int | None:
        """Return the smallest id, if the statistics of the first row group contain it."""
        names = [leaf.path for leaf in self._leaves()]
        if "_id" not in names or not pa.types.is_integer(self.schema.field("_id").type):
            return None
        if not self._metadata.num_row_groups:
            return None
        found = self._metadata.row_group(0).column(names.index("_id")).statistics
        return int(found.min) if found is not None and found.has_min_max else None

    def row_bytes(self) -> int:
        """Return the approximate number of uncompressed bytes of a row."""
        groups = self._groups()
        return max((-(-group.total_byte_size // max(1, group.num_rows)) for group in groups), default=0)

    def is_full(self, name: str) -> bool:
        """Return whether a column has no lists, and no missing values according to the statistics."""
        leaves = self._leaves()
        wanted = [n for n, leaf in enumerate(leaves) if leaf.path == name or leaf.path.startswith(name + ".")]
        if any(leaves[n].max_repetition_level for n in wanted):
            return False
        told = [group.column(n).statistics for group in self._groups() for n in wanted]
        return all(found is not None and found.has_null_count and not found.null_count for found in told)

    def _leaves(self) -> list[Any]:
        schema = self._metadata.schema
        return [schema.column(number) for number in range(len(schema.names))]

    def _groups(self) -> list[Any]:
        return [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]


class ArrowPart(Part):
    """An Arrow IPC file; its number of rows is unknown before the whole file is read."""

    def _read_metadata(self, file: DiskFile) -> None:
        self.schema = pa.ipc.open_file(file).schema

    def batches(self, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """Yield record batches, as `Part.batches`."""
        with open_to_read(self.path) as raw:
            with reading_arrow(self.path):
                file = pa.ipc.open_file(raw)
            for number in range(file.num_record_batches):
                with reading_arrow(self.path):
                    batch = file.get_batch(number)
                    batch.validate(full=True)  # otherwise forged offsets are followed
                for start in range(0, batch.num_rows, rows):
                    yield batch.slice(start, rows)
