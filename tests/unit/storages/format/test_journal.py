"""The journal: records are read in order, and torn or damaged ends are never read as records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expstore.disk.files import Disk
from expstore.errors import CorruptionError, StorageError
from expstore.storages.format.journal import ALIGN, Journal, Kind, read_journal, settle_journal
from expstore.storages.format.records import Mark, Publish, Redo
from tests.support.gated_disk import GatedDisk, refuse

SMALL = 2048


def make(path: Path, *, disk: Disk | None = None, segment_bytes: int = SMALL, **options: Any) -> Journal:
    path.mkdir(exist_ok=True)
    given = {"generation": 1, "sequence": 0} | options
    journal = Journal(disk or Disk(), path, uuid="ab", segment_bytes=segment_bytes, **given)
    journal.start_segment({"opening": True, "last": 0})
    return journal


def mark(sequence: int) -> bytes:
    return Mark(sequence, 0, 0, 0, 0, 1.0).pack()


def read(path: Path) -> list[tuple[int, Kind, bytes]]:
    return [(r.sequence, r.kind, r.body) for r in read_journal(Disk(), path)]


def bodies(path: Path) -> list[bytes]:
    return [body for _, kind, body in read(path) if kind is Kind.PUBLISH]


def write(journal: Journal, texts: list[bytes]) -> None:
    """Append as a storage does: a new segment when one is full."""
    for text in texts:
        if not journal.fits(len(text)):
            journal.start_segment({"opening": False, "last": 0}, room=len(text))
        journal.append(Kind.PUBLISH, text)


def test_records_come_back_in_order(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "journal"
    journal = make(path, sequence=41)
    texts = [rng.bytes(int(size)) for size in rng.integers(0, 300, 50)]
    write(journal, texts)
    journal.close()
    found = read(path)
    assert [sequence for sequence, _, _ in found] == list(range(42, 42 + len(found)))
    assert bodies(path) == texts
    assert len(os.listdir(path)) > 3
    assert found[0][1] is Kind.BASE


def test_a_record_that_is_too_long_gets_a_segment_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = make(path)
    texts = [b"a", b"b" * 3 * SMALL, b"c"]
    write(journal, texts)
    journal.close()
    assert bodies(path) == texts
    assert max(os.path.getsize(path / name) for name in os.listdir(path)) > 3 * SMALL


def test_a_full_segment_still_has_room_for_marks(tmp_path: Path) -> None:
    for size in range(0, 200, 8):
        path = tmp_path / f"journal{size}"
        journal = make(path)
        while journal.fits(size):
            journal.append(Kind.PUBLISH, bytes(size))
        journal.append(Kind.MARK, mark(journal.sequence))
        assert os.path.getsize(path / "000001") == SMALL, "a mark went beyond the end"
        journal.close()
        assert read(path)[-1][1] is Kind.MARK


def test_the_end_gives_back_what_was_reserved(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.mkdir()
    journal = Journal(Disk(), path, uuid="ab", generation=1, sequence=0)
    journal.start_segment({"opening": True, "last": 0})
    texts = [b"a" * 100, b"b" * 20_000]
    write(journal, texts)
    length, before = os.path.getsize(path / "000001"), os.stat(path / "000001").st_blocks * 512
    journal.end()
    assert before >= length
    assert os.stat(path / "000001").st_blocks * 512 < 64 << 10
    assert os.path.getsize(path / "000001") == length, "a segment that was cut off would be an error"
    journal.close()
    assert bodies(path) == texts


def test_cut_leaves_what_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = make(path)
    assert not journal.rotated
    write(journal, [bytes(440)] * 12)
    assert journal.rotated
    assert len(os.listdir(path)) == 4
    keep = journal.sync_files()[2]
    journal.cut(keep)
    assert sorted(os.listdir(path)) == ["000003", "000004"]
    assert read(path)[0][1] is Kind.BASE
    assert read(path)[-1][0] == journal.sequence
    journal.cut()
    assert os.listdir(path) == ["000004"]
    assert not journal.rotated
    journal.append(Kind.PUBLISH, b"more")
    journal.close()
    assert bodies(path)[-1] == b"more"


def test_segments_are_ordered_by_number_beyond_six_digits(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.mkdir()
    (path / "999998").touch()
    journal = make(path)
    texts = [bytes([k]) * 700 for k in range(6)]
    write(journal, texts)
    journal.close()
    (path / "999998").unlink()
    assert "1000000" in os.listdir(path)
    assert bodies(path) == texts


def test_an_opening_record_replaces_all_earlier_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = make(path)
    write(first, [b"old"])
    first.close()
    second = make(path, sequence=first.sequence, generation=2)
    write(second, [b"new"])
    second.close()
    assert bodies(path) == [b"new"]
    # One whose base did not reach the disk is as if it had never begun.
    with (path / "000002").open("r+b") as file:
        file.write(bytes(20))
    assert bodies(path) == [b"old"]


def test_records_of_another_life_are_not_read(tmp_path: Path) -> None:
    """A segment file whose blocks still hold an older segment's records ends where its own end."""
    path = tmp_path / "journal"
    old = make(path)
    write(old, [b"one", b"two", b"three"])
    old.close()
    stale = (path / "000001").read_bytes()
    (path / "000001").unlink()
    new = make(path, generation=2)
    write(new, [b"ONE"])
    new.close()
    fresh = bytearray((path / "000001").read_bytes())
    at = 3 * ALIGN
    fresh[at:] = stale[at:]
    (path / "000001").write_bytes(fresh)
    assert bodies(path) == [b"ONE"]


