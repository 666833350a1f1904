"""Storages under TorchRL's names: arguments, location of rows, and life of their folders."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

import expstore
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import ArgumentError, LockedError, SchemaError, SnapshotError, StateError
from expstore.storages import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    TensorStorage,
)
from tests.support import warm_processes
from tests.support.batches import numbered_rows
from tests.support.forks import in_child
from tests.support.paths import ROOT
from tests.support.stores import extend_all, read_files


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the system keeps temporary files, in this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def filled(storage: Storage, rows: int = 5) -> ReplayBuffer:
    return extend_all(ReplayBuffer(storage=storage, batch_size=4), numbered_rows(rows, key="a"))


# ---------------------------------------------------------------------------------------------------
# Arguments.


EVERY_KIND = [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_sizes(kind: Callable[..., Storage]) -> None:
    for size in (7, np.int64(7)):
        storage = kind(size)
        assert (storage.max_size, storage.capacity, len(storage), storage.ndim) == (7, 7, 0, 1)
        assert type(storage.max_size) is int
        storage.close()
    for wrong in (0, -3):
        with pytest.raises(ValueError, match="capacity must be at least 1"):
            kind(wrong)
    with pytest.raises(TypeError):
        kind(2.5)


@pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage])
def test_lists_without_bound(kind: Callable[..., Storage]) -> None:
    assert (kind().max_size, kind().capacity) == (2**63 - 1, None)
    assert kind().row_traits.whole
    assert not LazyTensorStorage(3).row_traits.whole
    assert (kind(3).row_traits.stack_dim, LazyStackStorage(3, stack_dim=-1).row_traits.stack_dim) == (
        None if kind is ListStorage else 0,
        -1,
    )


#: Options that mean nothing here, and the value that is TorchRL's default.
MEANINGLESS: list[tuple[Callable[..., Storage], dict[str, bool]]] = [
    (LazyTensorStorage, dict.fromkeys(("compilable", "consolidated", "shared_init"), False)),
    (LazyTensorStorage, {"cleanup_memmap": True}),
    (LazyMemmapStorage, {"compilable": False, "shared_init": False}),
    (ListStorage, {"compilable": False}),
    (LazyStackStorage, {"compilable": False}),
]


def test_meaningless_options_are_refused_with_a_reason(own_temporary_files: Path) -> None:
    for kind, options in MEANINGLESS:
        for option, plain in options.items():
            kind(10, **{option: plain}).close()
            with pytest.raises(ValueError, match=f"does not support {option}=.{{20}}"):
                kind(10, **{option: not plain})
    assert list(own_temporary_files.iterdir()) == []


def test_devices() -> None:
    assert LazyTensorStorage(3).device == torch.device("cpu")
    assert LazyTensorStorage(3, device="auto").device == torch.device("cpu")
    assert LazyTensorStorage(3, device=torch.device("meta")).device == torch.device("meta")
    assert ListStorage(3).device is None
    assert LazyStackStorage(3, device="cpu").device == torch.device("cpu")
    with pytest.raises(ValueError, match="Memory map device other than CPU isn't supported"):
        LazyMemmapStorage(3, device="cuda")


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_torch_decides_what_is_drawn(kind: Callable[..., Storage]) -> None:
    def seeds() -> list[int]:
        made = [kind(3) for _ in range(2)]
        for storage in made:
            storage.close()
        return [storage.seed for storage in made]

    torch.manual_seed(5)
    first = seeds()
    assert first[0] != first[1]
    torch.manual_seed(5)
    assert seeds() == first
    torch.manual_seed(6)
    assert first[0] not in seeds()
    before = torch.get_rng_state()
    storage = kind(3, seed=11)
    assert storage.seed == 11
    assert torch.equal(torch.get_rng_state(), before)
    storage.close()


# ---------------------------------------------------------------------------------------------------
# Folders.


def test_a_temporary_folder_goes_with_its_storage(own_temporary_files: Path) -> None:
    storage = LazyMemmapStorage(10)
    folder = Path(storage.scratch_dir)
    assert folder.parent == own_temporary_files
    assert folder.stat().st_mode & 0o077 == 0  # nobody else's
    rb = filled(storage)
    rb.flush()
    assert storage.cleanup() is True
    assert not folder.exists()
    assert storage.closed
    assert storage.cleanup() is False
    rb.close()

    rb = filled(LazyMemmapStorage(10))
    rb.close()
    rb.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb = filled(LazyMemmapStorage(10))
        folder = Path(rb.storage.scratch_dir)
        del rb
        gc.collect()
    assert not folder.exists()
    assert LazyMemmapStorage(10).cleanup() is False  # no rows were there
    assert list(own_temporary_files.iterdir()) == []


def test_nothing_in_a_temporary_folder_waits_for_the_disk(tmp_path: Path) -> None:
    rb = filled(LazyMemmapStorage(1000))
    before = rb.storage.disk.syncs
    rb.extend(TensorDict({"a": torch.arange(900)}, [900]))
    rb.flush()
    assert rb.storage.disk.syncs == before
    rb.close()
    rb = filled(LazyMemmapStorage(1000, scratch_dir=tmp_path / "kept"))
    before = rb.storage.disk.syncs
    rb.flush()
    assert rb.storage.disk.syncs > before
    rb.close()


def test_a_given_folder_stays(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    storage = LazyMemmapStorage(10, scratch_dir=folder)
    filled(storage).close()
    with expstore.open(folder) as rb:
        assert rb[:]["a"].tolist() == [0, 1, 2, 3, 4]
    storage = LazyMemmapStorage(10, scratch_dir=str(folder), existsok=True)
    assert storage.cleanup() is True
    assert not folder.exists()


def test_a_given_folder_goes_if_that_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    rb = filled(LazyMemmapStorage(10, scratch_dir=folder, auto_cleanup=True))
    assert (folder / "expstore.json").exists()
    rb.close()
    assert not folder.exists()
    storage = LazyMemmapStorage(10, auto_cleanup=False)
    filled(storage).close()
    assert Path(storage.scratch_dir).exists()


def test_a_folder_that_is_gone_already(tmp_path: Path) -> None:
    rb = filled(LazyMemmapStorage(10))
    os.rename(rb.storage.scratch_dir, tmp_path / "elsewhere")
    assert rb.storage.cleanup() is False


def test_a_store_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    rb = filled(LazyMemmapStorage(10, scratch_dir=folder, seed=3), rows=12)
    with pytest.raises(LockedError):
        LazyMemmapStorage(10, scratch_dir=folder, existsok=True)
    for _ in range(2):
        rb.sample()
    rb.close()
    before = read_files(folder)
    for options in ({}, {"auto_cleanup": True}):  # auto_cleanup is no way to lose it either
        with pytest.raises(StateError, match="holds rows already; existsok=True continues"):
            LazyMemmapStorage(10, scratch_dir=folder, **options)
    assert read_files(folder) == before
    with pytest.raises(StateError, match="max_size=10"):
        LazyMemmapStorage(11, scratch_dir=folder, existsok=True, auto_cleanup=True)
    with pytest.raises(StateError, match="ndim"):
        LazyMemmapStorage(10, scratch_dir=folder, existsok=True, ndim=2)
    again = ReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=folder, existsok=True, seed=99), batch_size=4
    )
    assert (again.storage.seed, again.storage.draws.number, again.write_count) == (3, 2, 12)
    assert again[:]["a"].tolist() == [10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    again.extend(TensorDict({"a": torch.tensor([12])}, [1]))
    assert again[2]["a"] == 12
    again.close()


@pytest.mark.parametrize("how", ["loads", "empty"])
def test_rows_that_are_there_may_make_room(tmp_path: Path, how: str) -> None:
    """TorchRL's users dump into the folder above the scratch_dir, and load into a new storage over it."""
    folder = tmp_path / "dump" / "storage"
    rb = filled(LazyMemmapStorage(10, scratch_dir=folder))
    rb.dumps(tmp_path / "dump")
    rb.extend(TensorDict({"a": torch.arange(50, 53)}, [3]))
    rb.close()
    rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder, existsok=True))
    if how == "loads":
        rb.loads(tmp_path / "dump")
    else:
        rb.empty()
    rb.extend(TensorDict({"a": torch.tensor([9])}, [1]))
    assert rb[:]["a"].tolist() == ([0, 1, 2, 3, 4] if how == "loads" else []) + [9]
    rb.close()


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for options in ({}, {"existsok": True}, {"auto_cleanup": True}):
        with pytest.raises(StateError, match=r"notes\.txt"):
            LazyMemmapStorage(10, scratch_dir=tmp_path, **options)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_storage_that_cannot_be_made_leaves_nothing(
    own_temporary_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StateError("no")

    monkeypatch.setattr("expstore.storages.engine.store.Store._open", fail)
    with pytest.raises(StateError, match="no"):
        LazyMemmapStorage(10)
    assert list(own_temporary_files.iterdir()) == []


#: A program that fills a storage and says so; what it does then comes behind it.
PROGRAM = """
import os, signal, sys
import numpy as np
from expstore.episodes.table import Steps
from expstore.schema.schema import Field, Schema
from expstore.storages import LazyMemmapStorage
from expstore.schema.field_roles import find_keys
from expstore.writers.writers import RoundRobinWriter

folder = sys.argv[1] if len(sys.argv) > 1 else None
storage = LazyMemmapStorage(10, device=None, seed=1, scratch_dir=folder, auto_cleanup=True)
schema = Schema([Field(("a",), "int64", ())])
storage.prepare(schema, find_keys(schema))
RoundRobinWriter().write(storage, [np.arange(3)], Steps(3), source=None, info="")
print(storage.scratch_dir, flush=True)
"""


def start(then: str, *given: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM + then, *given]
    return warm_processes.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.some(1)
@pytest.mark.parametrize("given", [False, True])
def test_a_folder_goes_when_the_program_ends(tmp_path: Path, given: bool) -> None:
    with start("", *([str(tmp_path / "scratch")] if given else [])) as program:
        out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (0, "")
    assert not Path(out.strip()).exists()


@pytest.mark.some(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_remove_a_temporary_folder(number: int) -> None:
    # Not signal.pause(): a signal that another thread receives does not end it.
    with start("import time\nwhile True:\n    time.sleep(0.05)") as program:
        folder = Path(program.stdout.readline().strip())
        assert (folder / "expstore.json").exists()
        program.send_signal(number)
        program.communicate(timeout=60)
    assert program.returncode != 0
    assert not folder.exists()


def test_children_remove_nothing() -> None:
    child = """
import multiprocessing
if os.fork() == 0:
    storage.cleanup()
    storage.close()
    del storage
    sys.exit()
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
worker = multiprocessing.get_context("fork").Process(target=lambda: storage._leave())
worker.start()
worker.join()
assert worker.exitcode == 0
assert storage.read(np.arange(1, 4))[0].tolist() == [0, 1, 2]
print(os.path.exists(storage.scratch_dir), flush=True)
"""
    with start(child) as program:
        out, err = program.communicate(timeout=60)
    folder, there = out.split()
    assert (program.returncode, err, there) == (0, "", "True")
    assert not Path(folder).exists()


# ---------------------------------------------------------------------------------------------------
# Rows of every kind.


def test_values_that_are_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected storage to be non-null"):
        TensorStorage(None, max_size=4)
    with pytest.raises(ValueError, match="mismatch: got max_size=4"):
        TensorStorage(torch.zeros(3), max_size=4)
    values: list[Any] = [torch.tensor(3.0), {"a": torch.zeros(3), "b": torch.zeros(4)}]
    for value in values:
        with pytest.raises(SchemaError):
            TensorStorage(value)


def test_preallocated_rows_without_fields() -> None:
    storage = TensorStorage(TensorDict(batch_size=[4]))
    assert (len(storage), storage.max_size, storage.schema) == (0, 4, None)
    rb = expstore.TensorDictReplayBuffer(storage=storage, batch_size=4)
    for start in (0, 3):
        rb.extend(TensorDict({"root": torch.arange(start, start + 3)}, [3]))
    assert rb[:]["root"].tolist() == [4, 5, 2, 3]
    lanes = TensorStorage(TensorDict(batch_size=[3, 2]), ndim=2)
    expstore.ReplayBuffer(storage=lanes).extend(TensorDict({"a": torch.arange(4).reshape(2, 2)}, [2, 2]))
    assert (lanes.max_size, lanes.shape) == (6, (2, 2))


def test_rows_whose_steps_have_different_shapes_are_stored_as_objects_or_refused() -> None:
    def ragged() -> LazyStackedTensorDict:
        parts = [TensorDict({"a": torch.ones(5, length, 8)}, [5]) for length in (4, 3)]
        return LazyStackedTensorDict(*parts, stack_dim=1)

    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(SchemaError, match=r"batch size \[5, 2\].*use a ListStorage"):
        rb.extend(ragged())
    assert (len(rb), rb.schema) == (0, None)
    for storage in (ListStorage(10), LazyStackStorage(10)):
        rb = ReplayBuffer(storage=storage, batch_size=2)
        rb.extend(ragged())
        assert [len(row["a"]) for row in rb[3].unbind(0)] == [4, 3]


def test_states_of_rows_with_gradients_are_detached() -> None:
    weights = torch.ones(3, requires_grad=True)

    def rows() -> list[Any]:
        return [weights * 2, {"a": (weights * 3, "text")}, TensorDict({"b": weights * 4}, [3])]

    rb = ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=list)
    rb.extend(rows())
    other = pickle.loads(pickle.dumps(rb))
    loaded = ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=list)
    loaded.load_state_dict(rb.state_dict())
    for copied in (other, loaded):
        plain, tree, batch = copied[:]
        assert (plain.tolist(), tree["a"][0].tolist(), tree["a"][1]) == ([2, 2, 2], [3, 3, 3], "text")
        assert not any(one.requires_grad for one in (plain, tree["a"][0], batch["b"]))
    assert rb[0].requires_grad


