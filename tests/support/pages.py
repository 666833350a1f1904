"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def read_page(name: str, begin: str = "", end: str = "") -> str:
    """Return the text of a page of docs/, or its part from one text up to another."""
    page = (DOCS / f"{name}.md").read_text()
    page = page[page.index(begin) :]
    return page[: page.index(end)] if end else page


def find_blocks(text: str, kind: str) -> list[str]:
    """Return the blocks of a language in a document."""
    return [block for found, block in split_blocks(text) if found == kind]


def split_blocks(text: str) -> list[tuple[str, str]]:
    """Return the languages and texts of all blocks of a document."""
    return _BLOCK.findall(text)


def execute(block: str, names: dict[str, object], page: str = "README.md") -> None:
    """Run a block of Python with the names of the blocks before it."""
    exec(compile(block, page, "exec"), names)


def run_first_example(names: dict[str, object]) -> None:
    """Run the first example of the front page, which makes runs/demo.exp in the working directory."""
    execute(find_blocks(read_page("index"), "python")[0], names, "docs/index.md")
