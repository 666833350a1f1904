"""Read Parquet, Arrow and CSV files of rows, batch by batch.

Used by imports, which combine the rows. This module knows the files and their statistics, but no fields.
"""

from __future__ import annotations

import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from expstore.core import tuning
from expstore.core.parsing import reading
from expstore.errors import SchemaError, StorageError
from expstore.exchange.base import DiskFile, open_to_read

#: Metadata key under which pandas describes a frame.
_PANDAS = b"pandas"


def reading_arrow(path: Path) -> AbstractContextManager[None]:
    """Convert Arrow's errors to StorageError."""
    return reading(path, pa.ArrowException, OSError)


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
    #: Descriptions of values that were changed.
    notes: Sequence[str] = ()

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

    def forget_description(self) -> None:
        """Ignore what expstore's metadata says about the columns."""
        self.schema = self.schema.remove_metadata()

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
            has_nan = _PANDAS in (file.schema_arrow.metadata or {})
            for batch in file.iter_batches(batch_size=rows, columns=columns, use_threads=False):
                yield _fill_floats(batch) if has_nan else batch

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
    """An Arrow IPC file or stream; its number of rows is unknown before the whole file is read."""

    def _read_metadata(self, file: DiskFile) -> None:
        self._is_file = (file.read(6) or b"") == b"ARROW1"
        file.seek(0)
        self.schema = (pa.ipc.open_file if self._is_file else pa.ipc.open_stream)(file).schema

    def batches(self, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """Yield record batches, as `Part.batches`."""
        with open_to_read(self.path) as raw, reading_arrow(self.path):
            if self._is_file:
                file = pa.ipc.open_file(raw)
                found = map(file.get_batch, range(file.num_record_batches))
            else:
                found = iter(pa.ipc.open_stream(raw))
            for batch in found:
                batch.validate(full=True)  # otherwise forged offsets are followed
                for start in range(0, batch.num_rows, rows):
                    yield batch.slice(start, rows)


def _fill_floats(batch: Any) -> Any:
    """Return a batch in which missing floats are NaN: pandas writes NaN as a missing value."""
    for place, column in enumerate(batch.columns):
        if column.null_count and pa.types.is_floating(column.type):
            filled = pc.fill_null(column, pa.scalar(float("nan"), column.type))
            batch = batch.set_column(place, batch.schema.field(place), filled)
    return batch


class CsvPart(Part):
    """A CSV file with a line of names, read as a whole: its types follow from all of its rows.

    Args:
        path: The file.
    """

    def _read_metadata(self, file: DiskFile) -> None:
        head = file.read(_HEAD_BYTES) or b""
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise SchemaError(f"{self.path} is text in UTF-16", hint="save it as CSV in UTF-8")
        line = head.removeprefix(b"\xef\xbb\xbf").split(b"\n")[0].rstrip(b"\r")
        separator = max(",;\t", key=lambda one: line.count(one.encode()))
        self._check_names(line, separator)
        file.seek(0)
        table = self._read(file, separator, ".")
        if _has_decimal_commas(table, thousands=separator == ","):
            file.seek(0)
            table = self._read(file, separator, ",")
        table = table.rename_columns([name.strip() for name in table.column_names])
        self._table, self.notes = _fill_missing(*_drop_empty_rows(table))
        self.schema, self.rows = self._table.schema, self._table.num_rows

    def _read(self, file: DiskFile, separator: str, decimal: str) -> Any:
        parse = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        convert = csv.ConvertOptions(decimal_point=decimal, strings_can_be_null=True, null_values=_MISSING)
        return csv.read_csv(file, parse_options=parse, convert_options=convert)

    def _check_names(self, line: bytes, separator: str) -> None:
        """Raise SchemaError if the first line has no names, or one twice."""
        if not line.strip() or b"\x00" in line:
            raise SchemaError(f"{self.path} is no CSV file in UTF-8: its first line has no names of columns")
        names = [name.strip().strip('"') for name in line.decode(errors="replace").split(separator)]
        if all(_NUMBER.fullmatch(name) for name in names):
            raise SchemaError(
                f"the first line of {self.path} has numbers where the names of the columns belong",
                hint="add a line with names, such as episode,observation,action,reward,done",
            )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SchemaError(
                f"two columns of {self.path} are called {twice[0]!r}", hint="rename one of them"
            )

    def batches(self, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """Yield record batches, as `Part.batches`."""
        table = self._table if columns is None else self._table.select(columns)
        yield from table.combine_chunks().to_batches(max_chunksize=rows)


_HEAD_BYTES = 1 << 20
_NUMBER = re.compile(r"[-+]?\d*[.,]?\d+([eE][-+]?\d+)?")
_THOUSANDS = r"^[-+]?\d{1,3}(,\d{3})+$"
#: Texts that stand for a missing value.
_MISSING = ["", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null", "None", "-nan", "<NA>"]


def _has_decimal_commas(table: Any, *, thousands: bool) -> bool:
    """Return whether a column of text has only numbers with a decimal comma.

    Args:
        table: The columns.
        thousands: Whether commas in numbers such as 1,000 separate thousands.
    """
    for column in table.columns:
        if pa.types.is_string(column.type) and column.null_count < len(column):
            texts = column.drop_null()
            commas = pc.all(pc.match_substring_regex(texts, r"^[-+]?\d*,?\d+([eE][-+]?\d+)?$")).as_py()
            if commas and not (thousands and pc.any(pc.match_substring_regex(texts, _THOUSANDS)).as_py()):
                return True
    return False


def _drop_empty_rows(table: Any) -> tuple[Any, list[str]]:
    """Return a table without the rows at its end that have no value, as spreadsheets save them, and notes."""
    count = table.num_rows
    filled = np.zeros(count, bool)
    for column in table.columns:
        filled |= pc.is_valid(column).to_numpy()
    rows = np.flatnonzero(filled)
    stop = int(rows[-1]) + 1 if rows.size else 0
    notes = [f"{count - stop:,} rows without any value at the end are left out"] if stop < count else []
    return table.slice(0, stop), notes


def _fill_missing(table: Any, notes: list[str]) -> tuple[Any, list[str]]:
    """Return a table in which missing numbers are NaN, with notes about them appended to `notes`."""
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        missing = column.null_count
        number = pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
        if missing and number and missing < len(column):
            filled = pc.fill_null(column.cast(pa.float64()), float("nan"))
            table = table.set_column(place, name, filled)
            notes.append(f"{name!r} has {missing:,} missing values, which become NaN")
    return table, notes


# -- JSON lines ---------------------------------------------------------------------------------------

#: No line of a file of JSON lines may be longer, in bytes.
LONGEST_LINE = 256 << 20
#: Number of lines whose types are found together.
_LINES = 1024
#: Raised by pyarrow for Python values that have no common type.
_MIXED = (pa.ArrowException, TypeError, ValueError, OverflowError)


class JsonPart(Part):
    """A file of JSON lines: each line is an object, and its members are columns.

    All lines are read once for the types, and once more for the rows; a few MB are in memory at a time. Lists
    of objects, and values that are text in some lines and lists or objects in others, become JSON text.

    Args:
        path: The file.
        left_out: Members to ignore, which may hold anything.
    """

    def __init__(self, path: Path, left_out: Collection[str] = ()) -> None:
        self._left_out = left_out
        self._bytes = 0
        self.kind: Any = pa.struct([])
        super().__init__(path)
        self.schema = pa.schema(list(self.kind))

    def _read_metadata(self, file: DiskFile) -> None:
        self._bytes = file.seek(0, 2)
        for numbers, lines in self._read_lines(file, _LINES):
            self.rows += len(lines)
            rows = [self._to_plain(line, None, ()) for line in lines]
            try:
                kind = merge_types(self.kind, pa.array(rows).type)
            except _MIXED:
                kind = self.kind
                for number, row in zip(numbers, rows, strict=True):
                    kind = self._add_line(kind, number, row)
            self.kind = kind
        if not self.rows:
            raise SchemaError(f"{self.path} has no lines")

    def _add_line(self, kind: Any, number: int, row: Mapping[str, Any]) -> Any:
        """Return the common type of earlier lines and of one more."""
        try:
            return merge_types(kind, pa.array([row]).type)
        except _MIXED as exc:
            raise SchemaError(
                f"line {number} of {self.path} does not have the types of the lines before: {exc}",
                hint="correct the line, or leave the member out: --map NAME=",
            ) from exc

    def use(self, kind: Any) -> None:
        """Set the type of the rows: the common one of several files."""
        self.kind = self._prune(kind, ())
        self.schema = pa.schema(list(self.kind))

    def _prune(self, kind: Any, path: tuple[str, ...]) -> Any:
        """Return a type without members of objects that have no value in any row."""
        if pa.types.is_list(kind):
            inner = self._prune(kind.value_type, path)
            return inner if pa.types.is_null(inner) else pa.list_(inner)
        if not pa.types.is_struct(kind):
            return kind
        parts = {part.name: self._prune(part.type, (*path, part.name)) for part in kind}
        empty = [name for name, one in parts.items() if path and pa.types.is_null(one)]
        self._report(
            f"{'.'.join((*path, name))!r} has no value in any row, and is left out" for name in empty
        )
        found = pa.struct([(name, one) for name, one in parts.items() if name not in empty])
        return found if found.num_fields or not path else pa.null()

    def _report(self, notes: Iterable[str]) -> None:
        self.notes = list(dict.fromkeys([*self.notes, *notes]))

    def batches(self, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """Yield record batches, as `Part.batches`."""
        with open_to_read(self.path) as file, reading_arrow(self.path):
            for _, lines in self._read_lines(file, rows):
                found = pa.array([self._to_plain(line, self.kind, ()) for line in lines], self.kind)
                batch = pa.RecordBatch.from_struct_array(found)
                yield batch if columns is None else batch.select(columns)

    def row_bytes(self) -> int:
        """Return the mean number of bytes of a line."""
        return -(-self._bytes // max(1, self.rows))

    def _read_lines(self, raw: DiskFile, rows: int) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
        """Yield the numbers and the objects of lines, in pieces of at most so many rows and a few MB."""
        raw.seek(0)
        file, place, size = io.BufferedReader(raw, 1 << 20), 0, 0
        numbers: list[int] = []
        found: list[dict[str, Any]] = []
        while line := file.readline(LONGEST_LINE + 1):
            place, size = place + 1, size + len(line)
            if place == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                numbers.append(place)
                found.append(self._parse(line, place))
            # Python's objects need several times the memory of their text.
            if found and (len(found) >= rows or size >= tuning.EXCHANGE_BYTES // 8):
                yield numbers, found
                numbers, found, size = [], [], 0
        if found:
            yield numbers, found

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        where = f"line {number} of {self.path}"
        if len(line) > LONGEST_LINE:
            raise StorageError(
                f"{where} is longer than {LONGEST_LINE >> 20} MiB", hint="write one object a line"
            )
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise StorageError(
                f"{where} is not JSON: {exc}",
                hint="correct or remove the line; a program that was stopped leaves half a line at the end",
            ) from exc
        if not isinstance(found, dict):
            raise SchemaError(
                f"{where} is not an object, which a row is",
                hint="write each row as one line: jq -c '.[]' FILE",
            )
        return found

    def _to_plain(self, value: Any, kind: Any, path: tuple[str, ...]) -> Any:
        """Return a value without lists of objects, and without what has another type than text in its place.

        Args:
            value: The value of a member, or a whole line.
            kind: Its type; None: not known yet.
            path: The names that lead to it.
        """
        is_text = kind is not None and pa.types.is_string(kind)
        if (kind is not None and pa.types.is_null(kind)) or (len(path) == 1 and path[0] in self._left_out):
            return None
        if isinstance(value, dict) and not is_text:
            found = {}
            for name, one in value.items():
                place = -1 if kind is None else kind.get_field_index(name)
                found[name] = self._to_plain(
                    one, None if place < 0 else kind.field(place).type, (*path, name)
                )
            return found or None if path else found
        objects = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        if objects or (is_text and isinstance(value, dict | list)):
            self._report([f"{'.'.join(path)!r} has objects or lists, which are stored as JSON text"])
            return json.dumps(value, ensure_ascii=False)
        return value


def merge_types(one: Any, two: Any) -> Any:
    """Return the type of values that have one of two types.

    Raises:
        TypeError: No type has both; the message names both.

    >>> import pyarrow as pa
    >>> from expstore.exchange.table_files import merge_types
    >>> str(merge_types(pa.list_(pa.int64()), pa.list_(pa.float64())))
    'list<item: double>'
    """
    is_a = pa.types
    if one == two or is_a.is_null(two):
        return one
    if is_a.is_null(one):
        return two
    if is_a.is_struct(one) and is_a.is_struct(two):
        parts = {part.name: part.type for part in one}
        for part in two:
            parts[part.name] = merge_types(parts.get(part.name, pa.null()), part.type)
        return pa.struct(list(parts.items()))
    if is_a.is_list(one) and is_a.is_list(two):
        return pa.list_(merge_types(one.value_type, two.value_type))
    if any(map(is_a.is_string, (one, two))) and any(map(is_a.is_nested, (one, two))):
        return pa.string()
    numbers = (is_a.is_int64, is_a.is_float64)
    if all(any(check(kind) for check in numbers) for kind in (one, two)):
        return pa.float64()
    raise TypeError(f"{one} and {two}")
