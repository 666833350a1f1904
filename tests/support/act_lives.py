"""Scripted histories of stores, each a function; `act_traces.py` records their file operations.

A history is short: one feature of a store, with the operations that it needs beforehand. Sizes are set low,
so that a few rows fill a shard, a chunk or a segment of the journal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDict

from expstore import (
    ConsumingSampler,
    PrioritizedSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
)
from expstore.core import tuning
from expstore.errors import ExpStoreError, StateError, StorageError
from expstore.maintenance.resize import resize
from expstore.storages.format.layout import ColumnLayout
from tests.support.act_traces import Life
from tests.support.batches import counted_frames, numbered_rows, transitions
from tests.support.variable_length import rollouts

Script = Callable[[Life], None]

LIVES: dict[str, Script] = {}

_FRAMES = ColumnLayout(fields={name: {"layout": "packed", "rows": 4} for name in ("frame", "next.frame")})


def _life(script: Script) -> Script:
    LIVES[script.__name__] = script
    return script


@contextlib.contextmanager
def _sizes(**values: Any) -> Iterator[None]:
    """Set sizes of `tuning` while the context is active."""
    with contextlib.ExitStack() as patches:
        for name, value in values.items():
            patches.enter_context(patch.object(tuning, name, value))
        yield


def _rows(count: int, start: int = 0) -> TensorDict:
    """Return rows of episodes of 7 steps."""
    return transitions(count, start=start, episode_length=7)


def _numbers(count: int, start: int = 0) -> TensorDict:
    """Return rows of one field, without episodes, for short traces."""
    return numbered_rows(count, start)


def _frames(count: int, start: int = 0) -> TensorDict:
    """Return rows whose next frame is the frame of the following row."""
    number = torch.arange(start, start + count)
    data = numbered_rows(count, start, frame=lambda number: counted_frames(number, 8, 8))
    data["next"] = TensorDict({"frame": counted_frames(number + 1, 8, 8)}, [count])
    return data


def _extend(life: Life, rb: Any, data: TensorDict, **options: Any) -> None:
    life.step(f"extend({', '.join([str(len(data)), *options])})")
    rb.extend(data, **options)


def _flush(life: Life, rb: Any) -> None:
    life.step("flush()")
    rb.flush()


# -- rows come -------------------------------------------------------------------------------------------


@_life
def make(life: Life) -> None:
    """A store that remains empty, opened twice."""
    life.close(life.open())
    life.close(life.open())


@_life
def add(life: Life) -> None:
    rb = life.open(20)
    for number in range(3):
        life.step("add()")
        rb.add(_rows(1, number)[0])
    _flush(life, rb)
    life.close(rb)


@_life
def extend_small(life: Life) -> None:
    """Batches that remain in the journal until the next checkpoint."""
    rb = life.open(40)
    _extend(life, rb, _rows(5))
    _extend(life, rb, _rows(5, 5))
    _flush(life, rb)
    _extend(life, rb, _rows(3, 10))
    life.close(rb)


@_life
def extend_large(life: Life) -> None:
    """Batches that are written to the columns directly, across the end of a shard."""
    with _sizes(FLAT_SHARD_ROWS=4096, MEMTABLE_BATCH_BYTES=0):
        rb = life.open()
        _extend(life, rb, _rows(3000))
        _extend(life, rb, _rows(3000, 3000))
        _flush(life, rb)
        life.close(rb)


@_life
def extend_longer_than_the_ring(life: Life) -> None:
    with _sizes(SPARE_SLOTS=10):
        rb = life.open(20)
        _extend(life, rb, _rows(65))
        _extend(life, rb, _rows(5, 65))
        life.close(rb)


@_life
def ring_goes_round(life: Life) -> None:
    """Rows overwrite the slots of others, and wait for a checkpoint if no slot is free."""
    with _sizes(SPARE_SLOTS=8, MEMTABLE_BATCH_BYTES=0):
        rb = life.open(12)
        for start in range(0, 42, 6):
            _extend(life, rb, _numbers(6, start))
        life.close(rb)


@_life
def unbounded(life: Life) -> None:
    with _sizes(UNBOUNDED_SPARE_ROWS=16, MEMTABLE_BATCH_BYTES=0):
        rb = life.open()
        for start in range(0, 30, 10):
            _extend(life, rb, _rows(10, start))
        life.close(rb)
        rb = life.open()
        _extend(life, rb, _rows(4, 30))
        life.close(rb)


@_life
def durability_sync(life: Life) -> None:
    with _sizes(INLINE_BATCH_BYTES=2048):
        rb = life.open(60, durability="sync")
        _extend(life, rb, _rows(3))
        _extend(life, rb, _rows(30, 3))  # more than fits into a record
        life.step("add()")
        rb.add(_rows(1, 33)[0])
        life.close(rb)


@_life
def two_dims(life: Life) -> None:
    rb = life.open(16, ndim=2)
    for start in (0, 12):
        data = transitions(12, start=start)
        data["action"] = torch.arange(start, start + 12)
        _extend(life, rb, data.reshape(4, 3))
    life.close(rb)


@_life
def sources(life: Life) -> None:
    """Episodes of several sources, continued after a restart."""
    rb = life.open(60)
    _extend(life, rb, _rows(5), source="left")
    _extend(life, rb, _rows(5, 100), source="right")
    _extend(life, rb, _rows(5, 5), source="left")
    life.close(rb)
    rb = life.open()
    _extend(life, rb, _rows(6, 10), source="left")
    life.close(rb)


@_life
def idempotency_keys(life: Life) -> None:
    with _sizes(IDEMPOTENCY_KEYS=3, IDEMPOTENCY_SLOTS=6):
        rb = life.open(40)
        for number in (0, 1, 1, 2, 3):
            _extend(life, rb, _numbers(2, number), idempotency_key=f"key {number}")
        life.close(rb)
        rb = life.open()
        _extend(life, rb, _numbers(2, 3), idempotency_key="key 3")
        life.close(rb)


# -- rows change -----------------------------------------------------------------------------------------


@_life
def change_in_place(life: Life) -> None:
    rb = life.open(20)
    _extend(life, rb, _rows(12))
    _flush(life, rb)
    life.step("rb[2:5] = rows")
    rb[torch.arange(2, 5)] = _rows(3, 100)
    life.step("update_if_present(patch of action)")
    rb.update_if_present(id=torch.tensor([4, 9]), patch={"action": torch.tensor([7, 8])})
    _extend(life, rb, _rows(2, 12))
    life.step("rb[12] = row, which is in memory")
    rb[torch.tensor([12])] = _rows(1, 200)
    life.close(rb)


@_life
def change_of_many_bytes(life: Life) -> None:
    """A replacement too large for a record is written to a separate file."""
    with _sizes(REPLACE_RECORD_BYTES=16):
        rb = life.open(20)
        _extend(life, rb, _rows(12))
        life.step("rb[2:5] = rows")
        rb[torch.arange(2, 5)] = _rows(3, 100)
        _flush(life, rb)
        life.close(rb)


@_life
def best_rows(life: Life) -> None:
    rb = life.open(6, buffer={"writer": TensorDictMaxValueWriter("score")})
    for numbers in ([3, 1, 4, 1, 5, 9], [2, 6, 5], [3, 5, 8]):
        number = torch.tensor(numbers)
        _extend(life, rb, TensorDict({"score": number.float(), "number": number}, [len(numbers)]))
    _flush(life, rb)
    _extend(life, rb, TensorDict({"score": torch.tensor([7.0]), "number": torch.tensor([7])}, [1]))
    life.close(rb)


@_life
def priorities(life: Life) -> None:
    rb = life.open(20, buffer={"sampler": PrioritizedSampler(20, alpha=0.7, beta=0.5)})
    _extend(life, rb, _numbers(10))
    life.step("update_priority([1, 4])")
    rb.update_priority(torch.tensor([1, 4]), torch.tensor([2.0, 3.0]))
    life.step("flush_priorities()")
    rb.storage.write_values()
    _extend(life, rb, _numbers(10, 10))
    life.step("update_priority([15])")
    rb.update_priority(torch.tensor([15]), torch.tensor([0.5]))
    life.close(rb)


@_life
def annotations(life: Life) -> None:
    rb = life.open(40, index=True)
    _extend(life, rb, _rows(9), episode_info={"level": 1})
    life.step("annotate(1)")
    rb.episodes.annotate(1, success=True)
    _extend(life, rb, _rows(9, 9), episode_info={"level": 2})
    _flush(life, rb)
    life.step("annotate(2)")
    rb.episodes.annotate(2, level=None, operator="ada")
    life.close(rb)


@_life
def episodes_end_and_resume(life: Life) -> None:
    """Episodes are ended by call and by close, and adopted by the next opening, which is killed."""
    rb = life.open(40)
    _extend(life, rb, _rows(3), source="left")
    _extend(life, rb, _rows(3, 100), source="right")
    life.step("episodes.end(right)")
    rb.episodes.end("right")
    life.step("episodes.end(right), which has none that is open")
    rb.episodes.end("right")
    life.close(rb)
    rb = life.open()
    life.step("episodes.resume(left)")
    rb.episodes.resume("left")
    _extend(life, rb, _rows(2, 3), source="left")
    life.kill()
    rb = life.open()
    life.step("episodes.resume(left)")
    rb.episodes.resume("left")
    life.step("episodes.end()")
    rb.episodes.end()
    life.close(rb)


@_life
def empty(life: Life) -> None:
    rb = life.open(20)
    _extend(life, rb, _rows(9))
    _flush(life, rb)
    life.step("empty()")
    rb.empty()
    _extend(life, rb, _rows(4, 9))
    life.close(rb)


# -- batches ---------------------------------------------------------------------------------------------


@_life
def draws(life: Life) -> None:
    """The number of the next draw, and a sampler's progress."""
    rb = life.open(20, buffer={"sampler": SamplerWithoutReplacement()})
    _extend(life, rb, _numbers(10))
    for _ in range(3):
        life.step("sample()")
        rb.sample()
    _flush(life, rb)
    life.step("sample()")
    rb.sample()
    life.close(rb)


