"""Every page: no errors, no foreign requests, accessible in both schemes, no wider than its window."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.browsers import Visit, expect, read_findings, wait_until

pytestmark = pytest.mark.slow  # in a browser

#: Pages by address; a page belongs here once for each state that looks different.
PAGES = {
    "stores": "/",
    "no such page": "/nothing/here",
    "no such store": "/stores/missing",
    "store": "/stores/run?by=source&x=rows&smooth=0.5&from=100&to=300",
    "store of texts": "/stores/texts",
    "empty store": "/stores/empty",
    "hostile store": "/stores/hostile?by=source",
    "episodes": "/stores/run/episodes?facts=%7B%22good%22%3A%22false%22%7D&order=return",
    "no episodes": "/stores/run/episodes?where=false",
    "empty episodes": "/stores/empty/episodes",
    "hostile episodes": "/stores/hostile/episodes",
    "episode": "/stores/run/episodes/42?step=3",
    "episode of texts": "/stores/texts/episodes/1",
    "hostile episode": "/stores/hostile/episodes/1",
    "no such episode": "/stores/run/episodes/12345",
    "two episodes": "/stores/run/pair?source=worker-2&counts=1&sync=reward",
    "no two episodes": "/stores/run/pair?where=false",
    "hostile pair": "/stores/hostile/pair?a=1&b=2&counts=1",
    "numbers": "/stores/run?left=info.level&right=field.next.reward&x=time&counts=1&status=terminated",
    "groups": "/stores/run/lists",
    "splits": "/stores/run/lists?of=splits&counts=1",
    "hostile selections": "/stores/hostile/lists?of=selections",
    "annotations": "/stores/run/lists?of=annotations",
    "consumers": "/stores/run/lists?of=consumers",
    "hostile lineage": "/stores/hostile/lists?of=lineage",
    "sql": "/stores/run/sql",
    "sql result": "/stores/hostile/sql?q=SELECT%20*%20FROM%20episodes&x=start_time&y=length&colour=source",
    "sampling": "/stores/run/sampling?where=next.reward%20%3C%200",
    "hostile sampling": "/stores/hostile/sampling?kind=slices&s.slice_len=2",
    "compare": "/compare?stores=run,texts",
    "compare hostile": "/compare?stores=hostile,run&by=source",
    "compare nothing": "/compare",
}
#: Pages that are usable on a phone.
NARROW = (
    "store", "hostile store", "episode", "episode of texts", "hostile episode", "two episodes",
    "hostile pair", "splits", "hostile lineage", "episodes",
)  # fmt: skip
#: Text that a page shows once it has its data.
MARKS = {
    "stores": "Tick up to", "no such page": "no such page", "no such store": "missing", "store": "Show these",
    "episodes": "7 episodes match", "no episodes": "No episode matches", "hostile episodes": "5 episodes",
    "episode": "Values at step", "episode of texts": "question 0", "hostile episode": "window.broken",
    "no such episode": "has no episode 12345", "sql": "Nothing was asked yet", "sql result": "5 rows",
    "two episodes": "first differs", "no two episodes": "No two ended episodes",
    "hostile pair": "window.broken",
    "groups": "has no groups", "splits": "best and worst", "hostile selections": "has no selections",
    "annotations": "has no annotations", "consumers": "has no consumers", "hostile lineage": "collect",
    "sampling": "Rows that match", "hostile sampling": "Rows to draw from",
    "empty store": "No episode has ended yet", "compare nothing": "No store is chosen",
}  # fmt: skip


@pytest.mark.guarantee(
    "access/page",
    "The page in the browser loads nothing from elsewhere, shows texts of a store as texts, and sends its"
    " token to its own server only.",
)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_sound(name: str, visit: Callable[..., Visit]) -> None:
    tab = visit()
    page = tab.open(PAGES[name])
    wait_until(page, "text => document.querySelector('main').innerText.includes(text)", MARKS.get(name, ""))
    expect(page.locator("main .error")).to_have_count(int(name == "no such store"))
    assert read_findings(page) == []
    page.emulate_media(color_scheme="dark")
    assert read_findings(page, ["color-contrast"]) == []
    assert tab.overflow(1024) <= 0
    if name in NARROW:
        assert tab.overflow(390) <= 0
        expect(page.locator("main")).to_have_css("padding-left", "12px")  # the rules for narrow windows apply
    assert page.evaluate("window.broken") is None
    assert page.query_selector_all("main img[onerror], main script, main b") == []
    assert tab.foreign == []
    expected = {"no such store": ["404"]}.get(name, [])
    assert [error for error in tab.errors if not any(text in error for text in expected)] == []
    assert tab.context.cookies() == []


@pytest.mark.guarantee("access/page")
def test_hostile_names_and_facts_are_texts(visit: Callable[..., Visit]) -> None:
    page = visit().open("/stores/hostile?by=source")
    hostile = '<img src=x onerror="window.broken=1">'
    wait_until(page, "text => document.querySelector('main').innerText.includes(text)", hostile)
    page.get_by_label("Group by").select_option(label='<img src=x onerror="window.broken=1">')
    wait_until(page, "location.hash.includes('by=info')")
    page.wait_for_selector("figure[aria-label='Return of episodes']")
    assert page.evaluate("window.broken") is None


@pytest.mark.guarantee("access/page")
def test_the_policy_forbids_what_is_not_a_file_of_the_page(visit: Callable[..., Visit]) -> None:
    tab = visit()
    page = tab.open("/")
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.broken = 1";
            document.body.append(script);
            const image = new Image();
            image.src = "http://example.invalid/x.png";
            document.body.append(image);
            document.body.insertAdjacentHTML("beforeend", "<p id='styled' style='color: rgb(1, 2, 3)'></p>");
        }"""
    )
    assert page.evaluate("window.broken") is None
    assert page.evaluate("getComputedStyle(document.getElementById('styled')).color") != "rgb(1, 2, 3)"
    deadline = time.monotonic() + 60
    while len(refused := [text for text in tab.errors if "Content Security Policy" in text]) < 3:
        assert time.monotonic() < deadline, refused
        page.wait_for_timeout(50)