def test_rows_are_returned_on_the_storages_device() -> None:
    storage = LazyTensorStorage(10, device="meta")
    rb = filled(storage)
    assert storage.get(range(3))["a"].device.type == "meta"
    assert rb.sample()["a"].device.type == "meta"
    assert rb[:]["a"].device.type == "meta"
    things = ListStorage(10, device="meta")
    ReplayBuffer(storage=things).extend([{"t": torch.ones(2)}, "text"])
    assert things.get(0)["t"].device.type == "meta"
    assert things.get(1) == "text"
    assert filled(LazyTensorStorage(10)).sample()["a"].device.type == "cpu"


# ---------------------------------------------------------------------------------------------------
# Versions.


def test_hooks_see_the_rows_of_a_version(tmp_path: Path) -> None:
    class Seen:
        shift = None
        is_full = None

        def __call__(self, rows: dict[str, Any], path: Any = None) -> dict[str, Any]:
            self.rows = rows["a"].tolist()
            return rows

    storage, hook = LazyMemmapStorage(10), Seen()
    rb = filled(storage)
    rb.register_save_hook(hook)
    rb.dumps(tmp_path / "versions")
    assert (hook.rows, hook.shift, hook.is_full) == ([0, 1, 2, 3, 4], 5, False)
    storage.register_save_hook(lambda rows: rows | {"a": rows["a"] + 1})
    with pytest.raises(SnapshotError, match="save hook has changed the rows"):
        rb.dumps(tmp_path / "versions")
    assert [path.name for path in (tmp_path / "versions").glob("v*")] == ["v0001"]
    rb.close()


