"""Packed images compared with TorchRL's LazyMemmapStorage: size on disk, speed of writing and sampling.

Run as `python benchmarks/images.py`; exits 1 below a bar. The frames are of real Atari games under a random
policy. Both observations of every row are stored and read, and both sides hold the same rows.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.atari import GAMES, LANES, STACK, Play, Rows, prepared  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Case, Series, alternate  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402

if TYPE_CHECKING:
    from tensordict import TensorDict

BATCH, SLICES = 256, 8
SIZES = {"Breakout": 80, "Pong": 80, "Seaquest": 40, "MsPacman": 20}
KINDS = {
    f"{what}-{lanes}": (stack, lanes)
    for what, stack in (("frame", 1), ("stack", STACK))
    for lanes in (1, LANES)
}
#: Rows per call: 8 steps of 8 lanes, 32 steps of 8 lanes (the Collector's default), and many.
WRITES = (64, 256, 1000)
OFFERED = 10_000


def _bars() -> dict[str, Bar]:
    found = {}
    for game, limit in SIZES.items():
        for kind in KINDS:
            found[f"{game}/{kind}/size"] = Bar(limit, "x", at_least=True)
            found[f"{game}/{kind}/sample"] = Bar(1, "x", at_least=True)
            found[f"{game}/{kind}/slices"] = Bar(3, "x", at_least=True)
        for rows in WRITES:
            found[f"{game}/extend-{rows}/tmpfs"] = Bar(20, "k rows/s", at_least=True)
    found["offered/tmpfs"] = Bar(50, " ms")
    return found


BARS = _bars()


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        steps: Steps of each of the 8 lanes of a game. The size on disk is measured with all of them.
        compared_rows: Rows of the stores that are compared with TorchRL's, and of the stores that are written
            to.
        calls: Calls in a block.
        rounds: Blocks of each side.
        seconds: Seconds during which rows are written without a pause, and at the offered rate.
    """

    steps: int = 12_500
    compared_rows: int = 20_000
    calls: int = 60
    rounds: int = 5
    seconds: float = 20.0


FULL = Effort()
QUICK = Effort(steps=2500, compared_rows=5000, calls=20, rounds=3, seconds=5.0)
SMOKE = Effort(steps=80, compared_rows=300, calls=1, rounds=1, seconds=0.2)


# -- the two sides ------------------------------------------------------------------------------------


class Sides:
    """Create buffers with rows of one kind.

    Args:
        folder: Folder of their files.
        options: Options of expstore's packed columns; empty for the defaults.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self._options = folder, options

    def ours(self, capacity: int, *, sampler: Any = None, where: Path | None = None) -> Any:
        each: dict[str, Any] = {"layout": "packed"} | self._options
        fields = dict.fromkeys(("observation", "next.observation"), each)
        return expstore.open(
            (where or self.folder) / "store.exp",
            capacity=capacity,
            batch_size=BATCH,
            layout=expstore.Layout(fields=fields),
            sampler=sampler,
            seed=1,
        )

    def theirs(self, capacity: int) -> Any:
        from torchrl import data

        logging.getLogger("torchrl").setLevel(logging.WARNING)
        storage = data.LazyMemmapStorage(capacity, scratch_dir=str(self.folder / "torchrl"))
        return data.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)

    @staticmethod
    def their_slices(rb: Any, *, cached: bool) -> Any:
        """Return another buffer over the same rows that samples slices."""
        from torchrl import data

        slices = data.SliceSampler(num_slices=SLICES, traj_key=("collector", "traj_ids"), cache_values=cached)
        return data.TensorDictReplayBuffer(storage=rb.storage, sampler=slices, batch_size=BATCH)


def disk_bytes(folder: Path) -> int:
    """Return the disk space of all files below a folder in bytes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _draw(rb: Any, _: None) -> object:
    return rb.sample()


def _warmed() -> None:
    """Wait until the compiled loops are loaded, which happens once per process in the background."""
    for thread in threading.enumerate():
        if thread.name == "expstore-warm":
            thread.join()