@_life
def counts(life: Life) -> None:
    """How often each row was returned."""
    rb = life.open(20, buffer={"sampler": ConsumingSampler(2)})
    _extend(life, rb, _numbers(10))
    for _ in range(3):
        life.step("sample()")
        rb.sample()
    _flush(life, rb)
    _extend(life, rb, _numbers(4, 10))
    life.close(rb)


# -- the journal, and ends that are not closes -----------------------------------------------------------


@_life
def journal_rotation(life: Life) -> None:
    """Segments of the journal are created, and removed when a checkpoint covers them."""
    rb = life.open(30, segment_bytes=4096)
    for start in range(0, 32, 4):
        _extend(life, rb, _rows(4, start))
        if start % 12 == 8:
            _flush(life, rb)
    life.close(rb)


@_life
def kill_and_reopen(life: Life) -> None:
    rb = life.open(30)
    _extend(life, rb, _rows(8))
    _flush(life, rb)
    _extend(life, rb, _rows(8, 8))
    life.step("rb[1] = row")
    rb[torch.tensor([1])] = _rows(1, 100)
    life.kill()
    rb = life.open()
    _extend(life, rb, _rows(8, 16))
    life.kill()
    life.close(life.open())


@_life
def restart_of_the_machine(life: Life) -> None:
    """After a restart of the machine STATE is invalid, and touched blocks get new checksums."""
    rb = life.open(30)
    _extend(life, rb, _rows(12))
    _flush(life, rb)
    _extend(life, rb, _rows(24, 12))
    life.kill(power=True)
    rb = life.open()
    _extend(life, rb, _rows(4, 36))
    life.close(rb)