@pytest.mark.parametrize("synced", [0, 1, 3])
def test_damage_before_what_a_mark_covers_is_an_error(tmp_path: Path, synced: int) -> None:
    path = tmp_path / "journal"
    journal = make(path)
    start = journal._at
    write(journal, [b"a" * 100, b"b" * 100, b"c" * 100])
    if synced:
        journal.append(Kind.MARK, mark(1 + synced))
    journal.close()
    with (path / "000001").open("r+b") as file:
        file.seek(start + 3 * ALIGN + 40)  # in b
        file.write(b"?")
    if synced < 2:
        assert bodies(path) == [b"a" * 100]
    else:
        with pytest.raises(CorruptionError, match=r"000001 is damaged at byte \d+.*number 2"):
            read(path)


def test_no_flipped_bit_brings_another_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = make(path)
    write(journal, [b"first", b"second"])
    journal.append(Kind.MARK, mark(2))
    write(journal, [b"third"])
    end = journal._at
    journal.close()
    good = read(path)
    whole = (path / "000001").read_bytes()
    outcomes = set()
    for bit in range(0, 8 * end, 11):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (path / "000001").write_bytes(data)
        try:
            found = read(path)
        except CorruptionError:
            outcomes.add("error")
        else:
            assert found == good[: len(found)]
            outcomes.add(len(found))
    assert {"error", 2, 3, 4, 5} - outcomes <= {2}  # padding may be hit, and nothing is lost
    assert "error" in outcomes


def test_a_segment_that_misses_its_predecessor_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = make(path)
    texts = [bytes([k]) * 700 for k in range(1, 6)]
    write(journal, texts)
    journal.close()
    assert len(os.listdir(path)) == 3
    whole = (path / "000001").read_bytes()
    (path / "000001").write_bytes(whole[: 8 * ALIGN] + bytes(len(whole) - 8 * ALIGN))  # loses its end
    assert bodies(path) == []
    (path / "000001").write_bytes(whole)
    with (path / "000002").open("r+b") as file:
        file.write(bytes(10))
    assert bodies(path) == texts[:2]


def test_settling_writes_all_segments_again(tmp_path: Path) -> None:
    acts: list[tuple[str, str]] = []
    path = tmp_path / "journal"
    journal = make(path)
    write(journal, [bytes(700)] * 3)
    journal.close()
    before = read(path)
    settle_journal(GatedDisk(lambda act, path: acts.append((act, path.name))), path)
    assert read(path) == before
    assert acts == [
        *[("write", "000001"), ("sync", "000001"), ("write", "000002"), ("sync", "000002")],
        ("sync_dir", "journal"),
    ]


def test_a_segment_that_cannot_be_made_leaves_the_journal_usable(tmp_path: Path) -> None:
    path, disk = tmp_path / "journal", GatedDisk()
    journal = make(path, disk=disk)
    write(journal, [b"one"])
    disk.before = refuse("allocate")
    with pytest.raises(StorageError):
        journal.start_segment({"last": 1})
    assert os.listdir(path) == ["000001"]
    journal.append(Kind.PUBLISH, b"two")
    disk.relax()
    journal.start_segment({"opening": False})
    journal.append(Kind.PUBLISH, b"three")
    journal.close()
    assert bodies(path) == [b"one", b"two", b"three"]


# ---------------------------------------------------------------------------------------------------
# Bodies.


def test_bodies_come_back() -> None:
    from expstore.episodes.sessions import NewSource
    from expstore.episodes.table import Segment
    from expstore.schema.schema import Field, Schema

    segment = Segment(3, -9, 2**40, 5, 6, 7, 8, 0.5, 1, 3)
    publish = Publish(
        first_id=2**50,
        count=700,
        skipped=13,
        draw=2**40,
        time=2**60,
        checksum=2**32 - 1,
        priority=1.5,
        segments=[segment, segment._replace(episode=4)],
        sources=[NewSource(1, "Größe", True, "one"), NewSource(2, "@1", False, "two", True)],
    )
    assert Publish.unpack(publish.pack()) == publish
    assert publish.last_id == 2**50 + 699
    bare = Publish(1, 1, 0, 0, 0, 0, 1.0, [], [])
    assert Publish.unpack(bare.pack()) == bare
    values = Mark(2**40, 2**41, 2**42, 2**43, 2**44, 0.25)
    assert Mark.unpack(values.pack()) == values

    schema = Schema(
        [Field(("a",), "float32", (2,)), Field(("b",), "bool", ()), Field(("c",), "bfloat16", (1,))]
    )
    columns = [np.array([[7], [8]], "<u2"), np.array([[1, 2], [3, 4]], "<f4")]
    redo = Redo.unpack(Redo(np.array([5, 9]), [2, 0], columns).pack(), schema)
    assert list(redo.places) == [2, 0]
    np.testing.assert_array_equal(redo.ids, [5, 9])
    for found, column in zip(redo.columns, columns, strict=True):
        np.testing.assert_array_equal(found, column)
        assert found.dtype == column.dtype
