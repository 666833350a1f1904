"""Tokens, lost connections, hidden tabs, and pages that the reader has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expstore.api import Settings
from tests.support.browsers import Visit, expect, query_of, read_findings, wait_until
from tests.support.servers import Serving
from tests.support.tcp_proxy import Proxy

pytestmark = pytest.mark.slow  # in a browser


@pytest.fixture(scope="module")
def guarded(page_folder: Path) -> Iterator[Serving]:
    settings = Settings(path=page_folder, token=b"writes", read_token=b"reads", read_only=True)
    with Serving(settings) as server:
        yield server


@pytest.mark.guarantee("access/page")
def test_a_token_is_asked_for_and_kept_in_the_tab(visit: Callable[..., Visit], guarded: Serving) -> None:
    tab = visit(url=guarded.url)
    page = tab.open("/stores/run")
    expect(page.locator("h1")).to_have_text("This server needs a token")
    expect(page.locator("#token")).to_be_focused()
    assert read_findings(page) == []
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=The server does not know this token.")
    page.fill("#token", "reads")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('run')")
    assert "reads" not in page.url
    assert page.evaluate("Object.values(sessionStorage)") == ["reads"]
    assert page.evaluate("localStorage.length") == 0
    assert tab.context.cookies() == []
    page.reload()
    tab.wait()
    assert page.inner_text("h1") == "run"
    assert [error for error in tab.errors if "401" not in error] == []
    assert not any("reads" in request.url for request in tab.requests)


@pytest.mark.parametrize("token", ["reads", "writes"])
def test_a_token_in_the_address_opens_the_page(
    token: str, visit: Callable[..., Visit], guarded: Serving
) -> None:
    tab = visit(url=guarded.url, token=token)
    page = tab.open("/stores/run")
    assert page.inner_text("h1") == "run"
    assert token not in page.url
    assert tab.errors == []


def test_a_token_that_cannot_be_sent_is_refused(visit: Callable[..., Visit], guarded: Serving) -> None:
    tab = visit(url=guarded.url, token="%zz")  # not what an address encodes
    page = tab.open("/stores/run")
    page.wait_for_selector("text=The server does not know this token.")
    page.fill("#token", "pasted\u2026")
    with page.expect_response("**/v1/stores") as found:
        page.keyboard.press("Enter")
    assert found.value.status == 401
    expect(page.locator("#token")).to_be_focused()
    expect(page.locator("#token")).to_have_value("")
    page.fill("#token", "reads")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('run')")


def test_the_page_goes_on_when_the_server_is_back(visit: Callable[..., Visit], server: Serving) -> None:
    is_there = [True]
    with Proxy(server.port, lambda number: "" if is_there[0] else "refuse") as proxy:
        tab = visit(url=f"http://127.0.0.1:{proxy.port}", has_clock=True)  # the page tries again after pauses
        page = tab.open("/stores/run?by=source")
        is_there[0] = False
        proxy.cut()
        wait_until(page, "document.getElementById('status').dataset.state === 'offline'", pace=500)
        expect(page.locator("#banner")).to_be_visible()
        expect(page.locator("h1")).to_have_text("run")  # what was drawn can still be read
        is_there[0] = True
        wait_until(page, "document.getElementById('status').dataset.state === 'online'", pace=500)
        expect(page.locator("#banner")).to_be_hidden()
        page.wait_for_selector("figure[aria-label='Return of episodes']")
        expect(page.locator("h1")).to_have_text("run")
        assert query_of(page) == {"by": "source"}


def test_a_hidden_tab_asks_for_nothing(visit: Callable[..., Visit]) -> None:
    tab = visit(has_clock=True)
    page = tab.open("/")
    hide(page, True)
    page.clock.run_for(1000)
    before = len(tab.requests)
    page.clock.run_for(120_000)
    page.evaluate("fetch('icon.svg')")  # a round trip, after which other requests would have been seen
    assert [request.url for request in tab.requests[before:] if "icon" not in request.url] == []
    with page.expect_request("**/summary"):
        hide(page, False)
        page.clock.run_for(10_000)


def hide(page: object, hidden: bool) -> None:
    page.evaluate(  # type: ignore[attr-defined]
        """(hidden) => {
            Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_requests_end_with_their_page(visit: Callable[..., Visit]) -> None:
    tab = visit()
    page = tab.open("/stores/run")
    wait_until(page, "performance.getEntriesByType('resource').some((one) => one.name.includes('/series'))")
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/events")):
        page.click("nav >> text=Stores")
    tab.wait()
    assert tab.errors == []
