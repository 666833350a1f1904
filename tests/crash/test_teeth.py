"""The protocol is broken in one place each: the harness must notice, or it would prove nothing.

The faults are in broken.py. Each runs in a process of its own until the first broken promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Reports = dict[str, dict[str, Any]]

pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole run


@pytest.fixture(scope="module")
def reports(harness: Callable[..., Reports]) -> Reports:
    """What was found with each fault: fault -> report."""
    return harness([["teeth"]])


@pytest.mark.parametrize("fault", ["journal first", "no spare", "redo without sync"])
def test_kills_find(reports: Reports, fault: str) -> None:
    """Faults that kill -9 shows.

    journal first: the record is appended before the columns are written, and a sync may cover it in between
    (without that sync the checksum in the record would still save the day). no spare: no spare slots and no
    waiting, so that an extend under way overwrites rows that can be read. redo without sync: rows are changed
    whose publish record no mark covers; their checksum no longer fits, and opening drops what was acked.
    """
    assert reports[fault]["failures"]


@pytest.mark.parametrize(
    "fault",
    [
        "slots reused before the mark",
        "mark without sync",
        "mark over half a change",
        "recovery without sync",
        "sync mode without sync",
        "snapshot without sync",
        "loads without sync",
    ],
)
def test_power_cuts_find(reports: Reports, fault: str) -> None:
    """Faults that only a power cut shows: kill -9 leaves the page cache as it is.

    slots reused before the mark: a slot is written to as soon as its row has left the readable set, with a
    capacity below the spare; the rows that were flushed are gone when the newer ones are lost. The last one
    needs two stops in a row. test_power_cut_model.py breaks many more rules, in a model.
    """
    assert reports[fault]["failures"]
