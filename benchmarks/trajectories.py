"""Queries of whole trajectories: SQL compared with TorchRL's trajectory query, episodes with Minari's.

Run as `python benchmarks/trajectories.py`; exits 1 below a bar. All sides hold the same rows and return the
same answers, which is checked before anything is timed. TorchRL reads all rows for each query, so its queries
are repeated only a few times.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some distributions install a `benchmarks` of their own

import expstore  # noqa: E402
from benchmarks.report import Bar, Report, Result, options, span  # noqa: E402
from benchmarks.timing import Case, alternate, each_threads  # noqa: E402
from benchmarks.vs_torchrl import scratch  # noqa: E402
from benchmarks.workloads import LOCOMOTION, TRAJECTORY, Workload  # noqa: E402

EPISODES = 8
BARS = {
    "trajectories/return-sql": Bar(100, "x", at_least=True),
    "trajectories/return-query": Bar(10, "x", at_least=True),
    "trajectories/reward-sql": Bar(10, "x", at_least=True),
}


@dataclass(frozen=True)
class Effort:
    """Rows, queries per block (ours and TorchRL's), number of blocks, and Minari's episodes."""

    workload: Workload = LOCOMOTION
    calls: int = 10
    their_calls: int = 1
    rounds: int = 3
    episodes: int = 200
    #: The queried trajectories: by their return, and by their largest reward.
    returned: float = 30.0
    reward: float = 4.0


FULL = Effort()
QUICK = Effort(LOCOMOTION.scaled(rows=100_000, extend_rows=1000))
SMOKE = Effort(
    LOCOMOTION.scaled(rows=1000, extend_rows=500), calls=1, rounds=1, episodes=10, returned=0.0, reward=2.5
)


def open_theirs(folder: Path, workload: Workload) -> Any:
    from torchrl import data

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    storage = data.LazyMemmapStorage(workload.rows, scratch_dir=str(folder / "torchrl"))
    return data.TensorDictReplayBuffer(storage=storage, batch_size=256)


class Trajectories:
    """Measure with full stores."""

    def __init__(self, folder: Path, effort: Effort, threads: Sequence[int]) -> None:
        self.folder, self.effort, self.threads = folder, effort, threads

    def run(self, skip: Callable[[str, str], object]) -> Iterator[Result]:
        workload = self.effort.workload
        path = self.folder / "store.exp"
        with expstore.open(path, capacity=workload.rows, batch_size=256, seed=1) as ours:
            theirs = open_theirs(self.folder, workload)
            for start in range(0, workload.rows, workload.extend_rows):
                batch = workload.batch(workload.extend_rows, start=start, seed=start)
                ours.extend(batch)
                theirs.extend(batch)
            ours.flush()
            for more in each_threads(self.threads):
                yield from self._questions(ours, theirs, more)
        if importlib.util.find_spec("minari") is None:
            skip("minari", "pip install --group bench")
            return
        yield from self._minari()

    def _questions(self, ours: Any, theirs: Any, more: str) -> Iterator[Result]:
        from torchrl.data import traj

        mine, least, most = expstore.trajectories.traj, self.effort.returned, self.effort.reward
        returns = 'SELECT trajectory_id FROM episodes WHERE "return" > $least ORDER BY 1'
        rewards = (
            "SELECT collector.traj_ids AS t FROM transitions GROUP BY t HAVING max(next.reward) > $least"
        )
        acts: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "return-sql": (
                lambda: [row[0] for row in ours.sql(returns, {"least": least}).fetchall()],
                lambda: theirs.query(traj.reward.sum() > least),
            ),
            "return-query": (
                lambda: ours.query(mine.reward.sum() > least),
                lambda: theirs.query(traj.reward.sum() > least),
            ),
            "reward-sql": (
                lambda: [row[0] for row in ours.sql(rewards, {"least": most}).fetchall()],
                lambda: theirs.query(traj.reward.max() > most),
            ),
        }
        for name, (one, other) in acts.items():
            found = names_of(one())
            if not found or found != names_of(other()):
                raise RuntimeError(f"{name}: the sides do not give the same answer")
            yield self._compare(f"trajectories/{name}{more}", one, other, f"{len(found)} trajectories found")

    def _compare(
        self, name: str, one: Callable[[], Any], other: Callable[[], Any], note: str, *, peer: str = "torchrl"
    ) -> Result:
        effort = self.effort
        calls = (effort.calls, effort.their_calls if peer == "torchrl" else effort.calls)
        cases = [
            Case(lambda _, act=act: act(), repeat(None), count)  # type: ignore[misc]
            for act, count in zip((one, other), calls, strict=True)
        ]
        mine, theirs = alternate(cases, rounds=effort.rounds, warm=1)
        ratio = theirs.median / mine.median
        data = {"expstore": mine.to_json(), peer: theirs.to_json()}
        return Result(name, ratio, span(mine), span(theirs), f"{ratio:.1f}x", note, data)

    # -- Minari ---------------------------------------------------------------------------------------

    def _minari(self) -> Iterator[Result]:
        """Sample whole episodes: ours as slices of that length, Minari's with its own call."""
        count, length = self.effort.episodes, LOCOMOTION.episode
        batch = LOCOMOTION.batch(count * length, seed=3)
        dataset = minari_of(batch, count, self.folder / "minari")
        sampler = expstore.SliceSampler(num_slices=EPISODES)
        path = self.folder / "episodes.exp"
        with expstore.open(path, batch_size=EPISODES * length, sampler=sampler, seed=1) as ours:
            ours.extend(batch)
            ours.flush()
            note = f"{EPISODES} whole episodes of {length} steps out of {count}"
            yield self._compare(
                "trajectories/minari",
                ours.sample,
                lambda: dataset.sample_episodes(EPISODES),
                note,
                peer="minari",
            )


def names_of(found: list[Any]) -> list[int]:
    """Return the ids of the trajectories that were found."""
    return sorted(one if isinstance(one, int) else int(_rows(one)[TRAJECTORY][0]) for one in found)


def _rows(found: Any) -> Any:
    return getattr(found, "data", found)


def minari_of(batch: Any, count: int, folder: Path) -> Any:
    """Create a Minari dataset of rows in a folder."""
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    import warnings

    import gymnasium
    import minari
    from minari.data_collector import EpisodeBuffer

    def part(key: Any, at: slice) -> np.ndarray:
        values: np.ndarray = batch[key][at].numpy()
        return values

    length = len(batch) // count
    buffers = []
    for number in range(count):
        at = slice(number * length, (number + 1) * length)
        seen, after = part("observation", at), part(("next", "observation"), at)
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=np.concatenate([seen, after[-1:]]),
                actions=part("action", at),
                rewards=part(("next", "reward"), at)[:, 0],
                terminations=part(("next", "terminated"), at)[:, 0],
                truncations=part(("next", "truncated"), at)[:, 0],
            )
        )
    space = gymnasium.spaces.Box
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that the author is missing
        return minari.create_dataset_from_buffers(
            "bench/locomotion-v0",
            buffers,
            observation_space=space(-np.inf, np.inf, (17,), np.float32),
            action_space=space(-np.inf, np.inf, (6,), np.float32),
        )


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Measure, print the table, return the exit code."""
    parser = options(__doc__, quick="100,000 rows", folder=ROOT / "benchmarks" / "out")
    wanted = parser.parse_args(argv)
    effort = SMOKE if wanted.smoke else QUICK if wanted.quick else FULL
    report = Report({} if wanted.smoke else BARS, out, other="the other", file=wanted.json)
    with scratch(wanted.folder, 6 * effort.workload.rows * effort.workload.row_bytes) as folder:
        for result in Trajectories(folder, effort, wanted.threads).run(report.skip):
            report.add(result)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
