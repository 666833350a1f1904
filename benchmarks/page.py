"""The cost of ten open pages for a writer, and how fast the page gets its data; exits 1 outside a bar.

Run as `python benchmarks/page.py [--quick]`. A store has one million rows with 84x84 frames in 100,000
episodes. This process adds 2,000 rows a second; a server follows it in a process of its own, and a third
process sends the requests that ten pages send, without a browser: what Chromium needs to draw is apart.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import httpx  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402

import expstore  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, slower  # noqa: E402
from benchmarks.timing import Series  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402

STEPS, SIDE, BATCH = 10, 84, 200
#: Seconds between two writes: 2,000 rows a second.
PAUSE = BATCH / 2000
#: Pages that show curves, lists of episodes, and players of 30 frames a second.
PAGES = {"overview": 6, "list": 2, "player": 2}
NAME = "/v1/stores/run"
FILTER = {"where": "\"return\" < 8 AND info->>'level' = '3'", "order": "return", "limit": 50}
BARS = {
    "page/first data": Bar(1.0, " s"),
    "page/filter": Bar(0.5, " s"),
    "page/frames": Bar(30, " frames/s", at_least=True),
    "page/writer": Bar(1.1, "x"),
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark."""

    rows: int
    seconds: float
    rounds: int


FULL, QUICK, SMOKE = Effort(1_000_000, 60.0, 4), Effort(20_000, 6.0, 2), Effort(2000, 0.5, 1)


