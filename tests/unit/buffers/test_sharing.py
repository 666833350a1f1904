"""Copies of a shared buffer write through the process that has the store open.

A copy that is unpickled in this process connects like one in another process: most tests need no other one.
"""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

import expstore
from expstore import SampleToInsertRatio, TensorDictReplayBuffer
from expstore.buffers import snapshots, writing_proxy
from expstore.disk.message_socket import MessageSocket
from expstore.errors import (
    LockedError,
    NotReadyError,
    PriorityError,
    RemoteError,
    SchemaError,
    SnapshotError,
    StateError,
)
from expstore.wire.slots import Slot
from tests.support.batches import numbered_rows, transitions
from tests.support.forks import collect_from_child
from tests.support.recorded_envs import drive, make_counting, model_of_lane, stored_rows
from tests.support.waits import wait_until


def copy_of(rb: TensorDictReplayBuffer) -> TensorDictReplayBuffer:
    found: TensorDictReplayBuffer = pickle.loads(pickle.dumps(rb))
    return found


@pytest.fixture
def rb(store_path: Path) -> Iterator[TensorDictReplayBuffer]:
    with expstore.open(store_path, capacity=1000, seed=1) as opened:
        yield opened.share()


@pytest.fixture
def worker(rb: TensorDictReplayBuffer) -> Iterator[TensorDictReplayBuffer]:
    with copy_of(rb) as opened:
        yield opened


def statuses(rb: TensorDictReplayBuffer) -> list[str]:
    return [row[0] for row in rb.sql("SELECT status FROM episodes ORDER BY episode_id").fetchall()]


def sources(rb: TensorDictReplayBuffer) -> list[str]:
    return [row[0] for row in rb.sql("SELECT source FROM episodes ORDER BY episode_id").fetchall()]


# -- writing -------------------------------------------------------------------------------------------------


def test_a_worker_fixes_the_fields_and_extends(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer
) -> None:
    assert rb.shared
    assert worker.shared
    assert worker.share() is worker
    for start in range(0, 400, 100):
        index = worker.extend(transitions(100, start=start))
        assert index.tolist() == list(range(start, start + 100))
    assert torch.equal(rb[:]["observation"], transitions(400)["observation"])
    worker.refresh()
    assert (len(worker), worker.write_count) == (400, 400)
    assert torch.equal(worker[:]["observation"], transitions(400)["observation"])
    assert worker.sample(32)["id"].max() <= 400


def test_a_long_batch_gets_a_longer_slot(rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer) -> None:
    wide = {"frame": lambda number: number[:, None].expand(-1, 2048).to(torch.float64)}  # 16 KiB a row
    for count in (3, 700, 5, 900):
        ids = worker.extend(numbered_rows(count, **wide), return_ids=True)
        assert torch.equal(rb.by_id(ids)["frame"][:, 9], torch.arange(count, dtype=torch.float64))


def test_dicts_and_arrays_and_lists_are_converted_by_the_fields(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer
) -> None:
    rb.extend({"x": np.zeros(1, np.float32), "next": {"y": np.zeros((1, 2), np.float32)}})
    worker.extend({"x": np.ones(2, np.float32), "next": {"y": np.ones((2, 2), np.float32)}})
    worker.extend([{"x": 2, "next": {"y": np.ones(2, np.float32)}}])
    worker.add({"x": 3.5, "next": {"y": np.ones(2, np.float32)}})
    assert rb[:]["x"].tolist() == [0, 1, 1, 2, 3.5]


