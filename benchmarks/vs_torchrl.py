"""expstore compared with TorchRL's LazyMemmapStorage, and with its own targets.

Run as `python -m benchmarks.vs_torchrl`; exits 1 below a bar. Both sides are used through their public
buffers with their defaults, in one process, alternating. All measurements are warm.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import expstore
from benchmarks.probes import ROOT, kill_writer, run_probe
from benchmarks.report import Bar, Result, Setup, at_least, compare, run_program, slowdown, slowest, span
from benchmarks.timing import Case, Series, alternate, busy_thread, each_threads, touch_memory
from benchmarks.workloads import LOCOMOTION, PIXELS, TRAJECTORY, Stream, Workload

BATCH = 256
MB = 1 << 20

BARS = {
    "locomotion/sample": at_least(3),
    "locomotion/extend-filling": at_least(2),
    "locomotion/extend-full": at_least(2),
    "locomotion/add-filling": at_least(3),
    "locomotion/add-full": at_least(3),
    "locomotion/extend-busy": Bar(3, "x its quiet time"),
    "trajectories/return-sql": at_least(100),
    "trajectories/return-query": at_least(10),
    "trajectories/reward-sql": at_least(10),
    "dumps/next-time": Bar(1 / 10, " of the first"),
    "dumps/next-bytes": Bar(1 / 30, " of the first"),
    "pixels/sample": at_least(8),
    "pixels/extend-filling": at_least(2),
    "pixels/extend-full": at_least(2),
    "pixels/add-filling": at_least(3),
    "pixels/add-full": at_least(3),
    "reopen/closed": Bar(0.5, " s"),
    "reopen/killed": Bar(0.5, " s"),
    "memory/growth": Bar(300, " MB"),
    "cli/help": Bar(0.5, " s"),
    "cli/info": Bar(1, " s"),
    "cli/sql": Bar(1, " s"),
}


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmark.

    Args:
        rounds: Blocks of each side.
        calls: Calls in a block.
        wide_calls: Calls in a block where one call writes megabytes.
        busy_calls: TorchRL's calls in a block while another thread is busy.
        query_calls: Queries of trajectories in a block; TorchRL's reads all rows and is run once.
        warm: Calls before the first block.
        warm_seconds: Seconds of sampling before anything is timed.
        repeats: Number of openings, of `dumps`, and of runs of a command.
        pool: Number of prepared batches.
        locomotion, pixels: The rows.
        memory_rows: Rows of the store whose memory is measured.
        memory_extend_rows: Rows per call there.
        least_return, least_reward: Thresholds of the queries.
    """

    rounds: int = 5
    calls: int = 400
    wide_calls: int = 10
    busy_calls: int = 100
    query_calls: int = 10
    warm: int = 20
    warm_seconds: float = 2.0
    repeats: int = 5
    pool: int = 40
    locomotion: Workload = LOCOMOTION
    pixels: Workload = PIXELS
    memory_rows: int = 10_000_000
    memory_extend_rows: int = 10_000
    least_return: float = 30.0
    least_reward: float = 3.5


FULL = Effort()
SMOKE = Effort(
    rounds=1,
    calls=2,
    wide_calls=2,
    busy_calls=1,
    query_calls=1,
    warm=1,
    warm_seconds=0.0,
    repeats=1,
    pool=2,
    locomotion=LOCOMOTION.scaled(rows=1000, extend_rows=250),
    pixels=PIXELS.scaled(rows=100, extend_rows=10),
    memory_rows=5000,
    memory_extend_rows=500,
    least_return=-100.0,
    least_reward=2.5,
)


def count_calls(workload: Workload, act: str, effort: Effort) -> int:
    """Return the number of calls in a block."""
    is_wide = act == "extend" and workload.extend_rows * workload.row_bytes > 4 * MB
    return effort.wide_calls if is_wide else effort.calls