@_life
def full_disk(life: Life) -> None:
    """An extend and a checkpoint fail; the store continues when there is space again."""
    with _sizes(MEMTABLE_BATCH_BYTES=0):
        rb = life.open(30)
        _extend(life, rb, _rows(5))
        for name in ("columns", "journal"):
            life.disk.fail("write", name)
            with contextlib.suppress(StorageError):
                _extend(life, rb, _rows(5, 5))
                raise AssertionError("a write to a full disk succeeded")
        life.disk.fail("write", "checksums")
        with contextlib.suppress(StorageError):
            _flush(life, rb)
            raise AssertionError("a write to a full disk succeeded")
        _extend(life, rb, _rows(5, 5))
        life.close(rb)


@_life
def failed_sync(life: Life) -> None:
    """After a failed sync the state of the disk is unknown: the store must be reopened."""
    rb = life.open(30)
    _extend(life, rb, _rows(5))
    life.disk.fail("sync", "columns")
    for act in (lambda: _flush(life, rb), lambda: _extend(life, rb, _rows(5, 5))):
        with contextlib.suppress(StorageError, StateError):
            act()
            raise AssertionError("a store continued after a failed sync")
    with contextlib.suppress(ExpStoreError):
        life.close(rb)
    life.kill()
    rb = life.open()
    _extend(life, rb, _rows(5, 5))
    life.close(rb)


# -- the whole store -------------------------------------------------------------------------------------


@_life
def resizes(life: Life) -> None:
    rb = life.open(20)
    _extend(life, rb, _numbers(20))
    life.close(rb)
    for capacity in (30, 10):
        life.step(f"resize({capacity})")
        resize(life.path, capacity=capacity, disk=life.disk)
    rb = life.open()
    _extend(life, rb, _numbers(4, 20))
    life.close(rb)


@_life
def dumps_and_loads(life: Life) -> None:
    rb = life.open(30)
    _extend(life, rb, _rows(10))
    life.step("dumps()")
    rb.dumps(life.folder / "kept")
    _extend(life, rb, _rows(10, 10))
    life.step("loads()")
    rb.loads(life.folder / "kept")
    _extend(life, rb, _rows(3, 30))
    life.close(rb)


