"""GUARANTEES.md: what expstore promises. Each promise is a mark on a test that would fail if it were not true.

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
from pathlib import Path

from tests.support.paths import ROOT

PAGE = ROOT / "GUARANTEES.md"
#: Sections of the page, in its order, by the first part of their keys.
SECTIONS = {
    "kill": "A process that dies",
    "power": "A power cut",
    "draw": "Batches",
    "rows": "Rows and episodes",
    "process": "Threads and processes",
    "disk": "A disk that fails or is full",
    "damage": "Damaged files",
    "keep": "Retention, resizing",
    "version": "Versions",
    "exchange": "Exports, imports, SQL over packed fields",
    "torchrl": "Programs for TorchRL",
    "server": "A server",
    "cluster": "Several stores as one",
    "access": "Clients that are not trusted",
}
HEAD = """\
# Guarantees

*Returned* means that the call has returned. *Synced* means that a `flush` or `close` has returned, or that the background thread has
synced, which it does about once a second and before half of the spare slots are used; `rb.stats()["unsynced_rows"]` counts the rows
that are not synced yet. [The tests](#the-tests) of each promise are at the end of the page, by its number.

## What is not promised

- An `extend` longer than the spare slots (`rb.stats()["spare"]`, at least an eighth of the capacity) drops the oldest rows before
  it writes. If the process or the machine dies before it returns, these rows are lost and the new ones do not exist. This is the
  one exception to "nothing that returned is lost". Meanwhile samples are drawn from the remaining rows; an `extend` of capacity +
  spare rows or more leaves none, and `sample` then raises `NotReadyError`.
- An `extend` that both fills a store of the best rows and replaces rows may be half done, between these two steps.
- Priorities set in the last 0.1 s may be lost if the process dies, and priorities set since the last sync after a power cut.
  Priorities have no checksum.
- The counts of `ConsumingSampler` since the last sync may be lost after a power cut; a kill during `sample` may count a batch
  that was not returned.
- Batches with `where=` or `weight=` may miss the newest rows for some tenths of a second while rows are written and right after a
  restart, without `rb.refresh()`.
- Rows that are written within a millisecond of the last look may be acknowledged although their folder was deleted.
- After a power cut, ids above the last surviving row are used again for other rows. After a power cut during `loads`, a store must
  be opened for writing before it can be read.
- If another program truncates a file of the store *while it is in use*, the process dies (SIGBUS), like every program that maps
  files.
- A copy made with `cp` or `rsync` while a process writes is not a store; `rb.dumps()` makes one.
- A network mount of unknown type may pass the trial of locks and maps and still lose synced data. Keep stores on local disks.
- SIGTERM is like `kill -9` if the program has its own handler or the disk hangs.
- A disk may report data as synced that is not, such as consumer drives with broken caches.
- `sample` does not find damage of single bits; `expstore verify` and the checks of an opening after a crash do.
- Answers that clients read slowly stay in the server's memory for up to sixteen times `answer_seconds`; then they are dropped.
- Changes that DuckDB's own programs make to `index.duckdb` are not kept.
"""


@dataclass
class Promise:
    """A sentence, and the tests that hold it as `path::name`."""

    sentence: str = ""
    tests: list[str] = field(default_factory=list)


def collect_promises(sources: Mapping[str, str]) -> dict[str, Promise]:
    """Return the promises by their keys, in the order of their sentences.

    Args:
        sources: Texts of test modules by their paths.
    """
    promises: dict[str, Promise] = {}
    for path, text in sources.items():
        found = 0
        for name, key, sentence in _read_marks(text):
            found += 1
            promise = promises.setdefault(key, Promise())
            promise.tests.append(f"{path}::{name}")
            if sentence and promise.sentence:
                raise ValueError(f"{path}::{name} states {key} again; only one test has the sentence")
            if sentence:
                promise.sentence = sentence
                promises[key] = promises.pop(key)
        if found != text.count("mark.guarantee("):
            raise ValueError(f"{path} marks something else than a test function of the module")
    for key, promise in promises.items():
        if not promise.sentence:
            raise ValueError(f"no test has the sentence of {key}, which {promise.tests[0]} refers to")
        if key.partition("/")[0] not in SECTIONS:
            raise ValueError(f"{promise.tests[0]}: {key} has none of the sections {', '.join(SECTIONS)}")
    return promises


def _read_marks(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name of the test, the key and the sentence or "" of each mark of a module."""
    for node in ast.parse(text).body:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.guarantee":
                key, sentence, *_ = [*map(ast.literal_eval, mark.args), ""]
                yield node.name, key, sentence


def render_page(promises: Mapping[str, Promise]) -> str:
    """Return the text of GUARANTEES.md."""
    lines, tests = [HEAD], ["## The tests", "", "| promise | tests |", "|---|---|"]
    number = 0
    for section, title in SECTIONS.items():
        lines += [f"## {title}", ""]
        for key, promise in promises.items():
            if key.startswith(f"{section}/"):
                number += 1
                lines.append(f"{number}. {promise.sentence}")
                tests.append(f"| {number} | {'<br>'.join(f'`{test}`' for test in promise.tests)} |")
        lines.append("")
    return "\n".join([*lines, *tests]) + "\n"


def read_tests() -> dict[str, str]:
    """Return the texts of the test modules that have marks, by path."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    texts = {path: path.read_text() for path in paths if path != ROOT / "tests/docs/test_guarantees.py"}
    return {
        path.relative_to(ROOT).as_posix(): text for path, text in texts.items() if "mark.guarantee(" in text
    }


def main(page: Path = PAGE) -> None:
    """Write the page."""
    page.write_text(render_page(collect_promises(read_tests())))


if __name__ == "__main__":
    main()
