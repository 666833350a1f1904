"""Names in the source use the project's vocabulary: one word for one thing.

The tests read names of modules, and every identifier that the source defines or uses. Texts are not checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

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

#: Finds a retired word wherever an identifier may have it: most files have none, and need not be parsed.
ANYWHERE = re.compile(
    rf"(?<![a-z])(?:{'|'.join(RETIRED_WORDS)})(?![a-z])"
    rf"|(?:{'|'.join(word.capitalize() for word in RETIRED_WORDS)})(?![a-z])"
    rf"|{'|'.join(word.upper() for word in RETIRED_WORDS)}"
)

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
    if not ANYWHERE.search(f"{module} {source}"):
        return
    for line, name in [(0, module), *find_identifiers(ast.parse(source))]:
        for word in sorted(split_words(name) & RETIRED_WORDS.keys()):
            yield f"{line}: {name}: instead of {word!r} use {RETIRED_WORDS[word]}"


def test_no_identifier_has_a_retired_word() -> None:
    files = python_files(*FOLDERS)
    found = [
        f"{file.relative_to(ROOT)}:{message}"
        for file in files
        for message in find_retired(file.stem, read(file))
    ]
    assert not found, "\n" + "\n".join(found)


def test_a_retired_word_is_found() -> None:
    for module, source in [
        ("set_aside", ""),
        ("x", "class FieldGaps: ..."),
        ("x", "LATEST_SHOWN = 1"),
        ("x", "f(hold=1)"),
        ("x", "self._coming = 1"),
        ("x", "import numpy as gaps"),
    ]:
        assert len(list(find_retired(module, source))) == 1, (module, source)
    assert not [*find_retired("holding", "def returned(threshold, outdoor): return 'turn', Formset, lawful")]


#: Past participles without the ending -ed.
IRREGULAR = {
    "begun", "broken", "built", "caught", "chosen", "done", "drawn", "fallen", "forgotten", "found",
    "frozen", "given", "gone", "got", "grown", "held", "hidden", "kept", "known", "laid", "left",
    "lost", "made", "met", "outgrown", "overwritten", "paid", "remade", "said", "seen", "sent", "shown",
    "sold", "spent", "stuck", "sunk", "taken", "thought", "told", "torn", "undone", "won", "worn",
    "woven", "written",
}  # fmt: skip


#: Words with the ending -ed that are no participles.
NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "ragged", "seed"}


ALLOWED = {
    "compiled": "a decorator",
    "compiled_for_c": "a decorator",
    "completed": "called after the fsync of a checkpoint record (Checkpointed)",
    "normalized_score": "D4RL's name",
    "required_keys": "TorchRL's name",
    "synced": "called after the fsync of a checkpoint's files (Checkpointed)",
}


#: Finds a function whose name may be one.
DEFINED = re.compile(rf"def _*(?:[a-z]+ed|{'|'.join(IRREGULAR)})(?![a-z])")


def find_participles(source: str) -> Iterator[str]:
    """Yield a message for each function, except properties, whose name begins with a past participle."""
    if not DEFINED.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name in ALLOWED:
            continue
        if any(re.search(r"property|\.setter", ast.unparse(mark)) for mark in node.decorator_list):
            continue
        first = node.name.strip("_").split("_")[0]
        if first in IRREGULAR or (first.endswith("ed") and first not in NO_PARTICIPLES):
            yield f"{node.lineno}: {node.name}: the name of a function is a verb"


def test_no_function_is_named_by_a_participle() -> None:
    files = python_files("expstore", "api")
    found = [
        f"{file.relative_to(ROOT)}:{message}" for file in files for message in find_participles(read(file))
    ]
    assert not found, "\n" + "\n".join(found)
