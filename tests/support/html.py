"""HTML as a browser reads it: the elements, and the text between them."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """The tags of a page, its attributes' names, and its visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.cells: list[str] = []
        self.text = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["style"]:
            return
        self.text += data
        if self._open[-1:] in (["td"], ["th"]):
            self.cells[-1] += data


def read_html(html: str) -> Page:
    """Return what a page shows; its elements must be closed in order."""
    page = Page()
    page.feed(html)
    page.close()
    assert page._open == []
    return page
