"""Read a Parquet file that says which rows to draw, in which order: an export of the relation `draws`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from expstore.core.parsing import reading
from expstore.core.values import Array, IntArray, Key, Selection
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.errors import ArgumentError, NotFoundError

_NUMBERS, _OTHERS = ("draw", "id", "place"), ("weight", "consumer")


@dataclass(frozen=True, slots=True)
class OrderFile:
    """The draws in an order file.

    Args:
        path: The file.
        numbers: Number of each draw in the file, ascending. Shape `(draws,)`.
        starts: Place of the first row of each draw, and the number of rows. Shape `(draws + 1,)`.
        ids: Ids of the rows. Shape `(rows,)`.
        weights: `priority_weight` of each row, float32 or float64; None: there are no weights. Shape
            `(rows,)`.
    """

    path: Path
    numbers: IntArray
    starts: IntArray
    ids: IntArray
    weights: Array | None

    def __len__(self) -> int:
        return self.numbers.size

    @classmethod
    def read(cls, path: str | Path) -> OrderFile:
        """Read a file with the columns `draw` and `id`, and perhaps `place`, `weight` and `consumer`.

        Draws come in the order of their numbers; the rows of a draw in that of `place`, or of the file.

        Raises:
            ArgumentError: A column is missing or not of whole numbers; a value is missing; there is no row;
                or there are several consumers.
            NotFoundError: There is no file.
            StorageError: It is not a Parquet file, or cannot be read.
        """
        path = local_path(path)
        disk = Disk()
        if not disk.exists(path):
            raise NotFoundError(
                f"there is no file {path}", hint="expstore export STORE FILE --draws writes one"
            )
        with reading(path, OSError, pa.ArrowException):
            names = pq.read_schema(path).names
            table = pq.read_table(path, columns=[name for name in (*_NUMBERS, *_OTHERS) if name in names])
        found = {name: table[name] for name in table.column_names}
        for name in _NUMBERS:
            if name not in found and name != "place":
                raise ArgumentError(
                    f"{path} has no column {name!r}", hint="it needs the columns draw and id of whole numbers"
                )
            if name in found and (not pa.types.is_integer(found[name].type) or found[name].null_count):
                raise ArgumentError(f"column {name!r} of {path} must have a whole number in each row")
        if not table.num_rows:
            raise ArgumentError(f"{path} has no row, so there is nothing to draw")
        if "consumer" in found and len(names := pc.unique(found["consumer"])) > 1:
            raise ArgumentError(
                f"{path} has draws of several consumers ({', '.join(map(str, names.to_pylist()[:3]))})",
                hint="export those of one: expstore export STORE FILE --draws --consumer NAME",
            )
        weights = found.get("weight")
        if weights is not None and weights.null_count < len(weights):
            if weights.null_count or not pa.types.is_floating(weights.type):
                raise ArgumentError(
                    f"column 'weight' of {path} must have a floating-point number in each row, or in none",
                    hint="leave the column out",
                )
        elif weights is not None:
            del found["weight"]
        return cls._of(path, {name: column.to_numpy() for name, column in found.items()})

    @classmethod
    def _of(cls, path: Path, columns: dict[str, Array]) -> OrderFile:
        draws = columns["draw"].astype(np.int64)
        order = np.lexsort((columns["place"], draws) if "place" in columns else (draws,))
        numbers, starts = np.unique(draws[order], return_index=True)
        ids, weights = columns["id"].astype(np.int64)[order], columns.get("weight")
        if weights is not None:
            weights = weights.astype(np.float64)[order]
            narrow = weights.astype(np.float32)  # the dtype of most samplers
            weights = narrow if (narrow == weights).all() else weights
        return cls(path, numbers, np.append(starts, draws.size), ids, weights)

    def draw(self, place: int) -> Selection:
        """Return the rows of a draw, counted from 0."""
        rows = slice(self.starts[place], self.starts[place + 1])
        info: dict[Key, Array] = {} if self.weights is None else {("priority_weight",): self.weights[rows]}
        return Selection(self.ids[rows], info)
