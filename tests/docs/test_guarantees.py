"""GUARANTEES.md names tests: each one exists, and each promise has one.

Run with the other tests. Names are looked up in the source; in a run of the whole suite pytest must also have
collected them.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TEXT = (ROOT / "GUARANTEES.md").read_text()
#: The name of a test as it is written in a table.
CELL = r"`tests/[\w/]+\.py::test_\w+`"
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))
#: Where no test is asked for: what is not promised has none.
NOT_PROMISED = "## What is not promised"


@functools.cache
def parse(path: str) -> ast.Module:
    """Return the source of a module as a tree."""
    return ast.parse((ROOT / path).read_text())


def definition(path: str, name: str) -> ast.FunctionDef | None:
    """Find a test function at the top of a module."""
    found = [node for node in parse(path).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[0] if found else None


def is_left_out(path: str, test: ast.FunctionDef) -> bool:
    """Return whether a test is left out of `make test`, by its own marks or by those of its module."""
    marks = [ast.unparse(mark) for mark in test.decorator_list]
    for node in parse(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks += map(ast.unparse, node.value.elts if isinstance(node.value, ast.List) else [node.value])
    return any(re.search(r"\bmark\.(slow|torture)\b", mark) and "param" not in mark for mark in marks)


def test_named_tests_are_there(request: pytest.FixtureRequest) -> None:
    config = request.config
    whole = config.args == config.getini("testpaths") and not config.option.keyword
    collected = {item.nodeid.partition("[")[0] for item in request.session.items}
    for path, name in NAMED:
        assert re.fullmatch(r"test_\w+\.py", Path(path).name)
        assert name.startswith("test_")
        test = definition(path, name)
        assert test is not None, f"GUARANTEES.md names {path}::{name}"
        assert not whole or is_left_out(path, test) or f"{path}::{name}" in collected


def test_every_promise_names_a_test() -> None:
    promised = TEXT[: TEXT.index(NOT_PROMISED)]
    tables = re.findall(r"^\| Guarantee \| Tests \|\n\|---\|---\|\n((?:\|.+\|\n)+)", promised, re.M)
    assert len(tables) == len(re.findall("^## ", promised, re.M))
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 100
    assert not [row for row in rows if not re.fullmatch(rf"\| [^|]+ \| {CELL}(<br>{CELL})* \|", row)]
    assert len(NAMED) > 30


def test_the_readme_links_to_it() -> None:
    assert "](GUARANTEES.md)" in (ROOT / "README.md").read_text()
