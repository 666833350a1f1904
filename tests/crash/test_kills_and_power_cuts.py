"""A process that writes is killed anywhere, the power goes at any moment: what was promised is there.

The harness is harness.py: a fresh process opens what is left and holds every row, every column, the
episodes, the priorities, the next batch and the snapshots against a ledger kept outside the store; then it
writes on, closes, and opens once more. At the end the protocol is broken in one place each (mutants.py), and
the harness must notice: what it notices within a second or two is tried here, the rest in the long run. One
run of two processes serves all tests of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Reports = dict[str, dict[str, Any]]

#: The faults that are found soon; the long run tries all of mutants.py.
_KILLS_FIND = [
    "journal first",
    "no spare",
    "redo without sync",
    "counted after",
    "counts of older rows",
    "notes without a record",
    "adoptions without a record",
    "displaced without a record",
    "raw rows in memory",
    "keys in no record",
    "archived after",
]
_CUTS_FIND = [
    "slots reused before the mark",
    "mark without sync",
    "recovery without sync",
    "sync mode without sync",
    "snapshot without sync",
    "loads without sync",
    "packed without sync",
    "segments without sync",
    "lenders without sync",
    "keys not cut",
    "keys without sync",
    "archive without sync",
]

pytestmark = [pytest.mark.index, pytest.mark.timeout(600)]  # the first test waits for the whole run


@pytest.fixture(scope="module")
def reports(harness: Callable[..., Reports]) -> Reports:
    """What the short run found, by task; what was found with a fault, by fault."""
    random = [
        "random",
        "--kills",
        "60",
        "--names",
        "tiny",
        "narrow",
        "ring",
        "counted",
        "best",
        "packed",
        "frames",
        "ragged",
        "texts",
        "tokens",
        "keyed",
        "archived",
    ]
    return harness(
        [["quick", *random], ["power", "teeth", "--cuts", "180", "--teeth", *(_KILLS_FIND + _CUTS_FIND)]]
    )


def _failures(report: dict[str, Any]) -> str:
    return "\n".join(report["failures"])


def test_kill_before_every_act(reports: Reports) -> None:
    """Gaps between two acts on files: opening, extends, `[]=`, flush, journal cut, close, dumps, loads.

    Some acts of every phase are met here, half of them changes of names; in the long run every act, syncs
    included, and the middle of every write. Some recoveries are killed, too.
    """
    report = reports["quick"]
    assert not report["failures"], _failures(report)
    assert report["kills"] >= 120
    assert {"add", "drop"} <= report["inside"].keys()
    wanted = {"new store", "first extend", "extend", "change", "long extend", "journal cut", "close"}
    assert wanted | {"dumps", "loads", "annotate", "best rows"} < report["acts"].keys()
    assert {"end episodes", "resume episodes"} < report["acts"].keys()
    assert {"open", "extend", "change", "empty", "flush", "closing"} <= report["inside"].keys()


def test_kill_at_random(reports: Reports) -> None:
    """Kills by a clock and by the number of acts, several lives per store, with the background thread."""
    report = reports["random"]
    assert not report["failures"], _failures(report)
    assert report["kills"] == 60
    assert report["inside"]["extend"] * 3 >= report["kills"], report["inside"]


def test_power_cut(reports: Reports) -> None:
    """The store is as it was at some moment not before its last sync.

    Pages, lengths and names that were not synced are lost, kept or torn, each by chance. Each state is a
    disk that a power cut may leave, built from the recorded life of a store.
    """
    report = reports["power"]
    assert not report["failures"], _failures(report)
    assert report["kills"] >= 300


def test_power_cut_while_recovering(reports: Reports) -> None:
    """Of a store that a power cut left, the opening is cut, too."""
    report = reports["power"]
    assert not report["failures"], _failures(report)
    assert report["inside"]["recovery"] * 5 >= report["kills"]


def test_power_cut_costs_rows(reports: Reports) -> None:
    """The simulated disk does lose rows that had been acked and not synced; else it would prove nothing."""
    assert reports["power"]["lost"] * 6 >= reports["power"]["kills"]


@pytest.mark.parametrize("fault", _KILLS_FIND)
def test_kills_find(reports: Reports, fault: str) -> None:
    """Faults that kill -9 shows.

    journal first: the record is appended before the columns are written, and a sync may cover it in between
    (without that sync the checksum in the record would still save the day). no spare: no spare slots and no
    waiting, so that an extend under way overwrites rows that can be read. redo without sync: rows are changed
    whose publish record no mark covers; their checksum no longer fits, and opening drops what was acked.
    counted after: a batch is handed out before its rows are counted on disk. counts of older rows: a row
    begins with the count of the one that had its slot. notes without a record: what is noted about an
    episode is in no record of the journal. adoptions without a record: nor is that episodes
    were adopted. displaced without a record: nor is a row that takes the place of
    another. raw rows in memory: rows of a packed chunk that is not full are not in any file. keys in no
    record: a write is made again when it is tried again. archived after: what leaves goes to the archive when
    others may have its slots. The others are told of in mutants.py.
    """
    assert reports[fault]["failures"]


@pytest.mark.parametrize("fault", _CUTS_FIND)
def test_power_cuts_find(reports: Reports, fault: str) -> None:
    """Faults that only a power cut shows: kill -9 leaves the page cache as it is.

    slots reused before the mark: a slot is written to as soon as its row has left the readable set, with a
    capacity below the spare; the rows that were flushed are gone when the newer ones are lost. keys not cut:
    those of rows that are lost stay, and answer with the ids of other rows. keys without sync: those of rows
    that are not lost are gone. archive without sync: slots are given to others when the archive has their
    rows, but not on its disk. The others are told of in mutants.py; tests/crash/test_protocol_model.py breaks
    many more rules, in a model.
    """
    assert reports[fault]["failures"]
