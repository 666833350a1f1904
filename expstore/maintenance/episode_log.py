"""Restore a damaged episodes.log: keep the entries that are whole, make lost ones from columns and journal.

Used by `repair`. The log keeps its length, which marks in the journal name. It writes nothing.
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

__all__ = ["Restored", "restore_log"]


@dataclass(frozen=True, slots=True)
class Restored:
    """Hold a log that is whole again.

    Args:
        data: Its bytes.
        summary: What was kept and made.
    """

    data: bytes
    summary: str


def restore_log(inspection: Inspection) -> Restored:
    """Return a log of the same length in which every entry is whole.

    Of an episode whose entry is lost, id, length and last row are found in the columns; it counts as cut,
    of no known source, with a return of 0. Of one without readable rows nothing is left. Sources with
    names are in the journal.
    """
    past = inspection.past
    length = 0 if past is None else past.log_length
    path = inspection.path / LOG
    data = inspection.disk.read_whole(path) if inspection.disk.exists(path) else b""
    data = data[:length].ljust(length, b"\0")
    kept, pieces = salvage(data)
    lost = _lost_entries(inspection, kept)
    # There is always one to repeat: the piece itself was an entry.
    filled, placed = fill_up(data, pieces, lost or kept[-1:] or [LogEntry(episode=0, source=0)])
    made = min(placed, len(lost))
    return Restored(filled, f"{len(kept)} entries kept, {made} made anew")


def _lost_entries(inspection: Inspection, kept: list[LogEntry]) -> list[LogEntry]:
    """Return entries for sources and episodes that rows or journal know and the log does not."""
    past = inspection.past
    if past is None:
        return []
    table = EpisodeTable()
    new = rebuild_episodes(past, table, inspection.window.low, lambda first_id, rows: None)
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
