"""Prioritized sampling compared with TorchRL and cpprb, also while a writer runs; opening a large store.

Run as `python -m benchmarks.samplers`; exits 1 below a bar. All sides sample a batch from 1M rows (on disk,
except cpprb's) and set its priorities, through their public buffers with the same alpha and beta,
alternating. TorchRL's segment trees are compiled; if the installed ones do not fit the installed torch, they
are built once from torchrl's sources, which needs a compiler, ninja and two minutes.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import expstore
from benchmarks.probes import run_probe
from benchmarks.report import Bar, Result, Setup, at_least, compare, run_program, slowest
from benchmarks.timing import Case, alternate, each_threads
from benchmarks.vs_torchrl import FULL, SMOKE, Effort
from benchmarks.workloads import Stream, Workload

BATCH, ALPHA, BETA = 256, 0.6, 0.4

BARS = {
    "prioritized/sample+update": at_least(3),
    "prioritized/reopen": Bar(0.5, " s"),
    "writer/paced": at_least(0.9, " of its pace alone"),
    "writer/busy": at_least(1.3, " of the paces alone"),
}


def load_trees(folder: Path, *, build: bool) -> str:
    """Make TorchRL's segment trees importable; return the reason if this fails, otherwise "".

    Args:
        folder: Folder in which they are built and kept.
        build: Whether to build them if necessary.
    """
    import torch

    try:
        importlib.import_module("torchrl._torchrl")
        return ""
    except ImportError as exc:
        if not build:
            return f"its segment trees do not load ({str(exc)[:60]}...)"
    from torch.utils.cpp_extension import load

    home = Path((importlib.util.find_spec("torchrl").submodule_search_locations or [""])[0])  # type: ignore[union-attr]
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja
    folder = folder / f"trees-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sys.modules["torchrl._torchrl"] = load(
            name="_torchrl",
            sources=[str(home / "csrc" / name) for name in ("pybind.cpp", "utils.cpp")],
            extra_include_paths=[str(home.parent)],
            extra_cflags=["-O3"],
            build_directory=str(folder),
        )
    except (OSError, RuntimeError) as exc:
        return f"its segment trees cannot be built: {str(exc).splitlines()[0]}"
    return ""


def open_ours(folder: Path, capacity: int) -> Any:
    sampler = expstore.PrioritizedSampler(capacity, ALPHA, BETA)
    return expstore.open(folder / "store.exp", capacity=capacity, batch_size=BATCH, sampler=sampler)


def open_theirs(folder: Path, capacity: int) -> Any:
    from torchrl.data import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    storage = LazyMemmapStorage(capacity, scratch_dir=str(folder / "torchrl"))
    return TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=storage, batch_size=BATCH)


class Cpprb:
    """cpprb's prioritized buffer, which keeps rows in RAM, with TorchRL's names of calls."""

    def __init__(self, workload: Workload, capacity: int) -> None:
        import cpprb

        fields = {
            ".".join(leaf.key): {"shape": leaf.shape or 1, "dtype": leaf.dtype} for leaf in workload.leaves
        }
        self._rb = cpprb.PrioritizedReplayBuffer(capacity, fields, alpha=ALPHA)

    def extend(self, batch: Any) -> None:
        leaves = batch.items(include_nested=True, leaves_only=True)
        names = {key: key if isinstance(key, str) else ".".join(key) for key, _ in leaves}
        self._rb.add(**{names[key]: value.numpy() for key, value in leaves})

    def sample(self) -> Any:
        return self._rb.sample(BATCH, beta=BETA)

    def update_tensordict_priority(self, batch: dict[str, Any]) -> None:
        self.update_priority(batch["indexes"], batch["td_error"])

    def update_priority(self, indices: Any, priorities: Any) -> None:
        self._rb.update_priorities(indices, priorities)


def learn(rb: Any) -> Callable[[Any], object]:
    """Return a function that samples a batch and sets its priorities to the given ones."""

    def act(priorities: Any) -> object:
        batch = rb.sample()
        batch["td_error"] = priorities
        return rb.update_tensordict_priority(batch)

    return act


def set_priorities(rb: Any, rows: int) -> Callable[[Any], object]:
    """Return a function that sets the priorities of 256 random rows."""
    import torch

    generator = torch.Generator().manual_seed(2)
    indices = itertools.cycle([torch.randint(rows, (BATCH,), generator=generator) for _ in range(64)])
    return lambda priorities: rb.update_priority(next(indices), priorities)


def measure_paces(acts: Sequence[tuple[Callable[[], object], float]], seconds: float) -> list[float]:
    """Call functions at the same time, each in a thread of its own; return the calls per second of each.

    Args:
        acts: The functions, and the seconds from one call of it to the next; 0: without a pause.
        seconds: How long they are called.
    """
    counts, started = [0] * len(acts), time.perf_counter()

    def run(number: int) -> None:
        act, every = acts[number]
        while (passed := time.perf_counter() - started) < seconds or not counts[number]:
            if (left := counts[number] * every - passed) > 0:
                time.sleep(left)
            act()
            counts[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [count / seconds for count in counts]


def call_next(act: Callable[[Any], object], items: Iterator[Any]) -> object:
    return act(next(items))


def measure_with_writer(sides: dict[str, Any], values: Sequence[Any], effort: Effort) -> Iterator[Result]:
    """Learn while a thread extends: 16 rows 125 times a second, then 1000 rows without a pause."""
    seconds = effort.warm_seconds / 4 or 0.02
    for name, size, every in (
        ("writer/paced", 16, 16 / 2000),
        ("writer/busy", effort.locomotion.extend_rows, 0.0),
    ):
        texts, shares = [], []
        for rb in [rb for side, rb in sides.items() if side != "cpprb"]:  # which two threads must not use
            stream = Stream(effort.locomotion, size, pool=effort.pool)
            learns = partial(call_next, learn(rb), itertools.cycle(values)), 0.0
            writes = partial(call_next, rb.extend, stream), every
            rounds = []
            for _ in range(effort.rounds):
                sides["expstore"].flush()
                alone = [measure_paces([one], seconds)[0] for one in (learns, writes)]
                together = measure_paces([learns, writes], seconds)
                rounds.append(
                    [after / max(before, 1.0) for after, before in zip(together, alone, strict=True)]
                )
            shares.append([statistics.median(share) for share in zip(*rounds, strict=True)])
            texts.append("learner {:.2f}, writer {:.2f} of its pace alone".format(*shares[-1]))
        value = shares[0][0] if every else sum(shares[0])
        yield Result(name, value, *texts, note=f"{size} rows a call", data={"shares": shares})


def measure(setup: Setup) -> Iterator[Result]:
    import torch

    effort = SMOKE if setup.smoke else FULL
    workload = effort.locomotion
    rows = workload.rows
    sides = {"expstore": open_ours(setup.folder, rows)}
    if reason := load_trees(setup.cache, build=not setup.smoke):
        setup.skip("torchrl", reason)
    else:
        sides["torchrl"] = open_theirs(setup.folder, rows)
    if importlib.util.find_spec("cpprb"):
        sides["cpprb"] = Cpprb(workload, rows)
    else:
        setup.skip("cpprb", "pip install --group bench")
    generator = torch.Generator().manual_seed(1)
    values = [torch.rand(BATCH, generator=generator) + 0.01 for _ in range(64)]
    for rb in sides.values():
        stream = Stream(workload, workload.extend_rows, pool=effort.pool)
        for _ in range(rows // workload.extend_rows):
            rb.extend(next(stream))
        rb.update_priority(torch.arange(rows), torch.rand(rows, generator=generator) + 0.01)
    acts: dict[str, Callable[[Any], Callable[[Any], object]]] = {
        "sample+update": learn,
        "update": lambda rb: set_priorities(rb, rows),
    }
    for suffix in each_threads():
        for name, make in acts.items():
            cases = [
                Case(make(rb), itertools.cycle(values), effort.calls, settle=sides["expstore"].flush)
                for rb in sides.values()
            ]
            ours, *others = alternate(cases, rounds=effort.rounds, warm=effort.warm)
            for other, theirs in zip([*sides][1:], others, strict=True):
                peer = "" if other == "torchrl" else f"/{other}"
                yield compare(f"prioritized/{name}{peer}{suffix}", ours, theirs, other=other)
    yield from measure_with_writer(sides, values, effort)
    sides["expstore"].close()
    path = str(setup.folder / "store.exp")
    answers = [
        run_probe("reopen", path=path, batch_size=BATCH, prioritized=True) for _ in range(effort.repeats)
    ]
    seconds = [answer["open"] + answer["first_sample"] for answer in answers]
    note = f"{answers[0]['rows']:,} priorities, open and first batch"
    yield slowest("prioritized/reopen", seconds, note, {"probes": answers})


if __name__ == "__main__":
    sys.exit(run_program(measure, BARS, gigabytes=1.2))
