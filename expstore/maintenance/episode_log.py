"""Restore a damaged episodes.log: keep intact entries, rebuild lost ones from the columns and the journal.

Used by `repair`. The log keeps its length, because mark records in the journal contain it. It writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from expstore.episodes.log import LogEntry, fill_up, salvage
from expstore.episodes.segmentation import CUT
from expstore.episodes.table import EpisodeTable
from expstore.maintenance.findings import Inspection
from expstore.maintenance.rows import ends_of, read_fragments
from expstore.storages.format.paths import LOG
from expstore.storages.recovery.recover import rebuild_episodes


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored log.

    Args:
        data: The bytes of the file.
        summary: How many entries were kept and rebuilt, as text.
    """

    data: bytes
    summary: str


def restore_log(inspection: Inspection) -> Restored:
    """Return a log of the same length in which every entry is intact.

    The id, length and last row of an episode whose entry is lost are read from the columns. Its status is
    cut, its source is unknown, and its return is 0. An episode without readable rows is lost. Named sources
    are read from the journal.
    """
    past = inspection.past
    length = 0 if past is None else past.log_length
    path = inspection.path / LOG
    data = inspection.disk.read_whole(path) if inspection.disk.exists(path) else b""
    data = data[:length].ljust(length, b"\0")
    kept, pieces = salvage(data)
    lost = _find_lost_entries(inspection, kept)
    # There always is an entry to repeat: the lost piece was itself an entry.
    filled, placed = fill_up(data, pieces, lost or kept[-1:] or [LogEntry(episode=0, source=0)])
    made = min(placed, len(lost))
    return Restored(filled, f"{len(kept)} entries kept, {made} rebuilt")


def _find_lost_entries(inspection: Inspection, kept: list[LogEntry]) -> list[LogEntry]:
    """Return entries for the sources and episodes that are in the rows or the journal but not in the log."""
    past = inspection.past
    if past is None:
        return []
    table = EpisodeTable()
    new = rebuild_episodes(past, table, inspection.stored.low, lambda first_id, rows: None)
    known = {entry.episode for entry in (*kept, *new, *table.open_entries())}
    sources = {entry.source for entry in (*kept, *new) if not entry.episode}
    base = past.base["episodes"]
    lost = [
        LogEntry(
            episode=0,
            source=number,
            start=session["started"],
            end=session["ended"],
            text=name,
            named=named == "named",
            session=session["key"][0],
        )
        for session in base["sessions"]
        for named in ("named", "unnamed")
        for name, number in session[named].items()
        if number not in sources
    ]
    fragments = read_fragments(inspection)
    if fragments is not None:
        lost += [
            LogEntry(episode=episode, source=0, status=CUT, last_id=last_id, length=length)
            for episode, (last_id, length) in ends_of(fragments).items()
            if episode not in known
        ]
    return lost
