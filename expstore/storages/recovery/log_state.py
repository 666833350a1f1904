"""The state that the records of a journal describe: a fold over them.

The only interpreter of records. Used by the writer's opening, by readers of a store with and without a
writer, and by verification. It reads no files and no columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from expstore.core.draw_state import Randomness, from_json
from expstore.core.id_set import NO_IDS, IdSet
from expstore.core.parsing import check_number
from expstore.core.values import Window
from expstore.episodes.log import LogEntry, NewFacts, flatten
from expstore.episodes.sessions import End, Resume
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError
from expstore.storages.format.journal import Kind, Record
from expstore.storages.format.manifest import unpack_ids
from expstore.storages.format.records import Mark, Publish, Redo

#: The records that concern rows or episodes.
_OF_ROWS = frozenset({Kind.PUBLISH, Kind.DELETE, Kind.RETIRE, Kind.ANNOTATE, Kind.END, Kind.RESUME})


@dataclass(slots=True, kw_only=True)
class LogState:
    """The state after some records of a journal.

    Invariant: it depends only on the base record and the records that were applied, in their order.

    Args:
        generation: The number of the opening that wrote the base record.
        sequence: LSN of the last record that was applied.
        last: The newest id that was committed.
        retired: The newest id that was removed other than by age.
        draw: How many batches were returned, as far as records say.
        progress: The progress of a sampler at the newest checkpoint.
        max_priority: The largest priority so far.
        write_count: The number of rows that were ever written.
        content: Position of the last record that concerns rows or episodes: generation and LSN.
        index_floor: A SQL index older than this position must be rebuilt.
        randomness: The state of the user's generator in a version; None in the journal of a store.
        limits: The counts of a rate limiter at the newest checkpoint.
        deleted: Rows that the records delete between readable rows; expstore.json lists earlier ones.
    """

    generation: int
    sequence: int
    last: int
    retired: int
    draw: int
    progress: tuple[int, ...]
    max_priority: float
    write_count: int
    content: tuple[int, int]
    index_floor: tuple[int, int]
    randomness: Randomness | None
    limits: tuple[int, int]
    deleted: IdSet = NO_IDS

    @classmethod
    def of(cls, record: Record) -> LogState:
        """Return the state in a base record."""
        base = record.json()
        for name in ("generation", "last", "retired", "draw", "write_count", "log_length"):
            check_number(name, base[name])
        if type(base["max_priority"]) not in (int, float):
            raise TypeError(f"max_priority is {base['max_priority']!r}")
        for value in (*base["progress"], *base["limits"]):
            check_number("progress and limits", value, 2**63 - 1)
        position = (check_number("content", base["content"][0]), check_number("content", base["content"][1]))
        return cls(
            generation=base["generation"],
            sequence=record.sequence,
            last=base["last"],
            retired=base["retired"],
            draw=base["draw"],
            progress=tuple(base["progress"]),
            max_priority=base["max_priority"],
            write_count=int(base["write_count"]),
            content=position,
            index_floor=position,
            randomness=from_json(base["randomness"]),
            limits=(base["limits"][0], base["limits"][1]),
        )

    def apply(self, record: Record, publish: Publish | None = None) -> None:
        """Apply one record.

        Args:
            record: The record after the last one that was applied.
            publish: The parsed body, if it is a commit record that was parsed already.
        """
        if record.kind is Kind.PUBLISH:
            publish = publish or Publish.unpack(record.body)
            if publish.first_id != self.last + 1:
                raise CorruptionError(
                    f"record {record.sequence} of the journal has rows from id {publish.first_id} on, "
                    f"but {self.last + 1} is next"
                )
            self.last, self.draw = publish.last_id, max(self.draw, publish.draw)
            self.max_priority = max(self.max_priority, publish.priority)
            self.write_count += publish.count
        elif record.kind is Kind.MARK:
            mark = Mark.unpack(record.body)
            self.draw = mark.draw if mark.set_back else max(self.draw, mark.draw)
            self.progress, self.limits = mark.progress, mark.limits
            self.max_priority = max(self.max_priority, mark.max_priority)
        elif record.kind is Kind.REDO:
            replaced, priority = Redo.count_replaced(record.body)
            self.write_count += replaced
            self.max_priority = max(self.max_priority, priority)
        elif record.kind is Kind.RETIRE:
            said = record.json()
            self.retired = max(self.retired, check_number("through", said["through"]))
            self.deleted = self.deleted.join(unpack_ids(said.get("gaps", [])))
            if "blocks" in said:  # an incremental update of the index misses these rows
                self.index_floor = (self.generation, record.sequence)
        elif record.kind is Kind.DELETE:
            self.retired = self.last = check_number("last", record.json()["last"])
        self.sequence = record.sequence
        if record.kind in _OF_ROWS:
            self.content = (self.generation, record.sequence)

    def find_low(self, capacity: int | None) -> int:
        """Return the newest id that is no longer stored."""
        return self.retired if capacity is None else max(self.retired, self.last - capacity)

    def find_stored(self, capacity: int | None, deleted: IdSet) -> Window:
        """Return the stored rows, without the deleted rows `deleted`."""
        low = min(self.find_low(capacity), self.last)
        # Deleted ids after the last one are not included: they will be reused for readable rows.
        return Window(low, self.last, deleted.between(low, self.last))


def apply_to_episodes(record: Record, table: EpisodeTable, publish: Publish | None = None) -> list[LogEntry]:
    """Apply one record to a table of episodes; return the resulting log entries.

    Args:
        record: The record after the last one that was applied.
        table: The episodes after the records before.
        publish: The parsed body, if it is a commit record that was parsed already.
    """
    if record.kind is Kind.ANNOTATE:
        return table.apply(NewFacts.unpack(record.body), record.sequence)
    if record.kind is Kind.DELETE:
        return table.end_episodes(record.sequence)
    if record.kind is Kind.END:
        return table.apply(End.unpack(record.json()), record.sequence)
    if record.kind is Kind.RESUME:
        return table.apply(Resume.unpack(record.json()), record.sequence)
    if record.kind is not Kind.PUBLISH:
        return []
    publish = publish or Publish.unpack(record.body)
    entries = table.commit(
        publish.segments,
        publish.sources,
        first_id=publish.first_id,
        time=publish.time,
        sequence=record.sequence,
        info=publish.info,
    )
    return list(flatten(entries))
