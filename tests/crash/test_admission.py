"""A program that starts, writes and draws groups, and is killed again and again."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import expstore
from expstore import GroupSampler
from expstore.errors import NotReadyError
from tests.crash.test_consumer_learner import Learner, live_once

SIZE, GROUPS, MAX_LAG, COMMIT_EVERY = 3, 2, 2, 5


def write(rb: Any, group: int, version: int, member: int, *, first: bool) -> None:
    """Append the first or the second row of a member of a group."""
    end = np.array([[not first]])
    rb.extend(
        {
            "group": np.array([group]),
            "member": np.array([10 * group + member]),
            "policy_version": np.array([version]),
            "next": {"terminated": end, "done": end},
        }
    )


class Program:
    """Starts groups, writes their members in turns, draws, and saves a checkpoint every 5 batches.

    Args:
        path: The store.
        folder: Where checkpoints are, and what each life has drawn.
        batches: Number of batches, after which it ends.
    """

    def __init__(self, path: Path, folder: Path, batches: int) -> None:
        self._path, self._batches = path, batches
        self.checkpoint, self.notes = folder / "checkpoint.json", folder / "notes"

    def live(self, until: int, tell: Callable[[], None]) -> None:
        """Work until it is killed, or all batches were committed; call `tell` after some draws."""
        chance, running = random.Random(until), list[tuple[Any, list[tuple[int, bool]]]]()
        roles = {"group": "group", "group_size": SIZE, "traj": "member"}
        sampler = GroupSampler(GROUPS, max_lag=MAX_LAG)
        with (
            expstore.open(self._path, seed=1, episodes=roles, batches={"as_numpy": True}) as rb,
            rb.consumer("learner", sampler=sampler) as learner,
            self.notes.open("a", buffering=1) as notes,
        ):
            if self.checkpoint.exists():
                learner.seek(json.loads(self.checkpoint.read_text()))
            while (number := learner.position["draw"]) < self._batches:
                for _ in range(3):
                    try:
                        group = rb.groups.start(version=number)
                    except NotReadyError:
                        break
                    rows = [(member, first) for first in (True, False) for member in range(SIZE)]
                    running.append((group, rows))
                for place in sorted({chance.randrange(len(running)) for _ in running}, reverse=True):
                    group, rows = running[place]
                    member, first = rows.pop(0)
                    write(rb, group.id, group.version, member, first=first)
                    if not rows:
                        running.pop(place)
                    elif chance.random() < 0.02:
                        running.pop(place)[0].discard(reason="failed")
                try:
                    batch = learner.sample()
                except NotReadyError:
                    continue
                notes.write(f"{json.dumps([number, *(batch[key].tolist() for key in KEYS)])}\n")
                until -= 1
                if until == 0:
                    tell()
                if learner.position["draw"] % COMMIT_EVERY == 0:
                    temporary = self.checkpoint.with_suffix(".tmp")
                    temporary.write_text(json.dumps(learner.position))
                    temporary.replace(self.checkpoint)
                    learner.commit()


KEYS = ("group", "member", "policy_version")


@pytest.mark.guarantee("consumers/admission")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "kills"), [(80, 3), pytest.param(1900, 100, marks=[pytest.mark.torture])]
)
def test_a_killed_program_draws_whole_groups_once_and_none_too_late(
    batches: int, kills: int, tmp_path: Path, long_seed: int, count_cases: Callable[..., None]
) -> None:
    chance, path = random.Random(long_seed), tmp_path / "run.exp"
    program, killed = Program(path, tmp_path, batches), 0
    while not live_once(cast(Learner, program), chance, draws=30):
        killed += 1
        count_cases()
    assert killed >= kills
    found: dict[int, set[str]] = defaultdict(set)
    for line in program.notes.read_text().splitlines():
        found[json.loads(line)[0]].add(line)
    assert sorted(found) == list(range(batches))
    assert all(len(lines) == 1 for lines in found.values()), "a draw came again with other rows"
    trained = []
    for number, (line,) in found.items():
        _, groups, members, versions = json.loads(line)
        names = groups[:: 2 * SIZE]
        assert groups == np.repeat(names, 2 * SIZE).tolist()
        assert members == [10 * name + member for name in names for member in range(SIZE) for _ in range(2)]
        assert number - min(versions) <= MAX_LAG
        trained += names
    assert len(trained) == len(set(trained)) == batches * GROUPS
