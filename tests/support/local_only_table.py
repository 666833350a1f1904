"""The table of docs/server.md: what a served store does not have, and what to do instead.

Run `python -m tests.support.local_only_table` to write it there; tests/docs/test_server_page.py compares it.
"""

from __future__ import annotations

import re

from expstore.remote.local_only import INSTEAD
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "server.md"
_BEGIN, _END = "<!-- local only -->\n", "<!-- end of local only -->"
#: Code in a hint: a call, or a keyword with or without a value.
_CODE = re.compile(r"[\w.]+\([^()]*\)|\b\w+=(?:'\w+')?|NotReadyError")


def render_table() -> str:
    """Return the table; methods with the same hint are in one row."""
    names: dict[str, list[str]] = {}
    for name, hint in INSTEAD.items():
        names.setdefault(hint, []).append(f"`{name}`" if "[" in name else f"`rb.{name}`")
    rows = [f"| {', '.join(same)} | {_mark_code(hint)} |" for hint, same in names.items()]
    return "\n".join(["| not over a connection | instead |", "|---|---|", *rows]) + "\n"


def _mark_code(hint: str) -> str:
    return _CODE.sub(r"`\g<0>`", hint)


def embed(page: str) -> str:
    """Return the text of docs/server.md with the table between its markers."""
    head, _, rest = page.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    assert tail, f"{PAGE} lacks the markers of the table"
    return head + _BEGIN + render_table() + _END + tail


if __name__ == "__main__":
    PAGE.write_text(embed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
