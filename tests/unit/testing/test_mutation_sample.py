"""The program that changes the library at random makes exactly the change that it prints."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from coverage.numbits import nums_to_numbits

from tests.support.mutation_sample import Checkout, Verdict, find_again, find_mutations, mutate, report
from tests.support.paths import ROOT

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


def test_kill_rates_are_printed_by_package_and_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = {"sql": ["noticed", "slow", "accepted", "noticed"], "wire": ["accepted", "noticed"]}
    judged = [
        (find, Verdict(verdict))
        for package, all_of_it in verdicts.items()
        for find, verdict in zip(find_mutations(f"expstore/{package}/a.py", SOURCE), all_of_it, strict=False)
    ]
    assert [report(judged, [], least) for least in (None, 0.6, 0.7)] == [1, 0, 1]
    lines = capsys.readouterr().out.splitlines()[:3]
    assert lines == [
        "expstore/sql: kill rate: 0.75 (3 of 4)",
        "expstore/wire: kill rate: 0.50 (1 of 2)",
        "kill rate: 0.67 (4 of 6)",
    ]


def test_tests_are_read_from_the_data_of_an_earlier_run(tmp_path: Path) -> None:
    checkout = Checkout.__new__(Checkout)
    checkout.folder = tmp_path
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").touch()
    with contextlib.closing(sqlite3.connect(tmp_path / "lines")) as data:
        data.executescript(
            "CREATE TABLE file (id, path); CREATE TABLE context (id, context);"
            "CREATE TABLE line_bits (file_id, context_id, numbits);"
            "INSERT INTO context VALUES (1, ''), (2, 'tests.test_a.Some.test_b'), (3, 'tests.test_a.test_c')"
        )
        data.execute("INSERT INTO file VALUES (1, ?)", [str(ROOT / "api" / "app.py")])
        for context, lines in ((1, [1, 2]), (2, [2, 3]), (3, [3])):
            data.execute("INSERT INTO line_bits VALUES (1, ?, ?)", [context, nums_to_numbits(lines)])
        data.commit()
    tests = checkout._read(tmp_path / "lines", set(), ROOT)
    one, other = "tests/test_a.py::Some::test_b", "tests/test_a.py::test_c"
    assert tests == {("api/app.py", 2): [one], ("api/app.py", 3): [other, one]}
