"""The code blocks of docs/datasets.md run in order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import expstore
from tests.support.paths import ROOT
from tests.support.public_addresses import serving_public_addresses
from tests.unit.datasets.test_d4rl import arrays, write

pytestmark = pytest.mark.index

PAGE = (ROOT / "docs" / "datasets.md").read_text()


@pytest.mark.slow
def test_its_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "public" / "gym_mujoco_v2" / "hopper_medium-v2.hdf5"
    file.parent.mkdir(parents=True)
    write(file, arrays())
    Path("logs").mkdir()
    for name, steps in (("a", 4), ("b", 3)):
        np.savetxt(f"logs/{name}.csv", np.arange(steps * 4.0).reshape(steps, 4), delimiter=",")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == PAGE.count("```python") == 2
    names: list[dict[str, object]] = []
    with serving_public_addresses(tmp_path / "public", tmp_path / "stores") as server:
        for block in blocks:  # each has its own imports
            names.append({"__name__": "example"})
            exec(compile(block, "docs/datasets.md", "exec"), names[-1])
        assert len(server.requests) == 1  # the second use finds the store
    assert names[0]["batch"].batch_size == (256,)  # type: ignore[attr-defined]
    assert len(names[0]["best"].fetchall()) == 3  # type: ignore[attr-defined]
    with expstore.open("logs.exp", mode="r") as rb:
        found = rb.sql("SELECT length, status FROM episodes ORDER BY episode_id").fetchall()
        assert found == [(4, "cut"), (3, "cut")]
        assert rb[:]["observation"].tolist() == [[0, 1], [4, 5], [8, 9], [12, 13], [0, 1], [4, 5], [8, 9]]
