"""Links of the documents: files, headings and addresses. Nothing is fetched from the network."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.paths import ROOT

FOLDERS = (
    ".", "benchmarks", "benchmarks/results", "docs", "docs/explanation", "docs/howto", "docs/tutorials",
    "examples", "migrations", "tests/fixtures",
)  # fmt: skip
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
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


def test_the_documents_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in DOCUMENTS}
    assert {"README.md", "ARCHITECTURE.md", "GUARANTEES.md", "CHANGELOG.md", "docs/index.md"} <= names
    assert sum(len(find_links(path.read_text())) for path in DOCUMENTS) > 80


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert find_dead_links(path, path.read_text()) == []


TEXT = """# A page: `code`, and_more!
## Again
## Again
```
# no heading [x](nowhere.md)
```
"""


@pytest.mark.parametrize(
    "link",
    [
        "[x](docs/index.md)",
        "[x](docs/)",
        "![x](docs/images/sb3_curves.png)",
        "[x](#a-page-code-and_more)",
        "[x](#again-1)",
        "[x](docs/numpy.md#statistics-of-fields)",
        "[x](https://example.org/a/b?c=d#e)",
        "<http://example.org>",
        "`[x](nowhere.md)`",
    ],
)
def test_a_good_link_passes(link: str) -> None:
    assert find_dead_links(ROOT / "README.md", f"{TEXT}\nSee {link}.") == []


@pytest.mark.parametrize(
    "link",
    [
        "[x](nowhere.md)",
        "[x](../nowhere.md)",
        "[x](/etc/passwd)",
        "[x](nowhere.md 'title')",
        '[x](nowhere.md "title")',
        "![x](nowhere.png)",
        "[x](#nowhere)",
        "[x](#no-heading-x)",
        "[x](#again-2)",
        "[x](docs/numpy.md#nowhere)",
        "[x](Makefile#nowhere)",
        "[x](https:///path)",
        "[x](htps://example.org)",
        "<https://nowhere>",
    ],
)
def test_a_dead_link_is_found(link: str) -> None:
    assert len(find_dead_links(ROOT / "README.md", f"{TEXT}\nSee {link}.")) == 1


def test_a_dead_definition_is_found() -> None:
    assert find_dead_links(ROOT / "README.md", "[a page][x]\n\n[x]: nowhere.md\n") == ["nowhere.md"]
