"""Whether a call continues an earlier call's episode: its first observation equals the last next observation.

Used by `expstore.episodes.table`. A collector that restarts counts its trajectories from 0 again; only the
observations tell its first episode from the one that was open under the same trajectory id.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
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

#: A single row that does not join its episode is a restart if this many different observations joined the
#: episode before it, without a miss. n-step rows join only where observations repeat with period n - 1, so
#: at most n - 1 different observations join in a row. 1 is unsafe: an environment that does not move at its
#: start joins for every n. 2 is safe for n = 2. For larger n it is wrong only if the first observations
#: alternate, and it then costs one cut, because the next miss has no proof and raises the number to
#: `_LINKED`.
_PROOFS = 2
#: The same number after a miss without proof, which n-step rows and alternating writers cause: n-step rows
#: with n <= 8 never reach it. A source that reaches it is linked: a miss is a restart in all its episodes.
_LINKED = 8
#: A source is no longer linked after this many calls in a row with a miss: its rows have stopped chaining.
_MISSES = 3
#: How many pairs of rows inside a call are compared, for each source.
_PAIRS = 8


@dataclass(slots=True)
class _Stream:
    """Whether the rows of one source have joined so far.

    Args:
        needed: Number of different observations that must have joined in an episode to make a miss a restart.
        linked: Whether every miss is a restart.
        misses: Number of consecutive calls with a miss.
    """

    needed: int = _PROOFS
    linked: bool = False
    misses: int = 0

    @property
    def is_settled(self) -> bool:
        """Whether further rows that join change nothing."""
        return self.linked and not self.misses

    def is_restart(self, joined: Collection[int]) -> bool:
        """Return whether a single row that does not join is a restart.

        Args:
            joined: The different observations that have joined in its episode.
        """
        return self.misses < _MISSES and (self.linked or len(joined) >= self.needed)


@dataclass(slots=True)
class JoinMemory:
    """Checksums of observations with which later rows are compared, kept between calls.

    It is only in RAM: if it lacks an episode, the checksum is computed from the stored row.

    Args:
        ends: Checksum (crc32c) of the last next observation, by episode id.
        joined: Checksums of the different observations that have joined since an episode's last miss, at most
            `_LINKED`, by episode id.
        required: Adopted episodes whose next row must join, and the source that has adopted each.
        awaiting: Sources that have adopted episodes and have not written rows yet.
        streams: The sources' records of joins, by number.
        warned: The warnings that were logged; each is logged once.
        schema: The schema for `pairs`.
        pairs: Positions of each observation field and of its next observation.
        names: Names of the observation fields.
        blind: Rows up to this id are not compared, since other fields were compared then.
    """

    ends: dict[int, int] = field(default_factory=dict)
    joined: dict[int, set[int]] = field(default_factory=dict)
    required: dict[int, int] = field(default_factory=dict)
    awaiting: set[int] = field(default_factory=set)
    streams: dict[int, _Stream] = field(default_factory=dict)
    warned: set[Hashable] = field(default_factory=set)
    schema: Schema | None = None
    pairs: Sequence[tuple[int, int]] = ()
    names: tuple[Key, ...] = ()
    blind: int = 0

    def carry_over(self) -> JoinMemory:
        """Return the memory for a journal that is read again, which may have more rows: without `ends`."""
        return replace(self, ends={}, required=dict(self.required), awaiting=set(self.awaiting))

    def note_rows(self, segments: Iterable[Segment]) -> None:
        """Record that sources have written rows."""
        for segment in segments:
            self.awaiting.discard(segment.source)
            if self.required.get(segment.episode) == segment.source:
                del self.required[segment.episode]

    def note_row(
        self, source: int, episode: int, *, joined: int | None, missed: bool = False, end: int | None
    ) -> None:
        """Record a single row that is not a restart, as `BatchJoins.note` does for batches.

        Args:
            source: Number of the row's source.
            episode: The row's episode.
            joined: crc32c of the row's observation, which equals the last next observation; None: the row
                began the episode, or missed.
            missed: Whether it continued the episode without joining it.
            end: crc32c of the row's next observation; None: the episode gets no more rows.
        """
        stream = self.streams.get(source)
        if stream is None:
            stream = self.streams[source] = _Stream()
        if missed:
            self.joined.pop(episode, None)
            stream.needed, stream.linked = _LINKED, False
            stream.misses += 1
        elif joined is not None and not stream.is_settled:
            self.count(source, episode, joined)
            stream.misses = 0
        if end is not None:
            self.ends[episode] = end
        elif self.joined:
            self.joined.pop(episode, None)

    def is_restart(self, source: int, episode: int) -> bool:
        """Return whether a single row that does not join its episode is a restart."""
        stream = self.streams.get(source)
        return stream is not None and stream.is_restart(self.joined.get(episode, ()))

    def count(self, source: int, episode: int, crc: int) -> None:
        """Count an observation that has joined."""
        stream = self.streams.setdefault(source, _Stream())
        if not stream.linked:
            joined = self.joined.setdefault(episode, set())
            joined.add(crc)
            stream.linked = len(joined) >= _LINKED

    def forget(self, episode: int) -> None:
        """Drop an episode that gets no more rows."""
        self.ends.pop(episode, None)
        self.joined.pop(episode, None)
        self.required.pop(episode, None)

    def forget_ends(self, last_id: int) -> None:
        """Forget the last observations of all episodes, because rows after this id have other fields."""
        self.ends.clear()
        self.joined.clear()
        self.required.clear()
        self.blind = last_id

    def forget_sources(self, numbers: Iterable[int]) -> None:
        """Drop sources whose session has ended."""
        for number in numbers:
            self.streams.pop(number, None)
            self.awaiting.discard(number)


@dataclass(slots=True)  # not frozen: one is created for every batch
class BatchJoins:
    """Compare one batch with the episodes that it may continue.

    Args:
        memory: The memory of the store's writer.
        columns: The batch, in the schema's order. Shapes `(n, *row shape)`.
        read: Function that returns the next observations of a stored row, by id, as a list of arrays of shape
            `(1, *row shape)`; None if the row was removed.
        joined: Source, episode and the observation's checksum of each row that continues an earlier call.
        missed: Source and episode of each row that does not, if the batch alone does not explain it, and
            whether it is a restart. `note` counts both: a batch that is not written changes nothing.
    """

    memory: JoinMemory
    columns: Sequence[Array]
    read: Callable[[int], Sequence[Array] | None]
    joined: list[tuple[int, int, int]] = field(default_factory=list)
    missed: list[tuple[int, int, bool]] = field(default_factory=list)

    def follows(
        self, source: int, episode: int, last_id: int, piece: Piece, pieces: Sequence[Piece], *, name: str
    ) -> bool:
        """Return whether rows of the batch may continue an episode.

        Args:
            source: Number of the rows' source.
            episode: The episode.
            last_id: Id of the episode's newest row.
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
        crc = self._crc_of(piece[3])
        stream = memory.streams.get(source)
        if crc == expected:
            if stream is None or not stream.is_settled:
                self.joined.append((source, episode, crc))
            return True
        if episode in memory.required:
            raise _build_not_continued_error(name, episode)
        lane = piece[0]
        runs = [one for one in ([piece] if piece[4] > 1 else pieces) if one[0] == lane and one[4] > 1]
        if runs:
            return not all(map(self._is_linked, runs))
        # The call does not show whether the source's rows chain, so earlier calls decide.
        is_restart = memory.is_restart(source, episode)
        self.missed.append((source, episode, is_restart))
        return not is_restart

    def check_adopted(self, segments: Sequence[Segment], names: dict[int, str]) -> None:
        """Check the first rows of sources that have adopted episodes.

        Args:
            segments: The batch.
            names: Names of the sources, by number.

        Raises:
            SchemaError: The rows continue none of the adopted episodes.
        """
        memory = self.memory
        continued = {segment.episode for segment in segments if not segment.flags & NEW}
        for number in memory.awaiting.intersection(names):
            adopted = [episode for episode, source in memory.required.items() if source == number]
            if adopted and continued.isdisjoint(adopted):
                raise _build_not_continued_error(names[number], adopted[0])

    def end_of(self, row: int) -> int | None:
        """Return the checksum of the next observations of a stored row; None if the row was removed."""
        stored = self.read(row)
        if stored is None:
            return None
        crc = 0
        for column in stored:
            crc = google_crc32c.extend(crc, column[0].tobytes())
        return crc

    def _crc_of(self, row: int) -> int:
        """Return the checksum of the observations of a row of the batch."""
        crc = 0
        for before, _ in self.memory.pairs:
            crc = google_crc32c.extend(crc, self.columns[before][row].tobytes())
        return crc

    def _is_linked(self, piece: Piece) -> bool:
        """Return whether each row of a run continues the previous one."""
        _, _, _, first, count, stride, _, _ = piece
        return all(
            self._is_pair(row, row + stride) for row in range(first, first + (count - 1) * stride, stride)
        )

    def _is_pair(self, row: int, next_row: int) -> bool:
        """Return whether a row of the batch continues another one."""
        columns = self.columns
        return all(  # compared as bytes, so that NaN equals NaN
            columns[after][row].tobytes() == columns[before][next_row].tobytes()
            for before, after in self.memory.pairs
        )

    def note(self, segments: Sequence[Segment]) -> None:
        """Record how the episodes of a written batch end; `segments` are the whole batch."""
        memory, columns = self.memory, self.columns
        self._count_joins(segments)
        newest = {(segment.source, segment.trajectory): segment for segment in segments}
        for segment in newest.values():
            status, flags = segment.status, segment.flags
            if status == TERMINATED or (status == TRUNCATED and not flags & HAS_TRAJECTORY):
                continue  # the episode gets no more rows
            row = segment.start + (segment.rows - 1) * segment.stride
            crc = 0
            for _, after in memory.pairs:
                crc = google_crc32c.extend(crc, columns[after][row].tobytes())
            memory.ends[segment.episode] = crc
        if memory.joined:
            for segment in segments:
                if segment.episode not in memory.ends:
                    memory.joined.pop(segment.episode, None)

    def _count_joins(self, segments: Sequence[Segment]) -> None:
        """Count which rows have joined, across calls and inside this one."""
        memory = self.memory
        missed: set[int] = set()
        for source, episode, is_restart in self.missed:
            memory.joined.pop(episode, None)
            missed.add(source)
            stream = memory.streams.setdefault(source, _Stream())
            if not is_restart:
                stream.needed, stream.linked = _LINKED, False
        counted: set[int] = set()
        for source, episode, crc in self.joined:
            counted.add(source)
            memory.count(source, episode, crc)
        left: dict[int, int] = {}  # number of pairs still to compare, by source
        for segment in segments:
            source = segment.source
            pairs = min(segment.rows - 1, left.get(source, _PAIRS))
            stream = memory.streams.setdefault(source, _Stream())
            if not pairs or (stream.linked and not stream.misses) or stream.misses >= _MISSES:
                continue  # more pairs would change nothing: rows that do not chain are no restarts
            counted.add(source)
            left[source] = left.get(source, _PAIRS) - pairs
            if not self._count_run(segment, pairs):
                missed.add(source)
                left[source] = 0
        for source in counted | missed:
            stream = memory.streams[source]
            stream.misses = stream.misses + 1 if source in missed else 0

    def _count_run(self, segment: Segment, pairs: int) -> bool:
        """Count which of the last rows of a run continue the previous one; return whether all do."""
        memory, stride = self.memory, segment.stride
        last = segment.start + (segment.rows - 1) * stride
        for row in range(last - pairs * stride, last, stride):
            if not self._is_pair(row, row + stride):
                memory.joined.pop(segment.episode, None)
                memory.streams[segment.source].needed = _LINKED
                return False
            memory.count(segment.source, segment.episode, self._crc_of(row + stride))
        return True


def _build_not_continued_error(name: str, episode: int) -> SchemaError:
    return SchemaError(
        f"the first row of source {name!r} does not continue episode {episode}, which was adopted: its "
        "observation is not the last next observation",
        hint="continue the environment where it stopped, or resume(..., check=False)",
    )
