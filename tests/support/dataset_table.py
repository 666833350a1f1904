"""What follows from the table of data sets: names in a stub, and a table in the documents.

python -m tests.support.dataset_table     write expstore/datasets/__init__.pyi and docs/datasets.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from expstore.datasets.registry import list_kinds
from tests.support.paths import ROOT

STUB = ROOT / "expstore" / "datasets" / "__init__.pyi"
PAGE = ROOT / "docs" / "datasets.md"
_CLASSES = "expstore.datasets.buffers.classes"
_DERIVED = ("from expstore.datasets.kinds.", f"from {_CLASSES} ")
_HEAD = "| format | prefix | source | public files | how episodes end |"


def _derive_lines() -> Iterator[str]:
    for kind in list_kinds():
        reader = kind.reader
        yield f"from {reader.__module__} import {reader.__name__} as {reader.__name__}"
        if kind.buffer:
            yield f"from {_CLASSES} import {kind.buffer} as {kind.buffer}"


def render_stub() -> str:
    """Return the text of the stub: the names that are not of a kind, and those of all kinds."""
    others = [line for line in STUB.read_text().splitlines() if not line.startswith(_DERIVED)]
    return "".join(f"{line}\n" for line in sorted([*others, *_derive_lines()]))


def render_page() -> str:
    """Return the text of the page, with a row for each kind in the table of formats."""
    rows = [_HEAD, "|---|---|---|---|---|"]
    for kind in list_kinds():
        prefix = f"`{kind.prefix}`" if kind.prefix else ""
        public = re.sub(r"(\w+://[^ ,]+)", r"`\1`", kind.public)
        rows.append(f"| `{kind.format}` | {prefix} | {kind.files} | {public} | {kind.endings} |")
    table = "\n".join(rows) + "\n"
    before, _, rest = PAGE.read_text().partition(_HEAD)
    _, _, after = rest.partition("\n\n")
    return f"{before}{table}\n{after}"


if __name__ == "__main__":
    STUB.write_text(render_stub())
    PAGE.write_text(render_page())
