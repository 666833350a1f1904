"""Rows of tokens, of any length, in an Arrow store: how fast they are written, drawn, and found again.

Run as `python benchmarks/tokens.py`; exits 1 below a bar. Lengths are 10 to 2000, tokens int32, Zipf over
32,000 words. Beside it stands Lance (`pip install pylance`), which is left out where it is not installed.
Times are of the process's CPUs: a busy machine does not change them much; the wall clock stands beside.
"""

from __future__ import annotations

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
from expstore.arrowtypes import ragged_text  # noqa: E402
from expstore.episodes import Steps  # noqa: E402
from expstore.keys import find_keys  # noqa: E402
from expstore.schema import ARROW, Field, Schema  # noqa: E402
from expstore.storages import ArrowStorage  # noqa: E402
from expstore.writers import RoundRobinWriter  # noqa: E402

WORDS, SHORTEST, LONGEST = 32_000, 10, 2000
BATCH, EXTEND = 256, 1000
SCHEMA = Schema([Field(("tokens",), ARROW, (), ragged_text("int32", (None,))), Field(("id",), "int64", ())])
BARS = {
    "extend": Bar(50, "k rows/s", at_least=True),
    "sample": Bar(5, " ms"),
    "size": Bar(1.1, "x"),
    "size/zstd": Bar(0.6, "x"),
    "reopen": Bar(1, " s"),
}


@dataclass(frozen=True)
class Effort:
    """Say how much is done: rows of the stores, draws of each."""

    rows: int = 200_000
    draws: int = 100


QUICK, SMOKE = Effort(20_000, 40), Effort(2000, 3)


@dataclass
class Took:
    """Hold what something took: seconds of the process's CPUs, and of the wall clock."""

    cpu: float
    wall: float

    def __str__(self) -> str:
        return f"{self.cpu:.3g} s CPU, {self.wall:.3g} s"


def took(act: Callable[[], object]) -> Took:
    """Do something, and say what it took."""
    cpu, wall = time.process_time(), time.perf_counter()
    act()
    return Took(time.process_time() - cpu, time.perf_counter() - wall)


def rows_of_tokens(count: int, seed: int) -> Iterator[pa.Array]:
    """Yield rows, some at a time; the same ones each time."""
    rng = np.random.default_rng(seed)
    chances = 1 / np.arange(1, WORDS + 1)
    known = rng.choice(WORDS, 1 << 22, p=chances / chances.sum()).astype(np.int32)
    for _ in range(0, count, EXTEND):
        ends = np.cumsum(rng.integers(SHORTEST, LONGEST + 1, EXTEND))
        start = int(rng.integers(0, known.size - ends[-1]))
        offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
        yield pa.ListArray.from_arrays(offsets, pa.array(known[start : start + ends[-1]]))


class Ours:
    """An Arrow store of these rows."""

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

    def take(self, numbers: np.ndarray) -> None:
        self.kept.read(numbers + 1)

    def close(self) -> None:
        self.kept.close()

    @property
    def size(self) -> int:
        """What the tokens take on the disk."""
        return sum(path.stat().st_size for path in (self.path / "segments").iterdir())


class Lance:
    """A Lance data set of the same."""

    def __init__(self, path: Path, lance: Any) -> None:
        self.path, self._lance = path, lance

    def open(self) -> None:
        with suppress(ValueError, OSError):
            self.data = self._lance.dataset(str(self.path))

    def extend(self, tokens: pa.Array) -> None:
        table = pa.table({"tokens": tokens})
        mode = "append" if self.path.exists() else "create"
        self.data = self._lance.write_dataset(table, str(self.path), mode=mode)

    def take(self, numbers: np.ndarray) -> None:
        self.data.take(np.sort(numbers).tolist())

    def close(self) -> None:
        del self.data

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())


def measure(side: Any, effort: Effort) -> dict[str, Any]:
    """Write rows, draw some, close, open again."""
    side.open()
    payload, wrote = 0, Took(0, 0)
    for tokens in rows_of_tokens(effort.rows, 0):
        spent = took(lambda tokens=tokens: side.extend(tokens))
        wrote = Took(wrote.cpu + spent.cpu, wrote.wall + spent.wall)
        payload += tokens.nbytes
    rng = np.random.default_rng(1)
    side.take(rng.integers(0, effort.rows, BATCH))
    time.sleep(1)  # compiled loops load in the background
    draws = [took(lambda: side.take(rng.integers(0, effort.rows, BATCH))) for _ in range(effort.draws)]
    side.close()
    opened = took(side.open)
    side.close()
    return {
        "wrote": wrote,
        "drew": Took(float(np.median([d.cpu for d in draws])), float(np.median([d.wall for d in draws]))),
        "opened": opened,
        "size": side.size / payload,
        "payload": payload,
    }


def results(folder: Path, effort: Effort, out: Callable[[str], object]) -> Iterator[Result]:
    """Measure all sides."""
    theirs: dict[str, Any] | None = None
    try:
        import lance
    except ImportError:
        out("Lance is left out: pip install pylance")
    else:
        theirs = measure(Lance(folder / "rows.lance", lance), effort)
    for kind in (None, "narrow", "lz4", "zstd"):
        ours = measure(Ours(folder / f"{kind}.exp", kind), effort)
        name = "" if kind is None else f"/{kind}"
        beside = theirs if kind is None else None
        rate = effort.rows / ours["wrote"].cpu / 1000
        yield _result(f"extend{name}", rate, "wrote", ours, beside, f"{rate:.0f} k rows/s CPU")
        drew = ours["drew"].cpu * 1000
        yield _result(f"sample{name}", drew, "drew", ours, beside, f"{drew:.2f} ms CPU")
        yield _result(f"reopen{name}", ours["opened"].wall, "opened", ours, beside, "")
        found = "–" if beside is None else f"{beside['size']:.3f}"
        yield Result(
            f"size{name}", ours["size"], f"{ours['size']:.3f}", found, note=f"{ours['payload']:,} bytes"
        )


def _result(
    name: str, value: float, what: str, ours: dict[str, Any], theirs: dict[str, Any] | None, text: str
) -> Result:
    if theirs is None:
        return Result(name, value, str(ours[what]), note=text)
    ratio = f"{theirs[what].cpu / max(1e-9, ours[what].cpu):.1f}x"
    return Result(name, value, str(ours[what]), str(theirs[what]), ratio, note=text)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="a tenth of the rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else Effort()
    with scratch(wanted.folder, effort.rows * 4 * LONGEST * 3) as folder:
        report = Report({} if wanted.smoke else BARS, out, other="Lance")
        for result in results(folder, effort, out):
            report.add(result)
    return report.end(wanted.json)


if __name__ == "__main__":
    sys.exit(main())
