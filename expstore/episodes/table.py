"""Assign each row to an episode and a step.

Storages use it to number new rows, and the index uses it to answer SQL. It works on (source, trajectory id),
so that interleaved workers, lanes and restarts are separated. It stores no rows and uses no files.
"""

from __future__ import annotations

import itertools
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter, itemgetter
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from expstore.core import tuning
from expstore.core.id_set import IdSet
from expstore.core.values import Array, IntArray
from expstore.episodes.facts import SPLIT, TRAIN, merge_info, split_groups, split_of
from expstore.episodes.fragments import CapturedFragments, Fragments, cut_out, find_fragments, last_ids
from expstore.episodes.log import (
    EPISODE,
    HEAD,
    NO_RETURN,
    EndedEpisodes,
    Episode,
    LogEntry,
    LogItem,
    NewFacts,
)
from expstore.episodes.segmentation import (
    CUT,
    HAS_TRAJECTORY,
    NEW,
    NO_REWARD,
    OPEN,
    TERMINATED,
    TRUNCATED,
    Piece,
    Run,
    Steps,
    cut_batch,
    find_runs,
    is_new_episode,
    list_pieces,
)
from expstore.episodes.sessions import End, Heir, NewSource, Resume, Session, SessionKey
from expstore.episodes.sources import lane_names, lane_of, stream_of
from expstore.errors import SchemaError

#: Status number -> word in SQL.
STATUS = ("open", "terminated", "truncated", "cut")


class Segment(NamedTuple):
    """Evenly spaced rows of one batch that are consecutive steps of one episode.

    The rows are number `start`, `start + stride`, ... of the batch (`rows` of them); `status` is the
    episode's status after the last of them.
    """

    episode: int
    trajectory: int
    step: int
    source: int
    start: int
    rows: int
    stride: int
    ret: float
    status: int
    flags: int

    @property
    def key(self) -> tuple[int, int | None]:
        """The key by which the episode is found: source and trajectory id."""
        return self.source, self.trajectory if self.flags & HAS_TRAJECTORY else None


#: Episode, first step and number of rows.
_RUN_OF = itemgetter(0, 2, 5)

SEGMENT_FORMAT = "<qqqiiiidBB6x"
_SEGMENT = struct.Struct(SEGMENT_FORMAT)
#: `Segment(*values)` without a call in Python: a journal has a segment for each episode.
_MAKE = partial(tuple.__new__, Segment)
SEGMENT_BYTES = _SEGMENT.size


#: A segment as in a commit record.
_COLUMNS = np.dtype(
    {
        "names": Segment._fields,
        "formats": ["<i8", "<i8", "<i8", "<i4", "<i4", "<i4", "<i4", "<f8", "u1", "u1"],
        "itemsize": SEGMENT_BYTES,
    }
)
#: A batch of one lane with more runs becomes columns.
_MANY_RUNS = 8


@dataclass(slots=True, eq=False)
class LaneSegments(Sequence[Segment]):
    """The segments of many episodes of one lane without trajectory ids, as columns.

    All but the last end their episode, and all but the first begin one; episodes have consecutive ids.

    Args:
        columns: The segments, as `Segment` describes them. Shape `(n,)`.
        data: Their bytes for a commit record.
    """

    columns: Array
    data: bytes

    @classmethod
    def of(cls, first: Segment, table: IntArray, sums: Array, following: int) -> LaneSegments:
        """Return the segments of a batch.

        Args:
            first: The first one.
            table: The runs of the batch; see `find_runs`. Shape `(n, 5)`.
            sums: The sum of rewards of each. Shape `(n,)`.
            following: Id of the second episode.
        """
        columns = np.zeros(len(sums), _COLUMNS)
        columns["episode"] = np.arange(following - 1, following - 1 + len(sums))
        columns["source"], columns["stride"] = first.source, 1
        columns["flags"] = first.flags | NEW
        columns["start"], columns["rows"], columns["status"] = table[:, :3].T
        columns["ret"] = sums
        columns[0] = first
        return cls(columns, columns.tobytes())

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[Segment]:
        return map(_MAKE, _SEGMENT.iter_unpack(self.data))

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]


def pack_segments(segments: Iterable[Segment]) -> bytes:
    """Return segments as bytes for a commit record (56 bytes each)."""
    if isinstance(segments, LaneSegments):
        return segments.data
    return b"".join(itertools.starmap(_SEGMENT.pack, segments))


def unpack_segments(data: bytes) -> list[Segment]:
    """Parse the result of `pack_segments`."""
    return list(map(_MAKE, _SEGMENT.iter_unpack(data)))


class Observations(NamedTuple):
    """The observations of a batch, and how to read those of stored rows.

    Args:
        columns: The batch, in the schema's order. Shapes `(n, *row shape)`.
        pairs: Positions of each observation and of its next observation.
        read: Function that returns the next observations of stored rows, by id, one array of shape `row
            shape` for each pair; it leaves out rows that are no longer in the store.
    """

    columns: Sequence[Array]
    pairs: Sequence[tuple[int, int]]
    read: Callable[[list[int]], Mapping[int, Sequence[Array]]]