class Games:
    """Make batches of whole episodes of 10 steps with frames that move. Batch size `[rows]`."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        base = self._rng.integers(0, 40, (SIDE, SIDE), np.uint8) // 8 * 8
        self._frames = np.stack([np.roll(base, 3 * step, 1) for step in range(64)])

    def batch(self, rows: int) -> TensorDict:
        """Return `rows` rows, which is a multiple of 10."""
        count = rows // STEPS
        first = self._rng.integers(0, 64 - STEPS, count)
        at = (first[:, None] + np.arange(STEPS)).ravel()
        pixels, following = self._frames[at], self._frames[at + 1]
        marks = self._rng.integers(0, 256, (rows, 8), np.uint8)
        pixels[:, 0, :8], following[:-1, 0, :8] = marks, marks[1:]
        ends = torch.zeros(rows, 1, dtype=torch.bool)
        ends[STEPS - 1 :: STEPS] = True
        after = {
            "pixels": torch.from_numpy(following),
            "reward": torch.from_numpy(self._rng.random((rows, 1), np.float32) * 2),
            "terminated": ends, "truncated": torch.zeros_like(ends),
        }  # fmt: skip
        actions = torch.from_numpy(self._rng.integers(0, 4, rows))
        return TensorDict({"pixels": torch.from_numpy(pixels), "action": actions, "next": after}, [rows])


def write(rb: Any, games: Games, rows: int, number: int) -> float:
    """Append rows; return the seconds of the call."""
    batch, facts = games.batch(rows), {"level": str(number % 5)}
    began = time.perf_counter()
    rb.extend(batch, source=f"worker-{number % 8}", episode_info=facts)
    return time.perf_counter() - began


def write_for(rb: Any, games: Games, seconds: float) -> list[float]:
    """Add 2,000 rows a second; return the seconds of each call."""
    times: list[float] = []
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        times.append(write(rb, games, BATCH, len(times)))
        due += PAUSE
        time.sleep(max(0.0, due - time.perf_counter()))
    return times


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder as `expstore ui` does; yield the address."""
    command = [sys.executable, "-m", "expstore", "ui", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        found = re.search(r"http://[^/\s]+", server.stdout.readline())
        if found is None:
            raise RuntimeError("the server did not start")
        try:
            yield found[0]
        finally:
            server.terminate()
            server.wait(60)


# -- requests of pages -----------------------------------------------------------------------------


def open_overview(client: httpx.Client) -> None:
    """Send what the page of a store sends before it draws: its files, the summary, curves, facts."""
    for file in ("", "app.css", "app.js", "client.js", "dom.js", "chart.js", "series.js", "pages/store.js"):
        client.get(f"/ui/{file}").raise_for_status()
    client.get("/v1/stores").raise_for_status()
    client.get(f"{NAME}/summary").raise_for_status()
    load_curves(client, with_facts=True)


def load_curves(client: httpx.Client, *, with_facts: bool = False) -> None:
    """Send the requests for curves, at the same time."""
    queries: list[tuple[str, dict[str, Any]]] = [
        ("series", {"y": "return", "by": "source", "points": 500}),
        ("series", {"y": "length", "by": "source", "points": 500}),
        ("series", {"y": "throughput", "x": "time", "points": 300}),
    ]
    if with_facts:
        queries.append(("episodes", {"limit": 100, "order": "-episode_id"}))
    with ThreadPoolExecutor(len(queries)) as pool:
        for answer in pool.map(lambda query: client.get(f"{NAME}/{query[0]}", params=query[1]), queries):
            answer.raise_for_status()


def list_episodes(client: httpx.Client, **query: Any) -> list[int]:
    """Return the ids of a page of episodes."""
    answer = client.get(f"{NAME}/episodes", params={"limit": 50, "order": "-episode_id"} | query)
    answer.raise_for_status()
    table = answer.json()
    at = table["columns"].index("episode_id")
    return [row[at] for row in table["rows"]]


def read_frames(client: httpx.Client, episode: int) -> int:
    """Return how many frames of an episode came."""
    answer = client.get(
        f"{NAME}/episodes/{episode}/frames", params={"field": "pixels", "count": STEPS, "format": "raw"}
    )
    answer.raise_for_status()
    return int(answer.headers["X-Shape"].partition(",")[0])


class Page:
    """One open page: it repeats its requests at the pace of the browser, until the event is set."""

    def __init__(self, kind: str, url: str, is_over: threading.Event) -> None:
        self._kind, self._url, self._is_over = kind, url, is_over
        self.requests = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        act, pause = {
            "overview": (self._overview, 2.0),
            "list": (self._list, 4.0),
            "player": (self._play, 1.0),
        }[self._kind]
        with httpx.Client(base_url=self._url, timeout=60) as client:
            open_overview(client)
            while not self._is_over.is_set():
                began = time.perf_counter()
                act(client)
                self.requests += 1
                self._is_over.wait(max(0.0, pause - (time.perf_counter() - began)))

    def _overview(self, client: httpx.Client) -> None:
        client.get(f"{NAME}/summary").raise_for_status()
        if self.requests % 2 == 0:
            load_curves(client)

    def _list(self, client: httpx.Client) -> None:
        list_episodes(client)

    def _play(self, client: httpx.Client) -> None:
        for episode in list_episodes(client, limit=3):  # 30 frames of three episodes
            read_frames(client, episode)


def visit(url: str, phase: Any, ready: Any) -> None:
    """Open ten pages while `phase` is 1, in a process of its own; end when it is 2."""
    ready.set()
    while phase.value != 2:
        if phase.value == 0:
            time.sleep(0.01)
            continue
        is_over = threading.Event()
        pages = [Page(kind, url, is_over) for kind, count in PAGES.items() for _ in range(count)]
        while phase.value == 1:
            time.sleep(0.01)
        is_over.set()
        for page in pages:
            page.thread.join()


# -- measurements ----------------------------------------------------------------------------------


def measure(folder: Path, effort: Effort, out: Callable[[str], object]) -> Iterator[Result]:
    """Fill the store, serve it, and measure."""
    games = Games()
    with expstore.open(folder / "run.exp", batch_size=256, seed=0) as rb:
        began = time.perf_counter()
        for number in range(effort.rows // 1000):
            write(rb, games, 1000, number)
        rb.flush()
        out(f"{effort.rows:,} rows in {effort.rows // STEPS:,} episodes: {time.perf_counter() - began:.0f} s")
        with serve(folder) as url:
            yield from _measure_requests(rb, games, url, effort)
            yield _measure_writer(rb, games, url, effort)


def _measure_requests(rb: Any, games: Games, url: str, effort: Effort) -> Iterator[Result]:
    """Time the requests of a page while this process writes."""
    is_over = threading.Event()

    def write_on() -> None:
        while not is_over.is_set():
            write_for(rb, games, 1.0)

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        with httpx.Client(base_url=url, timeout=120) as client:
            first = _timed(lambda: open_overview(client))
            again = [_timed(lambda: open_overview(client)) for _ in range(3 if effort.rounds > 1 else 1)]
            note = f"all requests of the page of a store; opened again {min(again):.2f} s"
            yield Result("page/first data", first, f"{first:.2f} s", note=note)
            found: list[int] = []
            list_episodes(client, **FILTER)  # starts the process that runs conditions
            times = [_timed(lambda: found.extend(list_episodes(client, **FILTER))) for _ in again]
            middle = sorted(times)[len(times) // 2]
            yield Result(
                "page/filter", middle, f"{middle:.2f} s", note="50 episodes by a condition and return"
            )
            episodes = list_episodes(client, limit=50)
            count, began = 0, time.perf_counter()
            for episode in episodes:
                count += read_frames(client, episode)
            rate = count / (time.perf_counter() - began)
            yield Result("page/frames", rate, f"{rate:.0f} frames/s", note=f"84x84, {STEPS} a request")
    finally:
        is_over.set()
        writer.join()


def _measure_writer(rb: Any, games: Games, url: str, effort: Effort) -> Result:
    """Compare writes without pages and with ten of them, in turns."""
    context = multiprocessing.get_context("spawn")
    phase, ready = context.Value("i", 0), context.Event()
    visitor = context.Process(target=visit, args=(url, phase, ready))
    visitor.start()
    ready.wait()
    quiet, busy = Series(), Series()
    for _ in range(effort.rounds):
        for number, series in ((0, quiet), (1, busy)):
            phase.value = number
            write_for(rb, games, min(1.0, effort.seconds))
            series.blocks.append(write_for(rb, games, effort.seconds / effort.rounds))
    phase.value = 2
    visitor.join(60)
    ratio = busy.median / quiet.median
    note = f"extend({BATCH}), 2,000 rows/s, without pages and with {sum(PAGES.values())}"
    data = {"quiet": quiet.to_json(), "pages": busy.to_json()}
    return Result("page/writer", ratio, slower(quiet, busy), ratio=f"{ratio:.2f}x", note=note, data=data)


def _timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="20,000 rows, 6 seconds a phase", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    report = Report({} if wanted.smoke else BARS, out, other="–", file=wanted.json)
    with scratch(wanted.folder, 2 * effort.rows * SIDE * SIDE) as folder:
        for result in measure(folder, effort, out):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