def test_fields_that_come_and_go_between_two_calls(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer
) -> None:
    for start in (0, 10, 20):
        worker.extend(numbered_rows(10, start))
    rb.columns.add("extra", fill=5.0, dtype="float32", default=5.0)
    worker.extend(numbered_rows(10, 30))  # late fields may be missing
    assert worker.schema == rb.schema  # the answer told it
    worker.extend(numbered_rows(10, 40, extra=torch.ones(10)))
    worker.extend({"number": np.arange(50, 60), "extra": [2] * 10})
    assert rb[:]["number"].tolist() == list(range(60))
    assert rb[30:]["extra"].tolist() == [5.0] * 10 + [1.0] * 10 + [2.0] * 10
    rb.columns.drop("extra")
    with pytest.raises(SchemaError, match="extra"):
        worker.extend(numbered_rows(10, 40, extra=torch.ones(10)))
    worker.extend(numbered_rows(10, 60))
    assert rb[:]["number"].tolist() == list(range(70))


def test_rows_of_no_fixed_size(store_path: Path) -> None:
    with expstore.open(store_path, layout="arrow").share() as rb, copy_of(rb) as worker:
        for number in range(3):
            worker.extend([{"text": "a" * number, "tokens": torch.arange(number), "x": 1.0}, {
                "text": "b", "tokens": torch.arange(2), "x": float(number)}])  # fmt: skip
        found = rb[:]
        assert list(found["text"]) == ["", "b", "a", "b", "aa", "b"]
        assert [len(row) for row in found["tokens"].unbind()] == [0, 2, 1, 2, 2, 2]


def test_priorities(rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer, store_path: Path) -> None:
    worker.extend(numbered_rows(5))
    assert worker.update_priority(id=torch.tensor([1, 2, 99]), priority=torch.tensor([2.0, 3.0, 1.0])) == 2
    assert worker.update_priority(torch.tensor([4, -1]), 7.0) == 1
    assert rb.sql("SELECT priority FROM priorities ORDER BY id").df()["priority"].tolist() == [2, 3, 1, 1, 7]
    worker.refresh()
    sample = worker.sample(4)
    sample["td_error"] = torch.full((4,), 9.0)
    assert worker.update_tensordict_priority(sample) == 4
    assert rb.storage.priorities.largest == 9
    with pytest.raises(PriorityError, match="nan"):
        worker.update_priority(id=torch.tensor([1]), priority=torch.tensor([float("nan")]))


def test_episodes_are_annotated_ended_and_resumed(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer
) -> None:
    worker.extend(numbered_rows(3), source="a", episode_info={"n": 1})
    assert worker.episodes.annotate(1, success=True) == {"n": 1, "success": True}
    assert worker.episodes.annotate_each({1: {}}) == {1: {"n": 1, "success": True}}
    assert rb.sql("SELECT info FROM episodes").fetchall() == [('{"n": 1, "success": true}',)]
    rb.extend(numbered_rows(3))
    worker.episodes.end()
    assert statuses(rb) == ["cut", "open"]  # only those of its own session
    worker.extend(numbered_rows(2), source="a")
    worker.episodes.end_stream(None)
    worker.episodes.end("b")
    assert statuses(rb) == ["cut", "open", "open"]
    worker.close()
    wait_until(lambda: statuses(rb) == ["cut", "open", "cut"])
    with copy_of(rb) as another:
        assert another.episodes.resume("a", check=False).tolist() == [3]
        another.extend(numbered_rows(1), source="a")
        assert rb.sql("SELECT length FROM episodes WHERE episode_id = 3").fetchall() == [(3,)]
        assert another.episodes.resume("never").tolist() == []


def test_environments_are_recorded(rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer) -> None:
    envs = expstore.gym.RecordVector(make_counting(AutoresetMode.SAME_STEP), worker, source="envs")
    for _ in itertools.islice(drive(envs), 9):
        pass
    envs.close()
    for lane, found in stored_rows(rb).items():
        assert found == model_of_lane(lane, 9, AutoresetMode.SAME_STEP)
    seeds = rb.sql("SELECT info->>'seed' FROM episodes WHERE info IS NOT NULL ORDER BY source").fetchall()
    assert seeds == [("3",), ("4",), ("5",), ("6",)]


# -- sessions ------------------------------------------------------------------------------------------------


