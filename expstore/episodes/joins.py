"""Whether a call continues an earlier call's episode: its first observation equals the last next observation.

Used by `expstore.episodes.table`. A collector that restarts counts its trajectories from 0 again; only the
observations tell its first episode from the one that was open under the same trajectory id.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import google_crc32c

from expstore.core.values import Array, Key
from expstore.episodes.segmentation import HAS_TRAJECTORY, NEW, TERMINATED, TRUNCATED, Piece
from expstore.errors import SchemaError

if TYPE_CHECKING:
    from expstore.episodes.table import Segment
    from expstore.schema.schema import Schema

__all__ = ["BatchJoins", "JoinMemory"]

#: Calls of single rows are compared once so many different observations have joined.
_PROOFS = 4


@dataclass(slots=True)
class _Stream:
    """Hold whether the rows of one source have joined so far.

    Args:
        proofs: How many different observations have joined.
        last: The checksum that joined last.
        unlinked: Whether a row has not joined before there was proof: calls of single rows are not compared.
    """

    proofs: int = 0
    last: int = -1
    unlinked: bool = False


@dataclass(slots=True)
class JoinMemory:
    """Keep, between calls, what the next call is compared with.

    It is kept in RAM only: where it lacks an episode, the checksum is computed from the stored row.

    Args:
        ends: By episode id: crc32c of its last next observation.
        required: Adopted episodes whose next row must join, and the source that has adopted each.
        awaiting: Sources that have adopted episodes, and no row of which has come yet.
        streams: By number of the source.
        warned: What the log has been told once.
        schema: The fields of `pairs`.
        pairs: The places of each observation field and of its next observation.
        names: Of the observation fields.
        blind: With rows up to this id nothing is compared: other fields were compared then.
    """

    ends: dict[int, int] = field(default_factory=dict)
    required: dict[int, int] = field(default_factory=dict)
    awaiting: set[int] = field(default_factory=set)
    streams: dict[int, _Stream] = field(default_factory=dict)
    warned: set[Hashable] = field(default_factory=set)
    schema: Schema | None = None
    pairs: Sequence[tuple[int, int]] = ()
    names: tuple[Key, ...] = ()
    blind: int = 0

    def carried(self) -> JoinMemory:
        """Return what still holds when the journal is read again: rows may have come that memory lacks."""
        return replace(self, ends={}, required=dict(self.required), awaiting=set(self.awaiting))

    def note_rows(self, segments: Iterable[Segment]) -> None:
        """Note that rows of sources have come."""
        for segment in segments:
            self.awaiting.discard(segment.source)
            if self.required.get(segment.episode) == segment.source:
                del self.required[segment.episode]

    def forget(self, episode: int) -> None:
        """Forget an episode that takes no more rows."""
        self.ends.pop(episode, None)
        self.required.pop(episode, None)

    def forget_ends(self, last_id: int) -> None:
        """Forget how all episodes end: rows after this id have other fields to compare."""
        self.ends.clear()
        self.required.clear()
        self.blind = last_id

    def forget_sources(self, numbers: Iterable[int]) -> None:
        """Forget sources whose session is over."""
        for number in numbers:
            self.streams.pop(number, None)
            self.awaiting.discard(number)


@dataclass(slots=True)  # made anew for every batch
class BatchJoins:
    """Compare one batch with the episodes that it may continue.

    Args:
        memory: Of the store's writer.
        columns: The batch, in the schema's order. Shapes `(n, *row shape)`.
        read: Returns the next observations of a stored row, by id, as a list of arrays of shape
            `(1, *row shape)`; None if the row is gone.
    """

    memory: JoinMemory
    columns: Sequence[Array]
    read: Callable[[int], Sequence[Array] | None]

    def follows(
        self, source: int, episode: int, last_id: int, piece: Piece, pieces: Sequence[Piece], *, name: str
    ) -> bool:
        """Return whether rows of the batch may continue an episode.

        Args:
            source: Number of their source.
            episode: The episode.
            last_id: Id of its newest row.
            piece: The rows.
            pieces: All rows of the batch.
            name: The source's name, for a message.

        Raises:
            SchemaError: The episode was adopted, and the first row does not continue it.
        """
        memory = self.memory
        expected = memory.ends.get(episode)
        if expected is None:
            expected = self.end_of(last_id) if last_id > memory.blind else None
            if expected is None:
                return True
            memory.ends[episode] = expected
        stream = memory.streams.get(source)
        if stream is None:
            stream = memory.streams[source] = _Stream()
        columns, crc = self.columns, 0
        for before, _ in self.memory.pairs:
            crc = google_crc32c.extend(crc, columns[before][piece[3]].tobytes())
        if crc == expected:
            stream.proofs += crc != stream.last
            stream.last = crc
            return True
        if episode in memory.required:
            raise _not_continued(name, episode)
        lane = piece[0]
        runs = [one for one in ([piece] if piece[4] > 1 else pieces) if one[0] == lane and one[4] > 1]
        if runs:
            return not all(map(self._is_linked, runs))
        # Nothing else in the call tells how the source's rows follow one another: the calls before do.
        if stream.proofs < _PROOFS:
            stream.unlinked = True
        return stream.unlinked

    def check_adopted(self, segments: Sequence[Segment], names: dict[int, str]) -> None:
        """Check the first rows of sources that have adopted episodes.

        Args:
            segments: The batch.
            names: Of the sources, by number.

        Raises:
            SchemaError: They continue none of the adopted episodes.
        """
        memory = self.memory
        continued = {segment.episode for segment in segments if not segment.flags & NEW}
        for number in memory.awaiting.intersection(names):
            adopted = [episode for episode, source in memory.required.items() if source == number]
            if adopted and continued.isdisjoint(adopted):
                raise _not_continued(names[number], adopted[0])

    def end_of(self, row: int) -> int | None:
        """Return the checksum of the next observations of a stored row; None if the row is gone."""
        stored = self.read(row)
        if stored is None:
            return None
        crc = 0
        for column in stored:
            crc = google_crc32c.extend(crc, column[0].tobytes())
        return crc

    def _is_linked(self, piece: Piece) -> bool:
        """Return whether each row of a run continues the one before it."""
        _, _, _, first, count, stride, _, _ = piece
        columns = self.columns
        return all(  # bytes: NaN equals NaN then
            columns[after][row].tobytes() == columns[before][row + stride].tobytes()
            for row in range(first, first + (count - 1) * stride, stride)
            for before, after in self.memory.pairs
        )

    def note(self, segments: Sequence[Segment]) -> None:
        """Remember how the episodes of the batch end, once its rows are written; segments are all of it."""
        ends, columns = self.memory.ends, self.columns
        newest = {(segment.source, segment.trajectory): segment for segment in segments}
        for segment in newest.values():
            status, flags = segment.status, segment.flags
            if status == TERMINATED or (status == TRUNCATED and not flags & HAS_TRAJECTORY):
                continue  # no more rows come
            row = segment.start + (segment.rows - 1) * segment.stride
            crc = 0
            for _, after in self.memory.pairs:
                crc = google_crc32c.extend(crc, columns[after][row].tobytes())
            ends[segment.episode] = crc


def _not_continued(name: str, episode: int) -> SchemaError:
    return SchemaError(
        f"the first row of source {name!r} does not continue episode {episode}, which was adopted: its "
        "observation is not the last next observation",
        hint="continue the environment where it stopped, or resume(..., check=False)",
    )
