"""GUARANTEES.md: the promises of expstore, each of which is a mark on a test that fails if it is broken.

    @pytest.mark.guarantee("kill/rows", "`kill -9` at any moment loses no row of ...")
    @pytest.mark.guarantee("kill/rows")

The first form states a promise; the second marks another test of the same promise. The part of the key before
the slash is a section of the page. Run `python -m tests.support.guarantees` to write the page;
tests/docs/test_guarantees.py compares it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.support.paths import ROOT

PAGE = ROOT / "GUARANTEES.md"
#: Sections of the page, in its order, by the first part of their keys.
SECTIONS = {
    "kill": "A process that dies",
    "power": "A power cut",
    "draw": "Batches",
    "consumers": "Consumers",
    "rows": "Rows and episodes",
    "process": "Threads and processes",
    "disk": "A disk that fails or is full",
    "damage": "Damaged files",
    "keep": "Retention, resizing",
    "version": "Versions",
    "ship": "Shipping to object storage",
    "exchange": "Exports, imports, SQL over packed fields",
    "torchrl": "Programs for TorchRL",
    "server": "A server",
    "cluster": "Several stores as one",
    "access": "Clients that are not trusted",
}
#: Marks of tests that `make test` does not run, or not with all of their cases.
_MARKS = ("slow", "torture", "some")
_ABOUT_TESTS = """\
`make test` runs the tests without a mark. Of a test marked *some* it runs a part of the cases, such as kills
at some of the acts; `make torture` runs all of them, and the tests marked *torture*. `make test-slow` runs
the tests marked *slow*."""
#: What is above this line of the page is written by hand.
_BEGIN = "<!-- python -m tests.support.guarantees writes what follows -->\n"


@dataclass
class Promise:
    """A sentence, and the tests that hold it as Markdown: path, name and marks."""

    sentence: str = ""
    tests: list[str] = field(default_factory=list)


def collect_promises(sources: Mapping[str, str]) -> dict[str, Promise]:
    """Return the promises by their keys, in the order of their sentences.

    Args:
        sources: Texts of test modules by their paths.
    """
    promises: dict[str, Promise] = {}
    for path, text in sources.items():
        count = 0
        for name, key, sentence, marks in _read_marks(text):
            count += 1
            promise = promises.setdefault(key, Promise())
            promise.tests.append(f"`{path}::{name}`{marks}")
            if sentence and promise.sentence:
                raise ValueError(f"{path}::{name} states {key} again; only one test has the sentence")
            if sentence:
                promise.sentence = sentence
                promises[key] = promises.pop(key)
        if count != text.count("mark.guarantee("):
            raise ValueError(f"{path} marks something else than a test function of the module")
    for key, promise in promises.items():
        if not promise.sentence:
            raise ValueError(f"no test has the sentence of {key}, which {promise.tests[0]} refers to")
        if key.partition("/")[0] not in SECTIONS:
            raise ValueError(f"{promise.tests[0]}: {key} has none of the sections {', '.join(SECTIONS)}")
    return promises


def _read_marks(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield of each promise of a module the test, the key, the sentence or "", and the test's other marks."""
    module = ast.parse(text)
    of_all = [
        each.value
        for each in module.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "pytestmark"
    ]
    for test in module.body:
        if not isinstance(test, ast.FunctionDef):
            continue
        decorators = [*map(ast.unparse, [*test.decorator_list, *of_all])]
        is_in_part = any("parametrize" in one and "mark.torture" in one for one in decorators)
        plain = [one for one in decorators if "parametrize" not in one]
        marks = [mark for mark in _MARKS if any(f"mark.{mark}" in one for one in plain)]
        if is_in_part and not {"some", "torture"} & {*marks}:
            marks.append("some")
        for mark in test.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.guarantee":
                key, sentence, *_ = [*map(ast.literal_eval, mark.args), ""]
                yield test.name, key, sentence, f" ({', '.join(marks)})" if marks else ""


def render_promises(promises: Mapping[str, Promise]) -> str:
    """Return the sections with the promises, and the table of their tests."""
    lines = []
    tests = ["## The tests", "", _ABOUT_TESTS, "", "| promise | tests |", "|---|---|"]
    number = 0
    for section, title in SECTIONS.items():
        lines += [f"## {title}", ""]
        for key, promise in promises.items():
            if key.startswith(f"{section}/"):
                number += 1
                lines.append(f"{number}. {promise.sentence}")
                tests.append(f"| {number} | {'<br>'.join(promise.tests)} |")
        lines.append("")
    return "\n".join([*lines, *tests]) + "\n"


def read_tests() -> dict[str, str]:
    """Return the texts of the test modules that have marks, by path."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    texts = {path: path.read_text() for path in paths if path != ROOT / "tests/docs/test_guarantees.py"}
    return {
        path.relative_to(ROOT).as_posix(): text for path, text in texts.items() if "mark.guarantee(" in text
    }


def embed(page: str) -> str:
    """Return the text of GUARANTEES.md with the promises below its marker."""
    head, marker, _ = page.partition(_BEGIN)
    assert marker, f"{PAGE} lacks its marker"
    return head + _BEGIN + "\n" + render_promises(collect_promises(read_tests()))


if __name__ == "__main__":
    PAGE.write_text(embed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