def test_some_lanes_are_reset(rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer) -> None:
    with worker.record("env", lanes=2) as episode:
        for step in range(4):
            if step == 3:
                episode.reset([1], info={"seed": 5})
            now = np.full((2, 1), step, np.float32)
            episode.step(now, np.zeros(2, np.int64), np.ones(2), now + 1, [False, False], [False, False])
    found = rb.sql("SELECT source, length, info FROM episodes ORDER BY source, episode_id").fetchall()
    assert found == [("env", 4, None), ("env//1", 3, None), ("env//1", 1, '{"seed": 5}')]


def test_flush_syncs_the_store(rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer) -> None:
    worker.extend(numbered_rows(100))
    worker.flush()
    assert rb.stats()["unsynced_rows"] == 0


def test_each_worker_is_a_session_of_its_own(rb: TensorDictReplayBuffer) -> None:
    with copy_of(rb) as one, copy_of(rb) as other:
        for start in range(0, 30, 10):
            for buffer in (rb, one, other):
                buffer.extend(numbered_rows(10, start))
                buffer.extend(numbered_rows(5, start), source="named")
        found = rb.sql("SELECT source, length FROM episodes ORDER BY episode_id").fetchall()
        assert [length for _, length in found] == [30, 15] * 3
        assert len({source for source, _ in found}) == 4  # three unnamed streams, and one name
    wait_until(lambda: statuses(rb) == ["open"] * 2 + ["cut"] * 4)


def test_another_number_of_lanes_cuts_and_never_joins_lane_0(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer
) -> None:
    lanes = TensorDict({"number": torch.arange(8).reshape(2, 4)}, [2, 4])
    worker.extend(lanes, source="s")
    worker.extend(lanes, source="s")
    worker.extend(numbered_rows(3), source="s")
    worker.extend(numbered_rows(3), source="s")
    worker.extend(lanes, source="s")
    with pytest.raises(SchemaError, match="other"):
        worker.extend(TensorDict({"other": torch.zeros(3)}, [3]), source="s")
    found = rb.sql("SELECT source, length, status FROM episodes ORDER BY episode_id").fetchall()
    assert found == [
        ("s", 8, "cut"), ("s//1", 8, "cut"), ("s", 6, "cut"), ("s", 4, "open"), ("s//1", 4, "open"),
    ]  # fmt: skip


def test_a_repeated_call_is_stored_once(rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer) -> None:
    first = worker.extend(numbered_rows(3), idempotency_key="one", digest=bytes(16))
    with copy_of(rb) as other:
        again = other.extend(numbered_rows(3), idempotency_key="one", digest=bytes(16))
        with pytest.raises(StateError, match="another write") as caught:
            other.extend(numbered_rows(3), idempotency_key="one", digest=b"1" * 16)
        assert caught.value.kind == "key_reused"
    assert first.tolist() == again.tolist() == [0, 1, 2]
    assert len(rb) == 3


