"""Tables for people: cells of bounded length, columns that fit, and HTML without anybody's markup."""

from __future__ import annotations

from expstore.core.tables import ListHead, build_table, cell_text, render_card, size_text
from tests.support.html import read_html


def test_a_cell_is_one_short_line() -> None:
    for value, text in [
        (None, "None"),
        (True, "True"),
        (0.123456789, "0.123457"),
        ([1, 2], "[1, 2]"),
        ([1, 2, 3, 4], "[1, 2, 3, ... 4]"),
        ([[0] * 9] * 2, "[[0, 0, 0, ... 9], [0, 0, 0, ... 9]]"[:25] + "..."),
        (ListHead([7], 1), "[7]"),
        (ListHead([7, 8, 9], 7056), "[7, 8, 9, ... 7056]"),
        ({"a": 0.5, "b": [1], "c": 2, "d": 3}, "{a: 0.5, b: [1], c: 2}"),
        ("a\nb\tc", "a b c"),
        ("red \x1b[31m", "red \ufffd[31m"),
        ("\u202eabc", "\ufffdabc"),
        ("\ud800", "\ufffd"),
        ("x" * 10_000_000, "x" * 25 + "..."),
        (b"\x00<b>", "b'\\x00<b>'"),
    ]:
        assert cell_text(value) == text


def test_columns_that_do_not_fit_are_named() -> None:
    table = build_table([f"column {k}" for k in range(40)], [range(40)], total=3)
    assert len(table.names) == len(table.rows[0]) == len(table.numeric) == 10
    assert table.more.startswith("... 3 rows, 30 more columns: column 10, column 11")
    assert len(table.more) < 150


def test_a_wide_column_stays() -> None:
    assert build_table(["x" * 500], [], total=0).names == ["x" * 25 + "..."]


def test_numbers_are_aligned_right_in_html() -> None:
    table = build_table(["n", "flag", "text"], [[1, True, "1"], [2.5, False, "2"]], total=2)
    assert table.numeric == [True, False, False]
    assert '<td class="number">2.5</td><td>False</td><td>2</td>' in table.render_html()
    assert build_table(["n"], [], total=0).numeric == [False]


def test_every_text_is_escaped() -> None:
    evil = "<script>alert('&\")</script>"
    wide = [evil, *(f"{k}<b>" for k in range(60))]
    table = build_table(wide, [[evil] * 61], total=2, what=evil)
    html = render_card(evil, [evil, "\u202e" + evil], [table], note=evil)
    page = read_html(html)
    assert page.tags == {"div", "style", "b", "bdi", "table", "thead", "tbody", "tr", "th", "td"}
    assert page.text.count("<script>alert") == 7 + len(table.names) - 1
    assert "&amp;&quot;" in html
    assert "\u202e" not in html


def test_sizes_have_units() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 2_500_000, 10**15)] == [
        "0 bytes", "999 bytes", "1 kB", "2.5 MB", "1,000 TB",
    ]  # fmt: skip
