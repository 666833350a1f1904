"""Import the Atari DQN data set, and compare the store with TorchRL's memory maps of the same data.

Run as `python benchmarks/datasets.py`; exits 1 below a bar. The files have Dopamine's format, with frames of
real Atari games under a random policy. It needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

from benchmarks.atari import SIZE, STACK, Play, made_up, prepared  # noqa: E402
from benchmarks.images import disk_bytes  # noqa: E402
from benchmarks.probes import rss_anon  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Case, alternate  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402

BATCH = 256
#: Required ratio of the sizes of a row in TorchRL's layout and in the store, by game.
SIZES = {"Breakout": 45, "Pong": 45, "MsPacman": 17}
#: Rows that are compressed together.
SLAB = 1000
#: Dopamine used 9, which takes two to three times as long to write, and about as long to read.
LEVEL = 6

#: The importing process, which prints the seconds of the import alone.
IMPORT = """
import json, sys, time
from expstore.datasets import AtariDQNReader, import_dataset
started = time.perf_counter()
done = import_dataset(AtariDQNReader(sys.argv[1]), sys.argv[2])
print(json.dumps({"seconds": time.perf_counter() - started, "rows": done.rows, "episodes": done.episodes}))
"""


def _bars() -> dict[str, Bar]:
    found = {}
    for game, times in SIZES.items():
        found[f"{game}/import"] = Bar(15, "k rows/s", at_least=True)
        found[f"{game}/memory"] = Bar(600, " MB")
        found[f"{game}/size"] = Bar(times, "x", at_least=True)
        found[f"{game}/sample"] = Bar(1, "x", at_least=True)
    return found


BARS = _bars()


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        rows: Rows of the run that is imported.
        checkpoints: Number of checkpoints of the run that hold these rows.
        steps: Steps that are played in each of the 8 lanes of a game; they are repeated until there are
            enough rows. The default is that of `images.py`, which keeps the same frames.
        torchrl_rows: Rows of TorchRL's memory maps.
        calls: Samples in a block.
        rounds: Blocks of each side.
        smoke: Whether frames may be synthetic.
    """

    rows: int = 1_000_000
    checkpoints: int = 2
    steps: int = 12_500
    torchrl_rows: int = 20_000
    calls: int = 60
    rounds: int = 5
    smoke: bool = False


FULL = Effort()
QUICK = Effort(rows=100_000, torchrl_rows=10_000, calls=20, rounds=3)
SMOKE = Effort(rows=600, steps=80, torchrl_rows=300, calls=1, rounds=1, smoke=True)


# -- files of Dopamine --------------------------------------------------------------------------------


def write_run(game: Play, folder: Path, *, rows: int, checkpoints: int) -> None:
    """Write a run of a ring buffer as Dopamine logged it: six .gz files for each dump of the ring.

    Dopamine dumps the ring before it writes the last slot, so the slot still has the row of the previous lap.

    Args:
        game: The recorded game; repeated until there are enough rows.
        folder: Target folder.
        rows: Slots of the ring times the number of dumps.
        checkpoints: Number of dumps.
    """
    folder.mkdir(parents=True)
    log = np.resize(_log(game), rows)
    slots = rows // checkpoints
    # A dump is missed if the zero rows before an episode pass the slot at which it is due.
    while any(log[(number + 1) * slots - 2] < 0 for number in range(checkpoints)):
        slots -= 1
    for number in range(checkpoints):
        start, added = number * slots, (number + 1) * slots - 1
        ring = np.append(log[start:added], log[start - 1] if number else -1)
        _write_checkpoint(game, folder, number, ring, added)


def _log(game: Play) -> NDArray[np.int64]:
    """Return the frame of each row in the order of writing; -1 for the zero rows before an episode."""
    steps = game.steps(1)
    begins = np.flatnonzero(game.first[steps] == steps)
    return np.insert(steps, np.repeat(begins, STACK - 1), -1)


def _write_checkpoint(game: Play, folder: Path, number: int, ring: NDArray[np.int64], added: int) -> None:
    def column(values: NDArray[Any], dtype: type) -> NDArray[Any]:
        return np.where(ring < 0, 0, values[ring]).astype(dtype)

    def frames() -> Iterator[NDArray[Any]]:
        for first in range(0, ring.size, SLAB):
            slab = game.frames[ring[first : first + SLAB]]
            slab[ring[first : first + SLAB] < 0] = 0
            yield slab

    slots, cursor = ring.size, added % ring.size
    invalid = (cursor - 1 + np.arange(STACK + 1)) % slots
    for name, slabs, shape in (
        ("$store$_observation", frames(), (slots, SIZE, SIZE)),
        ("$store$_action", [column(game.action, np.int32)], (slots,)),
        ("$store$_reward", [column(game.reward.clip(-1, 1), np.float32)], (slots,)),
        ("$store$_terminal", [column(np.roll(game.last, -1), np.uint8)], (slots,)),
        ("add_count", [np.array(added)], ()),
        ("invalid_range", [invalid], invalid.shape),
    ):
        _save(folder / f"{name}_ckpt.{number}.gz", slabs, shape)


