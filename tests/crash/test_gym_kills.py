"""Kills while `expstore.gym` records: stored are the steps that returned, and at most the one in flight."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode

import expstore
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.maintenance import verify
from expstore.storages.engine import store
from tests.crash.killing_disks import KillingDisk
from tests.support.recorded_envs import (
    LENGTHS,
    Counting,
    Row,
    action_of,
    drive,
    episodes_of,
    make_counting,
    model_of_lane,
    stored_episodes,
    stored_rows,
)
from tests.support.stores import NoKeeper

pytestmark = pytest.mark.index

Record, RecordVector = expstore.gym.Record, expstore.gym.RecordVector
#: How environments reset; None: a single environment.
MODES = (*AutoresetMode, None)
#: The lane whose episodes a single environment has.
LANE = 3
CALLS, FLUSH_EVERY = 60, 16
#: First and last file operation at which a child ends: at any time of its calls, or amid the first ones.
SPANS = ((100, 540), (165, 190))


class _Disk(KillingDisk):
    """A kill ends the process, but not the machine."""

    def boot_id(self) -> bytes:
        return Disk.boot_id(self)


def record(path: Path, mode: AutoresetMode | None, *, is_nested: bool) -> Iterator[int]:
    """Record until the generator is closed; yield the number of each call after it."""
    env: Any
    if mode is None:
        env = Record(Counting(LANE, is_nested=is_nested), path)
        calls = _drive_one(env, is_nested=is_nested)
    else:
        env = RecordVector(make_counting(mode, is_nested=is_nested), path)
        calls = drive(env, is_nested=is_nested)
    try:
        for call in calls:
            yield call
            if call % FLUSH_EVERY == FLUSH_EVERY - 1:
                env.rb.flush()
    finally:
        env.close()


def _drive_one(env: Any, *, is_nested: bool) -> Iterator[int]:
    seed: int | None = 3
    ended = True
    for call in itertools.count():
        if ended:
            env.reset(seed=seed)
            seed = None
        _, _, terminated, truncated, _ = env.step(action_of(call, 0, is_nested=is_nested))
        ended = terminated or truncated
        yield call


def run_killed(
    path: Path, mode: AutoresetMode | None, *, is_nested: bool, act: int, torn: float | None, after: int
) -> int:
    """Record in a child that is killed; return how many calls have returned.

    Args:
        path: Folder of the store.
        mode: How the environments reset.
        is_nested: Whether spaces are Dicts.
        act: The file operation at which the child ends; 0: it is killed from outside.
        torn: Share of a write that is done at the end; None: the operation is not begun.
        after: Otherwise, the number of calls after which the parent kills it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            disk = _Disk(act, torn=torn, serial=True)
            store.Disk = lambda: disk  # type: ignore[assignment,misc]
            store.Keeper = NoKeeper  # type: ignore[assignment,misc]
            tuning.JOURNAL_SEGMENT_BYTES = 8192
            calls = record(path, mode, is_nested=is_nested)
            for _ in itertools.islice(calls, CALLS):
                os.write(writing, b".")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    done = 0
    while (act or done < after) and (heard := os.read(reading, 64)):
        done += len(heard)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while heard := os.read(reading, 64):
        done += len(heard)
    os.close(reading)
    return done


def check(path: Path, mode: AutoresetMode | None, calls: int) -> None:
    """Check the rows and episodes of a store after a kill.

    Args:
        path: Folder of the store.
        mode: How the environments reset.
        calls: Number of calls that have returned.
    """
    lanes = [LANE] if mode is None else range(len(LENGTHS))

    def model(count: int) -> list[list[Row]]:
        return [model_of_lane(lane, count, mode or AutoresetMode.DISABLED) for lane in lanes]

    with expstore.open(path) as rb:
        found = stored_rows(rb)
        rows, episodes = [found[lane] for lane in lanes], stored_episodes(rb)
        query = "SELECT source, info->>'seed' FROM episodes WHERE info IS NOT NULL"
        seeds = {source.partition("//")[2] or "0": seed for source, seed in rb.sql(query).fetchall()}
    if calls:
        assert rows in (model(calls), model(calls + 1))
    else:  # the first steps have facts, and are stored lane by lane
        for own, following in zip(rows, model(1), strict=True):
            assert own in ([], following)
    for number, own in enumerate(rows):
        wanted = [(length, "cut" if status == "open" else status) for length, status in episodes_of(own)]
        assert episodes[number] == wanted
        assert seeds.get(str(number)) == (str(3 + number) if own else None)
    assert verify(path) == []


@pytest.mark.guarantee("kill/recorder")
@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(17, marks=pytest.mark.torture)])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.timeout(600)
def test_a_killed_recording_has_the_steps_that_returned(
    tmp_path: Path,
    mode: AutoresetMode | None,
    is_nested: bool,
    kills: int,
    long_seed: int,
    count_cases: Callable[..., None],
) -> None:
    rng = random.Random(f"{long_seed} {mode} {is_nested}")
    for number in range(kills):
        path = tmp_path / f"{number}.exp"
        act = rng.randint(*rng.choice(SPANS)) if number % 2 == 0 else 0
        calls = run_killed(
            path,
            mode,
            is_nested=is_nested,
            act=act,
            torn=rng.choice([None, 0.0, 0.5, 1.0]),
            after=rng.randint(0, CALLS // 2),
        )
        check(path, mode, calls)
        count_cases()
        with contextlib.closing(record(path, mode, is_nested=is_nested)) as again:
            for _ in itertools.islice(again, 5):
                pass  # the next process records into the same store
