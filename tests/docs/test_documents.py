"""Documents refer to what exists: files, headings, addresses, modules and names. Nothing is fetched."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.paths import ROOT

FOLDERS_OF_DOCUMENTS = (
    ".", "benchmarks", "benchmarks/results", "docs", "docs/explanation", "docs/howto", "docs/tutorials",
    "examples", "migrations", "tests/fixtures",
)  # fmt: skip
DOCUMENTS = sorted(path for folder in FOLDERS_OF_DOCUMENTS for path in (ROOT / folder).glob("*.md"))
BLOCK = re.compile(r"^ *(```+|~~~+).*?^ *\1[`~]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]+`")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", re.MULTILINE)
#: `[text](target)`, `![text](target)`, `[text](target "title")`; `[name]: target`; `<https://target>`.
LINK = re.compile(
    r"\]\(\s*<?([^\s()>]+)>?(?:\s+[\"'][^)]*)?\s*\)|^\[[^\]]+\]:\s+(\S+)|<(https?://[^\s>]*)>", re.M
)


def find_anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, by GitHub's rule."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(BLOCK.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link's text
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def find_links(text: str) -> list[str]:
    """Return the targets of a document's links, without those in code."""
    return ["".join(groups) for groups in LINK.findall(INLINE.sub("", BLOCK.sub("", text)))]


def is_dead(link: str, document: Path, text: str) -> bool:
    """Return whether a link names no file, no heading of its page, or an address that is malformed."""
    parts = urlsplit(link)
    if parts.scheme:
        return parts.scheme not in ("http", "https") or not re.fullmatch(
            r"[\w.-]+\.[a-z]+(:\d+)?", parts.netloc
        )
    target = (document.parent / parts.path).resolve() if parts.path else document
    if not target.exists() or not target.is_relative_to(ROOT):
        return True
    if not parts.fragment:
        return False
    if target.suffix != ".md":
        return True  # only pages have headings
    return parts.fragment not in find_anchors(text if target == document else target.read_text())


def find_dead_links(document: Path, text: str) -> list[str]:
    return [link for link in find_links(text) if is_dead(link, document, text)]


# -- names ---------------------------------------------------------------------------------------------

#: A path is relative to one of these, or to its document.
ROOTS = (ROOT, ROOT / "expstore")
FOLDERS = [path.name for root in ROOTS for path in root.iterdir() if (path / "__init__.py").exists()]
#: `file.py::Class.method`; backticks around a path of one of our folders; `expstore.module.name`.
FILE = re.compile(r"(?<![\w/.])((?:[\w.-]+/)+\w+\.py|\w+\.py(?=::))(?:::(\w+(?:\.\w+)*))?")
PATH = re.compile(rf"`((?:examples|migrations|docs|{'|'.join(FOLDERS)})/[\w/.-]*)`")
DOTTED = re.compile(r"(?<![\w/.@-])((?:expstore|tests|benchmarks)(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
#: Files in a store, and pages.
NOT_DOTTED = {"expstore.json", "expstore.wishes", "benchmarks.md"}


def find_dead_names(text: str, folder: Path) -> list[str]:
    """Return the paths and dotted names in a document that do not exist."""
    dead = []
    for path in PATH.findall(text):
        if not any((root / path).exists() for root in (folder, *ROOTS)):
            dead.append(path)
    for path, name in FILE.findall(text):
        files = [root / path for root in (folder, *ROOTS) if (root / path).is_file()]
        if not files:
            dead.append(path)
        elif name and name not in names_in(files[0]):
            dead.append(f"{path}::{name}")
    dead += [name for name in DOTTED.findall(text) if name not in NOT_DOTTED and not resolves(name)]
    return list(dict.fromkeys(dead))


def names_in(file: Path) -> set[str]:
    """Return the names that a file defines: `name`, `Class`, `Class.name`."""
    found = set()
    tree = ast.parse(file.read_text())
    bodies = [("", tree.body), *((f"{n.name}.", n.body) for n in tree.body if isinstance(n, ast.ClassDef))]
    for prefix, body in bodies:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(prefix + node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return found


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module or can be reached from one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:count]))
        except ModuleNotFoundError:  # a parent is no package
            continue
        if spec is not None:
            if count == len(parts):
                return True
            found: object = importlib.import_module(".".join(parts[:count]))
            for part in parts[count:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_what_is_there(path: Path) -> None:
    text = path.read_text()
    assert find_dead_links(path, text) == []
    if path.name != "CHANGELOG.md" and path.parts[-2] not in ("benchmarks", "results"):  # of former versions
        assert find_dead_names(text, path.parent) == []


def test_the_documents_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert {"README.md", "ARCHITECTURE.md", "GUARANTEES.md", "CHANGELOG.md", "docs/index.md"} <= names
    assert sum(len(find_links(path.read_text())) for path in DOCUMENTS) > 80


TEXT = """# A page: `code`, and_more!
## Again
## Again
```
# no heading [x](nowhere.md)
```
See """
GOOD_LINKS = (
    "[x](docs/index.md)", "[x](docs/)", "![x](docs/images/sb3_curves.png)", "[x](#a-page-code-and_more)",
    "[x](#again-1)", "[x](docs/numpy.md#statistics-of-fields)", "[x](https://example.org/a/b?c=d#e)",
    "<http://example.org>", "`[x](nowhere.md)`",
)  # fmt: skip
DEAD_LINKS = (
    "[x](nowhere.md)", "[x](../nowhere.md)", "[x](/etc/passwd)", "[x](nowhere.md 'title')",
    '[x](nowhere.md "title")', "![x](nowhere.png)", "[x](#nowhere)", "[x](#no-heading-x)", "[x](#again-2)",
    "[x](docs/numpy.md#nowhere)", "[x](Makefile#nowhere)", "[x](https:///path)", "[x](htps://example.org)",
    "<https://nowhere>", "[a page][x]\n\n[x]: nowhere.md\n",
)  # fmt: skip
GOOD_NAMES = (
    "`storages/base.py::Storage.write`, expstore/storages/base.py, `api/routes/`, expstore.json,"
    " `expstore.open`, expstore.schedulers, tests.support.paths, `journal/NNNNNN`"
)
DEAD_NAMES = (
    "expstore/journal.py", "`expstore/nowhere/`", "`storages/nowhere`", "storages/base.py::Nothing",
    "storages/base.py::Storage.nothing", "tests/conftest.py::nothing", "expstore.door.open",
    "expstore.storages.Nothing", "`python -m tests.nothing`",
)  # fmt: skip


def test_what_is_dead_is_found() -> None:
    found = {link: len(find_dead_links(ROOT / "README.md", TEXT + link)) for link in GOOD_LINKS + DEAD_LINKS}
    assert found == dict.fromkeys(GOOD_LINKS, 0) | dict.fromkeys(DEAD_LINKS, 1)
    assert find_dead_names(GOOD_NAMES, ROOT) == []
    assert {name: len(find_dead_names(f"See {name}.", ROOT)) for name in DEAD_NAMES} == dict.fromkeys(
        DEAD_NAMES, 1
    )