# ---------------------------------------------------------------------------------------------------
# Where TorchRL is wrong: named for the fault.


@pytest.mark.guarantee("exchange/safe")
def test_torchrls_fault_pickle_in_loads(tmp_path: Path) -> None:
    """TorchRL unpickles a file of the folder before it looks at anything: whoever put it there runs code."""
    rb = filled(LazyTensorStorage(10))
    version = rb.dumps(tmp_path / "versions")

    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "was-here",)

    for name in ("prefetch.pkl", "transform.t", "sampler.pt"):
        (version.path / name).write_bytes(pickle.dumps(Planted()))
        pickle.loads(pickle.dumps(Planted()))
        (tmp_path / "was-here").unlink()  # so it would have been
    other = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=2)
    other.loads(tmp_path / "versions")
    assert other[:]["a"].tolist() == [0, 1, 2, 3, 4]
    state = rb.storage.state_dict()
    for part in ("rows", "log"):
        with pytest.raises((SchemaError, TypeError, AttributeError)):
            other.storage.load_state_dict(state | {part: Planted()})
    assert not (tmp_path / "was-here").exists()


def test_a_forked_child_draws_from_a_temporary_folder() -> None:
    rb = filled(LazyMemmapStorage(10))
    rb.flush()
    folder = Path(rb.storage.scratch_dir)

    def child() -> None:
        assert len(rb) == 5
        assert set(rb.sample(50)["a"].tolist()) <= set(range(5))
        rb.close()

    in_child(child)
    assert folder.exists()
    assert rb.extend(TensorDict({"a": torch.arange(5, 8)}, [3])).tolist() == [5, 6, 7]
    rb.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    "storage", [LazyTensorStorage(4), ListStorage(4), expstore.storages.StorageEnsemble()]
)
def test_a_checkpointer_is_refused_with_the_reason(storage: Any) -> None:
    assert storage.checkpointer is None
    storage.checkpointer = None
    with pytest.raises(ArgumentError, match=r"checkpointer of a \w+ cannot be set .*dumps\(\) writes"):
        storage.checkpointer = object()
    assert storage.checkpointer is None


