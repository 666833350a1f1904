"""Former ids of rows: a restore gives rows new ids, and so does a resize that keeps the best rows.

Everything outside the rows that names rows, such as the log of a consumer, keeps the ids that it has; what
reads it calls `Renumbering.present`. That is unambiguous, because a store never uses an id again. The file
`renumbered` is replaced together with the rows (`storages/format/swap.py`), so after a crash both are former
or both are new.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np

from expstore.core.values import IntArray
from expstore.disk.files import Disk
from expstore.errors import CorruptionError
from expstore.storages.format.paths import RENUMBERED
from expstore.storages.format.swap import current_path

#: crc32c of what follows, and zeros.
_HEAD = struct.Struct("<I4x")


@dataclass(frozen=True, slots=True, eq=False)
class Renumbering:
    """Which ids rows have now that had other ids before.

    Args:
        runs: Runs of former ids, ascending: first former id, rows, and first present id. Shape `(n, 3)`.

    Example:
        >>> from expstore.storages.format.renumbering import Renumbering
        >>> table = Renumbering(np.array([[1, 40, 81]]))
        >>> table.then(np.array([[81, 20, 131]])).present(np.array([1, 21, 99, 200]))
        array([131, 101, 149, 200])
    """

    runs: IntArray

    @classmethod
    def load(cls, disk: Disk, store: Path) -> Renumbering:
        """Read the table of a store, which is empty if no row got another id.

        Raises:
            CorruptionError: The file is damaged.
        """
        path = current_path(disk, store, RENUMBERED)
        if not disk.exists(path):
            return cls(np.empty((0, 3), np.int64))
        data = disk.read_whole(path)
        body = data[_HEAD.size :]
        if len(body) % 24 or data[: _HEAD.size] != _HEAD.pack(google_crc32c.value(body)):
            raise CorruptionError(f"{path} is damaged: its checksum does not match")
        return cls(np.frombuffer(body, "<i8").reshape(-1, 3))

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        body = self.runs.astype("<i8").tobytes()
        return _HEAD.pack(google_crc32c.value(body)) + body

    def present(self, ids: IntArray) -> IntArray:
        """Return the ids that rows have now. Shapes `(n,)`.

        An id that is not a former one is returned as it is, and so is the last id of a row that is gone.
        """
        if not self.runs.size:
            return ids
        at = np.searchsorted(self.runs[:, 0], ids, side="right") - 1
        first, rows, new = self.runs[at].T
        found: IntArray = np.where((at >= 0) & (ids < first + rows), new + ids - first, ids)
        return found

    def present_last(self, last: int) -> int:
        """Return the present id of the newest row that a window up to the former id `last` had.

        It is `last` if no row up to it has another id now.
        """
        at = int(np.searchsorted(self.runs[:, 0], last, side="right")) - 1
        if at < 0 or last >= self.runs[at, 2]:
            return last
        first, rows, new = self.runs[at].tolist()
        return int(min(last, first + rows - 1) - first + new)

    def then(self, runs: IntArray) -> Renumbering:
        """Return the table after a change that gives rows new ids.

        Args:
            runs: Runs of rows that get new ids: first present id, rows, first new id; in any order. The new
                ids were never used. Shape `(n, 3)`.
        """
        change = Renumbering(runs[np.argsort(runs[:, 0])])
        both = np.concatenate([change.follow(self.runs), change.runs])
        return Renumbering(both[np.argsort(both[:, 0])])

    def follow(self, runs: IntArray) -> IntArray:
        """Return runs of ids with the present ids of what they refer to.

        Args:
            runs: Runs: any number, rows, first id. Shape `(n, 3)`.

        Returns:
            The runs, cut where present ids do not follow one another. Shape `(m, 3)`.
        """
        if not self.runs.size or not runs.size:
            return runs
        edges = np.unique([self.runs[:, 0], self.runs[:, 0] + self.runs[:, 1]])
        low = np.searchsorted(edges, runs[:, 2], side="right")
        pieces = np.searchsorted(edges, runs[:, 2] + runs[:, 1], side="left") - low + 1
        which, ends = np.repeat(np.arange(len(runs)), pieces), np.cumsum(pieces)
        number = np.arange(which.size) - (ends - pieces)[which]
        name, _, first = runs[which].T
        begin = np.where(number == 0, first, edges[low[which] + number - 1])
        end = np.append(begin[1:], 0)
        end[ends - 1] = runs[:, 2] + runs[:, 1]
        return np.stack([name + begin - first, end - begin, self.present(begin)], axis=1)
