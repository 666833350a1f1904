"""From the front page to the reason in at most four clicks; hostile names, and servers without SQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import expstore
from expstore.api import Settings
from tests.support.browsers import Visit, expect
from tests.support.odd_episodes import make_episodes
from tests.support.servers import Serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.index]  # in a browser
HOSTILE = '<img src=x onerror="window.broken=1">\'"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Path:
    """Stores whose planted reason is their name: `jump` in single episodes, the others in a group."""
    found = tmp_path_factory.mktemp("planted")
    for kind in ("sign", "worse", "jump"):
        with expstore.open(found / f"{kind}.exp") as rb:
            for (rows, source, facts), _ in make_episodes(kind, 0, 240):
                rb.extend(rows, source=f"{source}{HOSTILE}", episode_info=facts)
            rb.episodes.measure()
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["sql", "no-sql"])
def tab(request: pytest.FixtureRequest, folder: Path, browser: Browser) -> Iterator[Visit]:
    settings = Settings(path=folder, read_only=True, sql=request.param)
    with Serving(settings) as server, Visit(browser, server.url) as visit:
        visit.sql = request.param  # type: ignore[attr-defined]
        yield visit


@pytest.mark.parametrize(("kind", "group"), [("sign", "source arm-1"), ("worse", "policy version 11")])
def test_a_change_is_two_clicks_from_the_front_page(tab: Visit, kind: str, group: str) -> None:
    page = tab.open("/")
    entry = page.locator("ul.changes li", has_text=f"{kind}:")
    expect(entry).to_contain_text(group)
    expect(entry).to_contain_text("return")
    assert not page.evaluate("window.broken")
    if not tab.sql:  # type: ignore[attr-defined]
        expect(entry.locator("a")).to_have_count(1)  # only the store: the episodes cannot be selected
        return
    entry.locator("a").nth(1).click()
    page.wait_for_selector("tbody tr")
    assert "where=" in page.url
    page.locator("tbody tr a").first.click()  # the episode itself
    page.wait_for_selector("h1")


def test_an_odd_episode_is_three_clicks_from_the_front_page(tab: Visit) -> None:
    page = tab.open("/")
    page.click("tbody a:has-text('jump')")
    page.click("#changes summary:has-text('Odd episodes')")
    row = page.locator("#changes tbody tr").first
    expect(row).to_contain_text("jumps by")
    row.locator("a").click()
    page.wait_for_selector("h1")
    assert "step=" in page.url
    assert not page.evaluate("window.broken")
