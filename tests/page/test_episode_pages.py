"""The pages of episodes and of one episode: filters, frames, the player, values, texts and facts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.api import Settings
from tests.support.browsers import Visit, expect, query_of, wait_for_query, wait_until
from tests.support.page_stores import HOSTILE, game_rows
from tests.support.servers import Serving

pytestmark = pytest.mark.slow  # in a browser

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

Open = Callable[..., Visit]
#: Rows of the table of episodes.
ROWS = "main tbody tr"
#: Requests for frames at a time.
MOST_REQUESTS = 4


def column(page: Page, place: int) -> list[str]:
    """Return the texts of a column of the table."""
    return page.locator(f"{ROWS} td:nth-child({place})").all_inner_texts()


def brightness(page: Page, selector: str) -> int:
    """Return the first value of the last line of a canvas once it is drawn."""
    page.locator(selector).and_(page.locator(":not([width='1'])")).first.wait_for()
    found: int = page.evaluate(
        "(selector) => { const canvas = document.querySelector(selector);"
        " return canvas.getContext('2d').getImageData(0, canvas.height - 1, 1, 1).data[0]; }",
        selector,
    )
    return found


def step_of(page: Page) -> int:
    """Return the step that the player shows."""
    return int(page.get_attribute("canvas", "data-step") or -1)


@pytest.fixture(scope="module")
def reader(page_folder: Path) -> Iterator[Serving]:
    """A server that only reads, and answers no SQL."""
    with Serving(Settings(path=page_folder, read_only=True, sql=False)) as server:
        yield server


# -- episodes ----------------------------------------------------------------------------------------


def test_episodes_are_selected_by_a_condition(visit: Open) -> None:
    page = visit().open("/stores/run/episodes")
    expect(page.locator("main .heading")).to_contain_text("61 episodes")
    page.fill("#where", '"return" < 0')
    page.press("#where", "Enter")
    page.wait_for_selector("text=7 episodes match")
    assert set(column(page, 3)) == {"-8"}
    assert query_of(page)["where"] == '"return" < 0'
    page.fill("#where", "missing < 0")
    page.press("#where", "Enter")
    page.wait_for_selector("#where-error :text('missing')")
    expect(page.locator("#where")).to_have_attribute("aria-invalid", "true")
    page.go_back()
    page.wait_for_selector("text=7 episodes match")
    expect(page.locator("#where")).to_have_value('"return" < 0')


def test_episodes_are_selected_by_clicks(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/run/episodes")
    page.click("main td >> text=worker-2 >> nth=0")
    page.wait_for_selector("text=20 episodes match")
    page.click("td >> text='good: false' >> nth=0")
    page.wait_for_selector("text=7 episodes match")
    page.reload()
    tab.wait()
    page.wait_for_selector("text=7 episodes match")
    page.click("button[aria-label^='Remove the filter good']")
    page.wait_for_selector("text=20 episodes match")
    page.click("text=Remove all filters")
    page.wait_for_selector("text='61 episodes'")
    page.get_by_label("Status").select_option("cut")
    page.wait_for_selector("text=1 episode match")
    page.goto(page.url.split("#")[0] + "#/stores/run/episodes?where=" + quote("length > 100"))
    page.click("text=No episode matches >> .. >> button")
    page.wait_for_selector("text='61 episodes'")
    assert tab.errors == []


def test_hostile_facts_select_their_episodes(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/hostile/episodes")
    for number in range(len(HOSTILE)):
        row = page.locator(ROWS, has=page.locator(f"td:first-child >> text='{number + 1}'"))
        row.locator("td button.chip").first.click()
        page.wait_for_selector("text=1 episode match")
        expect(page.locator(f"{ROWS} td:nth-child(1)")).to_have_text([str(number + 1)])
        page.click("text=Remove all filters")
        page.wait_for_selector("text='5 episodes'")
    assert page.evaluate("window.broken") is None
    assert tab.errors == []


def test_facts_that_are_numbers_select_their_episodes(visit: Open, tmp_path: Path) -> None:
    facts = {"seed": 2**53 + 1, "gamma": 1.0, "rate": 1e-05, "large": 1e16, "level": 3}
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(game_rows(3, 1.0).set("big", torch.tensor([2**60 + 1] * 3)), episode_info=facts)
        rb.extend(game_rows(3, 1.0).set("big", torch.zeros(3, dtype=torch.int64)))
    with Serving(Settings(path=tmp_path)) as server:
        tab = visit(url=server.url)
        page = tab.open("/stores/run/episodes")
        expect(page.locator("td .chip").first).to_have_text(f"seed: {2**53 + 1}")
        for name in facts:
            page.click(f"td .chip:has-text('{name}:')")
            page.wait_for_selector("text=1 episode match")
            page.click("text=Remove all filters")
            page.wait_for_selector("text='2 episodes'")
        page = tab.open("/stores/run/episodes/1")
        page.wait_for_selector(f"dd >> text='{2**60 + 1}'")
        expect(page.locator("#fact-0")).to_have_value(str(2**53 + 1))
        page.wait_for_selector("figure[aria-label='big over the steps of the episode'] canvas")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert tab.errors == []


def test_episodes_are_sorted_and_read_in_pages(visit: Open) -> None:
    page = visit().open("/stores/run/episodes")
    assert column(page, 1)[:2] == ["61", "60"]
    page.click("th >> text=Return")
    page.wait_for_selector("th[aria-sort=descending]:has-text('Return')")
    page.click("th >> text=Return")
    page.wait_for_selector("th[aria-sort=ascending]:has-text('Return')")
    expect(page.locator("th button:has-text('Return')")).to_be_focused()
    assert column(page, 3)[:7] == ["-8"] * 7
    first = column(page, 1)
    assert len(first) == 50
    page.click("text=Next →")
    expect(page.locator(ROWS)).to_have_count(11)
    assert not {*column(page, 1)} & {*first}
    expect(page.locator("text=Next →")).to_be_disabled()
    page.reload()
    expect(page.locator(ROWS)).to_have_count(11)
    page.click("text=← Previous")
    expect(page.locator(ROWS)).to_have_count(50)
    assert column(page, 1) == first


def test_rows_have_their_first_and_last_frame(visit: Open) -> None:
    tab = visit()
    running: set[Request] = set()
    most = [0]

    def begin(request: Request) -> None:
        if "/frames?" in request.url:
            running.add(request)
            most[0] = max(most[0], len(running))

    for event in ("requestfinished", "requestfailed"):
        tab.page.on(event, lambda request: running.discard(request))
    tab.page.on("request", begin)
    page = tab.open("/stores/run/episodes?where=" + quote("episode_id IN (42, 41)"))
    page.wait_for_selector("text=2 episodes match")
    assert brightness(page, "tr:nth-child(1) canvas") == 200 - 180 * (column(page, 3)[0] == "8")
    page = tab.open("/stores/run/episodes")
    page.locator(".thumb:not([width='1'])").nth(11).wait_for()
    assert 1 < most[0] <= MOST_REQUESTS
    asked = [request for request in tab.requests if "/frames?" in request.url]
    assert len(asked) < 2 + 50  # only those of visible rows


def test_flags_and_notes_are_edited_in_the_table(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/run/episodes")
    with page.expect_response(lambda response: response.request.method == "PATCH"):
        page.check("[aria-label='Flag episode 60']")
    with page.expect_response(lambda response: response.request.method == "PATCH"):
        page.fill("[aria-label='Note on episode 60']", HOSTILE[0])
        page.keyboard.press("Tab")
    page.check("text=Flagged only")
    page.wait_for_selector("text=1 episode match")
    expect(page.locator(f"{ROWS} td:nth-child(1)")).to_have_text(["60"])
    page.reload()
    tab.wait()
    expect(page.locator("[aria-label='Note on episode 60']")).to_have_value(HOSTILE[0])
    with page.expect_response(lambda response: response.request.method == "PATCH"):
        page.uncheck("[aria-label='Flag episode 60']")
    assert tab.errors == []


def test_new_episodes_do_not_move_the_table(visit: Open, server: Serving) -> None:
    page = visit().open("/compare")  # it waits for no events
    with page.expect_response("**/stores/run/events"):
        page.evaluate("location.hash = '#/stores/run/episodes'")
    page.wait_for_selector(f"{ROWS} td")
    before = column(page, 1)
    with expstore.connect(f"{server.url}/run") as rb:
        rb.extend(game_rows(8, 0.5), source="late")
    page.wait_for_selector("text=1 new episode, show")
    assert column(page, 1) == before
    page.click("text=1 new episode, show")
    page.wait_for_selector("td >> text=late")
    expect(page.locator(".fresh")).to_be_hidden()


def test_a_server_that_only_reads_offers_no_changes(visit: Open, reader: Serving) -> None:
    tab = visit(url=reader.url)
    page = tab.open("/stores/run/episodes")
    page.wait_for_selector("text=does not answer SQL")
    expect(page.locator("[aria-label='Flag episode 3']")).to_be_disabled()
    expect(page.locator("#where")).to_have_count(0)
    page.click("td a >> text='3'")
    page.wait_for_selector("h1 >> text=Episode 3")
    page.click("a >> text=Next →")
    page.wait_for_selector("h1 >> text=Episode 4")
    page.wait_for_selector("text=level")
    expect(page.locator("main form")).to_have_count(0)
    tab.open("/stores/run/sql").wait_for_selector("text=--no-sql")
    assert tab.errors == []


def test_counts_by_value_select_episodes(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/run/episodes")
    page.click("summary:has-text('Counts by value')")
    source = page.locator("section[aria-label='Counts by source']")
    expect(source.locator("button").first).to_contain_text("worker-0")
    source.locator("button:has-text('worker-2')").click()
    page.wait_for_selector("text=20 episodes match")
    good = page.locator("section[aria-label='Counts by good']")
    expect(good.locator("button")).to_have_text([re.compile("true.*13"), re.compile("false.*7")])
    good.locator("button:has-text('false')").click()
    page.wait_for_selector("text=7 episodes match")
    page.click("summary:has-text('Copy as SQL')")
    sql = page.get_by_label("The filter as SQL").input_value()
    python = page.get_by_label("The filter as Python").input_value()
    page.reload()
    tab.wait()
    page.wait_for_selector("text=7 episodes match")
    for link in ("Overview", "Lists", "Two episodes", "Episodes"):  # the filter stays
        page.click(f"nav >> text='{link}'")
        page.wait_for_selector("text='source: worker-2'")
    assert "source=" not in (page.get_attribute("nav >> text='Sampling'", "href") or "")  # it selects rows
    answer = httpx.post(f"{tab.url}/v1/stores/run/sql", json={"query": sql}).raise_for_status().json()
    assert len(answer["rows"]) == 7
    with expstore.connect(f"{tab.url}/run") as rb:
        assert len(eval(python, {"rb": rb}).fetchall()) == 7
    page.get_by_label("Ended").first.select_option("range")
    page.get_by_label("Ended before").fill("2001-01-01T00:00:00")
    page.get_by_label("Ended before").dispatch_event("change")
    page.wait_for_selector("text=No episode matches")
    assert tab.errors == []


def test_messages_about_sql_are_for_those_who_typed_it(visit: Open) -> None:
    page = visit().open("/stores/run/lists?of=splits&where=" + quote("missing < 0"))
    page.wait_for_selector("#where-error :text('missing')")
    page = visit().open("/stores/run?left=field.missing")
    page.wait_for_selector("text=cannot answer this for the present filter")
    assert "missing'" not in page.inner_text("main .error")


def test_the_best_and_the_worst_episode_are_side_by_side(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/run/episodes?source=worker-2")
    page.click("text=Best and worst")
    page.wait_for_selector("h2:has-text('the worst')")
    facts = page.locator("[aria-label='Facts of both episodes']")
    expect(facts.locator("tr:has-text('Return') mark")).to_have_text(["8", "-8"])
    expect(facts.locator("tr:has-text('Source') mark")).to_have_count(0)
    values = page.locator("[aria-label='Values of both episodes']")
    expect(values.locator("tr:has-text('next.reward') mark")).to_have_text("-2")
    expect(page.locator("canvas[data-step='0']")).to_have_count(2)
    page.keyboard.press("ArrowRight")  # one player moves both
    expect(page.locator("canvas[data-step='1']")).to_have_count(2)
    assert brightness(page, "section[aria-label='Episode A'] canvas") == 20
    assert brightness(page, "section[aria-label='Episode B'] canvas") == 200
    page = tab.open("/stores/run/pair?a=1&b=61&sync=end")  # 8 and 5 steps
    page.wait_for_selector("text=step -7 of 0")
    expect(page.locator(".ended")).to_have_count(1)
    page.keyboard.press("End")
    page.wait_for_selector("canvas[data-step='7']")
    page.wait_for_selector("canvas[data-step='4']")
    expect(page.locator(".ended")).to_have_count(0)
    page.get_by_label("Align by").select_option("step")
    page.wait_for_selector("text=step 7 of 7")
    page.goto(page.url.split("#")[0] + "#/stores/run/pair?a=1&b=777")
    page.wait_for_selector("text=no episode 777")
    assert tab.errors == []


def test_addresses_in_facts_are_links_of_the_web_only(visit: Open, tmp_path: Path) -> None:
    facts = {
        "tracker_url": "https://wandb.example/run?a=1",
        "bad": "javascript:window.broken=1",
        "file": "file:///etc",
    }
    with expstore.open(tmp_path / "run.exp", meta=facts) as rb:
        rb.extend(game_rows(3, 1.0), episode_info={**facts, "policy_version": 3})
        rb.extend(game_rows(3, 1.0), episode_info={"policy_version": 4})
    with Serving(Settings(path=tmp_path, read_only=True)) as server:
        tab = visit(url=server.url)
        for address in ("/stores/run/episodes/1", "/stores/run", "/stores/run/pair?a=1&b=2"):
            page = tab.open(address)
            links = page.locator("main a[target=_blank]")
            expect(links).to_have_attribute("href", facts["tracker_url"])
            expect(links).to_have_attribute("rel", "noopener noreferrer")
        page = tab.open("/stores/run?x=version&from=3&to=4")
        page.wait_for_selector("text=Losses of the run: https://wandb.example")
        page.click("text=Show these episodes")
        page.wait_for_selector("text=2 episodes match")
        assert tab.errors == []


# -- an episode --------------------------------------------------------------------------------------


def test_the_player_follows_the_keyboard(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/run/episodes/2?step=1")
    expect(page.locator("canvas[data-step='1']")).to_have_count(1)
    page.check("label:has-text('next.pixels')")  # not shown at first: it repeats `pixels` a step later
    expect(page.locator("canvas[data-step='1']")).to_have_count(2)
    page.click("h1")  # the box would take the keys
    page.wait_for_selector("dd >> text=stay (1)")
    for key, step in (("ArrowRight", 2), ("Shift+ArrowRight", 7), ("Home", 0), ("End", 7), ("ArrowLeft", 6)):
        page.keyboard.press(key)
        page.wait_for_selector(f"canvas[data-step='{step}']")
    wait_for_query(page, {"step": "6"})
    page.wait_for_selector("text=Values at step 6")
    page.wait_for_selector("dd >> text=left (0)")
    page.fill("input[type=range]", "3")
    page.wait_for_selector("canvas[data-step='3']")
    page.uncheck("label:has-text('next.pixels')")
    expect(page.locator(".screen canvas")).to_have_count(1)
    assert "images" not in query_of(page)
    assert tab.errors == []


def test_the_player_plays_to_the_end_or_in_a_loop(visit: Open) -> None:
    tab = visit(has_clock=True)
    page = tab.open("/stores/run/episodes/2")
    page.wait_for_selector("canvas[data-step='0']")
    play = page.locator(".play")
    page.clock.pause_at(page.evaluate("Date.now()") + 1000)
    page.keyboard.press("Space")
    expect(play).to_have_text("Pause")
    page.clock.run_for(120)  # at 30 steps a second
    assert 2 <= step_of(page) <= 4
    page.clock.run_for(1000)
    assert step_of(page) == 7
    expect(play).to_have_text("Play")
    wait_for_query(page, {"step": "7"})
    page.select_option("select[aria-label=Speed]", "16")
    page.check("text=Loop")
    play.click()
    steps = []
    for _ in range(20):
        page.clock.run_for(17)
        steps.append(step_of(page))
    assert {later for earlier, later in pairwise(steps) if later < earlier} == {0}, steps
    expect(play).to_have_text("Pause")
    play.click()
    wait_for_query(page, {"speed": "16", "loop": "1"})


def test_charts_have_a_cursor_that_moves_the_player(visit: Open) -> None:
    page = visit().open("/stores/run/episodes/2")
    plot = page.locator(".field-chart .u-over").first
    box = plot.bounding_box()
    assert box is not None
    plot.click(position={"x": box["width"] * 3 / 7, "y": box["height"] / 2})
    page.wait_for_selector("canvas[data-step='3']")
    page.uncheck("legend:has-text('Components of state') >> .. >> label >> nth=0")
    wait_until(page, "location.hash.includes('state%3A1.2')")
    page.check("fieldset >> label:has-text('next.terminated')")
    page.wait_for_selector("h3 >> text=next.terminated")
    page.reload()
    page.wait_for_selector("h3 >> text=next.terminated")
    box = "legend:has-text('Components of state') >> .. >> label >> nth=0 >> input"
    expect(page.locator(box)).not_to_be_checked()


def test_neighbours_are_those_of_the_filter(visit: Open) -> None:
    page = visit().open("/stores/run/episodes?order=length&where=" + quote('"return" < 0'))
    ids = column(page, 1)
    assert len(ids) == 7
    page.click(f"td a >> text='{ids[2]}'")
    page.wait_for_selector(f"h1 >> text='Episode {ids[2]}'")
    page.click("a >> text=Next →")
    page.wait_for_selector(f"h1 >> text='Episode {ids[3]}'")
    for number in (2, 1, 0):
        page.click("a >> text=← Previous")
        page.wait_for_selector(f"h1 >> text='Episode {ids[number]}'")
    page.wait_for_selector("a >> text=Next →")
    expect(page.locator("a >> text=← Previous")).to_have_count(0)
    page.click("text=Episodes of this filter")
    page.wait_for_selector("text=7 episodes match")


def test_facts_are_changed_in_a_form(visit: Open, server: Serving) -> None:
    tab = visit()
    page = tab.open("/stores/run/episodes/5")

    def change(act: Callable[[], object]) -> dict[str, Any]:
        with page.expect_response(lambda response: response.request.method == "PATCH") as found:
            act()
        info: dict[str, Any] = found.value.json()["info"]
        return info

    def add() -> None:
        page.fill("#fact-name", HOSTILE[0])
        page.fill("#fact-value", "[1, 2]")
        page.keyboard.press("Enter")

    assert change(add)[HOSTILE[0]] == [1, 2]
    assert change(lambda: page.check("text=Flagged"))["flag"] is True

    def edit() -> None:
        page.fill("label:has-text('level') >> .. >> input", "two")
        page.keyboard.press("Enter")

    assert change(edit)["level"] == "two"
    found = change(lambda: page.click(f"button[aria-label={json.dumps('Remove ' + HOSTILE[0])}]"))
    assert found == {"level": "two", "good": True, "flag": True}
    assert page.evaluate("window.broken") is None
    assert tab.errors == []


def test_texts_and_tokens_are_coloured_by_a_field(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/texts/episodes/1")
    page.wait_for_selector("p >> text='question 0'")
    page.wait_for_selector(".token")
    colours = "[...document.querySelectorAll('.token')].map((one) => one.style.backgroundColor)"
    shades = page.evaluate(colours)
    assert len(shades) == 3
    assert len({*shades}) == 3
    page.keyboard.press("End")
    page.wait_for_selector("p >> text='three'")
    expect(page.locator(".token")).to_have_count(4)
    page.select_option("#colour", "")
    expect(page.locator(".token[style]")).to_have_count(0)
    page = tab.open("/stores/hostile/episodes/1")
    page.wait_for_selector("section.text p >> text=window.broken >> nth=0")
    assert page.evaluate("window.broken") is None
    assert tab.errors == []


def test_steps_keep_their_numbers_when_rows_leave_a_ring(visit: Open, tmp_path: Path) -> None:
    """Rows that left while the page is open are missing; the others are not shown at their steps."""
    steps = torch.arange(200)
    frames = steps.to(torch.uint8)[:, None, None].repeat(1, 8, 8)
    rows = TensorDict({"pixels": frames, "reward": steps.float(), "number": steps}, [200])
    with Serving(Settings(path=tmp_path)) as server:
        with expstore.open(tmp_path / "ring.exp", capacity=200) as rb:
            rb.extend(rows, source="a")
        tab = visit(url=server.url)
        page = tab.open("/stores/ring/episodes/1?plots=reward&speed=16")
        page.wait_for_selector("canvas[data-step='0']")
        page.wait_for_selector("text=Values at step 0")
        with expstore.connect(f"{server.url}/ring") as rb:
            rb.extend(rows[:150], source="b")
        page.keyboard.press("End")
        for step in (199, 160, 150):
            page.fill("input[type=range]", str(step))
            page.wait_for_selector(f"canvas[data-step='{step}']:not(.stale)")
            assert brightness(page, "canvas[data-step]") == step
            page.wait_for_selector(f"text=Values at step {step}")
            page.wait_for_selector(f"dt:has-text('number') + dd >> text='{step}'")
        page.fill("input[type=range]", "140")
        page.wait_for_selector("text='This step has left the store.'")
        page.wait_for_selector("text='Step 140 has left the store'")
        expect(page.locator("dt:has-text('number') + dd")).to_be_empty()
        page.check("label:has-text('number')")
        chart = page.locator("figure[aria-label='number over the steps of the episode']")
        chart.locator("summary").click()
        chart.locator("details tr >> nth=199").wait_for()
        cells = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        figures = chart.locator("details tbody tr").evaluate_all(cells)
        assert figures[149:151] == [["149", ""], ["150", "150"]]
        assert figures[199] == ["199", "199"]
        page.fill("input[type=range]", "100")  # playing does not wait for steps that have left
        page.click(".play")
        page.wait_for_selector("canvas[data-step='199']")
    assert [error for error in tab.errors if "getImageData" not in error] == []  # that is this test's


def test_a_missing_episode_leads_back_to_the_list(visit: Open) -> None:
    page = visit().open("/stores/run/episodes/12345")
    page.click("text=All episodes")
    page.wait_for_selector("h1 >> text=Episodes")


def test_a_filter_becomes_a_selection_from_which_an_episode_is_excluded(visit: Open) -> None:
    tab = visit()
    page = tab.open("/stores/run/episodes?where=episode_id+%3C+4")
    page.click("summary:has-text('Save as selection')")
    page.fill("label:has-text('Name') input", "it's clean")
    page.fill("label:has-text('Who') input", "ada")
    page.click("details button:has-text('Save')")
    page.wait_for_selector("text=selection('it''s clean')")
    page = tab.open("/stores/run/episodes/2")
    page.fill("label:has-text('Reason') input", "hangs")
    with page.expect_response(lambda response: response.url.endswith("/selections/exclude")) as answer:
        page.click("button:has-text('Exclude')")
    assert answer.value.ok
    expect(page.locator("section:has-text('Selections') s")).to_have_text("it's clean")
    answer = tab.open("/stores/run/episodes/2").request.post(
        page.url.split("/ui/")[0] + "/v1/stores/run/sql",
        data={"query": "SELECT author, episodes, excluded FROM selections"},
    )
    assert answer.json()["rows"] == [["ada", 2, 1]]
    assert tab.errors == []
