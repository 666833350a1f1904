"""An episode of calls to a language model as a conversation, and the way from a bad group to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

import expstore
from expstore.api import Settings
from expstore.wire.call_rows import build_row
from tests.support.browsers import Visit, expect, read_findings, wait_until
from tests.support.page_stores import HOSTILE, build_calls, message
from tests.support.servers import Serving

pytestmark = pytest.mark.slow  # in a browser

Open = Callable[..., Visit]
_ROW = ".turn[data-step='{}']"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("calls")
    build_calls(folder / "calls.exp")
    with expstore.open(
        folder / "plain.exp",
        layout="arrow",
        schema={("next", "messages"): pa.list_(pa.string()), "a": "int64"},
    ) as rb:
        rb.extend({"next": {"messages": [[message("user", "plain text")], ["no JSON"]]}, "a": [1, 2]})
    with Serving(Settings(path=folder)) as serving:
        yield serving


@pytest.mark.guarantee("access/page")
def test_from_the_worst_group_to_its_messages_in_three_clicks(visit: Open, calls: Serving) -> None:
    tab = visit(url=calls.url)
    page = tab.open("/")
    page.click("main a:has-text('calls')")
    groups = page.locator("section[aria-label=Groups] td a")
    expect(groups).to_have_text(["task-2", "task-1", "task-0"])
    groups.first.click()
    page.click("[aria-label=Episodes] tbody tr:first-child td:first-child a")
    expect(page.locator(_ROW.format(3))).to_be_visible()
    assert page.evaluate("location.hash").startswith("#/stores/calls/episodes/6?"), (
        "the lowest return of both"
    )
    expect(page.locator("main dl").first).to_contain_text("task-2 (complete, mean return 0.125)")
    said = [page.locator(_ROW.format(step)).inner_text() for step in range(6)]
    for step, text in enumerate(("Unanswered", "Status 429: slow down", "calls add", "result of add")):
        assert text in said[step]
    assert said[1].count("user") == 0, "a message is shown once"
    assert "A fork of step 3 after 1 of its 5 messages" in said[4]
    assert "terminated" in said[5]
    expect(page.locator(f"{_ROW.format(3)} .token")).to_have_text(["It is", " 7", ". ", HOSTILE[0]])
    colours = page.eval_on_selector_all(".token", "all => all.map((one) => one.style.backgroundColor)")
    assert len(set(colours)) == 4
    expect(page.locator("section[aria-labelledby=calls-title]")).to_contain_text("Without a good answer")
    assert read_findings(page) == []
    page.emulate_media(color_scheme="dark")
    assert read_findings(page, ["color-contrast"]) == []
    assert (tab.overflow(1024), tab.overflow(390)) == (0, 0)
    assert page.evaluate("window.broken") is None
    assert page.query_selector_all("main img, main script, main b") == []
    page.click("text=As steps")
    page.wait_for_selector("text=Values at step 0")
    page.click("text=As a conversation")
    expect(page.locator(_ROW.format(0))).to_be_visible()
    assert (tab.errors, tab.foreign) == ([], [])


def test_a_long_conversation_is_sent_once(visit: Open, calls: Serving) -> None:
    tab = visit(url=calls.url)
    sizes = list[int]()
    tab.page.on(
        "response", lambda answer: sizes.append(len(answer.body())) if "/messages?" in answer.url else None
    )
    page = tab.open("/stores/calls/episodes/7")
    expect(page.locator(_ROW.format(63))).to_contain_text("answer 63")
    expect(page.locator(".turn")).to_have_count(64)
    assert len(sizes) == 1
    assert sizes[0] < 200_000, "the rows have 6.4 MB"
    assert len(page.locator(_ROW.format(0)).inner_text()) < 5000
    page.click("text=Show all 100,000 characters")
    assert len(page.locator(_ROW.format(0)).inner_text()) > 100_000
    rb = calls.app.state.stores.get("calls").rb
    rb.extend(
        build_row({"messages": [message("user", "anew")], "event": "call"}), source="long", session="long"
    )
    expect(page.locator(_ROW.format(64))).to_contain_text("A new conversation")
    assert tab.errors == []


def test_a_conversation_of_many_rows_is_read_in_parts(visit: Open, calls: Serving) -> None:
    rb, asks = calls.app.state.stores.get("calls").rb, list[str]()
    for number in range(300):
        asks.append(message("user", f"message {number}."))
        rb.extend(build_row({"event": "call", "messages": asks}), source="many", session="many")
    page = visit(url=calls.url).open("/stores/calls/episodes/8")
    expect(page.locator(".turn")).to_have_count(256)
    page.click("text=Show the next rows")
    expect(page.locator(".turn")).to_have_count(300)
    expect(page.locator(_ROW.format(256))).to_have_text("Step 256usermessage 256.")


def test_any_field_of_messages_is_a_conversation(visit: Open, calls: Serving) -> None:
    page = visit(url=calls.url).open("/stores/plain/episodes/1")
    expect(page.locator(_ROW.format(0))).to_contain_text("plain text")
    expect(page.locator(_ROW.format(1))).to_contain_text("no JSON")
    wait_until(page, "document.querySelectorAll('.turn').length === 2")