class Pair:
    """A buffer of each side with one capacity, and separate inputs (TorchRL writes into its inputs)."""

    def __init__(self, folder: Path, workload: Workload, capacity: int, effort: Effort) -> None:
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        logging.getLogger("torchrl").setLevel(logging.WARNING)
        folder.mkdir()
        self.folder, self.workload, self.capacity, self.effort = folder, workload, capacity, effort
        self.ours = expstore.open(folder / "store.exp", capacity=capacity, batch_size=BATCH, layout="flat")
        storage = LazyMemmapStorage(capacity, scratch_dir=str(folder / "torchrl"))
        self.theirs = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
        size = workload.extend_rows
        # Inputs of at most 128 MB; larger ones would not be read from warm memory.
        pool = max(1, min(effort.pool, 128 * MB // (workload.row_bytes * size)))
        self.batches = [Stream(workload, size, pool=pool) for _ in range(2)]
        self._rows = [Stream(workload, 0, pool=min(1000, size * pool)) for _ in range(2)]
        self.extend_both()  # what both sides do only once
        until = time.monotonic() + effort.warm_seconds
        while time.monotonic() < until:
            self.ours.sample()
            self.theirs.sample()

    def extend_both(self) -> None:
        self.ours.extend(next(self.batches[0]))
        self.theirs.extend(next(self.batches[1]))

    def fill(self) -> None:
        while len(self.ours) < self.capacity:
            self.extend_both()

    def cases(self, act: str) -> list[Case]:
        """Return both sides' blocks of `extend`, `add` or `sample`."""
        inputs: dict[str, list[Any]] = {
            "extend": self.batches,
            "add": self._rows,
            "sample": [repeat(BATCH)] * 2,
        }
        calls = count_calls(self.workload, act, self.effort)
        new_bytes = calls * self.workload.row_bytes * (self.workload.extend_rows if act == "extend" else 1)

        def settle() -> None:
            # Outstanding writes of expstore must not run during TorchRL's block.
            self.ours.flush()
            if act != "sample" and len(self.ours) < self.capacity:
                touch_memory(2 * new_bytes)

        sides = zip((self.ours, self.theirs), inputs[act], strict=True)
        return [Case(getattr(side, act), items, calls, settle=settle) for side, items in sides]

    def compare(self, act: str, name: str) -> Result:
        ours, theirs = alternate(self.cases(act), rounds=self.effort.rounds, warm=self.effort.warm)
        return compare(name, ours, theirs)

    def close(self) -> None:
        self.ours.close()
        del self.theirs


def measure(setup: Setup) -> Iterator[Result]:
    effort = SMOKE if setup.smoke else FULL
    for workload in (effort.locomotion, effort.pixels):
        yield from measure_filling(setup.folder / "filling", workload, effort)
        folder = setup.folder / "full"
        yield from measure_full(folder, workload, effort)
        if workload is effort.locomotion:
            yield from measure_openings(folder / "store.exp", effort)
            yield from measure_commands(folder / "store.exp", effort)
            yield measure_start(folder / "store.exp", effort)
        shutil.rmtree(folder)
    yield measure_memory(setup.folder / "memory.exp", effort)


# -- compared with TorchRL ----------------------------------------------------------------------------


def measure_filling(folder: Path, workload: Workload, effort: Effort) -> Iterator[Result]:
    """Measure writing to a ring that is not full yet."""
    acts = {"add": 1, "extend": workload.extend_rows}
    capacity = workload.extend_rows + 1
    for act, rows in acts.items():
        capacity += (effort.rounds * count_calls(workload, act, effort) + effort.warm) * rows
    pair = Pair(folder, workload, capacity, effort)
    for act in acts:
        yield pair.compare(act, f"{workload.name}/{act}-filling")
    if len(pair.ours) == pair.capacity:
        raise RuntimeError("the ring is full, though it should be filling")
    pair.close()
    shutil.rmtree(folder)


def measure_full(folder: Path, workload: Workload, effort: Effort) -> Iterator[Result]:
    """Measure a full ring: queries of trajectories, writing and reading, `dumps`."""
    pair = Pair(folder, workload, workload.rows, effort)
    pair.fill()
    has_trajectories = workload.name == "locomotion"
    if has_trajectories:  # before rows are evicted: SQL also finds the episodes of evicted rows
        for suffix in each_threads():
            yield from measure_queries(pair, suffix)
    for suffix in each_threads():
        for act, name in (("add", "add-full"), ("extend", "extend-full"), ("sample", "sample")):
            yield pair.compare(act, f"{workload.name}/{name}{suffix}")
    if has_trajectories:
        yield measure_in_memory(pair)
        yield measure_busy(pair)
        yield from measure_dumps(pair)
    pair.close()


def measure_in_memory(pair: Pair) -> Result:
    """Compare `extend` with TorchRL's tensors in memory, which no other process sees and no kill survives."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    memory = TensorDictReplayBuffer(storage=LazyTensorStorage(pair.capacity), batch_size=BATCH)
    while len(memory) < pair.capacity:
        memory.extend(next(pair.batches[1]))
    ours, theirs = pair.cases("extend")
    theirs = replace(theirs, act=memory.extend)
    series = alternate([ours, theirs], rounds=pair.effort.rounds, warm=pair.effort.warm)
    return compare(f"{pair.workload.name}/extend-memory", *series)


def measure_queries(pair: Pair, suffix: str) -> Iterator[Result]:
    """Ask both sides which trajectories have a return, or a reward, above a number."""
    from torchrl.data import traj

    effort, ours, theirs = pair.effort, pair.ours, pair.theirs
    returns = 'SELECT trajectory_id FROM episodes WHERE "return" > $least ORDER BY 1'
    rewards = "SELECT collector.traj_ids AS t FROM transitions GROUP BY t HAVING max(next.reward) > $least"

    def run(query: str, least: float) -> list[int]:
        return [row[0] for row in ours.sql(query, {"least": least}).fetchall()]

    questions: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "return-sql": (
            lambda: run(returns, effort.least_return),
            lambda: theirs.query(traj.reward.sum() > effort.least_return),
        ),
        "return-query": (
            lambda: ours.query(expstore.trajectories.traj.reward.sum() > effort.least_return),
            lambda: theirs.query(traj.reward.sum() > effort.least_return),
        ),
        "reward-sql": (
            lambda: run(rewards, effort.least_reward),
            lambda: theirs.query(traj.reward.max() > effort.least_reward),
        ),
    }
    for name, asks in questions.items():
        answers = [read_ids(ask()) for ask in asks]
        if not answers[0] == answers[1] != []:
            first = [answer[:5] for answer in answers]
            raise RuntimeError(f"{name}: the sides give answers that begin with {first[0]} and {first[1]}")
        cases = [
            Case(lambda _, ask=ask: ask(), repeat(None), calls)  # type: ignore[misc]
            for ask, calls in zip(asks, (effort.query_calls, 1), strict=True)
        ]
        mine, other = alternate(cases, rounds=min(effort.rounds, 3), warm=1)
        yield compare(f"trajectories/{name}{suffix}", mine, other, f"{len(answers[0])} trajectories")


def read_ids(answer: list[Any]) -> list[int]:
    """Return the ids of trajectories, which are ids or rows."""
    return sorted(
        one if isinstance(one, int) else int(getattr(one, "data", one)[TRAJECTORY][0]) for one in answer
    )


def measure_busy(pair: Pair) -> Result:
    """Extend while another thread runs Python code."""
    ours, theirs = pair.cases("extend")
    few = replace(theirs, calls=pair.effort.busy_calls)
    cases = [ours, replace(ours, around=busy_thread), theirs, replace(few, around=busy_thread)]
    series = alternate(cases, rounds=pair.effort.rounds, warm=pair.effort.warm)
    ratios = [series[n + 1].median / series[n].median for n in (0, 2)]
    names = ("expstore", "expstore_busy", "torchrl", "torchrl_busy")
    return Result(
        "locomotion/extend-busy",
        ratios[0],
        f"{ratios[0]:.1f}x: {slowdown(series[0], series[1])}",
        f"{ratios[1]:.1f}x: {slowdown(series[2], series[3])}",
        data={name: one.to_json() for name, one in zip(names, series, strict=True)},
    )


def measure_dumps(pair: Pair) -> Iterator[Result]:
    """Measure the first `dumps` into a folder, and the next one, an `extend` later; TorchRL's do not sync."""
    first: list[list[float]] = [[], []]
    following: list[list[float]] = [[], []]
    sizes: dict[str, int] = {}
    for number in range(pair.effort.repeats):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            rb, folder = (pair.ours, pair.theirs)[side], pair.folder / "versions"
            pair.ours.flush()
            os.sync()  # so that no side has background work during the other side's call
            seconds, written = _dump(rb, folder)
            first[side].append(seconds)
            rb.extend(next(pair.batches[side]))
            seconds, added = _dump(rb, folder)
            following[side].append(seconds)
            if side == 0:
                sizes |= {"first": written.new_bytes, "next": added.new_bytes}
            else:
                sizes["torchrl"] = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
            shutil.rmtree(folder)
    ours, theirs = Series([first[0]]), Series([first[1]])
    yield compare("dumps/first", ours, theirs)
    next_ours, next_theirs = Series([following[0]]), Series([following[1]])
    share = next_ours.median / ours.median
    ratio = f"1/{1 / share:.0f} of the first"
    yield Result("dumps/next-time", share, span(next_ours), span(next_theirs), ratio)
    share = sizes["next"] / sizes["first"]
    yield Result(
        "dumps/next-bytes",
        share,
        f"{sizes['first'] / 1e6:.1f} MB, then {sizes['next'] / 1e6:.2f} MB",
        f"{sizes['torchrl'] / 1e6:.1f} MB each",
        f"1/{1 / share:.0f} of the first",
    )


def _dump(rb: Any, folder: Path) -> tuple[float, Any]:
    gc.collect()
    started = time.perf_counter()
    answer = rb.dumps(folder)
    return time.perf_counter() - started, answer


# -- own targets --------------------------------------------------------------------------------------


def measure_openings(store: Path, effort: Effort) -> Iterator[Result]:
    rows = effort.locomotion.extend_rows
    for name in ("reopen/closed", "reopen/killed"):
        answers = []
        for number in range(effort.repeats):
            if name == "reopen/killed":
                kill_writer(store, extend_rows=rows, calls=effort.calls, seed=number)
            answers.append(run_probe("reopen", path=str(store), batch_size=BATCH))
        note = "; ".join([f"{answers[0]['rows']:,} rows", *filter(None, [answers[-1]["recovered"]])])
        yield slowest(name, [answer["open"] for answer in answers], note, {"probes": answers})


def measure_memory(store: Path, effort: Effort) -> Result:
    answer = run_probe(
        "memory",
        path=str(store),
        rows=effort.memory_rows,
        extend_rows=effort.memory_extend_rows,
        batch_size=BATCH,
    )
    growth = answer["growth"] / MB
    note = f"{answer['rows']:,} rows, RssAnon after imports {answer['before'] / MB:.0f} MB"
    return Result("memory/growth", growth, f"{growth:.0f} MB", note=note, data=answer)


def measure_commands(store: Path, effort: Effort) -> Iterator[Result]:
    """Measure whole processes of the command line."""
    by_status = 'SELECT status, count(*), avg("return") FROM episodes GROUP BY status'
    mean = "SELECT count(*), avg(next.reward) FROM transitions"
    commands: dict[str, list[list[str]]] = {
        "cli/help": [["--help"]],
        "cli/info": [["info", str(store)]],
        "cli/sql": [["sql", str(store), by_status], ["sql", str(store), mean]],
    }
    for name, lines in commands.items():
        medians = [_time_process(["-m", "expstore", *words], effort) for words in lines]
        note = "episodes by status; a mean over transitions" if len(lines) > 1 else ""
        text = ", ".join(f"{median:.2f} s" for median in medians)
        yield Result(name, max(medians), text, note=note, data={"medians": medians})


def measure_start(store: Path, effort: Effort) -> Result:
    """Measure a process that opens a store and samples a batch; compare it with one that imports torch."""
    program = f"import expstore; expstore.open({str(store)!r}, batch_size={BATCH}).sample()"
    ours, torch, tensordict = (
        _time_process(["-c", code], effort) for code in (program, "import torch", "import tensordict")
    )
    note = f"beyond import torch, {torch:.2f} s; import tensordict {tensordict:.2f} s"
    data = {"process": ours, "torch": torch, "tensordict": tensordict}
    return Result("start/first-batch", ours - torch, f"{ours - torch:.2f} s", note=note, data=data)


def _time_process(words: Sequence[str], effort: Effort) -> float:
    """Return the median duration of a process of Python with these arguments, in seconds."""
    # An installed package has compiled modules.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(1 + effort.repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, check=True)
        seconds.append(time.perf_counter() - started)
    return Series([seconds[1:]]).median


if __name__ == "__main__":
    sys.exit(run_program(measure, BARS, gigabytes=6))
