"""Find which elements of new rows are stored already, by comparing them with earlier rows.

Used by the writer of segments, for each continued field alone. This module uses no files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from expstore.core import tuning
from expstore.core.values import Array, IntArray
from expstore.storages.columns.arrow.pieces import (
    Elements,
    Piece,
    join_lists,
    pack_pieces,
    split_elements,
    to_stored_type,
)

#: Most rows of an episode with which a new row is compared, the newest ones, and most rows of all episodes.
_ROWS, _ALL_ROWS = 256, 1 << 17


class Source(NamedTuple):
    """A stored row from which other rows can take elements.

    Args:
        id: The row's id.
        pieces: Its pieces, and then all elements of its `own` as a piece.
        elements: Its whole value.
        crc: The checksum of its whole value.
    """

    id: int
    pieces: list[Piece]
    elements: Elements
    crc: int


class Links(NamedTuple):
    """The rows that new rows may continue.

    Args:
        episodes: Episode of each new row. Shape `(n,)`, like the next two arguments.
        steps: Its step in the episode.
        parents: Id of the row that it names as its parent; not positive: none.
    """

    episodes: IntArray
    steps: IntArray
    parents: IntArray


class PrefixFinder:
    """Split rows of one continued field into pieces of earlier rows, and the elements that follow.

    The newest rows are kept in memory, up to `tuning.CONTINUED_BYTES`; others are read when they are needed.
    Threads: one uses it. Crashes: it has no state on the disk.

    Args:
        kind: Type of the whole values.
        read: Returns stored rows by id, without those that were removed from the store or are None.
        find_rows: Returns the newest stored rows of an episode, before a row: for each, in the order of the
            ids, its number of elements, its checksum and its id.
        may_use: Returns whether rows are not removed from the store. Shapes `(n,)`.
    """

    def __init__(
        self,
        kind: pa.DataType,
        *,
        read: Callable[[IntArray], list[Source]],
        find_rows: Callable[[int, int], Sequence[tuple[int, int, int]]],
        may_use: Callable[[IntArray], Array],
    ) -> None:
        self._kind, self._read, self._find_rows, self._may_use = kind, read, find_rows, may_use
        self._recent: OrderedDict[int, Source] = OrderedDict()
        self._bytes = self._names = 0
        #: Rows of each episode, oldest first: the id by the number of elements and the checksum.
        self._known: OrderedDict[int, OrderedDict[tuple[int, int], int]] = OrderedDict()

    def split(self, first_id: int, column: pa.ListArray, links: Links) -> pa.StructArray:
        """Return new rows as they are stored; later rows can continue them.

        Args:
            first_id: Id of the first row.
            column: The whole values. Length n.
            links: Which rows they may continue.
        """
        values, some = split_elements(column), column.is_valid().to_pylist()
        ends = np.cumsum([len(value) for value in values])
        leaf, own, counts, packed = column.flatten(), [], [], []
        for number, (value, end) in enumerate(zip(values, ends.tolist(), strict=True)):
            row, data, taken = first_id + number, b"", 0
            if some[number]:
                known = self._rows_of(int(links.episodes[number]), row, int(links.steps[number]))
                pieces, taken, crc = self._find(value, known, int(links.parents[number]))
                data = pack_pieces(row, pieces, crc)
                if value.size(taken) < 2 * len(data):  # the pieces would not save much
                    pieces, taken = [], 0
                    data = pack_pieces(row, pieces, crc)
                if taken < len(value):
                    pieces = [*pieces, Piece(row, len(value) - taken)]
                self._keep(Source(row, pieces, value.copy(), crc), known)
            own.append(leaf.slice(end - len(value) + taken, len(value) - taken))
            counts.append(len(value) - taken)
            packed.append(data)
        lists = join_lists(self._kind, np.array(counts), pa.concat_arrays(own), np.zeros(len(own), bool))
        members = [lists, pa.array(packed, pa.binary())]
        return pa.StructArray.from_arrays(members, fields=list(to_stored_type(self._kind)))

    def _find(
        self, value: Elements, known: OrderedDict[tuple[int, int], int], parent: int
    ) -> tuple[list[Piece], int, int]:
        """Return the pieces of a value, how many elements they have, and the checksum of the value.

        Rows that are a prefix of the value as a whole are found by their checksums, the longest one first,
        and then compared. Of the newest row of the episode, and of the parent, a part is enough.
        """
        cuts = sorted({count for count, _ in known if count <= len(value)})
        *sums, crc = value.checksums([*cuts, len(value)])
        whole = [known[one] for one in zip(cuts, sums, strict=True) if one in known]
        newest = next(reversed(known.values())) if known else 0
        best: Source | None = None
        taken = 0
        for row in dict.fromkeys([*whole[:-2:-1], newest, parent]):
            source = self._source(row) if taken < len(value) else None
            if source is not None and (common := value.common(source.elements)) > taken:
                best, taken = source, common
        pieces: list[Piece] = []
        left = taken
        for owner, count in best.pieces if best is not None else ():
            if left:
                pieces.append(Piece(owner, min(count, left)))
                left -= pieces[-1].size
        if not self._may_use(np.array([piece.owner for piece in pieces], np.int64)).all():
            return [], 0, crc
        return pieces, taken, crc

    def _rows_of(self, episode: int, row: int, step: int) -> OrderedDict[tuple[int, int], int]:
        """Return the known rows of an episode, which is now the one used last."""
        known = self._known.get(episode)
        if known is None:
            known = self._known[episode] = OrderedDict()
            if step > 0:
                for count, crc, other in self._find_rows(episode, row)[-_ROWS:]:
                    known[count, crc] = other
            self._names += len(known)
        self._known.move_to_end(episode)
        while self._names > _ALL_ROWS and len(self._known) > 1:
            self._names -= len(self._known.popitem(last=False)[1])
        return known

    def _source(self, row: int) -> Source | None:
        """Return a row from memory or from the store; None: there is no such row."""
        if row < 1:
            return None
        if row in self._recent:
            self._recent.move_to_end(row)
            return self._recent[row]
        found = self._read(np.array([row]))
        return found[0] if found else None

    def _keep(self, source: Source, known: OrderedDict[tuple[int, int], int]) -> None:
        """Keep a new row in memory."""
        name, before = (len(source.elements), source.crc), len(known)
        known.pop(name, None)
        known[name] = source.id
        if len(known) > _ROWS:
            known.popitem(last=False)
        self._names += len(known) - before
        self._recent[source.id] = source
        self._bytes += source.elements.nbytes
        while self._bytes > tuning.CONTINUED_BYTES and len(self._recent) > 1:
            _, former = self._recent.popitem(last=False)
            self._bytes -= former.elements.nbytes