@_life
def dumps_twice(life: Life) -> None:
    """The second snapshot shares unchanged files with the first one; the third replaces the first."""
    with _sizes(FLAT_SHARD_ROWS=4096):
        rb = life.open()
        _extend(life, rb, _numbers(5000))
        for start in (5000, 5010, 5020):
            life.step("dumps(keep=2)")
            rb.dumps(life.folder / "kept", keep=2)
            _extend(life, rb, _numbers(10, start))
        life.close(rb)


@_life
def tags(life: Life) -> None:
    rb = life.open(20)
    _extend(life, rb, _numbers(10))
    life.step("tag(first)")
    rb.snapshots.tag("first")
    life.close(rb)


@_life
def state_dict(life: Life) -> None:
    rb = life.open(20)
    _extend(life, rb, _numbers(6))
    life.step("load_state_dict(state_dict())")
    rb.load_state_dict(rb.state_dict())
    life.close(rb)


@_life
def columns_come_and_go(life: Life) -> None:
    rb = life.open(30)
    _extend(life, rb, _numbers(10))
    life.step("add_column(mark, fill)")
    rb.columns.add("mark", fill=torch.tensor(0.5))
    _extend(life, rb, _numbers(4, 10))
    life.step("add_column(double, function)")
    rb.columns.add("double", function=lambda rows: rows["number"] * 2, dtype=torch.int64, shape=(), default=0)
    life.step("drop_column(mark)")
    rb.columns.drop("mark")
    _extend(life, rb, _numbers(4, 14))
    life.close(rb)


@_life
def retention(life: Life) -> None:
    with _sizes(FLAT_SHARD_ROWS=4096, UNBOUNDED_SPARE_ROWS=64):
        rb = life.open(index=True)
        for start in range(0, 42, 14):
            _extend(life, rb, _rows(14, start))
        life.step("retain(where)")
        rb.retention.set({"where": "episode.episode_id not in (1, 3)"})
        life.step("apply_retention()")
        rb.retention.apply()
        _extend(life, rb, _rows(7, 42))
        life.close(rb)


# -- kinds of columns ------------------------------------------------------------------------------------


@_life
def packed_ring(life: Life) -> None:
    with _sizes(SPARE_SLOTS=12, PACKED_SHARD_ROWS=16, PACKED_LOOKBACK_ROWS=(4, 8), MEMTABLE_BATCH_BYTES=0):
        rb = life.open(24, layout=_FRAMES)
        for start in range(0, 60, 10):
            _extend(life, rb, _frames(10, start))
        _flush(life, rb)
        life.kill()
        rb = life.open()
        _extend(life, rb, _frames(5, 60))
        life.close(rb)


@_life
def packed_and_unbounded(life: Life) -> None:
    with _sizes(UNBOUNDED_SPARE_ROWS=32, UNBOUNDED_PACKED_SHARD_ROWS=16, PACKED_LOOKBACK_ROWS=(4, 8)):
        rb = life.open(layout=_FRAMES)
        for start in (0, 10, 20):
            _extend(life, rb, _frames(10, start))
        life.step("dumps()")
        rb.dumps(life.folder / "kept")
        life.close(rb)


@_life
def arrow(life: Life) -> None:
    rb = life.open(arrow=True)
    _extend(life, rb, rollouts(0, 6))
    _extend(life, rb, rollouts(6, 6))
    _flush(life, rb)
    life.kill()
    rb = life.open(arrow=True)
    _extend(life, rb, rollouts(12, 3))
    life.close(rb)


@_life
def arrow_ring(life: Life) -> None:
    """Segments are created, compacted from short batches, and removed."""
    with _sizes(
        SPARE_SLOTS=12, ARROW_SEGMENT_BYTES=6000, ARROW_SEGMENT_BATCHES=6, ARROW_BATCH_BYTES=1500,
        ARROW_COMPRESSED_BATCH_BYTES=500, ARROW_WRITE_BYTES=3000, ARROW_COMPACTED_BYTES=1500,
        ARROW_COMPACTION_BATCHES=4,
    ):  # fmt: skip
        rb = life.open(20, arrow=True)
        for start in range(0, 48, 6):
            _extend(life, rb, rollouts(start, 6))
        life.close(rb)


@_life
def slices_of_episodes(life: Life) -> None:
    """Draws of a sampler that uses the index of episodes, while rows are written."""
    rb = life.open(30, buffer={"sampler": SliceSampler(num_slices=2)})
    _extend(life, rb, _rows(14))
    life.step("sample()")
    rb.sample()
    _extend(life, rb, _rows(14, 14))
    life.step("sample()")
    rb.sample()
    life.close(rb)