def test_a_call_that_was_interrupted_leaves_its_slot_to_the_owner(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between a message and its answer: the next call does not write over what the owner reads."""
    worker.extend(numbered_rows(3))
    for name, holder in (("receive", MessageSocket), ("send", MessageSocket), ("_put", Slot)):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                worker.extend(numbered_rows(3, 10))
        assert worker.extend(numbered_rows(3, 20)).numel() == 3
    assert rb[:]["number"].tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22, 20, 21, 22, 20, 21, 22]
    assert statuses(rb) == ["open"]  # the session went on


# -- errors --------------------------------------------------------------------------------------------------


def test_errors_are_raised_in_the_worker(rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer) -> None:
    worker.extend(numbered_rows(3))
    with pytest.raises(SchemaError, match="'number'.*float32") as caught:
        worker.extend(TensorDict({"number": torch.zeros(3)}, [3]))
    with pytest.raises(SchemaError) as direct:
        rb.extend(TensorDict({"number": torch.zeros(3)}, [3]))
    assert str(caught.value) == str(direct.value)
    assert (caught.value.kind, caught.value.hint) == (direct.value.kind, direct.value.hint)
    with pytest.raises(StateError, match="this store has none"):
        worker.extend(numbered_rows(3), validate="domain")
    with pytest.raises(expstore.errors.NotFoundError, match="no episode 77"):
        worker.episodes.annotate(77, a=1)
    with pytest.raises(SchemaError, match="is not a valid name"):
        worker.extend(numbered_rows(3), source=" ")
    assert len(rb) == 3


def test_first_rows_without_values_are_refused_as_by_the_owner(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer
) -> None:
    for one in (rb, worker):
        with pytest.raises(SchemaError, match="field 'empty' has no values.*leave the field out"):
            one.extend(numbered_rows(3, empty=torch.zeros(3, 0)))


#: What a worker cannot do.
REFUSED: dict[str, Callable[[TensorDictReplayBuffer], Any]] = {
    "set_": lambda worker: worker.set_("number", 0),
    "set_at_": lambda worker: worker.set_at_("number", 0, 1),
    "update_": lambda worker: worker.update_({"number": torch.zeros(3, dtype=torch.int64)}),
    "[]=": lambda worker: worker.__setitem__(0, numbered_rows(1)[0]),
    "update_if_present": lambda worker: worker.update_if_present(id=[1], patch={"number": [1]}),
    "columns.add": lambda worker: worker.columns.add("extra", fill=1.0, dtype="float32"),
    "columns.drop": lambda worker: worker.columns.drop("number"),
    "loads": lambda worker: worker.loads("nowhere"),
    "load_state_dict": lambda worker: worker.load_state_dict(worker.state_dict()),
    "set_specs": lambda worker: worker.set_specs(None),
    "episodes.end": lambda worker: worker.episodes.end(session="another"),
    "episodes.delete": lambda worker: worker.episodes.delete("true"),
    "retention.set": lambda worker: worker.retention.set({"age": "7d"}),
}


def test_what_else_changes_the_store_is_refused_with_advice(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer
) -> None:
    worker.extend(numbered_rows(3))
    for name, act in REFUSED.items():
        with pytest.raises(StateError, match="in the process that opened") as caught:
            act(worker)
        if not name.startswith(("episodes.delete", "retention")):
            assert "through it this copy of a shared buffer can append rows" in str(caught.value), name
    assert rb[:]["number"].tolist() == [0, 1, 2]
    assert worker.extend(numbered_rows(1)).tolist() == [3]


def test_a_worker_deletes_all_rows(rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer) -> None:
    worker.extend(numbered_rows(3))
    worker.empty()
    assert (len(rb), len(worker), rb.write_count) == (0, 0, 3)
    assert worker.extend(numbered_rows(2, 10)).tolist() == [0, 1]
    assert rb[:]["number"].tolist() == [10, 11]
    with pytest.raises(ValueError, match="empty_write_count=True"):
        worker.empty(True)


def test_a_worker_creates_versions(
    rb: TensorDictReplayBuffer,
    worker: TensorDictReplayBuffer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker.extend(numbered_rows(3))
    monkeypatch.chdir(tmp_path)
    first = worker.dumps("backup", keep=1)
    assert (first.number, first.rows, first.path) == (1, 3, tmp_path / "backup" / "v0001")
    worker.extend(numbered_rows(2, 3))
    second = worker.save(Path("backup"), keep=1)
    assert second == replace(rb.snapshots.list(tmp_path / "backup")[-1], disk_bytes=0)
    assert [version.number for version in worker.snapshots.list("backup")] == [2]
    with expstore.open("backup", mode="r") as found:
        assert found[:]["number"].tolist() == [0, 1, 2, 3, 4]
    assert worker.snapshots.tag("five").tag == "five"
    assert [version.tag for version in rb.snapshots.list()] == ["five"]
    with pytest.raises(SnapshotError, match="already has a snapshot 'five'"):
        worker.snapshots.tag("five")
    with pytest.raises(ValueError, match="keep must be at least 1"):
        worker.dumps("backup", keep=0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(SnapshotError):
        worker.dumps("other")


def test_a_version_that_a_worker_creates_holds_up_no_other_one(
    rb: TensorDictReplayBuffer,
    worker: TensorDictReplayBuffer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker.extend(numbered_rows(3))
    entered, go = threading.Event(), threading.Event()
    dump = snapshots.dump

    def wait_and_dump(*args: Any, **keywords: Any) -> Any:
        entered.set()
        assert go.wait(60)
        return dump(*args, **keywords)

    monkeypatch.setattr(snapshots, "dump", wait_and_dump)
    with copy_of(rb) as other:
        dumping = threading.Thread(target=worker.dumps, args=(tmp_path / "backup",))
        dumping.start()
        assert entered.wait(60)
        assert other.extend(numbered_rows(1, 3)).tolist() == [3]
        go.set()
        dumping.join()
    with expstore.open(tmp_path / "backup", mode="r") as found:
        assert len(found) == 4


def test_only_what_is_open_for_writing_is_shared(store_path: Path) -> None:
    with pytest.raises(StateError, match="rows of a ListStorage are objects.*expstore.open"):
        expstore.ReplayBuffer(storage=expstore.ListStorage(10), shared=True)
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(3))
        assert not rb.shared
        with expstore.open(store_path, mode="r") as reader, pytest.raises(StateError, match="reading only"):
            reader.share()
        copied = copy_of(rb)
        rb.share()
        with pytest.raises(StateError, match="copy of a buffer"):
            copied.extend(numbered_rows(3))  # it was made before
    with pytest.raises(StateError, match="closed"):
        rb.share()
    shared = TensorDictReplayBuffer(storage=lambda: expstore.ZarrStorage(store_path), shared=True)
    with shared, copy_of(shared) as worker:
        assert worker.extend(numbered_rows(1)).tolist() == [3]


# -- rows in RAM ---------------------------------------------------------------------------------------------

IN_RAM = [expstore.LazyTensorStorage, expstore.MemoryStorage]


@pytest.mark.parametrize("kind", IN_RAM)
def test_rows_in_ram_are_written_by_copies_and_read_by_the_owner(kind: Any, tmp_path: Path) -> None:
    sampler = expstore.PrioritizedSampler(alpha=1.0, beta=0.0)
    rb = TensorDictReplayBuffer(storage=kind(10), sampler=sampler, batch_size=4, shared=True)
    with copy_of(rb) as worker:
        assert (worker.schema, len(worker), worker.write_count) == (None, 0, 0)
        assert worker.extend(transitions(8)).tolist() == list(range(8))
        assert worker.extend(transitions(4, start=8)).tolist() == [8, 9, 0, 1]
        assert (len(worker), worker.write_count, worker.schema) == (10, 12, rb.schema)
        assert torch.equal(rb[2:]["observation"], transitions(12)["observation"][2:10])
        worker.update_priority(torch.arange(10), torch.eye(10)[3] * 1e6 + 1e-6)
        assert rb.sample()["index"].tolist() == [3] * 4
        reads: list[Callable[[], object]] = [
            worker.sample, lambda: worker[:], lambda: worker.sql("SELECT 1 FROM transitions"),
            worker.query,
        ]  # fmt: skip
        for read in reads:
            with pytest.raises(StateError, match="a copy can write, but not read them; sample there"):
                read()
        with pytest.raises(StateError, match="do it in that process"):
            worker[0] = transitions(1)[0]
        assert worker.dumps(tmp_path / "versions").rows == 10
        worker.empty()
        assert len(rb) == len(worker) == 0
    rb.share(False)
    rb.extend(transitions(2))
    assert len(copy_of(rb)[:]) == 2  # not shared: it has the rows


def test_copies_of_rows_in_ram_are_sessions_of_their_own() -> None:
    rb = TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(100), batch_size=4).share()
    with copy_of(rb) as one, copy_of(one) as other:
        for worker in (one, other):
            with worker.record("env", flush_steps=3) as episode:
                for step in range(7):
                    now = np.full(1, step, np.float32)
                    episode.step(now, 0, 1.0, now + 1, step == 4, False)
        assert statuses(rb) == ["terminated", "cut"] * 2
        worker.extend(rb[:3], source="left")
        assert statuses(rb)[-1] == "open"
    wait_until(lambda: statuses(rb)[-1] == "cut")


@pytest.mark.parametrize("kind", [expstore.LazyTensorStorage, expstore.LazyMemmapStorage])
def test_a_forked_child_writes_to_torchrls_storages(kind: Any) -> None:
    rb = TensorDictReplayBuffer(storage=kind(100), batch_size=4)
    if kind is expstore.LazyTensorStorage:
        rb.share()
    rb.extend(numbered_rows(3))

    def work(tell: Callable[[Any], None]) -> None:
        tell(rb.extend(numbered_rows(2, 3)).tolist())

    assert collect_from_child(work) == [[3, 4]]
    assert rb[:]["number"].tolist() == [0, 1, 2, 3, 4]


def test_a_copy_of_a_lazy_memmap_storage_writes_through_its_owner() -> None:
    rb = TensorDictReplayBuffer(storage=expstore.LazyMemmapStorage(100), batch_size=4)
    assert not rb.shared
    with copy_of(rb) as worker:
        assert rb.shared
        assert worker.shared
        worker.extend(numbered_rows(3))
        assert rb[:]["number"].tolist() == [0, 1, 2]
        worker.refresh()
        assert worker[:]["number"].tolist() == [0, 1, 2]


# -- ends ----------------------------------------------------------------------------------------------------


def test_closing_ends_the_calls_of_workers(store_path: Path) -> None:
    rb = expstore.open(store_path).share()
    worker = copy_of(rb)
    worker.extend(numbered_rows(3))
    rb.close()
    with pytest.raises(RemoteError, match="closed it or has died") as caught:
        worker.extend(numbered_rows(3))
    assert caught.value.kind == "owner_gone"
    with pytest.raises(RemoteError, match="does not answer"):
        worker.extend(numbered_rows(3))
    worker.close()
    with expstore.open(store_path) as again:
        assert len(again) == 3
        assert statuses(again) == ["cut"]


def test_sharing_ends_and_begins_again(rb: TensorDictReplayBuffer) -> None:
    with copy_of(rb) as worker:
        worker.extend(numbered_rows(3))
        assert not rb.share(False).shared
        with pytest.raises(RemoteError):
            worker.extend(numbered_rows(3))
    assert statuses(rb) == ["cut"]
    with copy_of(rb.share()) as worker:
        worker.extend(numbered_rows(3))
    assert len(rb) == 6


def is_locked(path: Path) -> bool:
    """Return whether another buffer has a store open."""
    try:
        expstore.open(path).close()
    except LockedError:
        return True
    return False


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_shared_buffer_that_is_dropped_closes_its_store(store_path: Path) -> None:
    rb = expstore.open(store_path).share()
    worker = copy_of(rb)
    worker.extend(numbered_rows(3))
    threads = [one for one in threading.enumerate() if one.name == "expstore-writing"]
    gc.disable()
    try:
        del rb
        for thread in threads:
            thread.join()
        wait_until(lambda: not is_locked(store_path))  # a background thread may be working for the store
    finally:
        gc.enable()
    with pytest.raises(RemoteError):
        worker.extend(numbered_rows(3))
    worker.close()


def test_a_worker_that_breaks_the_protocol_is_disconnected(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.extend(numbered_rows(3))
    with copy_of(rb) as good:
        with monkeypatch.context() as patch:
            for text in (b"[]", b"{}", b"nonsense", b"[" * 100_000, b'{"do": "append"}'):
                patch.setattr(writing_proxy, "to_text", lambda told, text=text: text)
                with pytest.raises(RemoteError):
                    worker.flush()
            patch.setattr(writing_proxy, "to_text", lambda told: b'{"do": "dance"}')
            with pytest.raises(StateError, match="no call 'dance'"):
                worker.flush()
        assert good.extend(numbered_rows(1)).tolist() == [3]
    assert worker.extend(numbered_rows(1)).tolist() == [4]  # by another connection
    assert sources(rb)[0] != sources(rb)[-1]


# -- waits ---------------------------------------------------------------------------------------------------


def test_a_worker_that_waits_for_the_limiter_holds_up_nobody(store_path: Path) -> None:
    limiter = SampleToInsertRatio(1.0, min_size_to_sample=10, error_buffer=(-20.0, 20.0), timeout=None)
    with expstore.open(store_path, batches={"rate_limiter": limiter}, batch_size=10).share() as rb:
        with copy_of(rb) as one, copy_of(rb) as other:
            one.extend(numbered_rows(10))
            waiting = threading.Thread(target=one.extend, args=(numbered_rows(15, 10),))
            waiting.start()
            wait_until(lambda: limiter._newest[0] == 15)
            assert other.update_priority(id=torch.tensor([1]), priority=torch.tensor([2.0])) == 1
            other.flush()
            assert waiting.is_alive()
            rb.sample()
            waiting.join()
            assert len(rb) == 25


def test_sharing_ends_although_a_worker_waits_for_the_limiter(store_path: Path) -> None:
    limiter = SampleToInsertRatio(1.0, min_size_to_sample=10, error_buffer=(-20.0, 20.0), timeout=None)
    with expstore.open(store_path, batches={"rate_limiter": limiter}).share() as rb, copy_of(rb) as worker:
        worker.extend(numbered_rows(10))
        waiting = threading.Thread(target=worker.extend, args=(numbered_rows(15, 10),))
        waiting.start()
        wait_until(lambda: limiter._newest[0] == 15)
        ending = threading.Thread(target=rb.share, args=(False,), daemon=True)
        ending.start()
        wait_until(lambda: not ending.is_alive())
        waiting.join()
        assert len(rb) == 25
        assert not limiter.can_insert()


def test_a_worker_that_dies_while_it_waits_writes_nothing(store_path: Path) -> None:
    limiter = SampleToInsertRatio(1.0, min_size_to_sample=10, error_buffer=(-20.0, 20.0), timeout=None)
    with expstore.open(store_path, batches={"rate_limiter": limiter}, batch_size=10).share() as rb:
        rb.extend(numbered_rows(10), source="own")
        pid = os.fork()
        if not pid:
            try:
                rb.extend(numbered_rows(15, 10))
            finally:
                os._exit(1)
        wait_until(lambda: limiter._newest[0] == 15)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        server = rb._sharing._server
        assert server is not None
        wait_until(lambda: not server._loop._workers)
        rb.sample()
        assert len(rb) == 10


def test_a_limiter_that_closes_ends_the_wait(store_path: Path) -> None:
    limiter = SampleToInsertRatio(1.0, min_size_to_sample=10, error_buffer=(-20.0, 20.0), timeout=None)
    rb = expstore.open(store_path, batches={"rate_limiter": limiter}, batch_size=10).share()
    errors: list[BaseException] = []
    with copy_of(rb) as worker:
        worker.extend(numbered_rows(10))

        def extend() -> None:
            try:
                worker.extend(numbered_rows(15, 10))
            except BaseException as exc:
                errors.append(exc)

        waiting = threading.Thread(target=extend)
        waiting.start()
        wait_until(lambda: limiter._newest[0] == 15)
        rb.close()
        waiting.join()
        (error,) = errors
        assert isinstance(error, StateError)
        assert "closed" in str(error)
    limiter = SampleToInsertRatio(1.0, min_size_to_sample=10, error_buffer=(-20.0, 20.0), timeout=0)
    with expstore.open(store_path, batches={"rate_limiter": limiter}).share() as rb, copy_of(rb) as worker:
        with pytest.raises(NotReadyError, match="cannot insert"):
            worker.extend(numbered_rows(35))


# -- processes -----------------------------------------------------------------------------------------------


def test_a_forked_child_writes_by_a_session_of_its_own(rb: TensorDictReplayBuffer) -> None:
    rb.extend(numbered_rows(3))

    def work(tell: Callable[[Any], None]) -> None:
        tell(rb.extend(numbered_rows(2, 3)).tolist())

        def deeper(tell: Callable[[Any], None]) -> None:
            tell(rb.extend(numbered_rows(2, 5)).tolist())

        tell(collect_from_child(deeper))
        tell(rb.extend(numbered_rows(2, 7)).tolist())

    assert collect_from_child(work) == [[3, 4], [[5, 6]], [7, 8]]
    assert rb[:]["number"].tolist() == list(range(9))
    wait_until(lambda: statuses(rb) == ["open", "cut", "cut"])
    assert len(set(sources(rb))) == 3


def test_forked_children_keep_nothing_of_their_parents_connections(
    rb: TensorDictReplayBuffer, worker: TensorDictReplayBuffer
) -> None:
    """Of the owner's, nor of a worker's: both are in this process."""
    worker.extend(numbered_rows(3))

    def count() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:expstore")
        descriptors = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        links = [str(one.readlink()) for one in descriptors if one.is_symlink()]
        return maps, sum(link.startswith(("socket:", "/memfd:")) for link in links)

    def look(tell: Callable[[Any], None]) -> None:
        tell(count())

    maps, sockets = count()
    ((left, still),) = collect_from_child(look)
    assert maps - left == 2
    assert sockets - still >= 5  # the listener, both ends of the connection and of what wakes the thread
    worker.extend(numbered_rows(3))


@pytest.mark.guarantee("kill/shared")
def test_a_killed_worker_has_its_episodes_cut_and_others_continue(rb: TensorDictReplayBuffer) -> None:
    with copy_of(rb) as other:
        other.extend(numbered_rows(1), source="other")
        assert collect_from_child(lambda tell: tell(rb.extend(numbered_rows(2)).tolist())) == [[1, 2]]
        wait_until(lambda: statuses(rb) == ["open", "cut"])
        other.extend(numbered_rows(1), source="other")
        assert statuses(rb) == ["open", "cut"]


def test_a_child_that_lives_on_does_not_hide_the_end_of_its_parent(store_path: Path) -> None:
    """The owner forks a child, then dies: workers hear of it although the child has copies of descriptors."""
    read_end, write_end = os.pipe()
    until_end_read, until_end_write = os.pipe()
    owner = os.fork()
    if not owner:
        try:
            rb = expstore.open(store_path).share()
            os.write(write_end, pickle.dumps(rb))
            os.close(write_end)
            while rb.write_count == 0:
                threading.Event().wait(0.005)
            if not os.fork():
                os.close(until_end_write)
                os.read(until_end_read, 1)  # until the test ends
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    os.close(write_end)
    os.close(until_end_read)
    with os.fdopen(read_end, "rb") as pipe:
        worker = pickle.load(pipe)
    worker.extend(numbered_rows(3))
    os.waitpid(owner, 0)
    for _ in range(2):  # neither the connection nor the listener is open in the child
        with pytest.raises(RemoteError):
            worker.extend(numbered_rows(3))
    worker.close()
    os.close(until_end_write)
    with expstore.open(store_path) as again:
        assert len(again) == 3
