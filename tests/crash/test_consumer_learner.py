"""A learner that is killed again and again while two others write: each group is committed exactly once.

The learner draws, trains, and commits every 50 batches. It is killed by SIGKILL at random moments, also while
it saves a checkpoint or commits, and goes back to its checkpoint each time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.errors import NotReadyError

WRITERS, ROWS, COMMIT_EVERY = 2, 4, 50
_FORK = multiprocessing.get_context("fork")


def write(rb: Any, writer: int, groups: int) -> None:
    """Append groups, each a row, a few at once."""
    torch.set_num_threads(1)
    mine = torch.arange(writer, groups, WRITERS)
    for some in mine.split(ROWS):
        data = {"group": some, "value": torch.rand(len(some), 3)}
        rb.extend(TensorDict(data, [len(some)]), source=f"writer-{writer}")


class Learner:
    """Draws a group at a time, trains, and saves a checkpoint every 50 batches.

    Args:
        path: The store.
        folder: Where checkpoints are, and what each life has drawn.
        groups: Number of groups, after which it ends.
    """

    def __init__(self, path: Path, folder: Path, groups: int) -> None:
        self._path, self._groups = path, groups
        self.checkpoint, self.notes = folder / "checkpoint.json", folder / "notes"

    def live(self, until: int, tell: Callable[[], None]) -> None:
        """Train until it is killed, or all groups were trained on; call `tell` after some draws."""
        done: dict[str, Any] = {"groups": [], "weights": [0.0, 0.0, 0.0], "position": None}
        if self.checkpoint.exists():
            done = json.loads(self.checkpoint.read_text())
        weights = np.array(done["weights"])
        with (
            expstore.open(self._path, mode="r", batch_size=1, batches={"as_numpy": True}) as rb,
            rb.consumer("learner", sampler="consuming") as consumer,
            self.notes.open("a", buffering=1) as notes,
        ):
            if done["position"] is not None:
                consumer.seek(done["position"])
            while len(done["groups"]) < self._groups:
                number = consumer.position["draw"]
                try:
                    batch = consumer.sample()
                except NotReadyError:
                    time.sleep(0.001)  # the writers are slower
                    continue
                (group,) = batch["group"].tolist()
                bits = google_crc32c.value(b"".join((batch["value"].tobytes(), batch["id"].tobytes())))
                weights = 0.9 * weights + batch["value"].sum(0)
                notes.write(f"{number} {bits} {group}\n")
                done["groups"].append(group)
                until -= 1
                if until == 0:
                    tell()
                if consumer.position["draw"] % COMMIT_EVERY == 0 or len(done["groups"]) == self._groups:
                    state = done | {"weights": weights.tolist(), "position": consumer.position}
                    temporary = self.checkpoint.with_suffix(".tmp")
                    temporary.write_text(json.dumps(state))
                    temporary.replace(self.checkpoint)
                    consumer.commit()


def live_once(learner: Learner, chance: random.Random, draws: int = 90) -> bool:
    """Let a learner live, and kill it a moment after some draws; return whether it came to its end."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            os.close(read_end)
            learner.live(chance.randint(1, draws), lambda: os.close(write_end))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    os.close(write_end)
    os.read(read_end, 1)  # until it is closed
    os.close(read_end)
    time.sleep(chance.random() * 0.003)  # any moment of the next draws
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the learner failed"
    return os.WIFEXITED(status)


@pytest.mark.guarantee(
    "consumers/once",
    "A learner that is killed and goes back commits each row exactly once, while others write.",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "kills"), [(600, 8), pytest.param(10_000, 200, marks=[pytest.mark.torture])]
)
def test_each_group_is_committed_exactly_once(
    groups: int, kills: int, tmp_path: Path, long_seed: int, count_cases: Callable[..., None]
) -> None:
    chance, path = random.Random(long_seed), tmp_path / "run.exp"
    learner = Learner(path, tmp_path, groups)
    with expstore.open(path, seed=1) as rb:
        rb.share()
        writers = [_FORK.Process(target=write, args=(rb, number, groups)) for number in range(WRITERS)]
        for writer in writers:
            writer.start()
        killed = 0
        while not live_once(learner, chance):
            killed += 1
            count_cases()
        for writer in writers:
            writer.join()
            assert writer.exitcode == 0
        assert killed >= kills
        done = json.loads(learner.checkpoint.read_text())
        assert sorted(done["groups"]) == list(range(groups))
        drawn: dict[str, set[str]] = defaultdict(set)
        for line in learner.notes.read_text().splitlines():
            number, _, seen = line.partition(" ")
            drawn[number].add(seen)
        assert len(drawn) == groups
        assert all(len(seen) == 1 for seen in drawn.values()), "a batch came again with other rows"
        assert rb.consumers.list()[0].committed == groups
