"""The examples of docs/numpy.md run in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "numpy.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(BLOCKS) == 5
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": __name__}
    for block in BLOCKS:
        exec(compile(block, "docs/numpy.md", "exec"), names)
