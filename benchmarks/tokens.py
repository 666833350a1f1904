"""Variable-length rows of tokens in an Arrow store: speed of writing, sampling and opening.

Run as `python benchmarks/tokens.py`; exits 1 below a bar. Lengths are 10 to 2000, tokens int32, Zipf over
32,000 words. The other side is Lance (`pip install pylance`); it is left out if it is not installed. The
sides take turns, with the same rows. Times are CPU times of the process, which a busy machine changes little;
wall times are reported as well. Background work of one side may fall into another's turn.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

from benchmarks.report import Bar, Report, Result, options  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from expstore.episodes.segmentation import Steps  # noqa: E402
from expstore.kernels.loader import compiling  # noqa: E402
from expstore.schema.arrow_types import ragged_text  # noqa: E402
from expstore.schema.field_roles import find_keys  # noqa: E402
from expstore.schema.schema import ARROW, Field, Schema  # noqa: E402
from expstore.storages import ArrowStorage  # noqa: E402
from expstore.writers.writers import RoundRobinWriter  # noqa: E402

WORDS, SHORTEST, LONGEST = 32_000, 10, 2000
BATCH, EXTEND = 256, 1000
SCHEMA = Schema([Field(("tokens",), ARROW, (), ragged_text("int32", (None,))), Field(("id",), "int64", ())])
KINDS = (None, "lz4", "zstd")
#: Bars apply without compression and to the layout with separate rows; other layouts show only the size.
BARS = {
    name + ("" if kind is None else f"/{kind}"): bar
    for kind in KINDS
    for name, bar in {
        "extend": Bar(50, "k rows/s", at_least=True),
        "sample": Bar(5, " ms"),
        "size": Bar({None: 1.1, "lz4": 0.8, "zstd": 0.6}[kind], "x"),
        "reopen": Bar(1, " s"),
    }.items()
    if name == "size" or kind is None
}
#: Number of extends, or samples, before the other side's turn.
BLOCK = 10


@dataclass(frozen=True)
class Effort:
    """Rows of the stores, and samples of each."""

    rows: int = 200_000
    draws: int = 100


QUICK, SMOKE = Effort(20_000, 40), Effort(2000, 3)


@dataclass
class Took:
    """Hold the duration of an operation: CPU seconds of the process, and wall-clock seconds."""

    cpu: float
    wall: float

    def __str__(self) -> str:
        return f"{self.cpu:.3g} s CPU, {self.wall:.3g} s"


def took(act: Callable[[], object]) -> Took:
    """Run an operation and return its duration."""
    cpu, wall = time.process_time(), time.perf_counter()
    act()
    return Took(time.process_time() - cpu, time.perf_counter() - wall)


def rows_of_tokens(count: int, seed: int) -> Iterator[pa.Array]:
    """Yield rows in pieces; every call yields the same rows."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(1, WORDS + 1)
    known = rng.choice(WORDS, 1 << 22, p=chances / chances.sum()).astype(np.int32)
    for _ in range(0, count, EXTEND):
        ends = np.cumsum(rng.integers(SHORTEST, LONGEST + 1, EXTEND))
        start = int(rng.integers(0, known.size - ends[-1]))
        offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
        yield pa.ListArray.from_arrays(offsets, pa.array(known[start : start + ends[-1]]))


class Ours:
    """An Arrow store with these rows."""

    def __init__(self, path: Path, compression: Any) -> None:
        self.path, self._compression = path, compression

    def open(self) -> None:
        self.kept = ArrowStorage(self.path, compression=self._compression)
        if self.kept.schema is None:
            self.kept.prepare(SCHEMA, find_keys(SCHEMA))

    def extend(self, tokens: pa.Array) -> None:
        with self.kept.lock:
            first = self.kept.last + 1
            columns: list[Any] = [tokens, np.arange(first, first + len(tokens))]
            RoundRobinWriter().write(self.kept, columns, Steps(len(tokens)), source=None, info="")

    def take(self, numbers: np.ndarray) -> pa.Array:
        return self.kept.read(numbers + 1)[0]

    def close(self) -> None:
        self.kept.close()

    @property
    def size(self) -> int:
        """Disk space of the tokens in bytes."""
        return sum(path.stat().st_size for path in (self.path / "segments").iterdir())


