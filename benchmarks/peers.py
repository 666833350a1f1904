"""expstore compared with other replay buffers and with plain memory copies; exits 1 below a bar.

Run as `python benchmarks/peers.py --only locomotion` (or `atari`, `mixed`, `wide`). All sides hold the same
rows and take turns in one process, each through its public buffer with its defaults. `index-select` and
`memcpy` are not buffers: they gather rows, and copy as many bytes, in memory. Lists, Redis, Lance and
stable-baselines3 hold fewer rows, because their rows are expensive; each figure states the number of rows.
"""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

from benchmarks.adapters import BATCH, SIDES, Missing, Side, disk_bytes  # noqa: E402
from benchmarks.atari import Rows, made_up, prepared  # noqa: E402
from benchmarks.probes import rss_anon  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Case, Series, alternate, each_threads, touch_memory  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, MIXED, WIDE, Workload  # noqa: E402

if TYPE_CHECKING:
    from tensordict import TensorDict

#: The expstore side that is compared with the others: the default settings, except for random bytes.
DEFAULTS = {
    "locomotion": "expstore-default",
    "atari": "expstore-flat",
    "mixed": "expstore-flat",
    "wide": "expstore-flat",
}
GAME = "Breakout"

BARS = {
    "atari/sample/index-select": Bar(0.5, "x", at_least=True),
    **{
        f"{name}/sample/torchrl-{storage}": Bar(1, "x", at_least=True)
        for name in DEFAULTS
        for storage in ("list", "tensor", "memmap")
    },
}


@dataclass(frozen=True)
class Kind:
    """Describe how rows of one kind are created.

    Args:
        name: Name in the table.
        rows: Capacity of a full buffer.
        extend_rows: Rows per call of `extend`.
        row_bytes: Size of a row.
        make: Function that returns rows, given the number of the first and their count.
    """

    name: str
    rows: int
    extend_rows: int
    row_bytes: int
    make: Callable[[int, int], TensorDict]

    @classmethod
    def of(cls, workload: Workload) -> Kind:
        def make(first: int, count: int) -> TensorDict:
            return workload.batch(count, start=first, seed=first)

        return cls(workload.name, workload.rows, workload.extend_rows, workload.row_bytes, make)


