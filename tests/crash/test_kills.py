"""A process that writes to a store is killed anywhere: nothing that returned is lost, nothing is torn.

The harness is killing.py. After each kill a fresh process opens the store and holds every row, every column,
the episodes, the priorities and the next batch against a ledger kept outside the store; then it writes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Reports = dict[str, dict[str, Any]]

pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole run


@pytest.fixture(scope="module")
def reports(harness: Callable[..., Reports]) -> Reports:
    """What the short run found; two processes share the work."""
    return harness([["quick"], ["random", "--kills", "36"]])


def _failures(report: dict[str, Any]) -> str:
    return "\n".join(report["failures"])


def test_kill_in_every_gap(reports: Reports) -> None:
    """Gaps between two acts on files: opening, extends, `[]=`, flush, journal cut, close, dumps, loads.

    Every change of a name is met here, and every second or fifth of the other acts; in the long run every
    act, syncs included, and the middle of every write. Some recoveries are killed, too.
    """
    report = reports["quick"]
    assert not report["failures"], _failures(report)
    assert report["kills"] >= 120
    wanted = {"new store", "first extend", "extend", "change", "long extend", "journal cut", "close"}
    assert wanted | {"dumps", "loads"} < report["gaps"].keys()
    assert {"open", "extend", "change", "empty", "flush", "closing"} <= report["inside"].keys()


def test_kill_at_random(reports: Reports) -> None:
    """Kills by a clock and by the number of acts, several lives per store, with the background thread."""
    report = reports["random"]
    assert not report["failures"], _failures(report)
    assert report["kills"] == 36
    assert report["inside"]["extend"] * 3 >= report["kills"], report["inside"]