class Lance:
    """A Lance dataset with these rows."""

    def __init__(self, path: Path, lance: Any) -> None:
        self.path, self._lance = path, lance

    def open(self) -> None:
        with suppress(ValueError, OSError):
            self.data = self._lance.dataset(str(self.path))

    def extend(self, tokens: pa.Array) -> None:
        table = pa.table({"tokens": tokens})
        mode = "append" if self.path.exists() else "create"
        self.data = self._lance.write_dataset(table, str(self.path), mode=mode)

    def take(self, numbers: np.ndarray) -> pa.Array:
        return self.data.take(np.sort(numbers).tolist()).column("tokens").combine_chunks()

    def close(self) -> None:
        del self.data

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())


@dataclass
class Measured:
    """Hold the results of a side: durations, and the disk space of the rows."""

    wrote: Took
    drew: list[Took]
    opened: Took
    size: float = 0.0

    @property
    def draw(self) -> Took:
        """The median sample."""
        cpu, wall = zip(*((one.cpu, one.wall) for one in self.drew), strict=True)
        return Took(float(np.median(cpu)), float(np.median(wall)))


def measure(sides: dict[str, Any], effort: Effort) -> tuple[dict[str, Measured], int]:
    """Write the same rows, sample, close and reopen, all in turns; also return the rows' bytes."""
    found = {name: Measured(Took(0, 0), [], Took(0, 0)) for name in sides}
    for side in sides.values():
        side.open()
    payload = 0
    rows = rows_of_tokens(effort.rows, 0)
    while some := list(itertools.islice(rows, BLOCK)):
        payload += sum(tokens.nbytes for tokens in some)
        for name, side in sides.items():
            spent = took(lambda side=side, some=some: [side.extend(tokens) for tokens in some])
            wrote = found[name].wrote
            found[name].wrote = Took(wrote.cpu + spent.cpu, wrote.wall + spent.wall)
    rng = np.random.default_rng(1)
    numbers = np.sort(rng.integers(0, effort.rows, BATCH))
    first = [side.take(numbers) for side in sides.values()]
    if not all(rows.equals(first[0]) for rows in first):
        raise SystemExit("sides do not keep the same rows")
    with compiling:  # simulates the background compilation
        import expstore.kernels.arrow_decode
        import expstore.kernels.gather_runs  # noqa: F401
    time.sleep(1)
    for done in range(0, effort.draws, BLOCK):
        drawn = rng.integers(0, effort.rows, (min(BLOCK, effort.draws - done), BATCH))
        for name, side in sides.items():
            found[name].drew += [took(lambda side=side, one=one: side.take(one)) for one in drawn]
    for name, side in sides.items():
        side.close()
        found[name].opened = took(side.open)
        side.close()
        found[name].size = side.size / payload
    return found, payload


def results(folder: Path, effort: Effort, out: Callable[[str], object]) -> Iterator[Result]:
    """Measure all sides."""
    sides: dict[str, Any] = {str(kind): Ours(folder / f"{kind}.exp", kind) for kind in KINDS}
    try:
        import lance
    except ImportError:
        out("Lance is left out: pip install pylance")
    else:
        sides["lance"] = Lance(folder / "rows.lance", lance)
    found, payload = measure(sides, effort)
    theirs = found.get("lance")
    for kind in KINDS:
        ours, name = found[str(kind)], "" if kind is None else f"/{kind}"
        rate = effort.rows / ours.wrote.cpu / 1000
        yield _result(f"extend{name}", rate, ours.wrote, theirs and theirs.wrote, f"{rate:.0f} k rows/s CPU")
        drew = ours.draw.cpu * 1000
        yield _result(f"sample{name}", drew, ours.draw, theirs and theirs.draw, f"{drew:.2f} ms CPU")
        yield _result(f"reopen{name}", ours.opened.wall, ours.opened, theirs and theirs.opened, "")
        size = "–" if theirs is None else f"{theirs.size:.3f}"
        yield Result(f"size{name}", ours.size, f"{ours.size:.3f}", size, note=f"{payload:,} bytes")


def _result(name: str, value: float, ours: Took, theirs: Took | None, text: str) -> Result:
    if theirs is None:
        return Result(name, value, str(ours), note=text)
    ratio = f"{theirs.cpu / max(1e-9, ours.cpu):.1f}x"
    return Result(name, value, str(ours), str(theirs), ratio, note=text)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="a tenth of the rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else Effort()
    with scratch(wanted.folder, effort.rows * 4 * LONGEST * 4) as folder:
        report = Report({} if wanted.smoke else BARS, out, other="Lance", file=wanted.json)
        for result in results(folder, effort, out):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