class Images:
    """Run the selected measurements; each method yields rows of the table.

    Args:
        folder: Folder for stores on the disk.
        memory: Folder for stores on a RAM disk.
        effort: Sizes of the benchmark.
        only: Texts; measurements with one of them in their names are run.
        frames: Folder of recorded games; None plays them.
        options: Options of expstore's packed columns, see `Sides`.
    """

    def __init__(
        self,
        folder: Path,
        memory: Path,
        effort: Effort,
        *,
        only: str = "",
        frames: Path | None = None,
        options: dict[str, Any],
    ) -> None:
        self.folder, self.memory, self.effort = folder, memory, effort
        self._only, self._frames = only, frames or folder / "frames"
        self._sides = Sides(folder, options)

    def wants(self, *names: str) -> bool:
        return any(text in name for name in names for text in self._only.split(","))

    def _game(self, name: str) -> Play:
        return prepared(name, self.effort.steps, self._frames)

    def run(self) -> Iterator[Result]:
        for game in GAMES:
            for kind, (stack, lanes) in KINDS.items():
                names = [f"{game}/{kind}/{what}" for what in ("size", "sample", "slices", "slices-cached")]
                if self.wants(*names):
                    yield from self._compare_sides(f"{game}/{kind}", self._game(game), stack, lanes)
        for game in GAMES:
            for each in WRITES:
                for where in ("tmpfs", "disk"):
                    if self.wants(name := f"{game}/extend-{each}/{where}"):
                        yield self._sustained(name, Rows(self._game(game), stack=1, lanes=LANES), each, where)
        for where in ("tmpfs", "disk"):
            if self.wants(f"offered/{where}"):
                yield self._offered(f"offered/{where}", where)

    # -- compared with TorchRL ------------------------------------------------------------------------

    def _compare_sides(self, name: str, game: Play, stacked: int, lanes: int) -> Iterator[Result]:
        rows = Rows(game, stack=stacked, lanes=lanes)
        count = min(len(rows), self.effort.compared_rows)
        # Steps of one environment are written in large batches; of 8 environments one step each.
        each = lanes if lanes > 1 else 1000
        theirs = self._sides.theirs(count)
        # Always lane by lane: otherwise TorchRL would find no slices.
        for batch in Rows(game, stack=stacked, lanes=1).batches(count, 1000):
            theirs.extend(batch)
        if self.wants(f"{name}/size"):
            yield self._size(f"{name}/size", rows, each, disk_bytes(self.folder / "torchrl") / count)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder / "torchrl")
            stack.callback(shutil.rmtree, self.folder / "store.exp", ignore_errors=True)
            with self._sides.ours(count) as ours:
                for batch in rows.batches(count, each):
                    ours.extend(batch)
                ours.flush()
                if self.wants(f"{name}/sample"):
                    yield self._compare(f"{name}/sample", ours, theirs)
            with self._sides.ours(count, sampler=expstore.SliceSampler(num_slices=SLICES)) as ours:
                for what, cached in (("slices", False), ("slices-cached", True)):
                    if self.wants(f"{name}/{what}"):
                        other = self._sides.their_slices(theirs, cached=cached)
                        yield self._compare(f"{name}/{what}", ours, other)

    def _size(self, name: str, rows: Rows, each: int, other: float) -> Result:
        """Return the disk space per row of a closed store of all rows."""
        count, store = len(rows), self.folder / "store.exp"
        with self._sides.ours(count) as rb:
            for batch in rows.batches(count, each):
                rb.extend(batch)
        mine, columns = disk_bytes(store) / count, disk_bytes(store / "columns") / count
        images = sum(disk_bytes(store / "columns" / at) for at in ("observation", "next/observation")) / count
        shutil.rmtree(store)
        parts = f"{images:.0f} images, {columns - images:.0f} other columns, {mine - columns:.0f} besides"
        note = f"bytes per transition of {count:,}: {parts}"
        data = {"expstore": mine, "torchrl": other, "columns": columns, "images": images}
        return Result(
            name, other / mine, f"{mine:.0f} B", f"{other:.0f} B", f"{other / mine:.0f}x", note, data
        )

    def _compare(self, name: str, ours: Any, theirs: Any) -> Result:
        cases = [Case(partial(_draw, rb), repeat(None), self.effort.calls) for rb in (ours, theirs)]
        mine, other = alternate(cases, rounds=self.effort.rounds, warm=20)
        ratio = other.median / mine.median
        text = f"{ratio:.2f}x (means {other.mean / mine.mean:.2f}x)"
        data = {"expstore": mine.to_json(), "torchrl": other.to_json()}
        return Result(name, ratio, span(mine), span(other), text, data=data)

    # -- writing --------------------------------------------------------------------------------------

    def _store(self, where: str, capacity: int, stack: ExitStack) -> Any:
        folder = {"tmpfs": self.memory, "disk": self.folder}[where]
        stack.callback(shutil.rmtree, folder / "store.exp", ignore_errors=True)
        return stack.enter_context(self._sides.ours(capacity, where=folder))

    def _prepared(self, rows: Rows, each: int) -> list[TensorDict]:
        """Return rows in batches, prepared beforehand."""
        return [rows.batch(first, each) for first in range(0, self.effort.compared_rows, each)]

    def _sustained(self, name: str, rows: Rows, each: int, where: str) -> Result:
        """Extend without a pause, and sync everything to the disk."""
        batches = self._prepared(rows, each)
        written, clock = 0, time.perf_counter
        with ExitStack() as stack:
            rb = self._store(where, self.effort.compared_rows, stack)
            rb.extend(batches[0])
            rb.sample()
            _warmed()
            started = clock()
            while clock() - started < self.effort.seconds / 4:
                rb.extend(batches[written // each % len(batches)])
                written += each
            rb.flush()
            rate = written / (clock() - started) / 1e3
        note = f"{written:,} rows, {each} a call"
        return Result(name, rate, f"{rate:.1f}k rows/s", note=note, data={"rows": written})

    def _offered(self, name: str, where: str) -> Result:
        """Extend at a given rate; return the time from the due time of a batch to the end of its call."""
        each = WRITES[0]
        rows = Rows(self._game("Breakout"), stack=1, lanes=LANES)
        batches, calls = self._prepared(rows, each), int(self.effort.seconds * OFFERED / each)
        clock, waited, acted = time.perf_counter, [], []
        with ExitStack() as stack:
            rb = self._store(where, self.effort.compared_rows, stack)
            rb.extend(batches[0])
            _warmed()
            started = clock()
            for number in range(calls):
                due = started + number * each / OFFERED
                if (pause := due - clock()) > 0:
                    time.sleep(pause)
                begun = clock()
                rb.extend(batches[number % len(batches)])
                ended = clock()
                acted.append(ended - begun)
                waited.append(ended - due)
        return self._latencies(name, waited, acted, f"{OFFERED:,} rows/s in calls of {each}, {calls} calls")

    @staticmethod
    def _latencies(name: str, waited: list[float], acted: list[float], note: str) -> Result:
        def parts(times: list[float]) -> list[float]:
            ranked = sorted(times)
            return [ranked[min(len(ranked) - 1, int(len(ranked) * p))] * 1e3 for p in (0.5, 0.99, 0.999)]

        due, own = parts(waited), parts(acted)
        text = "p50 {:.1f}, p99 {:.1f}, p99.9 {:.1f} ms after they were there".format(*due)
        text += "; p50 {:.1f}, p99 {:.1f}, p99.9 {:.1f} ms in the call".format(*own)
        data = {"due": due, "call": own, "series": Series([acted]).to_json()}
        return Result(name, due[2], text, note=note, data=data)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, quick="a fifth of the rows, few calls", folder=ROOT / "benchmarks" / "out")
    parser.add_argument(
        "--only", default="", metavar="TEXT,...", help="measurements with one of these texts in their names"
    )
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder on a RAM disk")
    parser.add_argument(
        "--frames", type=Path, metavar="FOLDER", help="folder for the games' frames; existing ones are used"
    )
    parser.add_argument("--codec", help="codec of packed columns")
    parser.add_argument("--rows", type=int, help="number of rows to pack together")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    wanted = _arguments(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    asked = {key: value for key in ("codec", "rows") if (value := getattr(wanted, key)) is not None}
    needed = 4 * STACK * 2 * 84 * 84 * LANES * effort.steps
    with scratch(wanted.folder, needed) as folder, scratch(wanted.memory, needed // 8) as memory:
        report = Report({} if wanted.smoke else BARS, out, other="TorchRL", file=wanted.json)
        images = Images(folder, memory, effort, only=wanted.only, frames=wanted.frames, options=asked)
        for result in images.run():
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
