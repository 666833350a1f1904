"""A buffer in a separate process, which runs requested operations and can be killed at any file operation.

Used by tests/property/test_whole_buffer.py. Children are forked from a process that has opened no store;
calls and answers go through pipes. A buffer in RAM runs in the caller's process.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

import expstore.kernels.blosc_decode

# Imported here so that forked children have it.
import expstore.kernels.blosc_encode
import expstore.kernels.gather_runs
import expstore.kernels.rank_tree
import expstore.kernels.sum_tree
import expstore.sql.index
from expstore.buffers.policy_runner import PolicyRunner
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.disk.files import Disk, ReadingDisk
from expstore.maintenance.verify import verify
from expstore.storages import MemoryStorage
from expstore.storages.engine import store
from expstore.storages.engine.increment import capture
from expstore.storages.snapshots.rebuild import build, parts_of
from expstore.testing.model import Row
from expstore.testing.model_rows import columns_of, make_batch, patch_of
from tests.crash.killing_disks import KillingDisk
from tests.support.stores import NoKeeper

SEED, BATCH = 7, 6
#: Longer than any extend; longer extends are covered by other crash tests.
SPARE = 40
_SMALL = {"rows": 4}
_PACKED = {"layout": "packed", **_SMALL}
KINDS: dict[str, dict[str, Any]] = {
    "flat": {"layout": "flat"},
    "packed": {
        "layout": {
            "columns": "flat",
            "fields": {"pixels": _PACKED, "observation": _PACKED, "next.observation": _PACKED},
        }
    },
    "arrow": {"layout": "arrow"},
    "memory": {},
}
SAMPLERS: dict[str, Any] = {
    "random": expstore.RandomSampler,
    "prioritized": lambda: expstore.PrioritizedSampler(1000, 0.7, 0.5),
    "without replacement": expstore.SamplerWithoutReplacement,
    "slices": lambda: expstore.SliceSampler(num_slices=2, strict_length=False, truncated_key=None),
}
_ROWS = "SELECT _id, number, _episode, _step FROM transitions ORDER BY _id"
_EPISODES = (
    "SELECT episode_id, CASE WHEN source NOT LIKE '@%' THEN source END, length, status, live_rows "
    "FROM episodes ORDER BY episode_id"
)


class Dead(Exception):
    """The process was killed during an operation."""


def fields_of(rows: Sequence[Row], kind: str) -> dict[tuple[str, ...], Any]:
    """Return all fields of rows."""
    found: dict[tuple[str, ...], Any] = dict(columns_of(rows))
    if kind == "arrow":
        found["text",] = [
            None if row.serial % 5 == 3 else f"é{row.serial}" * (row.serial % 4) for row in rows
        ]
    return found


def _batch(rows: Sequence[Row], kind: str) -> TensorDict:
    batch = make_batch(rows)
    if kind == "arrow":
        batch["text"] = NonTensorStack(*fields_of(rows, kind)["text",])
    return batch


def _plain(data: TensorDict) -> dict[tuple[str, ...], Any]:
    """Return a batch in a form that can be sent through a pipe."""
    found: dict[tuple[str, ...], Any] = {}
    for key in data.keys(True, True):
        found[key if isinstance(key, tuple) else (key,)] = data[key].numpy()
    if "text" in data:
        found["text",] = list(data["text"])
    return found


def _shrink() -> None:
    """Set small sizes (shards, segments), and run no background threads."""
    torch.set_num_threads(1)
    tuning.SPARE_SLOTS = tuning.UNBOUNDED_SPARE_ROWS = SPARE
    tuning.PACKED_SHARD_ROWS = tuning.UNBOUNDED_PACKED_SHARD_ROWS = 16
    tuning.ARROW_SEGMENT_BYTES, tuning.ARROW_SEGMENT_BATCHES = 6000, 6
    tuning.JOURNAL_SEGMENT_BYTES = 8192
    store.Keeper = NoKeeper  # type: ignore[assignment,misc]
    PolicyRunner.start = lambda runner: None  # type: ignore[method-assign]


class Hand:
    """Run requested operations on a buffer; answers are plain values."""

    def __init__(self, folder: Path, kind: str, capacity: int | None, sampler: str, mode: Any = "a") -> None:
        self._folder, self._kind = folder, kind
        how: dict[str, Any] = {"batch_size": BATCH, "sampler": SAMPLERS[sampler]()}
        self.rb: Any
        if kind == "memory":
            kept = MemoryStorage(capacity, seed=SEED)
            self.rb = TensorDictReplayBuffer(storage=kept, with_ids=True, **how)
        else:
            made = KINDS[kind] if mode == "a" else {}
            self.rb = expstore.open(
                folder / "run.exp", capacity=capacity, mode=mode, seed=SEED, **how, **made
            )

    def recovered(self) -> str | None:
        return getattr(self.rb, "recovered", None)

    def extend(self, rows: Sequence[Row], source: str | None) -> list[int]:
        return sorted(self.rb.extend(_batch(rows, self._kind), source=source, return_ids=True).tolist())

    def add(self, row: Row, source: str | None) -> int:
        return int(self.rb.add(_batch([row], self._kind)[0], source=source))

    def put(self, index: Sequence[int], rows: Sequence[Row], late: dict[str, list[int]]) -> None:
        batch = _batch(rows, self._kind)
        for name, values in late.items():
            batch[name] = torch.tensor(values)
        self.rb[torch.tensor(index)] = batch

    def patch(self, ids: Sequence[int], rows: Sequence[Row]) -> int:
        return int(self.rb.update_if_present(id=torch.tensor(ids), patch=patch_of(rows)).updated_count)

    def prioritise(self, values: dict[int, float]) -> int:
        given = torch.tensor(list(values.values()), dtype=torch.float32)
        return int(self.rb.update_priority(id=torch.tensor(list(values)), priority=given))

    def sample(self) -> tuple[list[int], dict[tuple[str, ...], Any]]:
        batch = self.rb.sample()
        return batch["id"].tolist(), _plain(batch)

    def set_sampler(self, name: str) -> None:
        self.rb.set_sampler(SAMPLERS[name]())

    def empty(self) -> None:
        self.rb.empty()

    def flush(self) -> None:
        self.rb.flush()

    def tick(self) -> None:
        """Do the periodic work of the background thread."""
        self.rb.storage.write_values()

    def retain(self, least: int) -> None:
        self.rb.retention.set({"where": f"number >= {least}"})
        self.rb.retention.apply()
        self.rb.retention.set(None)

    def add_column(self, name: str, value: int, later: int | None) -> None:
        if later is None:
            self.rb.columns.add(name, fill=torch.tensor(value))
        else:
            how = {"dtype": "int64", "shape": (), "default": later}
            self.rb.columns.add(name, function=lambda rows: rows["number"] * value, **how)

    def drop_column(self, name: str) -> None:
        self.rb.columns.drop(name)

    def dumps(self, keep: int) -> int:
        return int(self.rb.dumps(self._folder / "versions", keep=keep).number)

    def loads(self, number: int) -> int:
        self.rb.loads(self._folder / "versions", number)
        return int(self.rb.storage.last)

    def ship(self) -> dict[str, Any]:
        """Capture what has changed since the last call; look at the store that is built of it."""
        place, built = self._folder / "parts", self._folder / "built.exp"
        parts, state = pickle.loads(place.read_bytes()) if place.exists() else ({}, None)
        names = (f"{len(parts) + n}" for n in itertools.count())
        increment = capture(self.rb.storage, state, name=names.__next__, part_bytes=2048)
        if increment is not None:
            parts |= dict(increment.parts)
            state = json.loads(json.dumps(increment.state))
        assert capture(self.rb.storage, state, name=names.__next__) is None
        place.write_bytes(pickle.dumps((parts, state)))
        kept = {name: parts[name] for name in parts_of(state, parts.__getitem__)}
        build(built, state, kept.__getitem__, disk=Disk())
        try:
            assert not verify(built)
            with expstore.open(built) as rb:
                return _look(rb)
        finally:
            shutil.rmtree(built)

    def versions(self) -> list[int]:
        path = self._folder / "versions"
        return [version.number for version in expstore.versions(path)] if path.exists() else []

    def look_at_version(self, number: int) -> dict[str, Any]:
        with expstore.open(self._folder / "versions", version=number) as rb:
            return _look(rb)

    def sql(self) -> tuple[list[Any], list[Any]]:
        return self.rb.sql(_ROWS).fetchall(), self.rb.sql(_EPISODES).fetchall()

    def look(self) -> dict[str, Any]:
        return _look(self.rb)

    def follow(self) -> dict[str, Any]:
        self.rb.refresh()
        return _look(self.rb)

    def close(self) -> None:
        self.rb.close()


def _look(rb: Any) -> dict[str, Any]:
    """Return everything that can be read from a buffer."""
    kept = rb.storage
    ids = kept.window.ids()
    found = {
        "ids": ids.tolist(), "last": int(kept.last), "len": len(rb), "write_count": int(rb.write_count),
        "largest": float(kept.priorities.largest), "draw": int(kept.draws.number), "fields": {}, "rows": None,
    }  # fmt: skip
    if kept.schema is not None:
        found["names"] = {field.key for field in kept.schema.fields}
    if ids.size:
        own = len(kept.require_schema().fields)
        places = [own, own + 1, own + 2, own + 4]
        if kept.path is not None:
            columns = kept.read(ids, places)
        else:
            columns = [np.concatenate(parts) for parts in kept.views(places, int(ids[0]), ids.size)]
        found["rows"] = [column.tolist() for column in columns]
        found["fields"] = _plain(rb[:])
    if hasattr(kept, "state"):
        entries = {e.episode: e for e in kept.state.log.read() if e.episode}
        entries |= {e.episode: e for e in kept.episodes.open_entries()}
        found["episodes"] = {n: (e.length, int(e.status)) for n, e in entries.items()}
    return found


class Host:
    """A hand in a separate process.

    Args:
        at: Number of the file operation at which the process is killed; 0 for none. A write is torn there.
        given: Arguments of `Hand`.

    Raises:
        Dead: The process was killed while it opened the store.
    """

    def __init__(self, *given: Any, at: int = 0, torn: float | None = None) -> None:
        self._pipe, far = multiprocessing.Pipe()
        self._child = multiprocessing.get_context("fork").Process(
            target=_serve, args=(far, self._pipe, given, at, torn), daemon=True
        )
        self._child.start()
        far.close()
        try:
            self._answer("open")
        except BaseException:
            self.end()
            raise

    def call(self, name: str, *given: Any) -> Any:
        """Run an operation; return the answer.

        Raises:
            Dead: The process was killed before it answered.
            AssertionError: The operation raised an error.
        """
        self._pipe.send((name, given))
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        if not self._pipe.poll(100):
            raise AssertionError(f"{name} has not finished")
        try:
            fine, answer = self._pipe.recv()
        except EOFError:
            self._child.join()
            assert self._child.exitcode == -signal.SIGKILL, f"{name} ended the process"
            raise Dead from None
        assert fine, f"{name} failed: {answer}"
        return answer

    def end(self) -> None:
        """Kill the process, if it is running."""
        self._child.kill()
        self._child.join()
        self._pipe.close()


class Here:
    """A hand in this process, which cannot be killed."""

    def __init__(self, *given: Any) -> None:
        self._hand = Hand(*given)

    def call(self, name: str, *given: Any) -> Any:
        return getattr(self._hand, name)(*given)

    def end(self) -> None:
        self._hand.close()


def _serve(pipe: Connection, near: Connection, given: Any, at: int, torn: float | None) -> None:
    near.close()
    disk = KillingDisk(at, torn=torn, serial=True)
    store.Disk = lambda: disk  # type: ignore[assignment,misc]
    ReadingDisk.boot_id = disk.boot_id  # type: ignore[method-assign]  # a follower knows the writer
    _shrink()
    hand: Hand | None = None
    name, more = "open", given
    while True:
        try:
            if name == "open":
                hand, answer = Hand(*more), None
            elif name == "arm":
                disk.torn = more[1]
                answer = disk.arm(more[0])
            else:
                answer = getattr(hand, name)(*more)
            pipe.send((True, answer))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        try:
            name, more = pipe.recv()
        except EOFError:
            os._exit(0)