@dataclass(slots=True)
class Assignment:
    """The decisions of `EpisodeTable.assign`, before anything is changed.

    Args:
        segments: The batch cut into runs.
        numbers: Id, episode, step and time of every row. Shape `(4, n)`, C-contiguous.
        sources: New sources.
        restarted: Names of sources whose first row does not continue the open episode and begins another one.
    """

    segments: Sequence[Segment]
    numbers: IntArray
    sources: list[NewSource] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)

    @property
    def episodes(self) -> IntArray:
        """Episode id per row. Shape `(n,)`."""
        episodes: IntArray = self.numbers[1]
        return episodes

    @property
    def steps(self) -> IntArray:
        """Step per row. Shape `(n,)`."""
        steps: IntArray = self.numbers[2]
        return steps


class OpenEpisodes:
    """The episodes that may get more rows: open ones, and truncated ones with a trajectory id.

    No call scans all of them, except to return all of them: a store may have 100,000s of truncated ones.

    Example:
        >>> from expstore.episodes.table import Episode, OpenEpisodes
        >>> episodes = OpenEpisodes()
        >>> episodes.put(Episode(7, source=1, trajectory=None, start=0))
        >>> episodes.find(1, None) is episodes.find_by_id(7)
        True
    """

    __slots__ = ("_open", "_truncated")

    def __init__(self) -> None:
        self._open, self._truncated = _Group(), _Group()

    def __iter__(self) -> Iterator[Episode]:
        return itertools.chain(self._open.by_number.values(), self._truncated.by_number.values())

    def find(self, source: int, trajectory: int | None) -> Episode | None:
        """Return the episode of a source and trajectory id."""
        own = self._open.by_source.get(source)
        if own is None or (found := own.get(trajectory)) is None:
            own = self._truncated.by_source.get(source)
            found = None if own is None else own.get(trajectory)
        return found

    def find_by_id(self, number: int) -> Episode | None:
        """Return the episode with an id."""
        return self._open.by_number.get(number) or self._truncated.by_number.get(number)

    def put(self, episode: Episode) -> None:
        """Add an episode that is not there."""
        group = self._truncated if episode.status == TRUNCATED else self._open
        group.by_number[episode.episode] = episode
        group.by_source.setdefault(episode.source, {})[episode.trajectory] = episode

    def remove(self, episode: Episode) -> None:
        """Remove an episode. Call this before its status changes."""
        group = self._truncated if episode.status == TRUNCATED else self._open
        del group.by_number[episode.episode]
        own = group.by_source[episode.source]
        del own[episode.trajectory]
        if not own:
            del group.by_source[episode.source]

    def has(self, sources: Collection[int] | None) -> bool:
        """Return whether there are episodes of some sources, given their numbers; None: of any."""
        groups = (self._open.by_source, self._truncated.by_source)
        return any(groups) if sources is None else any(one in group for group in groups for one in sources)

    def find_open(self, sources: Collection[int] | None = None) -> list[Episode]:
        """Return the open episodes of some sources, given their numbers; None: of all."""
        return self._open.of(sources)

    def of(self, sources: Collection[int] | None) -> list[Episode]:
        """Return the open and the truncated episodes of some sources; None: of all."""
        return self._open.of(sources) + self._truncated.of(sources)

    def find_evicted(self, low: int) -> list[Episode]:
        """Return the oldest truncated episodes, as long as all of their rows have ids up to `low`."""
        oldest = self._truncated.by_number.values()
        return list(itertools.takewhile(lambda episode: episode.last_id <= low, oldest))


class _Group:
    """Episodes by id, in the order in which they were added, and by source and trajectory id."""

    __slots__ = ("by_number", "by_source")

    def __init__(self) -> None:
        self.by_number: dict[int, Episode] = {}
        self.by_source: dict[int, dict[int | None, Episode]] = {}

    def of(self, sources: Collection[int] | None) -> list[Episode]:
        """Return the episodes of some sources; None: of all."""
        if sources is None:
            return list(self.by_number.values())
        found = (self.by_source.get(source) for source in sources)
        return [episode for own in found if own is not None for episode in own.values()]


class Changes(NamedTuple):
    """What the index lacks.

    Args:
        sources: New or changed sources.
        episodes: New or changed episodes in their present state.
        faded: Ids of episodes whose fragments were removed, or whose first rows are gone. Shape `(n,)`.
        cut: Ids of episodes of which rows were deleted. Shape `(n,)`.
        fragments: All fragments.
    """

    sources: list[LogEntry]
    episodes: list[LogEntry]
    faded: IntArray
    cut: IntArray
    fragments: CapturedFragments

    def find_touched(self, low: int) -> IntArray:
        """Return the episodes whose number of rows with ids above `low` may have changed. Shape `(n,)`."""
        fragments = self.fragments.columns()
        changed = np.array([entry.episode for entry in self.episodes], np.int64)
        return np.unique(np.concatenate((self.faded, changed, fragments[0, fragments[3] <= low])))


