"""Packed images compared with TorchRL's LazyMemmapStorage: size on disk, speed of sampling and writing.

Run as `python -m benchmarks.images`; exits 1 below a bar. The frames are of real Atari games under a random
policy. Both observations of every row are stored and read, and both sides hold the same rows.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import expstore
from benchmarks.atari import GAMES, LANES, Play, Rows, load_game, make_game
from benchmarks.report import Result, Setup, at_least, compare, compare_offered, run_program, scratch
from benchmarks.timing import Case, alternate, offer

BATCH, SLICES = 256, 8
#: Kinds of rows: a game, and the number of environments whose steps alternate.
KINDS = {"Breakout/frame-1": ("Breakout", 1)} | {f"{game}/frame-8": (game, LANES) for game in GAMES}
#: Rows of a call that writes: 8 steps of 8 lanes.
WRITE = 64

BARS = {
    "Breakout/frame-1/size": at_least(80),
    "Breakout/frame-8/size": at_least(80),
    "MsPacman/frame-8/size": at_least(20),
    **{f"{kind}/sample": at_least(1) for kind in KINDS},
    **{f"{kind}/slices": at_least(3) for kind in KINDS},
    **{f"{game}/extend-{WRITE}": at_least(20, "k rows/s") for game in GAMES},
    "stacks/add": at_least(2),
    "stacks/extend-256": at_least(1.4),
    "stacks/sample-32": at_least(3),
    "video/slices-16": at_least(6),
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        steps: Steps of each of the 8 lanes of a game. The size on disk is measured with all of them.
        rows: Rows of the stores that are compared with TorchRL's, and of the stores that are written to.
        calls: Calls in a block.
        rounds: Blocks of each side.
        seconds: Seconds during which rows are written without a pause.
        stacks: Rows of the stores of stacks and of videos.
        extends: Calls of `extend` in a block of stacks.
        offered: Calls at a fixed rate.
    """

    steps: int = 12_500
    rows: int = 20_000
    calls: int = 60
    rounds: int = 5
    seconds: float = 5.0
    stacks: int = 4096
    extends: int = 20
    offered: int = 200


FULL = Effort()
SMOKE = Effort(steps=80, rows=300, calls=1, rounds=1, seconds=0.05, stacks=512, extends=2, offered=2)


def open_ours(folder: Path, capacity: int, sampler: Any = None) -> Any:
    fields = {key: {"layout": "packed"} for key in ("observation", "next.observation")}
    return expstore.open(
        folder / "store.exp",
        capacity=capacity,
        batch_size=BATCH,
        layout=expstore.Layout(fields=fields),
        sampler=sampler,
        seed=1,
    )


def disk_bytes(folder: Path) -> int:
    """Return the disk space of all files below a folder in bytes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def measure(setup: Setup) -> Iterator[Result]:
    effort = SMOKE if setup.smoke else FULL
    games = {
        name: make_game(effort.steps)
        if setup.smoke
        else load_game(name, effort.steps, setup.cache / "frames")
        for name in GAMES
    }
    for kind, (name, lanes) in KINDS.items():
        yield from measure_kind(kind, games[name], lanes, setup.folder, effort)
    yield from measure_stacks(games[GAMES[0]], setup.folder, effort)
    yield from measure_videos(setup.folder, effort)
    # A RAM disk, so that the rate is that of the code.
    with scratch(setup.folder if setup.smoke else Path("/dev/shm"), 0) as folder:
        for name, game in games.items():
            yield measure_writes(f"{name}/extend-{WRITE}", game, folder / name, effort)


def measure_kind(kind: str, game: Play, lanes: int, folder: Path, effort: Effort) -> Iterator[Result]:
    """Compare size on disk, batches and slices with TorchRL's."""
    from torchrl import data

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    rows = Rows(game, lanes=lanes)
    count = min(len(rows), effort.rows)
    storage = data.LazyMemmapStorage(count, scratch_dir=str(folder / "torchrl"))
    theirs = data.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    # Always lane by lane: otherwise TorchRL would find no slices.
    for batch in Rows(game, lanes=1).batches(count, 1000):
        theirs.extend(batch)
    # Steps of one environment are written in large batches; of 8 environments one step each.
    each = lanes if lanes > 1 else 1000
    yield measure_size(f"{kind}/size", rows, each, folder, disk_bytes(folder / "torchrl") / count)
    with open_ours(folder, count) as ours:
        for batch in rows.batches(count, each):
            ours.extend(batch)
        ours.flush()
        yield compare_samples(f"{kind}/sample", ours, theirs, effort)
    with open_ours(folder, count, expstore.SliceSampler(num_slices=SLICES)) as ours:
        sampler = data.SliceSampler(num_slices=SLICES, traj_key=("collector", "traj_ids"), cache_values=False)
        slices = data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)
        yield compare_samples(f"{kind}/slices", ours, slices, effort)
    shutil.rmtree(folder / "torchrl")
    shutil.rmtree(folder / "store.exp")


