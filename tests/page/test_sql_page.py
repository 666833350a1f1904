"""The page that asks in SQL: completion, results, plots, downloads; and the page that tries samplers."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa
import pytest

from tests.support.browsers import Visit, expect, query_of
from tests.support.page_stores import HOSTILE, LONG

pytestmark = pytest.mark.slow  # in a browser

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., Visit]
RESULT = "[aria-label=Result]"


def download(page: Page, text: str) -> Path:
    """Click on a button that saves a file, and return the file."""
    with page.expect_download() as found:
        page.click(f"text={text}")
    return Path(found.value.path())


def test_names_are_completed_by_the_keyboard(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/run/sql")
    page.focus("#query")
    page.keyboard.type("SELECT next.rew")
    chosen = page.locator("#completion [aria-selected=true]")
    expect(chosen).to_contain_text("next.reward")
    expect(page.locator("#query")).to_have_attribute(
        "aria-activedescendant", chosen.get_attribute("id") or ""
    )
    page.keyboard.press("Tab")
    expect(page.locator("#completion")).to_be_hidden()
    page.keyboard.type(" FROM tr")
    chosen.wait_for()
    page.keyboard.press("Enter")
    expect(page.locator("#query")).to_have_value("SELECT next.reward FROM transitions")
    page.keyboard.type(" WHERE _")
    chosen.wait_for()
    first = chosen.inner_text()
    page.keyboard.press("ArrowDown")
    expect(chosen).not_to_have_text(first)
    page.keyboard.press("Escape")
    expect(page.locator("#completion")).to_be_hidden()
    page.keyboard.press("Control+Space")
    chosen.wait_for()
    page.keyboard.press("Escape")
    expect(page.locator("#completion")).to_be_hidden()
    page.keyboard.type("id <= 3")
    page.keyboard.press("Control+Enter")
    page.locator(f"{RESULT} tbody tr").nth(2).wait_for()
    assert query_of(page)["q"].startswith("SELECT next.reward")
    page.keyboard.press("Tab")  # the list is closed, so the key leaves the editor
    expect(page.locator("#query")).not_to_be_focused()
    assert tab.errors == []


def test_a_query_is_in_the_address_and_errors_have_a_hint(visit: Open) -> None:
    tab = visit()
    query = 'SELECT episode_id, "return" FROM episodes ORDER BY 1 LIMIT 2'
    page = tab.open("/stores/run/sql?q=" + quote(query))
    expect(page.locator(f"{RESULT} td")).to_have_text(["1", "8", "2", "8"])
    page.fill("#query", "SELECT nothing FROM episodes")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".error :text('nothing')")
    expect(page.locator(".error .hint")).not_to_be_empty()
    page.fill("#query", "SELECT range AS n FROM range(20000)")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("text=The result was cut")
    expect(page.locator(f"{RESULT} tbody tr")).to_have_count(1000)
    page.fill("#query", "SELECT 1 AS n WHERE false")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("text=The query has no rows.")
    page.fill("#query", "")
    page.keyboard.press("Control+Enter")
    page.click("text=Episodes with the lowest return")
    page.click(f"{RESULT} a >> nth=0")
    page.wait_for_selector("h1 >> text=Episode")


def test_results_are_saved_as_they_are(visit: Open) -> None:
    tab = visit()
    query = """SELECT _episode AS episode_id, prompt AS "a,""b", NULL AS none, '' AS empty
               FROM transitions ORDER BY _id"""
    page = tab.open("/stores/hostile/sql?q=" + quote(query))
    page.wait_for_selector(f"{RESULT} >> text=window.broken >> nth=0")
    assert page.evaluate("window.broken") is None
    with download(page, "Download CSV").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["episode_id", 'a,"b', "none", "empty"]
    assert [row[1] for row in rows[1::2]] == [*HOSTILE, LONG]
    assert {(row[2], row[3]) for row in rows[1:]} == {("", "")}
    with pa.ipc.open_stream(download(page, "Download Arrow")) as stream:
        table = stream.read_all()
    assert table.column_names == rows[0]
    assert table.column(1).to_pylist()[::2] == [*HOSTILE, LONG]
    assert tab.errors == []


def test_integers_have_all_their_digits(visit: Open) -> None:
    values = [2**53 + 1, -(2**62) - 1, 2**63 - 1]
    query = f"SELECT unnest([{', '.join(map(str, values))}]) AS seed, [{values[0]}] AS seeds, 1e300 AS large"
    tab = visit()
    page = tab.open("/stores/run/sql?q=" + quote(query))
    page.locator(f"{RESULT} td").nth(8).wait_for()
    cells = page.locator(f"{RESULT} td").all_inner_texts()
    assert cells[::3] == [str(value) for value in values]
    assert (cells[1], cells[2]) == (f'["{values[0]}"]', "1e+300")
    expect(page.locator(f"{RESULT} th").first).to_have_class("number")
    with download(page, "Download CSV").open(newline="", encoding="utf-8") as file:
        assert [row[0] for row in csv.reader(file)][1:] == cells[::3]
    page.select_option("label:has-text('Plot') select", label="seed")
    page.select_option("label:has-text('against') select", label="large")
    page.wait_for_selector("figure[aria-label='large against seed'] canvas")
    assert tab.errors == []


def test_two_columns_are_plotted(visit: Open) -> None:
    tab = visit()
    query = 'SELECT episode_id, "return" AS r, source, start_time FROM episodes ORDER BY 1'
    page = tab.open("/stores/run/sql?q=" + quote(query))
    page.select_option("label:has-text('Plot') select", label="episode_id")
    page.select_option("label:has-text('against') select", label="r")
    page.wait_for_selector(".uplot")
    page.select_option("label:has-text('coloured by') select", label="source")
    page.wait_for_selector(".u-legend >> text=worker-2")
    page.select_option("label:has-text('Plot') select", label="start_time")
    page.reload()
    tab.wait()
    page.wait_for_selector(".u-legend >> text=worker-2")
    page.click("text=Figures")
    # The table comes with the event of the opened element, after the click.
    page.locator(".figures tbody tr").nth(20).wait_for()
    assert tab.errors == []


def test_relations_are_listed_and_inserted(visit: Open) -> None:
    page = visit().open("/stores/hostile/sql")
    page.click("summary >> text=transitions")
    page.click("button >> text='odd - field'")
    expect(page.locator("#query")).to_have_value('"odd - field"')
    expect(page.locator("#query")).to_be_focused()


def test_samplers_are_tried_out(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/run/sampling?where=" + quote("next.reward < 0"))
    page.wait_for_selector("dd >> text=56 of 485")
    shares = page.locator("section:has-text('Sources') tr:has-text('worker-2') td").all_inner_texts()
    assert shares[1] == "100.0 %"
    page.select_option("#kind", "slices")
    page.fill("label:has-text('slice len') + input", "4")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=/^5,120 rows drawn/")
    assert query_of(page)["s.slice_len"] == "4"
    page.reload()
    tab.wait()
    expect(page.locator("label:has-text('slice len') + input")).to_have_value("4")
    page.fill("label:has-text('Only rows where') input", "missing < 0")
    page.keyboard.press("Enter")
    page.wait_for_selector(".error :text('missing')")
    empty = tab.open("/stores/empty/sampling")
    empty.wait_for_selector("text=There is nothing to sample yet.")
