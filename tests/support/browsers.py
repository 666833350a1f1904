"""A system Chromium for tests of the page, and what its pages asked for and reported.

A browser lives as long as the tests of one folder: Playwright's synchronous interface runs an event loop in
the thread of the tests, in which other tests could start none.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Size of the window, in pixels.
WIDTH, HEIGHT = 1024, 768
#: Milliseconds that a page may take on a busy machine.
PATIENCE = 60_000
#: Findings of axe that fail a test.
SERIOUS = ("serious", "critical")


@contextmanager
def launch() -> Iterator[Browser]:
    """Yield a browser; skip the test where Playwright or Chromium is missing."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)} was found")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One tab, with everything that it requests and reports.

    Args:
        browser: The browser.
        url: Where the server listens.
        token: Token for the page; None: the server asks for none.
        has_clock: Whether the test moves the page's clock (`page.clock`).
    """

    def __init__(
        self, browser: Browser, url: str, *, token: str | None = None, has_clock: bool = False
    ) -> None:
        self.url, self._token = url, token
        self.context = browser.new_context(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce"
        )
        self.context.set_default_timeout(PATIENCE)
        self.page: Page = self.context.new_page()
        if has_clock:
            self.page.clock.install()
        self.requests: list[Request] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console",
            lambda message: (
                self.errors.append(message.text) if message.type in ("error", "warning") else None
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def reset(self) -> None:
        """Leave the page, and forget what it did, so that the tab is as a new one."""
        self.page.goto("about:blank")
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        self.page.emulate_media(color_scheme="light")
        self.requests.clear()
        self.errors.clear()

    def open(self, address: str) -> Page:
        """Open a page by what follows `#` in its address, and wait until it is drawn."""
        start = "" if self._token is None else f"token={self._token}&"
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/ui/#{start}{address}")
        self.wait()
        return self.page

    def wait(self) -> None:
        """Wait until the page is drawn."""
        self.page.wait_for_selector("body[data-ready]")

    @property
    def foreign(self) -> list[str]:
        """Requests to other servers."""
        own = (f"{self.url}/", f"blob:{self.url}/", "data:", "about:")
        return [request.url for request in self.requests if not request.url.startswith(own)]

    def overflow(self, width: int) -> int:
        """Return by how many pixels the page is wider than a window."""
        self.page.set_viewport_size({"width": width, "height": HEIGHT})
        # Charts follow their containers after a layout.
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found: int = self.page.evaluate("document.querySelector('main').scrollWidth - innerWidth")
        return found


def expect(target: Any) -> Any:
    """Return Playwright's assertions about a locator or a page, which wait until they hold."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    api.expect.set_options(timeout=PATIENCE)
    return api.expect(target)


def wait_until(page: Page, expression: str, argument: Any = None, *, pace: int = 0) -> None:
    """Wait until JavaScript is true. The policy of the page forbids what `page.wait_for_function` does.

    Args:
        page: The page.
        expression: An expression, or a function of `argument`.
        argument: A JSON value.
        pace: Milliseconds by which the page's clock is advanced before each look (`Visit(has_clock=True)`).
    """
    deadline = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(expression, argument):
        assert time.monotonic() < deadline, expression
        if pace:
            page.clock.run_for(pace)
        page.wait_for_timeout(20)


def query_of(page: Page) -> dict[str, str]:
    """Return the state in the address of a page. (`page.url` follows the address with a delay.)"""
    text = page.evaluate("location.hash").partition("?")[2]
    return {name: values[0] for name, values in parse_qs(text).items()}


def wait_for_query(page: Page, expected: dict[str, str]) -> None:
    """Wait until the state in the address of a page has these entries."""
    deadline = time.monotonic() + PATIENCE / 1000
    while not expected.items() <= (found := query_of(page)).items():
        assert time.monotonic() < deadline, f"the address has {found}, not {expected}"
        page.wait_for_timeout(20)


def read_findings(page: Page, rules: list[str] | None = None) -> list[str]:
    """Return the serious findings of axe about a page.

    Args:
        page: The page.
        rules: Only these rules; None: all.
    """
    module = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    options = {"resultTypes": ["violations"]}
    if rules:
        options["runOnly"] = rules
    found = module.Axe().run(page, options=options).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:3]]}"
        for one in found
        if one["impact"] in SERIOUS
    ]
