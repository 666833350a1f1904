"""Names in the source use the project's vocabulary: one word for one thing.

The tests read names of modules, and every identifier that the source defines or uses. Texts are not checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT
from tests.support.shape import python_files, read

#: Words that no identifier may contain, each with what to write instead.
RETIRED_WORDS = {
    "aside": "temporary, damaged, old",
    "coming": "new, pending, incoming",
    "displacing": "the name of the rows",
    "door": "open",
    "forms": "formats",
    "gap": "deleted, missing",
    "gaps": "deleted, missing",
    "halves": "the name of the parts",
    "hold": "pin, contain, keep",
    "law": "rule, distribution",
    "laws": "rules, distributions",
    "leaving": "evicted",
    "lend": "share",
    "lending": "sharing",
    "lends": "shares",
    "shown": "visible, listed",
    "stranger": "untrusted",
    "strangers": "untrusted",
    "thinning": "compaction",
    "turn": "lap, draw, cycle",
    "turns": "laps, draws, cycles",
}

FOLDERS = ("api", "benchmarks", "examples", "expstore", "tests")


def find_identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each identifier."""
    for node in ast.walk(tree):
        for field in ("arg", "asname", "attr", "id", "name"):
            if isinstance(name := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), name


def split_words(name: str) -> set[str]:
    """Return the words of an identifier in lower case: parts between underscores and before capitals."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def find_retired(module: str, source: str) -> Iterator[str]:
    """Yield a message for each identifier with a retired word."""
    for line, name in [(0, module), *find_identifiers(ast.parse(source))]:
        for word in sorted(split_words(name) & RETIRED_WORDS.keys()):
            yield f"{line}: {name}: instead of {word!r} use {RETIRED_WORDS[word]}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_identifier_has_a_retired_word(folder: str) -> None:
    files = python_files(folder)
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{message}"
        for file in files
        for message in find_retired(file.stem, read(file))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("set_aside", ""),
        ("x", "def take_turn(): ..."),
        ("x", "class FieldGaps: ..."),
        ("x", "LATEST_SHOWN = 1"),
        ("x", "def f(hold): ..."),
        ("x", "f(hold=1)"),
        ("x", "self._coming = 1"),
        ("x", "import numpy as gaps"),
    ],
)
def test_a_retired_word_is_found(module: str, source: str) -> None:
    assert len(list(find_retired(module, source))) == 1


def test_other_words_pass() -> None:
    source = "def returned(threshold, transforms, outdoor): return 'turn', Formset, lawful"
    assert list(find_retired("holding", source)) == []
