"""The cost of transforms that read other steps: batches with them and batches without.

Run as `python benchmarks/steps.py`. All buffers of a kind sample from one full ring on disk, in turns.
TorchRL's transforms do this work when rows are written, or on slices, so there is no comparison.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.report import Report, Result, options, span  # noqa: E402
from benchmarks.timing import Case, alternate  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, PIXELS, Stream, Workload  # noqa: E402

BATCH = 256

#: The measured transforms by kind of rows. Frames of (84, 84) are stacked vertically, which needs no copy.
TRANSFORMS: dict[str, dict[str, Callable[[], Any]]] = {
    "locomotion": {
        "n-step": lambda: expstore.MultiStepTransform(3, 0.99),
        "frames": lambda: expstore.CatFrames(4, -1, ["observation", ("next", "observation")]),
        "next-state": lambda: expstore.NextStateReconstructor(["observation"]),
        "to-go": lambda: expstore.Reward2GoTransform(0.99),
    },
    "pixels": {
        "n-step": lambda: expstore.MultiStepTransform(3, 0.99),
        "frames": lambda: expstore.CatFrames(4, -2, ["observation"]),
    },
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        workloads: The rows.
        calls: Number of calls per block.
        rounds: Number of blocks per buffer.
    """

    workloads: tuple[Workload, ...] = (LOCOMOTION, PIXELS)
    calls: int = 200
    rounds: int = 5


FULL = Effort()
QUICK = Effort(
    (LOCOMOTION.scaled(rows=100_000, extend_rows=1000), PIXELS.scaled(rows=6000, extend_rows=1000))
)
SMOKE = Effort(
    (LOCOMOTION.scaled(rows=2000, extend_rows=400), PIXELS.scaled(rows=400, extend_rows=100)),
    calls=2,
    rounds=1,
)


def fill(folder: Path, workload: Workload) -> Any:
    """Return a full ring that has wrapped once."""
    settings: dict[str, Any] = {"capacity": workload.rows, "batch_size": BATCH, "seed": 1, "layout": "flat"}
    rb = expstore.open(folder / f"{workload.name}.exp", **settings)
    stream = Stream(workload, workload.extend_rows, pool=20)
    for _ in range(workload.rows // workload.extend_rows + 2):
        rb.extend(next(stream))
    return rb


def looking(rb: Any, transform: Any) -> Any:
    """Return another buffer over the same rows, with a transform."""
    return expstore.TensorDictReplayBuffer(storage=rb.storage, transform=transform, batch_size=BATCH)


def measure(folder: Path, effort: Effort) -> Iterator[Result]:
    for workload in effort.workloads:
        with fill(folder, workload) as rb:
            made = TRANSFORMS[workload.name]
            buffers = [looking(rb, None), *(looking(rb, make()) for make in made.values())]
            cases = [Case(_sample(one), repeat(None), effort.calls) for one in buffers]
            plain, *found = alternate(cases, rounds=effort.rounds, warm=20)
        for name, series in zip(made, found, strict=True):
            more = (series.median - plain.median) * 1e6
            yield Result(
                f"steps/{workload.name}-{name}",
                more,
                span(series),
                span(plain),
                ratio=f"{series.median / plain.median:.1f}x",
                note=f"sample({BATCH}) out of {workload.rows:,} rows: {more:+.0f} µs",
                data={"with": series.to_json(), "without": plain.to_json()},
            )


def _sample(rb: Any) -> Callable[[Any], object]:
    return lambda _: rb.sample()


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="a tenth of the rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    with scratch(wanted.folder, sum(2 * one.rows * one.row_bytes for one in effort.workloads)) as folder:
        report = Report({}, out, other="without", file=wanted.json)
        for result in measure(folder, effort):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
