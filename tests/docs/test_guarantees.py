"""GUARANTEES.md is what the marks of the tests say, and wrong marks are found."""

from __future__ import annotations

import pytest

from tests.support.guarantees import PAGE, SECTIONS, collect_promises, embed, read_tests, render_promises
from tests.support.paths import ROOT

RETURNED = '@pytest.mark.guarantee("kill/rows", "A kill loses nothing.")\ndef test_a(): ...\n'
ANOTHER = '@pytest.mark.slow\n@pytest.mark.guarantee("kill/rows")\ndef test_b(): ...\n'


def test_the_page_is_the_one_of_the_marks() -> None:
    page = PAGE.read_text()
    assert embed(page) == page, "run: python -m tests.support.guarantees"
    assert page.index("\n## What is not promised\n") < page.index(f"\n## {SECTIONS['kill']}\n")


def test_every_section_has_promises_and_every_promise_a_test_that_pytest_runs() -> None:
    promises = collect_promises(read_tests())
    assert {key.partition("/")[0] for key in promises} == set(SECTIONS)
    names = [test.partition("::")[2] for promise in promises.values() for test in promise.tests]
    assert [name for name in names if not name.startswith("test_")] == []


def test_a_promise_has_one_sentence_and_all_of_its_tests() -> None:
    promises = collect_promises({"tests/test_x.py": ANOTHER, "tests/test_y.py": RETURNED})
    assert promises["kill/rows"].sentence == "A kill loses nothing."
    assert promises["kill/rows"].tests == ["`tests/test_x.py::test_b` (slow)", "`tests/test_y.py::test_a`"]
    page = render_promises(promises)
    assert f"## {SECTIONS['kill']}\n\n1. A kill loses nothing.\n" in page
    assert "| 1 | `tests/test_x.py::test_b` (slow)<br>`tests/test_y.py::test_a` |\n" in page


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ANOTHER, "no test has the sentence of kill/rows"),
        (RETURNED + RETURNED, "states kill/rows again"),
        (RETURNED.replace("kill/", "nowhere/"), "has none of the sections"),
        ("class TestA:\n    " + RETURNED.replace("\n", "\n    "), "marks something else than a test"),
        ("pytestmark = " + RETURNED.partition("\n")[0][1:], "marks something else than a test"),
    ],
)
def test_a_wrong_mark_is_found(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        collect_promises({"tests/test_x.py": source})


def test_the_readme_links_to_it() -> None:
    assert "](GUARANTEES.md)" in (ROOT / "README.md").read_text()
