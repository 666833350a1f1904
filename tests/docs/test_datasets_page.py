"""The code blocks of docs/datasets.md run in order."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import numpy as np
import pytest

import expstore
from expstore.datasets import registry
from tests.support.paths import ROOT

pytestmark = pytest.mark.index

PAGE = (ROOT / "docs" / "datasets.md").read_text()


@pytest.mark.slow
def test_its_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "stores"))
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(httpx, "Client", None)  # nothing is downloaded
    Path("logs").mkdir()
    for name, steps in (("a", 4), ("b", 3)):
        np.savetxt(f"logs/{name}.csv", np.arange(steps * 4.0).reshape(steps, 4), delimiter=",")
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == PAGE.count("```python") == 4
    names: list[dict[str, object]] = []
    for block in blocks[:3]:  # each has its own imports
        names.append({"__name__": "example"})
        exec(compile(block, "docs/datasets.md", "exec"), names[-1])
    exec(compile(blocks[3], "docs/datasets.md", "exec"), names[-1])  # it uses the reader of the third
    assert names[0]["batch"].batch_size == (256,)  # type: ignore[attr-defined]
    assert len(names[0]["best"].fetchall()) == 3  # type: ignore[attr-defined]
    assert names[1]["batch"]["observation"].shape == (32, 84, 84)  # type: ignore[index]
    assert len(names[2]["data"]) == 5  # type: ignore[arg-type]
    with expstore.open("logs.exp", mode="r") as rb:
        found = rb.sql("SELECT length, status FROM episodes ORDER BY episode_id").fetchall()
        assert found == [(4, "cut"), (3, "cut")]
        assert rb[:]["observation"].tolist() == [[0, 1], [4, 5], [8, 9], [12, 13], [0, 1], [4, 5], [8, 9]]
