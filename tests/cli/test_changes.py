"""`expstore changes`: since when episodes differ from those before, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

import expstore
from tests.support.commands import Cli
from tests.unit.buffers.test_changes import fill

pytestmark = pytest.mark.index


def test_changes_are_listed_with_their_conditions(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    with expstore.open(path) as rb:
        assert cli("changes", path).out == "0 changes in 0 episodes\n"
        fill(rb, "sign")
        local = rb.episodes.changes().arrow().to_pylist()
        done = cli("changes", path)  # while another process may write
    assert (done.code, done.err) == (0, "")
    head, first, where = done.out.splitlines()
    assert head == "1 change in 240 episodes"
    assert first.split()[0] == "change"
    assert local[0]["reason"] in first
    assert f"(row {local[0]['row_id']:,})" in first
    assert where.strip() == local[0]["where"]
    found = cli("changes", path, "--json").json
    assert (found["compared"], len(found["changes"])) == (240, 1)
    assert found["changes"][0]["where"] == local[0]["where"]