def _save(path: Path, slabs: Iterable[NDArray[Any]], shape: tuple[int, ...]) -> None:
    """Write an array in pieces to a gzip file, in the format of `numpy.save`."""
    with gzip.open(path, "wb", compresslevel=LEVEL) as stream:
        for number, slab in enumerate(slabs):
            if not number:
                header = {"descr": slab.dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(stream, header)
            stream.write(slab.tobytes())


# -- the two sides ------------------------------------------------------------------------------------


def import_run(source: Path, target: Path) -> tuple[dict[str, Any], int]:
    """Import a run in a separate process; return its output, and its peak RssAnon in bytes."""
    target.parent.mkdir(parents=True)
    command = [sys.executable, "-c", IMPORT, str(source), str(target)]
    peak = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            with suppress(OSError):  # the process has just ended
                peak = max(peak, rss_anon(process.pid))
            time.sleep(0.01)
        told, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the import of {source} failed with exit code {process.returncode}")
    found: dict[str, Any] = json.loads(told)
    return found, peak


def torchrl_folder(source: Path, folder: Path) -> None:
    """Let TorchRL's class build its memory maps of a run, as it does after a download."""
    theirs = _torchrl_class()
    files = theirs._list_runs(source)
    for number in files:
        theirs._preproc_run(folder / str(number), files, number)
    (folder / "processed.json").write_text(json.dumps({"processed": None}))


def _torchrl_class() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from importing its collectors
        from torchrl.data.datasets.atari_dqn import AtariDQNExperienceReplay
    return AtariDQNExperienceReplay


def _opened(kind: Any, dataset_id: str, root: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL's class warns that its bucket no longer exists
        return kind(dataset_id, BATCH, root=root, download=False)


def measure(game: str, play: Play, folder: Path, effort: Effort) -> Iterator[Result]:
    """Yield the results of a game."""
    from expstore.datasets import AtariDQNExperienceReplay

    name = f"{game}/1"
    raw, part = folder / "raw" / name, folder / "part" / name
    store, maps = folder / "expstore" / name, folder / "torchrl" / name
    write_run(play, raw, rows=effort.rows, checkpoints=effort.checkpoints)
    said, peak = import_run(raw, store)
    rows = said["rows"]
    rate = rows / said["seconds"] / 1e3
    read = (
        f"{disk_bytes(raw) / 1e6:.0f} MB in {effort.checkpoints} checkpoints, {said['episodes']:,} episodes"
    )
    note = f"{rows:,} rows: {read}"
    yield Result(f"{game}/import", rate, f"{rate:.1f}k rows/s", note=note, data=said)
    size = peak / 1e6
    yield Result(f"{game}/memory", size, f"{size:.0f} MB", note="peak RssAnon of the importing process")

    write_run(play, part, rows=effort.torchrl_rows, checkpoints=1)
    torchrl_folder(part, maps)
    mine, other = disk_bytes(store) / rows, disk_bytes(maps) / effort.torchrl_rows
    note = f"bytes per row of {rows:,}, of {effort.torchrl_rows:,} of TorchRL's"
    data = {"expstore": mine, "torchrl": other}
    ratio = other / mine
    yield Result(f"{game}/size", ratio, f"{mine:.0f} B", f"{other:.0f} B", f"{ratio:.0f}x", note, data)

    sides = [
        _opened(kind, name, folder / at)
        for kind, at in ((AtariDQNExperienceReplay, "expstore"), (_torchrl_class(), "torchrl"))
    ]
    cases = [Case(_sample(side), repeat(None), effort.calls) for side in sides]
    ours, theirs = alternate(cases, rounds=effort.rounds, warm=20)
    sides[0].close()
    ratio = theirs.median / ours.median
    note = f"sample({BATCH}) out of {rows:,} rows, out of {effort.torchrl_rows:,} of TorchRL's"
    data = {"expstore": ours.to_json(), "torchrl": theirs.to_json()}
    yield Result(f"{game}/sample", ratio, span(ours), span(theirs), f"{ratio:.2f}x", note, data)


def _sample(rb: Any) -> Callable[[Any], object]:
    return lambda _: rb.sample()["next", "observation"]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__, quick="a tenth of the rows, few calls", folder=ROOT / "benchmarks" / "out")
    parser.add_argument("--only", default=",".join(SIZES), metavar="GAME,...", help="only these games")
    parser.add_argument("--rows", type=int, help="number of rows to import (1,000,000)")
    parser.add_argument(
        "--frames", type=Path, metavar="FOLDER", help="folder for the games' frames; existing ones are used"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    wanted = _arguments(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    effort = replace(effort, rows=wanted.rows or effort.rows)
    report = Report({} if wanted.smoke else BARS, out, other="TorchRL", file=wanted.json)
    for game in wanted.only.split(","):
        with scratch(wanted.folder, 3000 * effort.rows + 2 * SIZE**2 * effort.torchrl_rows) as folder:
            frames = wanted.frames or folder / "frames"
            play = made_up(effort.steps) if effort.smoke else prepared(game, effort.steps, frames)
            for result in measure(game, play, folder, effort):
                report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