def atari(effort: Effort, frames: Path) -> Kind:
    """Return rows of real frames: observation and next observation, 14 KB per row."""
    game = made_up(effort.frames // 8) if effort.smoke else prepared(GAME, effort.frames // 8, frames)
    rows = Rows(game, stack=1, lanes=1)
    return Kind("atari", min(effort.atari_rows, len(rows)), effort.atari_extend, 2 * 84 * 84 + 27, rows.batch)


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        workloads: Synthetic rows.
        atari_rows: Number of rows of real frames.
        atari_extend: Rows of real frames per call of `extend`.
        frames: Number of frames that are played for them.
        calls: Calls per block; a tenth of it for slow sides, a fifth for calls that handle megabytes.
        rounds: Number of blocks per side.
        smoke: Whether frames may be synthetic.
    """

    workloads: tuple[Workload, ...] = (LOCOMOTION, MIXED, WIDE)
    atari_rows: int = 30_000
    atari_extend: int = 250
    frames: int = 100_000
    calls: int = 100
    rounds: int = 5
    smoke: bool = False


FULL = Effort()
QUICK = Effort(
    (LOCOMOTION.scaled(rows=100_000, extend_rows=1000), MIXED.scaled(rows=10_000, extend_rows=1000), WIDE),
    atari_rows=10_000,
    frames=12_000,
    calls=40,
    rounds=3,
)
SMOKE = Effort(
    (
        LOCOMOTION.scaled(rows=600, extend_rows=300),
        MIXED.scaled(rows=300, extend_rows=300),
        replace(
            WIDE, rows=20, extend_rows=10, leaves=tuple(replace(one, shape=(99,)) for one in WIDE.leaves)
        ),
    ),
    atari_rows=300,
    atari_extend=300,
    frames=800,
    calls=1,
    rounds=1,
    smoke=True,
)
MB = 1 << 20


class Peers:
    """Measure rows of one kind on all available sides."""

    def __init__(self, folder: Path, kind: Kind, effort: Effort, threads: Sequence[int]) -> None:
        self.folder, self.kind, self.effort, self.threads = folder, kind, effort, threads
        self.name = kind.name
        self.sides: dict[str, Side] = {}
        self.rows: dict[str, int] = {}
        self.inputs: dict[str, dict[str, Iterator[Any]]] = {}
        self._stack = ExitStack()

    def run(self, skip: Callable[[str, str], object]) -> Iterator[Result]:
        with self._stack:
            touch_memory(min(1 << 31, 4 * self.kind.rows * self.kind.row_bytes))
            for name in SIDES:
                try:
                    yield self._fill(name)
                except Missing as exc:
                    skip(f"{self.name}/{name}", str(exc))
            for more in each_threads(self.threads):
                for act in ("sample", "extend", "add"):
                    yield from self._compare(act, more)

    def _fill(self, name: str) -> Result:
        """Fill a side until its ring is full; report the size of its rows."""
        kind, folder = self.kind, self.folder / f"{self.name}-{name}"
        folder.mkdir()
        gc.collect()
        first = kind.make(0, kind.extend_rows)
        if not self.effort.smoke:
            self._warm(name, folder / "warm", first)
        before = rss_anon()
        rows = min(kind.rows, getattr(SIDES[name], "most", kind.rows))
        side = SIDES[name](folder, rows, first)
        self._stack.callback(side.close)
        made = rss_anon()
        pool = max(1, min(8, 64 * MB // (kind.row_bytes * kind.extend_rows)))
        batches = [kind.make(n * kind.extend_rows, kind.extend_rows) for n in range(pool)]
        taken = [side.take(batch) for batch in batches]
        singles = [side.take(first[n]) for n in range(min(64, kind.extend_rows))]
        held = rss_anon() - made
        for number in range(-(-rows // kind.extend_rows)):
            given = number % pool
            # Sides that keep references to their inputs need separate rows.
            side.extend(side.take(batches[given]) if side.keeps_inputs else taken[given])
        side.settle()
        memory = (rss_anon() - before - held + side.elsewhere()) / rows
        disk = disk_bytes(folder) / rows
        self.sides[name], self.rows[name] = side, rows
        self.inputs[name] = {"extend": cycle(taken), "add": cycle(singles), "sample": repeat(None)}
        text = f"{disk:.0f} B on disk, {memory:.0f} B in memory"
        data = {"disk": disk, "memory": memory, "rows": rows, "row_bytes": kind.row_bytes}
        return Result(
            f"{self.name}/space/{name}", disk + memory, text, note=f"per row of {rows:,}", data=data
        )

    def _warm(self, name: str, folder: Path, batch: TensorDict) -> None:
        """Make a side load what it loads once, so that this does not count as memory of its rows."""
        folder.mkdir()
        side = SIDES[name](folder, len(batch), batch)
        try:
            side.extend(side.take(batch))
            side.sample(None)
        finally:
            side.close()
            shutil.rmtree(folder)

    def _calls(self, name: str, act: str) -> int:
        size = self.kind.row_bytes * {"extend": self.kind.extend_rows, "sample": BATCH}.get(act, 1)
        parts = (10 if self.sides[name].slow else 1) * (5 if size > 4 * MB else 1)
        return max(1, self.effort.calls // parts)

    def _compare(self, act: str, more: str) -> Iterator[Result]:
        def settle() -> None:
            for side in self.sides.values():
                side.settle()

        cases = [
            Case(getattr(side, act), self.inputs[name][act], self._calls(name, act), settle=settle)
            for name, side in self.sides.items()
            if act in side.acts
        ]
        names = [name for name, side in self.sides.items() if act in side.acts]
        found = dict(zip(names, alternate(cases, rounds=self.effort.rounds, warm=10), strict=True))
        ours = found[DEFAULTS[self.name]]
        for name, series in found.items():
            if name != DEFAULTS[self.name]:
                yield self._result(f"{self.name}/{act}/{name}{more}", name, ours, series)

    def _result(self, called: str, name: str, ours: Series, theirs: Series) -> Result:
        ratio = theirs.median / ours.median
        mine = DEFAULTS[self.name]
        note = f"{self.rows[mine]:,} rows in {mine}, {self.rows[name]:,} in {name}"
        data = {"expstore": ours.to_json(), name: theirs.to_json(), "side": mine}
        return Result(called, ratio, span(ours), span(theirs), f"{ratio:.2f}x", note, data)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="fewer rows and calls", folder=ROOT / "benchmarks" / "out")
    parser.add_argument("--only", choices=DEFAULTS, help="rows of this kind; all kinds by default")
    parser.add_argument("--frames", type=Path, help="folder for frames of games; in FOLDER by default")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    makers: dict[str, Callable[[], Kind]] = {
        workload.name: lambda workload=workload: Kind.of(workload)  # type: ignore[misc]
        for workload in effort.workloads
    }
    makers["atari"] = lambda: atari(effort, wanted.frames or wanted.folder / "frames")
    report = Report({} if wanted.smoke else BARS, out, other="the other", file=wanted.json)
    with scratch(wanted.folder, (30 if not wanted.smoke else 1) << 28) as folder:
        for name, make in makers.items():
            if wanted.only in (None, name):
                for result in Peers(folder, make(), effort, wanted.threads).run(report.skip):
                    report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
