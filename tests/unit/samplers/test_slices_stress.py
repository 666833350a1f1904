"""Threads and followers sample slices while lanes are written and the ring wraps: slices stay intact.

The content of a row follows from its episode and step, which its lane counts itself. So a slice of two
episodes, a missing step or a torn row is visible in the batch. The long form is `make torture`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement

pytestmark = pytest.mark.usefixtures("checked_locks")

CAPACITY, LANES, LENGTH, BATCH = 5000, 5, 8, 128
#: Steps of an `extend`.
LONGEST = 60
#: Steps of an episode of lane 0, 1, ...; all longer than a slice.
EPISODES = np.array([9, 14, 40, 11, 150])
LIMIT = 60

MAKE: dict[str, Callable[[], Any]] = {
    "trajectory": lambda: SliceSampler(slice_len=LENGTH),
    "start": lambda: SliceSampler(slice_len=LENGTH, by="start"),
    "without-replacement": lambda: SliceSamplerWithoutReplacement(slice_len=LENGTH),
    "prioritized": lambda: PrioritizedSliceSampler(slice_len=LENGTH),
}


def fields(lanes: np.ndarray, times: np.ndarray) -> dict[Any, np.ndarray]:
    """Return what rows hold: the step number `times` of lanes. Shapes all the same."""
    cycle, step = np.divmod(times, EPISODES[lanes])
    episode = lanes * 1_000_000 + cycle
    return {
        "episode_of_lane": episode,
        "step": step,
        "time": times,
        "frame": ((episode * 31 + step * 7)[..., None] + np.arange(600)).astype(np.uint8),
        ("next", "terminated"): (step == EPISODES[lanes] - 1)[..., None],
    }


def rows(time: int, count: int) -> TensorDict:
    """The next steps of all lanes. Batch size `[LANES, count]`."""
    lanes, times = np.broadcast_arrays(np.arange(LANES)[:, None], time + np.arange(count))
    found = TensorDict({}, [LANES, count])
    for key, values in fields(lanes, times).items():
        found[key] = torch.from_numpy(values)
    return found


def faults(batch: TensorDict) -> str:
    """Say what is wrong with a batch of slices; nothing if all is well."""
    episode, step = batch["episode_of_lane"].numpy(), batch["step"].numpy()
    if episode.size % LENGTH:
        return f"{episode.size} rows are no slices of {LENGTH}"
    episode, step = episode.reshape(-1, LENGTH), step.reshape(-1, LENGTH)
    if (episode != episode[:, :1]).any():
        return f"a slice of two episodes: {episode[(episode != episode[:, :1]).any(axis=1)][0]}"
    if (np.diff(step, axis=1) != 1).any():
        return f"steps that do not follow: {step[(np.diff(step, axis=1) != 1).any(axis=1)][0]}"
    frame = ((episode * 31 + step * 7).reshape(-1, 1) + np.arange(600)).astype(np.uint8)
    if not np.array_equal(batch["frame"].numpy(), frame):
        return "a torn row"
    ends = batch["next", "truncated"].numpy().reshape(-1, LENGTH)
    if ends[:, :-1].any() or not ends[:, -1].all():
        return "a slice without an end of its own"
    return ""


class Writer:
    """Let all lanes go on, by batches of every size."""

    def __init__(self, rb: Any) -> None:
        self.rb, self.time, self.rng = rb, 0, np.random.default_rng(1)

    def write(self, count: int | None = None) -> None:
        count = int(self.rng.integers(1, LONGEST)) if count is None else count
        self.rb.extend(rows(self.time, count))
        self.time += count

    @property
    def oldest(self) -> int:
        """The oldest step of a lane that the ring may hold; it may end within the rows of an `extend`."""
        return self.time - CAPACITY // LANES - LONGEST

    @property
    def laps(self) -> float:
        return LANES * self.time / CAPACITY


def draw(rb: Any, found: dict[str, Any], rng: np.random.Generator) -> None:
    """Draw a batch and look at it."""
    batch = rb.sample()
    found["wrong"] = found["wrong"] or faults(batch)
    found["batches"] += 1
    found["oldest"] = int(batch["time"].min())
    if rb.sampler.prioritized and not rb.storage.follows:
        rb.update_priority(id=batch["id"], priority=rng.random(batch["id"].numel()) + 0.1)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    "seconds",
    [1.0, pytest.param(30.0, marks=[pytest.mark.torture, pytest.mark.timeout(300)])],
    ids=["short", "long"],
)
@pytest.mark.parametrize("name", MAKE)
def test_threads_sample_while_a_writer_writes(name: str, seconds: float, store_path: Path) -> None:
    found: list[dict[str, Any]] = [{"wrong": "", "batches": 0, "oldest": 0} for _ in range(3)]
    done = threading.Event()
    with expstore.open(store_path, capacity=CAPACITY, sampler=MAKE[name](), batch_size=BATCH) as rb:
        writer = Writer(rb)
        writer.write(CAPACITY // LANES)

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            try:
                while not done.is_set() and not found[number]["wrong"]:
                    draw(rb, found[number], rng)
                draw(rb, found[number], rng)
            except BaseException as exc:
                found[number]["wrong"] = repr(exc)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end or writer.laps < 4:
            writer.write()
        done.set()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), f"a thread has not come to an end within {LIMIT} s"
    for answer in found:
        assert not answer["wrong"], answer["wrong"]
        assert answer["batches"] > 1
        assert answer["oldest"] >= writer.oldest, "steps that have left were drawn"


def follow(path: Path, name: str, made: Any, over: Any, answers: Any) -> None:
    """Draw out of a store that another process writes to, until that is over."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"wrong": "", "batches": 0, "oldest": 0}
    try:
        made.wait()
        with expstore.open(path, mode="r", sampler=MAKE[name](), batch_size=BATCH, seed=1) as rb:
            ended = False
            while not ended and not found["wrong"]:
                ended = over.is_set()
                with contextlib.suppress(expstore.StateError):  # overtaken by the writer again and again
                    draw(rb, found, np.random.default_rng(0))
    except BaseException as exc:
        found["wrong"] = repr(exc)
    answers.put(found)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    "seconds",
    [1.0, pytest.param(30.0, marks=[pytest.mark.torture, pytest.mark.timeout(300)])],
    ids=["short", "long"],
)
@pytest.mark.parametrize("name", MAKE)
def test_a_follower_reads_while_a_writer_writes(name: str, seconds: float, store_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    made, over, answers = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=follow, args=(store_path, name, made, over, answers))
    process.start()
    with expstore.open(store_path, capacity=CAPACITY) as rb:
        writer = Writer(rb)
        writer.write(CAPACITY // LANES)
        made.set()
        end = time.monotonic() + seconds
        while time.monotonic() < end or writer.laps < 4:
            writer.write()
        over.set()
        found = answers.get(timeout=LIMIT)
        process.join()
    assert not found["wrong"], found["wrong"]
    assert found["batches"] > 1
    assert found["oldest"] >= writer.oldest, "steps that have left were drawn"


def test_the_ring_goes_round_while_a_follower_looks(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it saw of episodes is gone when it comes to the priorities of their rows."""
    with expstore.open(store_path, capacity=CAPACITY) as rb:
        writer = Writer(rb)
        writer.write(CAPACITY // LANES)
        with expstore.open(store_path, mode="r", sampler=MAKE["prioritized"](), batch_size=BATCH) as seen:
            sampler: Any = seen.sampler
            catch_up, calls = sampler._weights.catch_up, []

            def late(*given: Any) -> Any:
                if not calls:
                    writer.write(2 * CAPACITY // LANES)
                calls.append(given)
                return catch_up(*given)

            monkeypatch.setattr(sampler._weights, "catch_up", late)
            assert faults(seen.sample()) == ""
            assert len(calls) == 2


@pytest.mark.slow
def test_a_follower_that_is_overtaken_looks_again(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it knows of episodes, their rows are gone: twice, and then always."""
    with expstore.open(store_path, capacity=CAPACITY) as rb:
        writer = Writer(rb)
        writer.write(CAPACITY // LANES)
        with expstore.open(store_path, mode="r", sampler=MAKE["start"](), batch_size=BATCH) as seen:
            storage: Any = seen.storage
            follow, calls = storage.follow, []
            limit = 2

            def overtaken() -> None:
                follow()
                calls.append(len(calls))
                for _ in range(3 if len(calls) <= limit else 0):
                    writer.write(CAPACITY // LANES)

            monkeypatch.setattr(storage, "follow", overtaken)
            writer.write(20)
            assert faults(seen.sample()) == ""
            assert len(calls) == 3
            limit = 1000
            writer.write(20)
            with pytest.raises(expstore.StateError, match="faster than they can be read"):
                seen.sample()


def faulty(**changes: Any) -> TensorDict:
    batch = rows(3, LENGTH)[2].clone()
    batch["next", "truncated"] = (torch.arange(LENGTH) == LENGTH - 1)[:, None]
    for name, place in changes.items():
        batch[name][place] += 1
    return batch


def test_the_check_detects_wrong_rows() -> None:
    for changes, words in [
        ({}, ""),
        ({"episode_of_lane": 3}, "two episodes"),
        ({"step": 4}, "follow"),
        ({"frame": (2, 599)}, "torn"),
    ]:
        said = faults(faulty(**changes))
        assert words in said
        assert bool(said) == bool(words)
