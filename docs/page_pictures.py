"""Make the stores of a demonstration, and the pictures of docs/page.md and of the README from them.

    python docs/page_pictures.py                   # into docs/images
    python docs/page_pictures.py --stores runs     # only the stores, for `expstore ui runs`
    python docs/page_pictures.py --views looks     # every view: light, dark, and as wide as a phone

Chromium, which must be installed as `chromium`, draws the page. Look at the pictures before you commit them.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

import numpy as np
import torch
from PIL import Image
from tensordict import TensorDict

import expstore

IMAGES = Path(__file__).resolve().parent / "images"
SIDE, PADDLE, LIMIT = 84, 6, 150
ROWS, BROKEN_AT, WORKERS = 60_000, 40_000, 4
ACTIONS = ["left", "stay", "right"]
#: Milliseconds that a page may take on a busy machine.
PATIENCE = 300_000
#: Most bytes of a picture, and the width of each in pixels.
MOST_BYTES, WIDTH = 150_000, 1200


@dataclass
class Episode:
    """Steps of a game in which a paddle catches balls. All arrays begin with the steps."""

    frames: np.ndarray  # one more than steps
    paddle: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: bool


def play(rng: np.random.Generator, skill: float, *, camera_works: bool = True) -> Episode:
    """Play until three balls are missed, or for 150 steps.

    Args:
        rng: Draws balls and mistakes.
        skill: Probability of a good action.
        camera_works: Otherwise frames become noise after some steps, and the player acts at random.
    """
    frames, places, actions, rewards = [], [], [], []
    paddle, misses, breaks = 42.0, 0, int(rng.integers(10, 30))
    ball = np.array([rng.uniform(10, 74), 4.0, rng.uniform(-2, 2), 3.0])
    while len(actions) < LIMIT and misses < 3:
        blind = not camera_works and len(actions) >= breaks
        frames.append(draw(rng, ball, paddle, noise=blind))
        aim = ball[0] - paddle
        good = 1 if abs(aim) < 3 else (0 if aim < 0 else 2)
        action = good if rng.random() < skill and not blind else int(rng.integers(3))
        paddle = float(np.clip(paddle + 3 * (action - 1), PADDLE, SIDE - PADDLE))
        ball[:2] += ball[2:]
        if not 4 < ball[0] < 80:
            ball[2] = -ball[2]
        reward = 0.0
        if ball[1] >= 78:
            caught = abs(ball[0] - paddle) <= PADDLE + 2
            reward = 1.0 if caught else -1.0
            misses += not caught
            ball = np.array([rng.uniform(10, 74), 4.0, rng.uniform(-2, 2), 3.0])
        places.append([paddle, *ball])
        actions.append(action)
        rewards.append(reward)
    frames.append(draw(rng, ball, paddle, noise=not camera_works))
    return Episode(
        np.stack(frames), np.asarray(places, np.float32), np.asarray(actions),
        np.asarray(rewards, np.float32), misses == 3,
    )  # fmt: skip


def draw(rng: np.random.Generator, ball: np.ndarray, paddle: float, *, noise: bool) -> np.ndarray:
    """Return a frame. Shape `(84, 84)`, uint8."""
    if noise:
        return (rng.integers(0, 2, (SIDE // 4, SIDE // 4), np.uint8) * 90).repeat(4, 0).repeat(4, 1)
    frame = np.full((SIDE, SIDE), 18, np.uint8)
    frame[:, :2] = frame[:, -2:] = frame[:2] = 90
    x, y = int(np.clip(ball[0], 3, 80)), int(np.clip(ball[1], 3, 76))
    frame[y - 2 : y + 3, x - 2 : x + 3] = 255
    left = int(paddle)
    frame[79:82, left - PADDLE : left + PADDLE] = 170
    return frame


def rows_of(game: Episode, *, frames: bool) -> TensorDict:
    """Return the rows of a game. Batch size `[steps]`."""
    count = len(game.action)
    ends = torch.zeros(2, count, 1, dtype=torch.bool)
    ends[0 if game.terminated else 1, -1] = True
    state = np.concatenate([game.paddle[:1], game.paddle])
    rows = {"action": torch.from_numpy(game.action), "state": torch.from_numpy(state[:-1])}
    after = {"state": torch.from_numpy(state[1:]), "reward": torch.from_numpy(game.reward)[:, None],
             "terminated": ends[0], "truncated": ends[1]}  # fmt: skip
    if frames:
        rows["pixels"] = torch.from_numpy(game.frames[:-1])
        after["pixels"] = torch.from_numpy(game.frames[1:])
    return TensorDict({**rows, "next": after}, [count])


def fill(path: Path, *, seed: int, frames: bool, broken: bool, rows: int = ROWS) -> None:
    """Make a store of games that get better; from 40,000 rows on the camera of one worker may be broken."""
    rng = np.random.default_rng(seed)
    meta = {"env": "Catch-v2", "algorithm": "dqn", "seed": seed, "actions": ACTIONS}
    with expstore.open(path, capacity=rows, batch_size=64, seed=seed, meta=meta, sampler="prioritized") as rb:
        while rb.write_count < rows:
            part = rb.write_count / rows
            worker = int(rng.integers(WORKERS))
            works = not (broken and part >= BROKEN_AT / ROWS and worker == 2)
            skill = float(np.clip(0.15 + 1.1 * part + rng.normal(0, 0.08), 0, 0.97))
            game = play(rng, skill, camera_works=works)
            facts: dict[str, Any] = {
                "level": int(rng.integers(1, 4)),
                "version": "2.1" if part > 0.5 else "2.0",
            }
            added = rb.extend(rows_of(game, frames=frames), source=f"worker-{worker}", episode_info=facts)
            rb.update_priority(
                index=added, priority=np.abs(game.reward) + rng.exponential(0.2, len(game.reward))
            )
            if rng.random() < 0.5:
                rb.sample()
        rb.snapshots.tag("first-policy")


def fill_answers(path: Path) -> None:
    """Make a store of answers of a language model, with texts and tokens of variable length."""
    rng = np.random.default_rng(7)
    meta = {"model": "tiny-2", "task": "sums"}
    with expstore.open(path, layout="arrow", batch_size=16, seed=0, meta=meta) as rb:
        for _ in range(40):
            left, right = rng.integers(1, 50, 2).tolist()
            answers, tokens, values = [], [], []
            for _ in range(4):
                words = f"{left} plus {right} makes {left + right + int(rng.integers(-1, 2))}".split()
                answers.append(" ".join(words))
                tokens.append(torch.from_numpy(rng.integers(0, 900, len(words))))
                values.append(torch.from_numpy(-rng.exponential(1, len(words)).astype(np.float32)))
            ends = torch.zeros(4, 1, dtype=torch.bool)
            ends[-1] = True
            reward = torch.tensor([[float(text.endswith(f" {left + right}"))] for text in answers])
            rows = {
                "prompt": [f"What is {left} + {right}?"] * 4, "answer": answers,
                "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
                "logprob": torch.nested.nested_tensor(values, layout=torch.jagged),
                "next": {"reward": reward, "terminated": ends, "truncated": torch.zeros_like(ends)},
            }  # fmt: skip
            rb.extend(TensorDict(rows, batch_size=[4]), source="rollout-0", episode_info={"epoch": 1})


def build_stores(folder: Path, *, rows: int = ROWS) -> None:
    """Make all stores in a folder.

    Args:
        folder: The folder, which must exist.
        rows: Rows of each store of games.
    """
    fill(folder / "catch-pixels.exp", seed=1, frames=True, broken=True, rows=rows)
    for seed in (2, 3):
        fill(folder / f"catch-state-{seed}.exp", seed=seed, frames=False, broken=False, rows=rows)
    fill_answers(folder / "answers.exp")


# -- pictures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shot:
    """A picture of a page.

    Args:
        name: Name of the file, after `page_`.
        address: What follows `#` in the address; "": the page on which the shot before it has ended.
        height: Height of the window in pixels; the width is 1200.
        scheme: "light" or "dark".
        click: Text of a link that is clicked first.
        step: A step of the episode that is shown then.
        wait: A selector that must be there.
    """

    name: str
    address: str
    height: int
    scheme: Literal["light", "dark"] = "light"
    click: str = ""
    step: int | None = None
    wait: str = "body[data-ready]"


STORE = "/stores/catch-pixels"
QUERY = (
    'SELECT source, count(*) AS episodes, avg("return") AS mean FROM episodes GROUP BY source ORDER BY mean'
)
#: A range of episodes around the one in which the camera breaks.
RANGE = "from={low}&to={high}"
#: Episodes in which the camera may be broken.
NEWER = urlencode({"where": "episode_id > 290"})
#: Every view; `--views` takes pictures of them.
VIEWS = {
    "stores": "/",
    "store": f"{STORE}?by=source&x=rows&from=38000&to=48000&counts=1",
    "numbers": f"{STORE}?left=info.level&right=field.state:1&x=time&status=terminated",
    "versions": f"{STORE}?x=version",
    "episodes": f"{STORE}/episodes?counts=1&source=worker-2",
    "no-episodes": f"{STORE}/episodes?where=false",
    "wrong-condition": f"{STORE}/episodes?where=missing",
    "episode": f"{STORE}/episodes/230?step=45",
    "answer": "/stores/answers/episodes/3",
    "pair": f"{STORE}/pair?source=worker-2&sync=end&step=120",
    "groups": f"{STORE}/lists",
    "splits": f"{STORE}/lists?of=splits",
    "lineage": f"{STORE}/lists?of=lineage",
    "sql": f"{STORE}/sql?{urlencode({'q': QUERY})}",
    "sampling": f"{STORE}/sampling?kind=prioritized",
    "compare": "/compare?stores=catch-pixels,catch-state-2,catch-state-3",
}
SHOTS = (
    Shot("stores", "/", 330, wait="svg.sparkline"),
    Shot("store", f"{STORE}?smooth=0.8", 1000),
    Shot("store_dark", f"{STORE}?smooth=0.8", 1000, scheme="dark"),
    Shot("drop", f"{STORE}?by=source&smooth=0.8&x=rows&{RANGE}", 900, wait="text=Show these episodes"),
    Shot("bad_episodes", "", 700, click="worker-2", wait="tbody tr"),
    Shot("bad_episode", "", 900, click="tbody a", step=45, wait="canvas"),
    Shot("pair", f"{STORE}/pair?source=worker-2&{NEWER}&step=45", 1000, wait="canvas"),
    Shot("facets", f"{STORE}/episodes?counts=1&source=worker-2", 620, wait=".facet"),
    Shot("answer", "/stores/answers/episodes/3", 800),
    Shot("sql", f"{STORE}/sql?{urlencode({'q': QUERY})}", 640),
    Shot("sampling", f"{STORE}/sampling?kind=prioritized", 900, wait="text=Of the rows drawn"),
    Shot("compare", "/compare?stores=catch-pixels,catch-state-2,catch-state-3&smooth=0.8", 900),
)  # fmt: skip


def take_pictures(folder: Path, only: str = "") -> None:
    """Serve stores, and write a picture of each page into docs/images.

    Args:
        folder: Stores that `build_stores` made.
        only: Only shots with this text in their name, and those that they continue.
    """
    from playwright.sync_api import sync_playwright

    low, high = BROKEN_AT - 2000, BROKEN_AT + 8000
    with serve(folder) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for number, shot in enumerate(SHOTS):
            later = SHOTS[number + 1 :]
            continued = next((k for k, one in enumerate(later) if one.address), len(later))
            if not any(only in one.name for one in (shot, *later[:continued])):
                continue
            if shot.address:
                page = browser.new_page(viewport={"width": WIDTH, "height": shot.height})
                page.set_default_timeout(PATIENCE)
                page.emulate_media(color_scheme=shot.scheme, reduced_motion="reduce")
                page.goto(f"{url}/ui/#{shot.address.format(low=low, high=high)}")
            else:
                page.set_viewport_size({"width": WIDTH, "height": shot.height})
                page.wait_for_selector("body[data-ready]")
                page.locator(
                    f"main {shot.click}" if " " in shot.click else f"main a:has-text('{shot.click}')"
                ).first.click()
            page.wait_for_selector("body[data-ready]")
            if shot.step is not None:
                page.goto(f"{page.url}{'&' if '?' in page.url else '?'}step={shot.step}")
                page.wait_for_selector("body[data-ready]")
            page.wait_for_selector(shot.wait)
            page.wait_for_timeout(2000)  # charts and frames arrive after the page
            if shot.name == "drop":
                page.locator(".selection tbody tr").last.scroll_into_view_if_needed()
            save(page.screenshot(), IMAGES / f"page_{shot.name}.png")
        browser.close()


def take_views(folder: Path, looks: Path) -> None:
    """Serve stores, and write pictures of whole pages, to look at before a change is committed.

    Args:
        folder: Stores that `build_stores` made.
        looks: Where the pictures are written; it must exist.
    """
    from playwright.sync_api import sync_playwright

    with serve(folder) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for look, scheme, width in (
            ("light", "light", WIDTH),
            ("dark", "dark", WIDTH),
            ("phone", "light", 390),
        ):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.set_default_timeout(PATIENCE)
            for name, address in VIEWS.items():
                page.goto(f"{url}/ui/#{address}")
                page.wait_for_selector("body[data-ready]")
                page.locator("main .loading").first.wait_for(state="detached")
                page.wait_for_timeout(1500)  # charts and frames arrive after the page
                page.screenshot(path=looks / f"{name}-{look}.png", full_page=True)
        browser.close()


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder for reading by the command; yield the address."""
    command = [sys.executable, "-m", "expstore", "ui", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            yield line.partition(" at ")[2].partition("/ui/")[0]
        finally:
            server.terminate()


def save(data: bytes, path: Path) -> None:
    """Write a screenshot with a palette, which takes a third of the space."""
    with Image.open(io.BytesIO(data)) as file:
        picture = file.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {picture.size}, {size:,} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{path} is larger than {MOST_BYTES:,} bytes: show less")


def main() -> None:
    """Make the stores, and the pictures unless only the stores are wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--stores", type=Path, metavar="FOLDER", help="make the stores there, and no pictures"
    )
    parser.add_argument(
        "--views",
        type=Path,
        metavar="FOLDER",
        help="write pictures of every view there, and none for the docs",
    )
    parser.add_argument("--use", type=Path, metavar="FOLDER", help="stores that --stores made")
    parser.add_argument("--only", default="", metavar="TEXT", help="only pictures with TEXT in their name")
    wanted = parser.parse_args()
    if wanted.stores:
        wanted.stores.mkdir(parents=True, exist_ok=True)
        build_stores(wanted.stores)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = wanted.use or Path(made)
        if not wanted.use:
            build_stores(folder)
        if wanted.views:
            wanted.views.mkdir(parents=True, exist_ok=True)
            take_views(folder, wanted.views)
        else:
            take_pictures(folder, wanted.only)


if __name__ == "__main__":
    main()