def _rows_with_texts(count: int) -> TensorDict:
    texts = NonTensorStack(*(str(number) for number in range(count)))
    rows = TensorDict({"x": torch.arange(count), "text": texts}, [count])
    return rows.set("where", NonTensorData("here", batch_size=[count]))


def test_texts_of_a_lazy_memmap_storage_are_stored_in_arrow_files(tmp_path: Path) -> None:
    folder = tmp_path / "rows.exp"
    with TensorDictReplayBuffer(storage=LazyMemmapStorage(6, scratch_dir=folder), batch_size=4) as rb:
        reader = expstore.open(folder, mode="r")  # before the first rows decide
        rb.extend(_rows_with_texts(4))
        rb.extend(_rows_with_texts(4))
        rb.add(_rows_with_texts(1)[0])
        assert list(rb[:]["text"]) == ["2", "3", "0", "3", "0", "1"]
        batch = rb.sample()
        assert list(batch["text"]) == [str(number) for number in batch["x"].tolist()]
        assert rb.sql('SELECT DISTINCT "where" FROM transitions').fetchall() == [("here",)]
        other = pickle.loads(pickle.dumps(rb))
        other.extend(_rows_with_texts(1))
        rb.dumps(tmp_path / "versions")
        reader.refresh()
        assert set(reader[:]["text"]) <= {"0", "1", "2", "3"}
        reader.close()
    again = LazyMemmapStorage(6, scratch_dir=folder, existsok=True)
    with TensorDictReplayBuffer(storage=again, batch_size=4) as rb:
        assert list(rb[:]["text"]) == ["2", "3", "0", "0", "0", "1"]
        rb.loads(tmp_path / "versions")
    with expstore.open(tmp_path / "versions", mode="r") as version:
        assert len(version[:]["text"]) == 6
    with TensorDictReplayBuffer(storage=LazyMemmapStorage(6)) as fresh:
        with pytest.raises(SchemaError, match=r"field 'text' is string.*layout=.arrow"):
            fresh.loads(tmp_path / "versions")
        fresh.extend(TensorDict({"x": torch.arange(2)}, [2]))
        with pytest.raises(SchemaError, match="text"):  # only the first rows decide
            fresh.extend(_rows_with_texts(1))
