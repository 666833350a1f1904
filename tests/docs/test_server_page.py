"""docs/server.md prints the table of what a connection does not have."""

from __future__ import annotations

from tests.support.local_only_table import PAGE, embed, render_table


def test_its_table_is_that_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert embed(page) == page, "run: python -m tests.support.local_only_table"


def test_code_in_hints_is_marked() -> None:
    table = render_table()
    assert "| `sample()`: it raises `NotReadyError`; `connect(wait=)` waits for rows |" in table
    assert "| `rb.refresh`, `rb.synchronize` | nothing: " in table