class EpisodeTable:
    """Assign numbers of episodes and steps to rows, and track which episodes are open.

    Not locked: the caller holds the storage's lock, and to change it also the lock of the episodes. After a
    crash the storage builds it again from a base record, the commit records after it and the columns.
    `assign` changes nothing, so a write that fails has no effect.

    Args:
        generation: This opening's number; it is part of the names of unnamed sources.
        session: Id of the session that writes, unless a call names another one.
    """

    def __init__(self, *, generation: int = 0, session: str = "") -> None:
        self.generation = generation
        self.session = SessionKey(session)
        #: Sources that have adopted episodes which rows have not continued yet, by number.
        self.heirs: dict[int, Heir] = {}
        self.fragments = Fragments()
        self.next_episode = 1
        self.next_source = 1
        self._sessions: dict[SessionKey, Session] = {}
        self._low = 0  # newest id that could no longer be read when the last batch was numbered
        self._swept = 0  # cut episodes with rows up to this id only were dropped
        self._open = OpenEpisodes()
        self._resumable: WeakValueDictionary[int, Episode] = WeakValueDictionary()  # those that are cut
        self._changed: dict[int, Episode] = {}
        self._ended: list[EndedEpisodes] = []  # changed, too; `_changed` has those that changed again
        self._faded: set[int] = set()
        self._cut: set[int] = set()  # episodes whose fragments the index must read again
        self._sources: dict[int, LogEntry] = {}
        self.touched = ChangedIds()
        #: The splits other than "train" that any episode ever had.
        self.split_names: set[str] = set()
        #: The splits of the episodes that are not in "train"; unless `knows_splits`, of newer ones only.
        self.splits: dict[int, str] = {}
        self.knows_splits = True
        self.kernels: ModuleType | None = None  # compiled loops, once they are loaded

    # -- numbering -------------------------------------------------------------------------------

    def assign(
        self,
        steps: Steps,
        *,
        source: str | None,
        observations: Observations | None = None,
        low: int = 0,
        first_id: int = 1,
        time: int = 0,
    ) -> Assignment:
        """Assign an episode and a step to every row of a batch, without changing the table.

        Args:
            steps: The batch.
            first_id: Id of its first row.
            time: Time of all its rows, microseconds since 1970.
            source: The user's name for this stream; None for the session's unnamed stream.
            observations: With them the batch is compared with the episodes that it continues; None: it is not
                compared.
            low: The newest id that can no longer be read. A truncated episode is not continued if all of its
                rows have ids up to `low`.

        Raises:
            SchemaError: The source's name is not text that can be stored; or its first row after `resume`
                does not continue the episode.
        """
        numbers, names, new_sources = self._source_numbers(
            source, steps.lane_count, steps.session or self.session
        )
        self._low = low
        runs: tuple[IntArray, Array] | None = None
        order: IntArray | None = None
        if steps.count == 1:
            pieces = [self._single(steps)]
        elif self.kernels is not None and steps.lane_count == 1:
            runs, named = find_runs(steps, self.kernels), steps.trajectories is not None
            if len(runs[1]) <= _MANY_RUNS or named or self.heirs or not runs[0][:-1, 2].all():
                pieces, runs = list_pieces(*runs, named=named), None
            else:
                row, count, status, _, starts = runs[0][0].tolist()
                pieces = [(0, None, starts, row, count, 1, status, runs[1].item(0))]
        else:
            pieces, order = cut_batch(steps)
        restarted: list[str] = []
        unrewarded = NO_REWARD if steps.rewards is None else 0
        restarts: Collection[int] = ()
        if observations is not None:
            restarts = self._find_new_episodes(pieces, numbers, names, observations, compares=steps.linked)
        segments: Sequence[Segment] = (made := list[Segment]())
        pending: dict[tuple[int, int | None], tuple[int, int, int] | None] = {}
        next_episode = self.next_episode
        for place, piece in enumerate(pieces):
            lane, trajectory, starts, row, count, stride, status, ret = piece
            number = numbers[lane]
            key = (number, trajectory)
            if key in pending:
                known = pending[key]
            else:
                episode, known = self._open.find(number, trajectory), None
                if episode is not None and (episode.status == OPEN or episode.last_id > low):
                    known = (episode.episode, episode.length, episode.status)
                    if place in restarts:
                        restarted.append(names[lane])
                        known = None
            flags = (HAS_TRAJECTORY if trajectory is not None else 0) | unrewarded
            if known is None or starts:
                known = (next_episode, 0, OPEN)
                next_episode += 1
                flags |= NEW
            name, step, _ = known
            made.append(Segment(name, trajectory or 0, step, number, row, count, stride, ret, status, flags))
            over = status == TERMINATED or (status == TRUNCATED and trajectory is None)
            pending[key] = None if over else (name, step + count, status)
        if runs is not None:
            segments = LaneSegments.of(made[0], *runs, next_episode)
        if observations is not None and self.heirs:
            self._check_heirs(segments, dict(zip(numbers, names, strict=True)))
        numbers_of_rows = _spread(segments, steps.count, order, first_id, time, self.kernels)
        return Assignment(segments, numbers_of_rows, new_sources, restarted)

    def check_split(self, segments: Sequence[Segment], info: str) -> None:
        """Check that rows continue no episode of another split than that in their facts.

        Args:
            segments: The segments of `assign`.
            info: The facts, as JSON text, with a split.

        Raises:
            SchemaError: An episode has another split; nothing has changed.
        """
        split = split_of(info)
        for segment in segments:
            episode = None if segment.flags & NEW else self._open.find_by_id(segment.episode)
            if episode is not None and split_of(episode.text) != split:
                raise SchemaError(
                    f"rows of split {split!r} continue episode {segment.episode}, which is in split "
                    f"{split_of(episode.text)!r}",
                    hint="give each split its own source=, or end the episode first",
                )

    def _find_new_episodes(
        self,
        pieces: Sequence[Piece],
        numbers: Sequence[int],
        names: Sequence[str],
        observations: Observations,
        *,
        compares: bool,
    ) -> set[int]:
        """Return the places of the pieces that do not continue the open episode, as `is_new_episode` decides.

        Args:
            pieces: The batch.
            numbers: Number of each lane's source.
            names: Names of the sources.
            observations: The observations of the batch.
            compares: Whether a piece may begin another episode; False: only adopted episodes are checked.

        Raises:
            SchemaError: A row does not continue an adopted episode.
        """
        columns, pairs, read = observations
        seen: set[tuple[int, int | None]] = set()
        compared: list[tuple[int, Piece, Episode, bool]] = []
        for place, piece in enumerate(pieces):
            lane, trajectory, starts, _, count, _, _, _ = piece
            key = (numbers[lane], trajectory)
            if key in seen:
                continue
            seen.add(key)
            episode = None if starts else self._open.find(*key)
            if episode is not None:
                heir = self.heirs.get(key[0])
                is_required = heir is not None and episode.episode in heir.unchecked
                if is_required or (compares and count > 1):
                    compared.append((place, piece, episode, is_required))
            if trajectory is None and len(seen) == len(numbers):
                break  # all other pieces follow rows of the batch
        restarts: set[int] = set()
        stored = read([episode.last_id for _, _, episode, _ in compared]) if compared else {}
        for place, piece, episode, is_required in compared:
            former = stored.get(episode.last_id)
            if former is not None and is_new_episode(columns, pairs, piece, former, required=is_required):
                if is_required:
                    raise _build_not_continued_error(names[piece[0]], episode.episode)
                restarts.add(place)
        return restarts

    def _check_heirs(self, segments: Sequence[Segment], names: Mapping[int, str]) -> None:
        """Check that first rows of sources which have adopted episodes continue one of them.

        Args:
            segments: The batch.
            names: Names of its sources, by number.

        Raises:
            SchemaError: The rows of a source continue none of the episodes that it must continue.
        """
        continued = {segment.episode for segment in segments if not segment.flags & NEW}
        for number in self.waiting_heirs().intersection(names):
            unchecked = self.heirs[number].unchecked
            if unchecked and continued.isdisjoint(unchecked):
                raise _build_not_continued_error(names[number], min(unchecked))

    def waiting_heirs(self) -> set[int]:
        """Return the numbers of sources that have adopted episodes and have not written rows yet."""
        return {number for number, heir in self.heirs.items() if not heir.has_written}

    def assign_runs(self, source: int, runs: Sequence[Run], flags: int, low: int) -> list[Segment] | None:
        """Assign episodes and steps to rows of a source, without changing the table.

        Args:
            source: Number of the source, which has written rows before.
            runs: The rows. All runs but the last end their episode. Only a single run has a trajectory id.
            flags: Flags of their segments: `NO_REWARD` or 0.
            low: The newest id that can no longer be read.

        Returns:
            A segment for each run; None: `assign` must decide.
        """
        self._low = low
        trajectory = runs[0][4]
        if trajectory is not None:
            if trajectory == -1:
                return None  # such rows are not transitions, and are dropped
            flags |= HAS_TRAJECTORY
        open_episode, following, name = (
            self._open.find(source, trajectory),
            self.next_episode,
            trajectory or 0,
        )
        segments = []
        for start, rows, ret, status, _ in runs:
            if open_episode is None:
                segment = Segment(following, name, 0, source, start, rows, 1, ret, status, flags | NEW)
                following += 1
            elif open_episode.status == OPEN:
                number, step = open_episode.episode, open_episode.length
                segment = Segment(number, name, step, source, start, rows, 1, ret, status, flags)
                open_episode = None
            else:
                return None
            segments.append(segment)
        return segments

    def _source_numbers(
        self, source: str | None, lanes: int, key: SessionKey
    ) -> tuple[list[int], list[str], list[NewSource]]:
        """Return the number and the name of each lane's source, and the new sources."""
        session = self._sessions.get(key)
        known: Mapping[str, int] = {}
        if session is not None:
            known = session.unnamed if source is None else session.named
        handle = f"@{self.generation}" if key == self.session else f"@{key.id[:8]}"
        first = handle if source is None else source
        names = [first]
        if lanes > 1 or first not in known:
            names = lane_names(source, handle, lanes)
        numbers: list[int] = []
        new: list[NewSource] = []
        for name in names:
            number = known.get(name)
            if number is None:
                number = self.next_source + len(new)
                new.append(NewSource(number, name, source is not None, *key))
            numbers.append(number)
        return numbers, names, new

    @staticmethod
    def _single(steps: Steps) -> Piece:
        status = OPEN
        if steps.terminated is not None and steps.terminated[0]:
            status = TERMINATED
        elif steps.truncated is not None and steps.truncated[0]:
            status = TRUNCATED
        return (
            0 if steps.lanes is None else int(steps.lanes[0]),
            None if steps.trajectories is None else int(steps.trajectories[0]),
            steps.starts is not None and bool(steps.starts[0]),
            0,
            1,
            1,
            status,
            0.0 if steps.rewards is None else float(steps.rewards[0]),
        )

    # -- applying decisions ----------------------------------------------------------------------

    def use_kernels(self, kernels: ModuleType | None) -> None:
        """Cut and number rows by compiled loops from now on; None: by Python."""
        self.kernels = kernels

    def commit(
        self,
        segments: Sequence[Segment],
        sources: Sequence[NewSource],
        *,
        first_id: int,
        time: int,
        sequence: int,
        info: str = "",
    ) -> Sequence[LogItem]:
        """Apply the decisions of `assign`; return the log entries of changed episodes and new sources.

        Args:
            segments: The segments of `assign`, in a container that can be iterated more than once.
            sources: New sources.
            first_id: Id of the batch's first row.
            time: Time of the batch, microseconds since 1970.
            sequence: LSN of its commit record.
            info: Facts to attach to its episodes, as JSON text.
        """
        entries: list[LogItem] = []
        if sources:
            entries += [self._add_source(source, time) for source in sources]
        if self.heirs:
            for segment in segments:
                self._note_continued(segment.source, segment.episode, is_row=True)
        info, groups = split_groups(info) if info else ("", None)
        alone = merge_info("", info) if info else ""  # once: most of a batch's episodes have none yet
        parts: Iterable[Segment | Array] = segments
        if isinstance(segments, LaneSegments):
            columns = segments.columns
            begins = columns["flags"][0] & NEW and self._open.find(int(columns["source"][0]), None) is None
            start, stop = 0 if begins else 1, len(columns) - int(columns["status"][-1] == OPEN)
            first, last = columns[:start].tolist(), columns[stop:].tolist()
            parts = [*map(_MAKE, first), columns[start:stop], *map(_MAKE, last)]
        for part in parts:
            if isinstance(part, Segment):
                text = alone if groups is None or not part.flags & NEW else next(groups)
                self._commit_segment(part, first_id, time, sequence, (info or text, text), entries)
            else:
                texts = [alone] * len(part) if groups is None else list(islice(groups, len(part)))
                entries.append(self._commit_ended(part, first_id, time, sequence, texts))
        if self.fragments.crowded:
            self.evict(self._low)
        return entries

    def _note_continued(self, source: int, episode: int, *, is_row: bool) -> None:
        """Stop checking an episode that a source has adopted: a row has continued it, or it has ended."""
        heir = self.heirs.get(source)
        if heir is not None:
            heir.has_written |= is_row
            heir.unchecked.discard(episode)
            if heir.has_written and not heir.unchecked:
                del self.heirs[source]

    def _annotate(self, facts: NewFacts, sequence: int) -> list[LogEntry]:
        """Set the facts of episodes; return the log entries of those that are not open."""
        noted = []
        for entry in facts.entries:
            episode = self.find(entry.episode) or Episode.of(entry)
            episode.text = entry.text
            self._note_split(episode)
            noted.append(self._note(episode, sequence))
        return [entry for entry in noted if entry.status != OPEN]

    def find(self, number: int) -> Episode | None:
        """Return an episode that is open, can be resumed, or is not in the index yet; otherwise None."""
        found = self._changed.get(number) or self._open.find_by_id(number) or self._resumable.get(number)
        if found is None and (at := bisect_right(self._ended, number, key=attrgetter("first"))):
            entry = self._ended[at - 1].entry(number)
            found = None if entry is None else Episode.of(entry)
        return found

    # -- sessions --------------------------------------------------------------------------------

    def session_of(self, key: SessionKey) -> Session | None:
        """Return the state of a session; None: it has written nothing, or ended long ago."""
        return self._sessions.get(key)

    def live_sessions(self) -> list[SessionKey]:
        """Return the sessions that have written and have not ended."""
        return [key for key, session in self._sessions.items() if not session.ended]

    def sources_named(self, source: str, *, session: SessionKey | None = None) -> list[int]:
        """Return the numbers of a stream's sources, one for each lane.

        Args:
            source: The name that the user gave.
            session: Key of the session, which may have ended; None: all live sessions.
        """
        if session is None:
            chosen = [known for known in self._sessions.values() if not known.ended]
        else:
            chosen = [known] if (known := self._sessions.get(session)) else []
        return [
            number
            for known in chosen
            for name, number in known.named.items()
            if name.startswith(source) and stream_of(name) == source
        ]

    def sources_of_lanes(self, source: str | None, lanes: Collection[int], session: SessionKey) -> list[int]:
        """Return the numbers of the sources of some lanes of a session's stream.

        Args:
            source: The name that the user gave; None: the unnamed stream.
            lanes: Numbers of the lanes.
            session: Key of the session.
        """
        known = self._sessions.get(session)
        if known is None:
            return []
        names = known.unnamed if source is None else known.named
        return [
            number
            for name, number in names.items()
            if source in (None, stream_of(name)) and lane_of(name) in lanes
        ]

    def newest_ended(self, source: str) -> Session | None:
        """Return the newest ended session that wrote a stream of this name; None if no session did."""
        found = (one for one in reversed(self._sessions.values()) if one.ended and source in one.named)
        return next(found, None)

    def resumption(self, session: Session, source: str, *, to: SessionKey, time: int) -> Resume:
        """Return, without applying it, the change by which a session adopts episodes of an ended one.

        If the session itself has ended, the change reopens it, with the episodes that its end has cut.

        Args:
            session: The ended session.
            source: Name of the stream of these episodes, in both sessions.
            to: Key of the session that adopts them.
            time: Microseconds since 1970.
        """
        lanes = [(name, number) for name, number in session.named.items() if stream_of(name) == source]
        new = [NewSource(self.next_source + at, name, True, *to) for at, (name, _) in enumerate(lanes)]
        numbers = tuple(number for _, number in lanes)
        episodes = [one.episode for (number, _), one in session.cut.items() if number in set(numbers)]
        heir = self._sessions.get(to)
        if heir is not None and heir.ended:
            episodes += [one.episode for one in heir.cut.values()]
        return Resume(time, session.key, tuple(new), numbers, tuple(episodes))

    def apply(self, change: NewFacts | End | Resume, sequence: int) -> list[LogEntry]:
        """Apply a change of episodes; return the log entries of the changed episodes and sources.

        Args:
            change: New facts about episodes, or which episodes end or are resumed.
            sequence: LSN of the record.
        """
        if isinstance(change, NewFacts):
            return self._annotate(change, sequence)
        return self._end(change, sequence) if isinstance(change, End) else self._resume(change, sequence)

    def end_local(self, time: int, sequence: int) -> list[LogEntry]:
        """End all other local sessions, as an opening for writing does; return the log entries."""
        over = [key for key in self.live_sessions() if not key.remote and key != self.session]
        return self._end(End(time, (), tuple(over)), sequence)

    def end_episodes(self, sequence: int) -> list[LogEntry]:
        """End all open episodes because all rows are deleted; none can be resumed. Return the log entries."""
        for session in self._sessions.values():
            session.cut.clear()
        return self._end(End(0, None), sequence)

    def _end(self, end: End, sequence: int) -> list[LogEntry]:
        sessions = [found for key in end.sessions if (found := self._sessions.get(key)) and not found.ended]
        owner = {number: session for session in sessions for number in session.numbers()}
        over = self._open.of(None if end.sources is None else {*end.sources, *owner})
        if end.episodes:
            owner |= {number: one for one in self._sessions.values() for number in one.numbers()}
            single = (self._open.find_by_id(number) for number in end.episodes)
            over += [one for one in single if one is not None and one not in over]
        entries: list[LogEntry] = []
        for episode in over:
            self._open.remove(episode)
            self._note_continued(episode.source, episode.episode, is_row=False)
            if episode.status == OPEN:
                episode.status = CUT
                entries.append(self._note(episode, sequence))
                if (session := owner.get(episode.source)) is not None:
                    session.cut[episode.source, episode.trajectory] = episode
                    self._resumable[episode.episode] = episode
                    if len(session.cut) > tuning.CUT_EPISODES:
                        del session.cut[next(iter(session.cut))]
        for session in sessions:
            self._sessions[session.key] = self._sessions.pop(session.key)  # keep the order of their ends
            session.ended = max(1, end.time)
            for number in session.numbers():
                self.heirs.pop(number, None)
            entries += [self._note_source(source, session) for source in session.sources()]
        if sessions:
            self._forget_sessions()
        return entries

    def _resume(self, resume: Resume, sequence: int) -> list[LogEntry]:
        session = self._sessions.get(resume.session)
        heir = self._sessions.get(resume.sources[0].key) if resume.sources else session
        entries: list[LogEntry] = []
        opened: dict[int, int] = {}
        if heir is not None and (heir is session or heir.ended):
            heir.ended = 0
            entries += [self._note_source(source, heir) for source in heir.sources()]
            opened = {number: number for number in heir.numbers()}
        entries += [self._add_source(source, resume.time) for source in resume.sources]
        opened |= zip(resume.numbers, (source.number for source in resume.sources), strict=True)
        wanted = set(resume.episodes)
        for one in [session] if heir is session else [heir, session]:
            for (number, trajectory), episode in [] if one is None else list(one.cut.items()):
                if one is not None and episode.episode in wanted:
                    del one.cut[number, trajectory]
                    episode.source, episode.status, episode.fragment = opened[number], OPEN, -1
                    self._open.put(episode)
                    entries.append(self._note(episode, sequence))
        return entries

    def _forget_sessions(self) -> None:
        """Drop ended sessions that cannot be resumed, and the oldest of the others if there are too many."""
        ended = [one for one in reversed(self._sessions.values()) if one.ended]
        seen: set[str] = set()
        kept = 0
        for session in ended:
            newest = set(session.named) - seen
            seen.update(session.named)
            if (session.key.remote or newest) and kept < tuning.ENDED_SESSIONS:
                kept += 1
                if not session.key.remote:  # only `resume` by name can reopen its episodes
                    numbers = set(session.named.values())
                    session.cut = {key: one for key, one in session.cut.items() if key[0] in numbers}
            else:
                del self._sessions[session.key]

    def _add_source(self, source: NewSource, time: int) -> LogEntry:
        session = self._sessions.get(source.key)
        if session is None:
            session = self._sessions[source.key] = Session(source.key, time)
        names = session.named if source.named else session.unnamed
        names[source.name] = source.number
        self.next_source = max(self.next_source, source.number + 1)
        return self._note_source(source, session)

    def _note_source(self, source: NewSource, session: Session) -> LogEntry:
        entry = LogEntry(
            episode=0,
            source=source.number,
            start=session.started,
            end=session.ended,
            text=source.name,
            session=source.session,
            named=source.named,
            generation=self.generation,
        )
        self._sources[source.number] = entry
        return entry

    def _commit_segment(
        self,
        segment: Segment,
        first_id: int,
        time: int,
        sequence: int,
        info: tuple[str, str],
        entries: list[LogItem],
    ) -> None:
        """Add a segment's rows to its episode; `info`: new facts, and the info of an episode without any."""
        number, trajectory, step, source, start, rows, stride, ret, status, flags = segment
        name = trajectory if flags & HAS_TRAJECTORY else None
        episode = self._open.find(source, name)
        is_known = episode is not None and not flags & NEW
        if episode is None or not is_known:
            if episode is not None:
                self._open.remove(episode)
                if episode.status == OPEN:
                    episode.status = CUT  # a new episode begins although this one did not end: a manual reset
                    entries.append(self._note(episode, sequence))
                self._note_continued(source, episode.episode, is_row=True)
            episode = Episode(number, source, name, start=time, length=step)
            self.next_episode = max(self.next_episode, number + 1)
        facts, alone = info
        if facts:
            episode.text = merge_info(episode.text, facts) if episode.text else alone
            if SPLIT in facts:
                self._note_split(episode)
        goes_on = episode.status == TRUNCATED
        first = first_id + start
        episode.fragment = self.fragments.add(episode.fragment, (episode.episode, step, rows, first, stride))
        episode.length += rows
        if not flags & NO_REWARD:
            episode.ret = (episode.ret or 0.0) + ret
        episode.end = time
        episode.last_id = first + (rows - 1) * stride
        is_over = status == TERMINATED or (status == TRUNCATED and name is None)
        if is_known and (is_over or status != OPEN or goes_on):
            self._open.remove(episode)
            is_known = False
        episode.status = status
        self._changed[episode.episode] = episode
        self.touched.add(episode.episode)
        if status != OPEN or goes_on:
            entries.append(episode.entry(sequence, self.generation))
        if not is_over and not is_known:
            self._open.put(episode)

    def _commit_ended(
        self, columns: Array, first_id: int, time: int, sequence: int, texts: Sequence[str]
    ) -> EndedEpisodes:
        """Do what `_commit_segment` does for segments that begin and end an episode, at once.

        Args:
            columns: The segments; see `LaneSegments`.
            first_id: Id of the batch's first row.
            time: Time of the batch.
            sequence: LSN of its commit record.
            texts: The info of each episode.
        """
        heads, firsts, rows = np.zeros(len(columns), HEAD), first_id + columns["start"], columns["rows"]
        heads["kind"], heads["start"], heads["end"] = EPISODE, time, time
        heads["sequence"], heads["generation"] = sequence, self.generation
        for name in ("episode", "source", "status"):
            heads[name] = columns[name]
        heads["flags"] = np.where(columns["flags"] & NO_REWARD, NO_RETURN, 0)
        heads["ret"], heads["length"], heads["last_id"] = 0.0 + columns["ret"], rows, firsts + rows - 1
        episodes = range(number := int(heads["episode"][0]), number + len(heads))
        ended = EndedEpisodes(heads, texts, number)
        self.next_episode = episodes.stop
        if SPLIT in texts[0] and (split := split_of(texts[0])) != TRAIN:
            self.split_names.add(split)
            self.splits.update(dict.fromkeys(episodes, split))
        self.fragments.append(
            np.stack([columns["episode"], columns["step"], rows, firsts, columns["stride"]])
        )
        self._ended.append(ended)
        self.touched.add(*episodes)
        return ended

    def _note_split(self, episode: Episode) -> None:
        if (split := split_of(episode.text)) != TRAIN:
            self.split_names.add(split)
            self.splits[episode.episode] = split

    def add_splits(self, splits: Mapping[int, str]) -> None:
        """Add the splits of episodes before those that `splits` has; all of them are known then."""
        self.splits = {**splits, **self.splits}
        self.knows_splits = True

    def _touch(self, episode: Episode) -> None:
        self._changed[episode.episode] = episode
        self.touched.add(episode.episode)

    def _note(self, episode: Episode, sequence: int) -> LogEntry:
        self._touch(episode)
        return episode.entry(sequence, self.generation)

    def tails(self) -> list[int]:
        """Return the newest row of each open episode of the own session's unnamed streams."""
        return [one.last_id for one in self.open_of(self.find_unnamed_sources(self.session))]

    def find_unnamed_sources(self, key: SessionKey) -> list[int]:
        """Return the numbers of a session's unnamed stream, one for each lane."""
        session = self._sessions.get(key)
        return [] if session is None else list(session.unnamed.values())

    def evict(self, low: int) -> None:
        """Drop what is only needed for rows with ids <= `low`."""
        self._faded.update(self.fragments.evict(low).tolist())
        # Keep episodes that `assign` has continued until `commit`, even if their rows were removed meanwhile.
        low = min(low, self._low)
        for episode in self._open.find_evicted(low):
            self._open.remove(episode)
        for session in self._sessions.values() if low > self._swept else ():
            if session.cut:
                session.cut = {key: one for key, one in session.cut.items() if one.last_id > low}
        self._swept = max(self._swept, low)

    # -- storing and loading ---------------------------------------------------------------------

    def to_base(self) -> dict[str, Any]:
        """Return the values for a base record: everything that is not in columns and episodes.log.

        Of the splits it has the names, which say that episodes.log has some.
        """
        return {
            "next_episode": self.next_episode,
            "next_source": self.next_source,
            "sessions": [session.to_dict() for session in self._sessions.values()],
            "open": [episode.to_dict() for episode in self._open],
        } | ({"splits": sorted(self.split_names)} if self.split_names else {})

    def load_base(self, data: Mapping[str, Any]) -> None:
        """Restore the result of `to_base`."""
        self.next_episode = int(data["next_episode"])
        self.next_source = int(data["next_source"])
        self.split_names.update(data.get("splits", ()))
        self.knows_splits = not self.split_names
        for values in data["sessions"]:
            key = SessionKey(*values["key"])
            cut = {(e["source"], e["trajectory"]): Episode(**e) for e in values["cut"]}
            self._resumable.update((episode.episode, episode) for episode in cut.values())
            self._sessions[key] = Session(
                key, values["started"], values["ended"], dict(values["named"]), dict(values["unnamed"]), cut
            )
        for values in data["open"]:
            self._open.put(Episode(**values))

    def load_rows(self, ids: IntArray, episodes: IntArray, steps: IntArray) -> None:
        """Find the fragments of the rows in the columns.

        Args:
            ids: Ids of the rows, ascending. Shape `(n,)`, as the others.
            episodes: Episode id per row.
            steps: Step per row.
        """
        if not ids.size:
            return
        fragments = find_fragments(episodes, steps, ids)
        self._fill(fragments)
        # Episodes whose first rows were removed; the index may not know it yet.
        names, at = np.unique(fragments[0], return_index=True)
        self._faded.update(names[fragments[1, at] > 0].tolist())

    def _fill(self, fragments: IntArray) -> None:
        """Replace all fragments, and set the newest ones of open episodes, which their next rows lengthen."""
        first = self.fragments.fill(fragments)
        known = {episode.episode: episode for episode in self._open}
        places = np.flatnonzero(np.isin(fragments[0], list(known)))
        ends = last_ids(fragments[:, places])
        for place, end in zip(places.tolist(), ends.tolist(), strict=True):
            episode = known[int(fragments[0, place])]
            if end == episode.last_id:
                episode.fragment = first + place

    def give_up(self, deleted: IdSet) -> None:
        """Drop the fragments of deleted rows."""
        fragments = self.fragments.rows
        touched = deleted.meets(fragments[3], last_ids(fragments))
        if touched.any():
            self._faded.update(episodes := np.unique(fragments[0, touched]).tolist())
            self._cut.update(episodes)
            self._fill(cut_out(fragments, deleted))

    # -- for the index ---------------------------------------------------------------------------

    def open_entries(self) -> list[LogEntry]:
        """Return the state of open episodes, whose current state is not in the log."""
        return [episode.entry(0, self.generation) for episode in self._open.find_open()]

    def has_open(self, sources: Collection[int] | None) -> bool:
        """Return whether an episode of some sources, or of any if None, may still get rows."""
        return self._open.has(sources)

    def open_of(self, sources: Collection[int]) -> list[Episode]:
        """Return the open episodes of some sources, given their numbers."""
        return self._open.find_open(sources)

    def take_changes(self, *, whole: bool = False) -> Changes:
        """Return what has changed since the last call, in time that does not depend on the unchanged rest.

        Args:
            whole: Return the open episodes instead of the changed ones: the log has all others.
        """
        faded, cut = self._faded, self._cut
        changes = Changes(
            list(self._sources.values()),
            self.open_entries()
            if whole
            else [
                *(entry for ended in self._ended for entry in ended if entry.episode not in self._changed),
                *(episode.entry(0, self.generation) for episode in self._changed.values()),
            ],
            np.fromiter(faded, np.int64, len(faded)),
            np.fromiter(cut, np.int64, len(cut)),
            self.fragments.capture(),
        )
        self._sources.clear()
        self._changed.clear()
        self._ended.clear()
        faded.clear()
        cut.clear()
        return changes

    @property
    def waiting(self) -> int:
        """Number of changes of episodes that the index lacks."""
        return len(self._changed) + sum(map(len, self._ended))


