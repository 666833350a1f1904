"""Small tables for people, as text and as HTML: previews that terminals and notebooks show.

Used by `repr` and `_repr_html_` of results, storages, schemas and buffers. Cells are bounded in length, and
every text is escaped: names, facts and values may come from anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

#: Number of rows of a preview.
PREVIEW_ROWS = 10
#: Number of items of a list in a cell.
ITEMS = 3
_WIDTH = 100
_CELL = 28

#: Colours are those of the notebook, so that tables can be read in light and dark themes.
# JupyterLab aligns all cells to the right by a rule of higher specificity, hence `!important`.
_STYLE = """\
.expstore {margin: 0.3em 0; font-size: 0.9em; line-height: 1.4}
.expstore table {border-collapse: collapse; margin: 0.4em 0; font-size: inherit}
.expstore th, .expstore td {padding: 0.15em 0.7em; text-align: left !important; white-space: nowrap}
.expstore th {font-weight: 600; border-bottom: 1px solid rgba(128, 128, 128, 0.6)}
.expstore td {font-family: monospace; border-bottom: 1px solid rgba(128, 128, 128, 0.2)}
.expstore .number {text-align: right !important}
.expstore .more {opacity: 0.7}"""


@dataclass(frozen=True, slots=True)
class ListHead:
    """The first items of a list, and how many it has."""

    items: Sequence[Any]
    length: int


@dataclass(frozen=True, slots=True)
class Table:
    """A table cut to a size that people read; `build_table` makes it.

    Args:
        names: Heads of the columns.
        rows: Rows with one text per column.
        numeric: Whether a column has numbers only, per column.
        more: What was left out, as one line; "" if nothing was.
    """

    names: list[str]
    rows: list[list[str]]
    numeric: list[bool]
    more: str

    def render_text(self) -> str:
        """Return the table as lines of text."""
        widths = _widths(self.names, self.rows)
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (self.names, *self.rows)]
        return "\n".join(lines + [self.more] * bool(self.more))

    def render_html(self) -> str:
        """Return the table as HTML."""
        head = self._html_row("th", self.names)
        body = "".join(self._html_row("td", row) for row in self.rows)
        more = f'<div class="more">{escape(self.more)}</div>' if self.more else ""
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{more}"

    def _html_row(self, tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="number"' if numeric else "" for numeric in self.numeric]
        texts = [f"<{tag}{kind}>{escape(text)}</{tag}>" for text, kind in zip(cells, kinds, strict=True)]
        return f"<tr>{''.join(texts)}</tr>"


def build_table(
    names: Sequence[str], rows: Iterable[Sequence[Any]], *, total: int, what: str = "rows"
) -> Table:
    """Return a table of the columns that fit side by side.

    Args:
        names: Names of all columns.
        rows: The rows to list, with one value per column.
        total: Number of rows that there are.
        what: What a row is, in the plural.
    """
    listed = [list(row) for row in rows]
    heads = [elide(printable(name)) for name in names]
    cells = [[cell_text(value) for value in row] for row in listed]
    widths = _widths(heads, cells)
    fitting = max(1, sum(sum(widths[: k + 1]) + 2 * k <= _WIDTH for k in range(len(widths))))
    heads = heads[:fitting]
    more = [f"{total} {what}"] if total > len(listed) else []
    if fitting < len(names):
        others = ", ".join(printable(name) for name in names[fitting:])
        more.append(f"{len(names) - fitting} more columns: {elide(others, _WIDTH)}")
    return Table(
        names=heads,
        rows=[row[:fitting] for row in cells],
        numeric=[bool(listed) and all(_is_number(row[k]) for row in listed) for k in range(len(heads))],
        more="... " + ", ".join(more) if more else "",
    )


def render_card(title: str, facts: Sequence[str], tables: Sequence[Table] = (), note: str = "") -> str:
    """Return the HTML that a notebook shows for an object, without scripts.

    Args:
        title: The object's class.
        facts: Short texts about it.
        tables: Tables below them.
        note: A text below the tables.
    """
    line = " · ".join(f"<bdi>{escape(printable(fact))}</bdi>" for fact in facts)
    parts = [f"<div><b>{escape(title)}</b> {line}</div>", *(table.render_html() for table in tables)]
    if note:
        parts.append(f'<div class="more">{escape(printable(note))}</div>')
    return f'<div class="expstore"><style>{_STYLE}</style>{"".join(parts)}</div>'


def cell_text(value: Any) -> str:
    """Return a value as one line of bounded length; long lists as their first items and their length."""
    return elide(_short(value))


def elide(text: str, width: int = _CELL) -> str:
    """Return a text, cut to a width with "..." at its end if it is longer."""
    return text if len(text) <= width else text[: width - 3] + "..."


def size_text(count: int) -> str:
    """Return a number of bytes for people."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:,.0f} {units[0]}"


def _widths(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(names, *rows, strict=True)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    if isinstance(value, list):
        value = ListHead(value[:ITEMS], len(value))
    if isinstance(value, ListHead):
        inside = ", ".join(_short(item) for item in value.items[:ITEMS])
        return f"[{inside}, ... {value.length}]" if value.length > ITEMS else f"[{inside}]"
    if isinstance(value, dict):
        items = list(value.items())[:ITEMS]
        return "{" + ", ".join(f"{printable(str(name))}: {_short(item)}" for name, item in items) + "}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str | bytes):
        value = value[: 2 * _CELL]  # the rest is cut off, so nothing is done with it
    return printable(str(value))


def printable(text: str) -> str:
    """Return a text without control characters, which terminals obey, and without lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
