"""The long run: thousands of kills and power cuts. `make torture` runs it, with other seeds by SEED=...

Each prints its seed and what it met. Not part of `make test`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

Reports = dict[str, dict[str, Any]]
Harness = Callable[..., Reports]

SEED = os.environ.get("SEED", "20260101")

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]


def _judge(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nseed {SEED}:", json.dumps({k: v for k, v in report.items() if k != "failures"}))
    assert not report["failures"], "\n".join(report["failures"])


def test_a_thousand_kills(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["random", "--kills", "1000", "--seed", SEED, "--plain", "0.3"]
    report = harness([arguments], memory=False)["random"]
    _judge(report, capsys)
    assert report["kills"] >= 1000
    assert report["inside"]["extend"] * 3 >= report["kills"]


def test_every_gap(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    """Every act, syncs included; every write also in its middle; half of the recoveries killed, too."""
    report = harness([["gaps", "--torn", "also", "--again", "0.5", "--seed", SEED]])["gaps"]
    _judge(report, capsys)


def test_twenty_thousand_power_cuts(harness: Harness, capsys: pytest.CaptureFixture[str]) -> None:
    """LOG=... names a file from which a run that was interrupted goes on."""
    log = ["--log", os.environ["LOG"]] if "LOG" in os.environ else []
    report = harness([["power", "--cuts", "20000", "--free", "0.3", "--seed", SEED, *log]])["power"]
    _judge(report, capsys)
    assert report["kills"] >= 20_000
    assert report["lost"] * 6 >= report["kills"]
    assert report["inside"]["recovery"] * 5 >= report["kills"]