def _build_not_continued_error(name: str, episode: int) -> SchemaError:
    return SchemaError(
        f"the first row of source {name!r} does not continue episode {episode}, which was adopted: its "
        "observation is not the last next observation",
        hint="continue the environment where it stopped, or resume(..., check=False)",
    )


def _spread(
    segments: Sequence[Segment],
    n: int,
    order: IntArray | None,
    first_id: int,
    time: int,
    kernels: ModuleType | None,
) -> IntArray:
    """Return id, episode, step and time of every row. Shape `(4, n)`."""
    if n == 1:
        return np.array([[first_id], [segments[0].episode], [segments[0].step], [time]])
    if isinstance(segments, LaneSegments):
        columns = segments.columns
        runs = np.stack([columns["episode"], columns["step"], columns["rows"]], axis=1)
    else:
        runs = np.array(list(map(_RUN_OF, segments)))
    numbers = np.empty((4, n), np.int64)
    if kernels is not None and order is None:
        kernels.spread_runs(runs, first_id, time, numbers)
        return numbers
    episode, start, counts = runs.T
    steps = np.arange(n)
    numbers[0] = first_id + steps
    numbers[3] = time
    steps += np.repeat(start + counts - np.cumsum(counts), counts)
    rows: Any = slice(None) if order is None else order
    numbers[1, rows] = np.repeat(episode, counts)
    numbers[2, rows] = steps
    return numbers


class ChangedIds:
    """The ids of recently changed episodes, in the order of the changes.

    Not locked: the caller holds the storage's `locks.episodes`.
    """

    def __init__(self) -> None:
        self._ids: deque[int] = deque(maxlen=1 << 16)
        self.count = 0

    def add(self, *episodes: int) -> None:
        """Record that episodes have changed."""
        self._ids.extend(episodes)
        self.count += len(episodes)

    def since(self, count: int) -> IntArray | None:
        """Return the episodes changed since `count` had this value. Shape `(n,)`; None if too many."""
        new = self.count - count
        if new > len(self._ids):
            return None
        return np.unique(np.fromiter(islice(reversed(self._ids), new), np.int64, new))
