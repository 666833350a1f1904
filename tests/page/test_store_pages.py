"""The pages of stores, of one store, and the comparison: their content, their addresses, and live updates."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
import numpy as np
import pytest

import expstore
from expstore.api import Settings
from tests.support.browsers import Visit, expect, query_of, wait_for_query, wait_until
from tests.support.page_stores import game_rows
from tests.support.servers import Serving

if TYPE_CHECKING:
    from playwright.sync_api import Route

pytestmark = pytest.mark.slow  # in a browser


def figures(page: Any, title: str) -> list[list[str]]:
    """Return the table of figures of a chart, with its heading."""
    chart = page.locator(f"figure[aria-label='{title}']")
    chart.locator("summary").click()
    rows = chart.locator("details tr")
    rows.first.wait_for()
    found: list[list[str]] = rows.evaluate_all(
        "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    chart.locator("summary").click()
    return found


def drag(page: Any, title: str, start: float, end: float) -> None:
    """Drag over a chart, from one part of its width to another."""
    box = page.locator(f"figure[aria-label='{title}'] .u-over").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + (start + end) / 2 * box["width"], y, steps=3)
    page.mouse.move(box["x"] + end * box["width"], y, steps=3)
    page.mouse.up()


def test_stores_can_be_found_sorted_and_compared(visit: Callable[..., Visit]) -> None:
    page = visit().open("/")
    page.wait_for_selector("svg.sparkline")
    names = page.locator("tbody a")
    expect(names).to_have_text(["empty", "hostile", "run", "texts"])
    page.click("button:has-text('Rows') >> nth=0")
    expect(names.first).to_have_text("run")
    assert query_of(page) == {"order": "-rows"}
    page.check("[aria-label='Compare run']")
    page.check("[aria-label='Compare texts']")
    page.fill("[type=search]", "RU")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert query_of(page) == {"order": "-rows", "pick": "run,texts", "q": "RU"}
    page.reload()
    page.wait_for_selector("text=Compare 2 stores")
    expect(names).to_have_text(["run"])
    page.click("text=Compare 2 stores")
    page.wait_for_selector("text=Return of the last tenth")
    assert query_of(page) == {"stores": "run,texts"}
    assert figures(page, "Return")[0] == ["rows written", "run", "texts"]


def test_runs_are_told_apart_by_large_numbers(visit: Callable[..., Visit], tmp_path: Path) -> None:
    """Seeds are shown with all digits, and runs have one colour only if their facts are equal."""
    for name, seed in (("a", 521227598), ("b", 521227599), ("c", 521227599), ("d", 1e-9)):
        expstore.open(tmp_path / f"{name}.exp", capacity=10, meta={"seed": seed}).close()
    with Serving(Settings(path=tmp_path)) as server:
        page = visit(url=server.url).open("/compare?stores=a,b,c,d&by=meta.seed")
        page.wait_for_selector("section[aria-label='Facts'] tbody tr >> nth=3")
        cells = page.locator("section[aria-label='Facts'] td:last-child")
        expect(cells).to_have_text(["521227598", "521227599", "521227599", "1e-9"])
        colours = page.locator("section[aria-label='Facts'] .swatch").evaluate_all(
            "(marks) => marks.map((mark) => mark.style.background)"
        )
    assert colours == [f"var(--series-{number})" for number in (1, 2, 2, 3)]


def test_a_store_is_described(visit: Callable[..., Visit]) -> None:
    page = visit().open("/stores/run?smooth=0")
    text = page.inner_text("main")
    for part in ("485 of 2,000", "env: Catch", "uint8[24, 24]", "flat", "first", "No rate limiter"):
        assert part in text, part
    expect(page.locator("section[aria-label='Priorities'] .u-wrap")).to_be_visible()
    rows = figures(page, "Return of episodes")
    assert rows[0][0] == "episode"
    assert {float(row[1]) for row in rows[1:]} <= {-8.0, 0.0, 5.0, 8.0}  # a bin may have two episodes
    assert [float(row[1]) for row in figures(page, "Length of episodes")[1:]][:5] == [8.0] * 5


def test_consumers_are_listed(visit: Callable[..., Visit], server: Serving) -> None:
    learner = f"{server.url}/v1/stores/run/consumers/learner"
    for method, act, body in (
        ("PUT", "", {"batch_size": 4}), ("POST", "/draws/11", {}), ("POST", "/commit", {"draws": 5}),
    ):  # fmt: skip
        httpx.request(method, learner + act, json=body).raise_for_status()
    page = visit().open("/stores/run")
    table = page.locator("section[aria-label='Consumers'] table")
    assert table.locator("th").all_inner_texts() == [
        "Consumer", "Draws", "Committed", "Lag", "Ranks", "Log", "Open",
    ]  # fmt: skip
    cells = table.locator("tbody td").all_inner_texts()
    assert [*cells[:5], cells[6]] == ["learner", "12", "5", "7", "1", "yes"]
    httpx.delete(learner).raise_for_status()


def test_lists_have_the_rows_of_a_filter(visit: Callable[..., Visit], tmp_path: Path) -> None:
    ends = np.array([False, True])
    with expstore.open(tmp_path / "run.exp", episodes={"group": "prompt_id", "group_size": 2}) as rb:
        for number in range(6):
            after = {"reward": np.ones(2) * number, "done": ends, "terminated": ends}
            rows = {"prompt_id": np.full(2, number // 2), "next": after}
            rb.extend(rows, source=f"s{number % 3}", split="eval" if number > 3 else "train")
        rb.annotate([1, 2, 12], {"advantage": [0.5, 1.0, 2.0]}, by="judge")
        rb.selections.create("good", where='"return" > 5', by="me")
        with rb.consumer("learner", sampler=expstore.RandomSampler(), batch_size=32) as learner:
            learner.sample()
    with Serving(Settings(path=tmp_path, read_only=True)) as server:
        tab = visit(url=server.url)
        for name, filter, texts in (
            ("groups", "split=eval", ["5", "2"]), ("splits", "split=eval", ["eval", "2"]),
            ("selections", "source=s2", ["good", "1", "3"]),
            ("annotations", "split=train", ["advantage", "judge", "2"]),
            ("consumers", "source=s1", ["learner", "s1"]), ("lineage", "", ["collect", "12"]),
        ):  # fmt: skip
            page = tab.open(f"/stores/run/lists?of={name}&{filter}")
            row = page.locator("main .card tbody tr").filter(has_text=texts[0])
            expect(row).to_have_count(1)
            cells = [text.strip() for text in row.locator("td").all_inner_texts()]
            assert [text for text in texts if text not in cells] == [], (name, cells)
        tab.open("/stores/run/lists?of=groups&split=eval").click("text=best and worst")
        page.wait_for_selector("h2:has-text('the worst')")
        assert query_of(page)["where"] == "episode_id IN (5, 6)"
        assert tab.errors == []


def test_groups_axes_and_smoothing_are_in_the_address(visit: Callable[..., Visit]) -> None:
    tab = visit()
    page = tab.open("/stores/run")
    page.get_by_label("Group by").select_option("source")
    page.get_by_label("Over").select_option("rows")
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_label("Smoothing").dispatch_event("change")
    wait_until(page, "document.querySelectorAll('figure')[0].textContent.includes('worker-2')")
    wait_for_query(page, {"by": "source", "x": "rows", "smooth": "0.9"})
    page.reload()
    tab.wait()
    rows = figures(page, "Return of episodes")
    assert rows[0] == ["rows written", "worker-0", "worker-1", "worker-2"]
    smoothed = [float(row[3]) for row in rows[1:] if row[3]]
    assert min(smoothed) > -8
    assert smoothed[-1] < smoothed[0]
    page.get_by_label("Group by").select_option("info.level")
    wait_for_query(page, {"by": "info.level"})
    asked = [parse_qs(urlsplit(request.url).query) for request in tab.requests if "/series?" in request.url]
    for query in asked:
        groups = 1 if query.get("by", ["none"]) == ["none"] else 20
        assert int(query["points"][0]) * groups <= 10_000


def test_a_range_leads_to_its_episodes(visit: Callable[..., Visit]) -> None:
    page = visit().open("/stores/run?by=source")
    drag(page, "Return of episodes", 0.7, 0.95)
    link = page.locator("text=Show these episodes")
    where = unquote(link.get_attribute("href") or "")
    found = re.search(r"episode_id\+BETWEEN\+(\d+)\+AND\+(\d+)", where)
    assert found
    low, high = map(int, found.groups())
    assert 36 <= low <= 50 < high <= 60
    wait_for_query(page, {"from": str(low)})
    first = page.locator("[aria-label^='Groups in this range'] tbody tr").first
    expect(first).to_have_text(re.compile(r"^\s*worker-2"))
    assert "source+=+'worker-2'" in unquote(first.locator("a").first.get_attribute("href") or "")
    page.click("text=Choose none")
    expect(link).to_have_count(0)
    assert "from" not in query_of(page)
    page.get_by_label("From", exact=True).fill("45")
    page.get_by_label("To", exact=True).fill("50")
    page.keyboard.press("Enter")
    wait_for_query(page, {"from": "45", "to": "50"})


def test_rows_arrive_without_disturbing_the_reader(visit: Callable[..., Visit], server: Serving) -> None:
    tab = visit(has_clock=True)  # the page asks again after pauses
    former: dict[str, bytes] = {}

    def reuse(route: Route) -> None:
        """Answer each question once more as the first time, as a server does for some seconds."""
        url = route.request.url
        answer = former.get(url)
        if answer is None:
            former[url] = (answer := route.fetch()).body()
            route.fulfill(response=answer)
        elif answer:
            former[url] = b""
            route.fulfill(body=answer, content_type="application/json")
        else:
            route.continue_()

    tab.page.route("**/series?*", reuse)
    page = tab.open("/stores/run?by=source")
    page.get_by_label("From", exact=True).fill("12")
    page.evaluate("window.scrollTo(0, 200)")
    before = page.evaluate("scrollY")
    written = page.locator("dt:text-is('Written') + dd")
    count = int(written.inner_text().replace(",", ""))
    with expstore.connect(f"{server.url}/run") as rb:
        rb.extend(game_rows(8, 1.0), source="worker-9")
    wait_until(
        page,
        "(count) => [...document.querySelectorAll('dd')].some((one) => one.textContent === count)",
        f"{count + 8:,}",
        pace=500,
    )
    wait_until(page, "document.querySelector('figure').textContent.includes('worker-9')", pace=500)
    expect(page.get_by_label("From", exact=True)).to_be_focused()
    expect(page.get_by_label("From", exact=True)).to_have_value("12")
    assert page.evaluate("scrollY") == before
    assert tab.errors == []


def test_a_chart_gets_the_name_of_its_number_when_it_is_known(visit: Callable[..., Visit]) -> None:
    tab = visit()
    held: list[Route] = []
    tab.page.route("**/episodes?*limit=100*", lambda route: held.append(route))
    page = tab.open("/stores/run?left=field.next.reward")
    page.wait_for_selector("figure[aria-label='field.next.reward']")
    for route in held:
        route.continue_()
    page.wait_for_selector("figure[aria-label='mean of next.reward']")
    page.unroute("**/episodes?*limit=100*")  # other tests use the same page


def test_an_empty_store_says_what_to_do_and_fills(visit: Callable[..., Visit], server: Serving) -> None:
    tab = visit(has_clock=True)  # the page asks again after pauses
    page = tab.open("/stores/empty")
    expect(page.locator("main")).to_contain_text("No episode has ended yet")
    expect(page.locator("main")).to_contain_text("none were written yet")
    with expstore.connect(f"{server.url}/empty") as rb:
        rb.extend(game_rows(8, 1.0))
    wait_until(page, "document.querySelector(\"figure[aria-label='Return of episodes']\") !== null", pace=500)
    page.wait_for_selector("text=uint8[24, 24]")
    assert figures(page, "Return of episodes")[1] == ["1", "8"]


def test_five_clicks_lead_from_a_drop_to_its_frames(visit: Callable[..., Visit]) -> None:
    tab = visit()
    page = tab.open("/")
    page.evaluate("window.clicks = 0; addEventListener('pointerdown', () => { window.clicks += 1; }, true)")
    page.click("tbody a:text-is('run')")
    page.wait_for_selector("figure[aria-label='Return of episodes']")
    page.get_by_label("Group by").select_option("source")  # which takes a click
    wait_until(page, "document.querySelector('figure').textContent.includes('worker-2')")
    drag(page, "Return of episodes", 0.7, 0.95)
    page.locator("[aria-label^='Groups in this range'] tbody a").first.click()
    page.wait_for_selector("h1:text-is('Episodes')")
    page.wait_for_selector("main tbody tr:nth-child(2)")
    returns = page.locator("main tbody td:nth-child(3)")
    assert set(returns.all_inner_texts()) == {"-8"}
    page.locator("main tbody a").first.click()
    page.wait_for_selector("h1:has-text('Episode 4')")
    wait_until(
        page,
        "[...document.querySelectorAll('main canvas')].some((one) => one.width >= 24"
        " && one.getContext('2d').getImageData(0, one.height - 1, 1, 1).data[0] === 200)",
    )
    assert page.evaluate("window.clicks") + 1 <= 5
    assert tab.errors == []
