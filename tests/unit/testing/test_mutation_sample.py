"""The program that changes the library at random makes exactly the change that it prints."""

from __future__ import annotations

from tests.support.mutation_sample import find_mutations, mutate

SOURCE = '''
LIMIT = 3

def first(rows, count):
    """Text with 1 and a == b."""
    if not rows or count < 2:
        raise ValueError("none")
    rows.sort()
    return min(rows) + LIMIT
'''


def test_each_change_is_the_one_that_is_printed() -> None:
    changes = {found.what: mutate(SOURCE, found) for found in find_mutations("a.py", SOURCE)}
    assert "rows.sort()  ->  pass" in changes
    assert "    pass" in changes["raise ValueError('none')  ->  pass"]
    assert "if not rows or count <= 2:" in changes["count < 2  ->  count <= 2"]
    assert "if rows or count < 2:" in changes["not rows  ->  rows"]
    assert "return min(rows) - LIMIT" in changes["min(rows) + LIMIT  ->  min(rows) - LIMIT"]
    assert "return max(rows) + LIMIT" in changes["min(rows)  ->  max(rows)"]
    assert "count < 3" in changes["2  ->  3"]
    assert "if not (not rows or count < 2):" in next(
        text for what, text in changes.items() if "if not (" in what
    )
    assert all(text.count("Text with 1 and a == b.") == 1 for text in changes.values())
