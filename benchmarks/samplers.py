"""Prioritized sampling compared with TorchRL, and the time to open a store with a million priorities.

Run as `python benchmarks/samplers.py`; exits 1 below a bar. Both sides sample a batch from 1M rows on disk
and set its priorities, through their public buffers with the same alpha and beta, taking turns. TorchRL's
segment trees are compiled; if the installed ones do not fit the installed torch, they are built once from
torchrl's sources, which needs a compiler, ninja and two minutes.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.adapters import Cpprb  # noqa: E402
from benchmarks.probes import Probes  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Case, Series, alternate, each_threads  # noqa: E402
from benchmarks.vs_torchrl import FULL, QUICK, SMOKE, Effort, scratch  # noqa: E402
from benchmarks.workloads import Stream  # noqa: E402

BATCH, ALPHA, BETA = 256, 0.6, 0.4

BARS = {
    "prioritized/sample+update": Bar(3, "x", at_least=True),
    "prioritized/reopen": Bar(0.5, " s"),
}


def find_trees(folder: Path, *, build: bool) -> str:
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


class CpprbPrioritized(Cpprb):
    """cpprb's prioritized buffer with the interface of this script."""

    priorities = {"alpha": ALPHA}  # noqa: RUF012 - never changed

    def extend(self, rows: Any) -> None:
        super().extend(self.take(rows))

    def sample(self, _: Any = None) -> Any:
        return self.rb.sample(BATCH, beta=BETA)

    def update_tensordict_priority(self, batch: dict[str, Any]) -> None:
        self.update_priority(batch["indexes"], batch["td_error"])

    def update_priority(self, indices: Any, priorities: Any) -> None:
        self.rb.update_priorities(indices, priorities)


class Samplers:
    """Measure with a full ring of `effort.locomotion.rows` rows."""

    def __init__(self, folder: Path, effort: Effort, *, theirs: str, threads: Sequence[int]) -> None:
        self.folder, self.effort, self.missing, self.threads = folder, effort, theirs, threads

    def run(self, probes: Probes) -> Iterator[Result]:
        yield from self._compare()
        yield from self._reopen(probes)

    def _sides(self) -> dict[str, Any]:
        workload = self.effort.locomotion
        sides = {"expstore": open_ours(self.folder, workload.rows)}
        if not self.missing:
            sides["torchrl"] = open_theirs(self.folder, workload.rows)
        if importlib.util.find_spec("cpprb"):
            sides["cpprb"] = CpprbPrioritized(self.folder, workload.rows, workload.batch(1))
        return sides

    def _compare(self) -> Iterator[Result]:
        import torch

        workload, effort = self.effort.locomotion, self.effort
        sides = self._sides()
        generator = torch.Generator().manual_seed(1)
        values = [torch.rand(BATCH, generator=generator) + 0.01 for _ in range(64)]
        for rb in sides.values():
            stream = Stream(workload, workload.extend_rows, pool=effort.pool)
            for _ in range(workload.rows // workload.extend_rows):
                rb.extend(next(stream))
            indices = torch.arange(workload.rows)
            rb.update_priority(indices, torch.rand(workload.rows, generator=generator) + 0.01)
        acts = {"sample+update": learn, "update": lambda rb: set_priorities(rb, workload.rows)}
        for more in each_threads(self.threads):
            for name, make in acts.items():
                cases = [
                    Case(make(rb), itertools.cycle(values), effort.calls, settle=sides["expstore"].flush)
                    for rb in sides.values()
                ]
                series = alternate(cases, rounds=effort.rounds, warm=effort.warm)
                yield from self._results(f"prioritized/{name}", more, dict(zip(sides, series, strict=True)))
        sides["expstore"].close()

    def _results(self, name: str, more: str, series: dict[str, Series]) -> Iterator[Result]:
        """Return a row for each of the other sides; TorchRL's has the bar."""
        ours = series.pop("expstore")
        if self.missing:
            yield Result(name + more, 1.0, span(ours), note=self.missing, data={"expstore": ours.to_json()})
        for other, theirs in series.items():
            called = name if other == "torchrl" else f"{name}/{other}"
            ratio = theirs.median / ours.median
            text = f"{ratio:.1f}x (means {theirs.mean / ours.mean:.1f}x)"
            data = {"expstore": ours.to_json(), other: theirs.to_json()}
            yield Result(called + more, ratio, span(ours), span(theirs), text, data=data)

    def _reopen(self, probes: Probes) -> Iterator[Result]:
        """Open the store with its priorities, after the imports, and with the compiled loops loaded."""
        path = str(self.folder / "store.exp")
        for name, loaded in (("prioritized/reopen", True), ("prioritized/reopen-cold", False)):
            found = [
                probes.run("reopen", path=path, batch_size=BATCH, prioritized=True, loaded=loaded)
                for _ in range(self.effort.repeats)
            ]
            seconds = sorted(one["open"] + one["first_sample"] for one in found)
            note = f"{found[0]['rows']:,} priorities, open and first batch" + (
                "" if loaded else "; loads the compiled loops"
            )
            text = f"{seconds[-1]:.3f} s, the slowest of {len(seconds)} (fastest {seconds[0]:.3f})"
            yield Result(name, seconds[-1], text, note=note, data={"probes": found})


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="100,000 rows", folder=ROOT / "benchmarks" / "out")
    parser.add_argument("--trees", type=Path, help="folder for TorchRL's trees; in FOLDER by default")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    bars = {} if wanted.smoke else dict(BARS)
    with Probes() as probes, scratch(wanted.folder, 6 * effort.locomotion.rows * 200) as folder:
        missing = find_trees(wanted.trees or wanted.folder, build=not wanted.smoke)
        if missing:
            bars.pop("prioritized/sample+update", None)
        report = Report(bars, out, other="TorchRL", file=wanted.json)
        if not importlib.util.find_spec("cpprb"):
            report.skip("cpprb", "pip install --group bench")
        for result in Samplers(folder, effort, theirs=missing, threads=wanted.threads).run(probes):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
