"""The program that changes the library at random makes exactly the change that it prints."""

from __future__ import annotations

import pytest

from tests.support.mutation_sample import Verdict, find_again, find_mutations, mutate, report

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


def test_only_functions_change() -> None:
    assert {found.line for found in find_mutations("a.py", SOURCE)} == {6, 7, 8, 9}


NESTED = """
class Ring:
    def size(self, low, high):
        def clip(value):
            return value + 1
        return clip(high) - low if high > low else high > low
"""


def test_a_change_is_named_by_its_function_and_its_place_among_equal_ones() -> None:
    changes = [found.key for found in find_mutations("a.py", NESTED)]
    assert ("Ring.size.clip", "value + 1  ->  value - 1", 0) in changes
    equal = [key for key in changes if key[1] == "high > low  ->  high >= low"]
    assert equal == [("Ring.size", "high > low  ->  high >= low", nth) for nth in (0, 1)]


def test_a_recorded_change_is_found_in_another_file(capsys: pytest.CaptureFixture[str]) -> None:
    [former] = [found for found in find_mutations("a.py", NESTED) if found.nth == 1]
    record = {"path": former.path, "function": former.function, "what": former.what, "nth": former.nth}
    [again] = find_again([record], find_mutations("b.py", "import os\n" + NESTED))
    assert (again.path, again.key, again.line) == ("b.py", former.key, former.line + 1)
    assert find_again([record], find_mutations("b.py", SOURCE)) == []
    assert "gone: a.py: Ring.size" in capsys.readouterr().out


def test_only_a_change_that_was_noticed_before_is_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    one, two, *_ = find_mutations("expstore/sql/a.py", NESTED)
    records = [
        {"function": change.function, "what": change.what, "nth": change.nth, "verdict": verdict}
        for change, verdict in ((one, "noticed"), (two, "accepted"))
    ]
    assert report([(one, Verdict.NOTICED), (two, Verdict.ACCEPTED)], records) == 0
    assert report([(one, Verdict.ACCEPTED), (two, Verdict.ACCEPTED)], records) == 1
    assert "noticed before, accepted now" in capsys.readouterr().out
