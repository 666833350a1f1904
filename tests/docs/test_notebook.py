"""The notebook has the blocks of its page, and runs."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import find_blocks, read_page
from tests.support.paths import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "first_look.ipynb"


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_cells_are_the_blocks_of_the_page() -> None:
    """If not: run `python docs/pictures.py`."""
    cells = code_cells(NOTEBOOK)
    assert ["".join(cell["source"]) for cell in cells] == [
        block.strip() for block in find_blocks(read_page("look", end="\n## pandas and Polars\n"), "python")
    ]
    assert [cell["outputs"] for cell in cells] == [[] for _ in cells]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nbconvert", "ipykernel", "matplotlib")),
    reason="nbconvert, ipykernel or matplotlib is not installed: pip install --group docs",
)
def test_the_notebook_runs(tmp_path: Path) -> None:
    shutil.copy(NOTEBOOK, tmp_path / "a.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "notebook", "--output", "b.ipynb"]
    run = subprocess.run([*command, "a.ipynb"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    outputs = [cell["outputs"] for cell in code_cells(tmp_path / "b.ipynb")]
    kinds = [{kind for output in found for kind in output.get("data", {})} for found in outputs]
    first, *results, last = kinds
    assert first == last == set()
    assert all(kind & {"text/html", "image/png"} for kind in results)
