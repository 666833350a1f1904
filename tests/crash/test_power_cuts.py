"""The power goes at any moment: the store is as it was at some moment not before its last sync.

The harness is power.py. Each state is a disk that a power cut may leave, built from a recorded life of a
store; a fresh process opens it, holds it against the ledger, writes on, closes it, and opens it once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Reports = dict[str, dict[str, Any]]

pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole run


@pytest.fixture(scope="module")
def report(harness: Callable[..., Reports]) -> dict[str, Any]:
    """What the short run found."""
    return harness([["power"]])["power"]


def test_power_cut(report: dict[str, Any]) -> None:
    """Pages, lengths and names that were not synced are lost, kept or torn, each by chance."""
    assert not report["failures"], "\n".join(report["failures"])
    assert report["kills"] >= 300


def test_power_cut_while_recovering(report: dict[str, Any]) -> None:
    """Of a store that a power cut left, the opening is cut, too."""
    assert not report["failures"], "\n".join(report["failures"])
    assert report["inside"]["recovery"] * 5 >= report["kills"]


def test_rows_are_lost(report: dict[str, Any]) -> None:
    """The simulated disk does lose rows that had been acked and not synced; else it would prove nothing."""
    assert report["lost"] * 6 >= report["kills"]
