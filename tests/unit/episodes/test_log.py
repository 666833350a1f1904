"""episodes.log: entries are read as written, and damage is never mistaken for an entry."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from expstore.disk.files import Disk
from expstore.episodes.log import EpisodeLog, LogColumns, LogEntry
from expstore.errors import CorruptionError

ENTRIES = [
    LogEntry(episode=0, source=1, text="left ", named=True, generation=3),
    LogEntry(episode=0, source=2, text="@3", generation=3),
    LogEntry(
        episode=1,
        source=2,
        trajectory=-(2**62),
        start=2**60,
        end=2**61,
        ret=-0.1,
        length=2**40,
        last_id=2**50,
        status=2,
        sequence=2**33,
        generation=7,
        text='{"seed": 4, "Größe": "12345678"}',
    ),
    LogEntry(episode=2, source=1, trajectory=None, ret=float("inf"), status=3),
    LogEntry(episode=3, source=1, trajectory=0, status=1, text="x" * 1000),
    LogEntry(episode=0, source=4, start=5, end=6, text="Größe", named=True, session="8f" * 16),
]


def open_log(path: Path, length: int = 0) -> EpisodeLog:
    return EpisodeLog(Disk(), path / "episodes.log", length=length)


def test_entries_come_back(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert list(log.read()) == []
    assert not log.dirty
    log.append(ENTRIES[:2])
    assert not log.dirty
    log.flush()
    assert log.dirty
    log.append([])
    log.append(ENTRIES[2:])
    assert list(log.read()) == ENTRIES
    log.close()
    again = open_log(tmp_path, log.length)
    assert list(again.read()) == ENTRIES
    again.append(ENTRIES[:1])
    assert list(again.read()) == [*ENTRIES, ENTRIES[0]]
    again.close()


def test_every_field_is_kept() -> None:
    names = {field.name for field in dataclasses.fields(LogEntry)}
    default = LogEntry(episode=1, source=0)
    varied = {name for name in names for e in ENTRIES if getattr(e, name) != getattr(default, name)}
    assert varied == names


def test_entries_missing_from_the_journal_are_dropped(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(ENTRIES[:3])
    log.flush()
    length = log.length
    log.append(ENTRIES[3:])
    log.flush()
    log.close()
    again = open_log(tmp_path, length)
    assert list(again.read()) == ENTRIES[:3]
    again.append(ENTRIES[4:5])
    assert list(again.read()) == [*ENTRIES[:3], ENTRIES[4]]
    again.flush()
    assert again.file.size() == again.length
    again.close()


def test_a_log_that_is_too_short_is_damage(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(ENTRIES)
    log.flush()
    log.close()
    with pytest.raises(CorruptionError, match=rf"episodes.log has {log.length} bytes, .* {log.length + 1}"):
        open_log(tmp_path, log.length + 1)


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append(ENTRIES[:3])
    log.flush()
    log.close()
    path = tmp_path / "episodes.log"
    good = path.read_bytes()
    assert len(good) > 300
    for at in range(0, 8 * len(good), 19):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        path.write_bytes(bad)
        again = open_log(tmp_path, len(good))
        with pytest.raises(CorruptionError, match="is damaged at byte") as by_entry:
            list(again.read())
        with pytest.raises(CorruptionError) as by_column:
            LogColumns(again.capture()(), str(path))
        assert str(by_column.value) == str(by_entry.value)
        again.close()


def test_columns_say_what_entries_say() -> None:
    later = [dataclasses.replace(ENTRIES[2], status=0, text=""), LogEntry(episode=9, source=1, ret=1.5)]
    first = LogEntry(episode=12, source=1, status=1)
    entries = [first, *ENTRIES, *later, dataclasses.replace(ENTRIES[3], length=5)]
    columns = LogColumns(b"".join(entry.pack() for entry in entries), "a log")
    assert list(columns.sources()) == [entry for entry in entries if not entry.episode]
    assert columns.latest().tolist() == [0, 7, 9, 5, 8]  # in the order of the first entries
    heads = columns.heads
    for name in (
        "episode",
        "source",
        "start",
        "end",
        "length",
        "last_id",
        "status",
        "sequence",
        "generation",
    ):
        assert heads[name].tolist() == [getattr(entry, name) for entry in entries], name
    assert columns.has_trajectory().tolist() == [entry.trajectory is not None for entry in entries]
    assert heads["trajectory"].tolist() == [entry.trajectory or 0 for entry in entries]
    assert columns.has_return().tolist() == [entry.ret is not None for entry in entries]
    assert heads["ret"].tolist() == [entry.ret or 0 for entry in entries]
    episodes = np.flatnonzero(heads["episode"])
    assert columns.texts(episodes) == [entry.text for entry in entries if entry.episode]
    empty = LogColumns(b"", "episodes.log")
    assert (len(empty.latest()), list(empty.sources()), empty.texts(empty.latest())) == (0, [], [])