def measure_size(name: str, rows: Rows, each: int, folder: Path, theirs: float) -> Result:
    """Return the disk space per row of a closed store of all rows."""
    count, store = len(rows), folder / "store.exp"
    with open_ours(folder, count) as rb:
        for batch in rows.batches(count, each):
            rb.extend(batch)
    ours, columns = disk_bytes(store) / count, disk_bytes(store / "columns") / count
    images = sum(disk_bytes(store / "columns" / at) for at in ("observation", "next/observation")) / count
    shutil.rmtree(store)
    parts = f"{images:.0f} images, {columns - images:.0f} other columns, {ours - columns:.0f} other files"
    note = f"bytes per transition of {count:,}: {parts}"
    data = {"expstore": ours, "torchrl": theirs, "columns": columns, "images": images}
    ratio = theirs / ours
    return Result(name, ratio, f"{ours:.0f} B", f"{theirs:.0f} B", f"{ratio:.0f}x", note, data)


def compare_samples(name: str, ours: Any, theirs: Any, effort: Effort) -> Result:
    cases = [Case(lambda _, rb=rb: rb.sample(), repeat(None), effort.calls) for rb in (ours, theirs)]  # type: ignore[misc]
    mine, other = alternate(cases, rounds=effort.rounds)
    return compare(name, mine, other)


def measure_stacks(game: Play, folder: Path, effort: Effort) -> Iterator[Result]:
    """Compare rows of stacks of four frames: written, at a fixed rate too, and sampled."""
    from torchrl import data

    rows, size = Rows(game, lanes=1, stack=4), effort.stacks
    batches = [rows.batch(first, 256) for first in range(0, size, 256)]
    storage = data.LazyMemmapStorage(size, scratch_dir=str(folder / "torchrl"))
    theirs = data.TensorDictReplayBuffer(storage=storage, batch_size=32)
    with open_ours(folder, size) as ours:
        for batch in batches:
            ours.extend(batch)
            theirs.extend(batch.clone())
        singles = [batch[0] for batch in batches] + list(batches[0].unbind(0))
        acts: dict[str, tuple[str, list[Any], int, float]] = {
            "extend-256": ("extend", batches, effort.extends, 20),
            "add": ("add", singles, effort.calls, 500),
            "sample-32": ("sample", [32], effort.calls, 0),
        }
        for name, (act, items, calls, rate) in acts.items():
            sides = [
                Case(getattr(rb, act), (copy_row(item) for item in cycle(items)), calls, settle=ours.flush)
                for rb in (ours, theirs)
            ]
            yield compare(f"stacks/{name}", *alternate(sides, rounds=effort.rounds))
            if rate:
                late = [offer(replace(side, calls=effort.offered), rate=rate) for side in sides]
                yield compare_offered(f"stacks/{name}-offered", *late, f"{rate:.0f} calls/s, from when due")
    shutil.rmtree(folder / "torchrl")
    shutil.rmtree(folder / "store.exp")


def copy_row(item: Any) -> Any:
    """Return a copy of rows, because TorchRL writes into its inputs."""
    return item if isinstance(item, int) else item.clone()


def measure_videos(folder: Path, effort: Effort) -> Iterator[Result]:
    """Compare 16 slices of 64 steps of packed frames of 64 x 64 x 3."""
    import torch
    from tensordict import TensorDict
    from torchrl import data

    size = effort.stacks
    number = torch.arange(size)
    x = torch.arange(64)
    frames = (x[None, :, None] + x[None, None, :] // 2 + number[:, None, None]) % 64 * 4
    ends = {"done": (number % 128 == 127)[:, None], "terminated": (number % 128 == 127)[:, None]}
    ends["truncated"] = torch.zeros_like(ends["done"])
    rows = TensorDict(
        {
            "pixels": frames.to(torch.uint8)[..., None].repeat(1, 1, 1, 3),
            "next": ends,
            "collector": {"traj_ids": number // 128},
        },
        [size],
    )
    slices = {"num_slices": 16}
    sampler = data.SliceSampler(**slices, traj_key=("collector", "traj_ids"), cache_values=False)
    storage = data.LazyMemmapStorage(size, scratch_dir=str(folder / "torchrl"))
    theirs = data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=16 * 64)
    theirs.extend(rows.clone())
    layout = expstore.Layout(fields={"pixels": {"layout": "packed"}})
    with expstore.open(
        folder / "store.exp",
        capacity=size,
        batch_size=16 * 64,
        layout=layout,
        sampler=expstore.SliceSampler(**slices),
        seed=1,
    ) as ours:
        for first in range(0, size, 256):
            ours.extend(rows[first : first + 256])
        ours.flush()
        yield compare_samples("video/slices-16", ours, theirs, effort)
    shutil.rmtree(folder / "torchrl")
    shutil.rmtree(folder / "store.exp")


def measure_writes(name: str, game: Play, folder: Path, effort: Effort) -> Result:
    """Extend without a pause, and sync everything."""
    rows = Rows(game, lanes=LANES)
    batches = [rows.batch(first, WRITE) for first in range(0, effort.rows, WRITE)]
    written, clock = 0, time.perf_counter
    with open_ours(folder, effort.rows) as rb:
        rb.extend(batches[0])
        rb.sample()
        for thread in threading.enumerate():
            if thread.name == "expstore-warm":  # it loads the compiled loops, once per process
                thread.join()
        started = clock()
        while clock() - started < effort.seconds:
            rb.extend(batches[written // WRITE % len(batches)])
            written += WRITE
        rb.flush()
        rate = written / (clock() - started) / 1e3
    shutil.rmtree(folder)
    return Result(name, rate, f"{rate:.1f}k rows/s", note=f"{written:,} rows, {WRITE} a call, on a RAM disk")


if __name__ == "__main__":
    sys.exit(run_program(measure, BARS, gigabytes=2))
