"""Processes are killed anywhere and the power is cut at any moment: everything that was promised remains.

The harness is harness.py: a fresh process opens the store and compares every row, every column, the episodes,
the priorities, the next batch and the snapshots with a ledger kept outside of the store. Then it writes,
closes, and reopens. At the end single faults are injected (mutants.py), and the harness must detect them:
those that it detects within a second or two are tested here, the others in the long run. One run of two
processes serves the quick tests of this file, another one the slow tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Reports = dict[str, dict[str, Any]]

#: The faults that are detected quickly; the long run tests all of mutants.py.
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
]

pytestmark = [pytest.mark.index, pytest.mark.timeout(600)]  # the first test waits for the whole run


@pytest.fixture(scope="module")
def reports(harness: Callable[..., Reports]) -> Reports:
    """Results of random kills and of power cuts, by task."""
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
    ]
    return harness([random, ["power", "--cuts", "220"]])


@pytest.fixture(scope="module")
def slow_reports(harness: Callable[..., Reports]) -> Reports:
    """Results of kills before operations as "quick", and of runs with a fault by fault."""
    return harness([["quick"], ["teeth", "--teeth", *(_KILLS_FIND + _CUTS_FIND)]])


def _failures(report: dict[str, Any]) -> str:
    return "\n".join(report["failures"])


@pytest.mark.guarantee(
    "kill/rows",
    "`kill -9` at any moment loses no row of an `extend`, `add` or `rb[i] = row` that returned, and no "
    "fact or setting that was written.",
)
@pytest.mark.guarantee(
    "kill/whole",
    "A call in progress is done completely or not at all: no row is torn, and no episode is half deleted.",
)
@pytest.mark.guarantee(
    "kill/best",
    "In a store that keeps the best rows, a row replaces a worse row completely or not at all.",
)
@pytest.mark.guarantee(
    "kill/fields",
    "A field is added or dropped once `columns.add` or `columns.drop` returned, and the files of other "
    "fields do not change.",
)
@pytest.mark.guarantee(
    "version/whole",
    "After a kill or a power cut a version is complete or does not exist, and it is durable when `dumps` "
    "returns; one with a tag is never removed.",
)
@pytest.mark.guarantee(
    "version/loads",
    "`loads` is done completely or not at all, and afterwards no id refers to another row.",
)
@pytest.mark.guarantee("kill/keys")
@pytest.mark.guarantee("kill/sessions")
@pytest.mark.guarantee("draw/count")
@pytest.mark.slow
def test_kill_before_every_act(slow_reports: Reports) -> None:
    """Gaps between file operations: opening, extends, `[]=`, flush, journal rotation, close, dumps, loads.

    Here some operations of every phase are tested, half of them changes of names; the long run tests every
    operation, syncs included, and the middle of every write. Some recoveries are killed too.
    """
    report = slow_reports["quick"]
    assert not report["failures"], _failures(report)
    assert report["kills"] >= 120
    assert {"add", "drop"} <= report["inside"].keys()
    wanted = {"new store", "first extend", "extend", "change", "long extend", "journal cut", "close"}
    assert wanted | {"dumps", "loads", "annotate", "best rows"} < report["acts"].keys()
    assert {"end episodes", "resume episodes"} < report["acts"].keys()
    assert {"open", "extend", "change", "empty", "flush", "closing"} <= report["inside"].keys()


@pytest.mark.guarantee("kill/rows")
@pytest.mark.guarantee("kill/best")
@pytest.mark.guarantee("rows/variable")
def test_kill_at_random(reports: Reports) -> None:
    """Timed kills and kills at operations, several lives per store, with the background thread."""
    report = reports["random"]
    assert not report["failures"], _failures(report)
    assert report["kills"] == 60
    assert report["inside"]["extend"] * 3 >= report["kills"], report["inside"]


@pytest.mark.guarantee(
    "power/state",
    "The store is as it was at some moment at or after the last sync: rows, episodes, facts, and the "
    "number of drawn batches.",
)
@pytest.mark.guarantee(
    "power/durable",
    "`flush`, `rb[i] = row`, `empty`, `columns.add`, `columns.drop` and an `extend` longer than the spare"
    " slots are durable when they return.",
)
@pytest.mark.guarantee(
    "power/sync-mode",
    'With `durability="sync"`, every `extend`, `add` and change of an episode is durable when it returns,'
    " and no reader sees a row before.",
)
@pytest.mark.guarantee("power/keys", "An idempotency key is known exactly if its rows exist.")
@pytest.mark.guarantee("kill/fields")
@pytest.mark.guarantee("kill/readers")
@pytest.mark.guarantee("version/whole")
@pytest.mark.guarantee("version/loads")
def test_power_cut(reports: Reports) -> None:
    """The store has a state that is not older than its last sync.

    Pages, lengths and names that were not synced are lost, kept or torn at random. Each state is a disk that
    a power cut may leave, built from the recorded life of a store.
    """
    report = reports["power"]
    assert not report["failures"], _failures(report)
    assert report["kills"] >= 300


@pytest.mark.guarantee("power/state")
def test_power_cut_while_recovering(reports: Reports) -> None:
    """The power is cut again while a store recovers from a power cut."""
    report = reports["power"]
    assert not report["failures"], _failures(report)
    assert report["inside"]["recovery"] * 5 >= report["kills"]


@pytest.mark.guarantee("power/tests")
def test_power_cut_costs_rows(reports: Reports) -> None:
    """The simulated disk loses acknowledged rows that were not synced; otherwise it would prove nothing."""
    assert reports["power"]["lost"] * 6 >= reports["power"]["kills"]


@pytest.mark.guarantee(
    "power/tests",
    "If one rule of the crash protocol is broken in the code, the tests find it, and the simulated power "
    "cuts do lose unsynced rows.",
)
@pytest.mark.slow
@pytest.mark.parametrize("fault", _KILLS_FIND)
def test_kills_find(slow_reports: Reports, fault: str) -> None:
    """Faults that kill -9 reveals.

    journal first: the record is appended before the columns are written, and a sync may cover it in between
    (without that sync the checksum in the record would detect it). no spare: no spare slots and no waiting,
    so that an extend under way overwrites readable rows. redo without sync: rows are changed whose publish
    record no mark covers; their checksum no longer fits, and opening drops acknowledged rows. counted after:
    a batch is returned before its rows are counted on disk. counts of older rows: a row starts with the count
    of the previous row in its slot. notes without a record: annotations of an episode are in no record of the
    journal. adoptions without a record: the same for adoptions of episodes. displaced without a record: the
    same for a row that replaces another. raw rows in memory: rows of an incomplete packed chunk are in no
    file. keys in no record: a repeated write is made again. mutants.py describes the others.
    """
    assert slow_reports[fault]["failures"]


@pytest.mark.guarantee("power/tests")
@pytest.mark.slow
@pytest.mark.parametrize("fault", _CUTS_FIND)
def test_power_cuts_find(slow_reports: Reports, fault: str) -> None:
    """Faults that only a power cut reveals, because kill -9 keeps the page cache.

    slots reused before the mark: a slot is overwritten as soon as its row is no longer readable, with a
    capacity below the spare; flushed rows are lost if the newer ones are lost. keys not cut: keys of lost
    rows are kept, and answer with the ids of other rows. keys without sync: keys of rows that are not lost
    are lost. mutants.py describes the others; tests/crash/test_protocol_model.py breaks many more rules in a
    model.
    """
    assert slow_reports[fault]["failures"]
