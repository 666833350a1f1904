"""The storage in docs/storages.md is complete: it passes the suite that the page names."""

from __future__ import annotations

import re
from typing import Any

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "storages.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
assert len(BLOCKS) == 2
_names: dict[str, Any] = {"__name__": __name__}
for block in BLOCKS:
    exec(compile(block, "docs/storages.md", "exec"), _names)

TestArrays = _names["TestArrays"]  # pytest collects it


def test_it_takes_less_than_100_lines() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) < 100
