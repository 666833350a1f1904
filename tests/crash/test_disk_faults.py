"""Failing disks: the N-th operation of the file layer fails, for every N, once or from then on.

Every failure raises an error of expstore with the system's error number, nothing acknowledged is lost, and
the handle continues or says why it cannot. Stores are small; rows are functions of their ids (ledger.py).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.disk.files import Disk, File, _to_error
from expstore.errors import ExpStoreError, LockedError, StateError, StorageError
from expstore.storages.engine import store
from expstore.storages.engine.opening import Opening
from tests.crash import ledger as facts
from tests.crash.checks import (
    Wrong,
    check_episodes,
    check_info,
    check_keys,
    check_rows,
    check_sampled,
    check_sql,
    expect,
)
from tests.crash.children import (
    CONSTANTS,
    candidates,
    fit_constants,
    matching,
    new_ledger,
    open_store,
    perform,
)
from tests.crash.ledger import Ledger, Op, Spec
from tests.support.stores import NoKeeper

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs")]

SPECS = (
    Spec("ring", 40, 12, frame=64, segment_bytes=4096, longest=14, lean=True),
    Spec("synced", 40, 12, frame=64, segment_bytes=4096, longest=14, lean=True, durability="sync"),
    Spec("filed", 40, 12, frame=64, segment_bytes=4096, longest=10, lean=True, redo_bytes=1),
    Spec("counted", 40, 12, frame=64, segment_bytes=4096, longest=14, lean=True, consume=2),
    Spec("best", 40, 12, frame=64, segment_bytes=4096, longest=30, lean=True, overlong=False, best=True),
    Spec("chunks", 40, 12, frame=64, segment_bytes=4096, longest=14, lean=True, packed=True),
    Spec("late", 40, 12, frame=64, segment_bytes=4096, longest=12, lean=True, overlong=False, late=True),
    Spec("growing", None, 24, frame=64, segment_bytes=4096, longest=14, lean=True, packed=True),
    Spec("keyed", 40, 12, frame=64, segment_bytes=4096, longest=14, lean=True, keyed=True),
)
WEIGHTS = {
    "extend": 8,
    "change": 2,
    "priority": 1,
    "sample": 1,
    "annotate": 1,
    "flush": 2,
    "empty": 0.3,
    "tick": 1,
}


@dataclass(frozen=True)
class Fault:
    """A failure and its duration.

    Args:
        code: The system's error number.
        lasting: Fail until the disk is repaired, instead of once.
        half: Do half of a write first; with code 0 the write then continues.
        syncs: Only the next sync fails.
        news: Only operations that need new blocks fail.
    """

    code: int
    lasting: bool = False
    half: bool = False
    syncs: bool = False
    news: bool = False


FAULTS = {
    "EIO": Fault(errno.EIO),
    "ENOSPC": Fault(errno.ENOSPC),
    "full": Fault(errno.ENOSPC, lasting=True),
    "packed": Fault(errno.ENOSPC, lasting=True, news=True),
    "sync": Fault(errno.ENOSPC, syncs=True),
    "torn": Fault(errno.ENOSPC, half=True),
    "short": Fault(0, half=True),
}


class FaultyFile(File):
    disk: FaultyDisk

    def write_some(self, data: Any, size: int, offset: int) -> int:
        if self.disk.torn:
            self.disk.torn = False
            raw = data if isinstance(data, bytes) else np.asarray(data).tobytes()
            done = os.pwrite(self.fd, raw[: max(1, size // 2)], offset)
            self.disk.owed = self.disk.fault.code
            return done
        if self.disk.owed:
            code, self.disk.owed = self.disk.owed, 0
            raise OSError(code, os.strerror(code))
        return super().write_some(data, size, offset)

    def read(self, offset: int, size: int) -> bytes:
        self.disk.look("read", self.path)
        return super().read(offset, size)


class FaultyDisk(Disk):
    """Fail operation number `at` (0 for none), and record what failed."""

    def __init__(self, fault: Fault, at: int) -> None:
        super().__init__()
        self.fault, self.at = fault, at
        self.acts = 0
        self.failed: list[str] = []
        self.torn = False
        self.owed = 0
        self._index = False

    def heal(self) -> None:
        self.at = self.owed = 0

    def gate(self, act: str, path: Path) -> None:
        self.acts += 1
        # The folder is synced for the index after the index has got its name.
        self._index = path.name.startswith("index.") or (act == "sync_dir" and self._index)
        fault = self.fault
        if not self.at or self.acts < self.at or (self.failed and not fault.lasting):
            return
        if fault.syncs and act not in ("sync", "sync_dir"):
            return
        if self.acts > self.at and not (fault.lasting or fault.syncs):
            return
        if fault.half:
            self.torn = act == "write"
            self.failed += [act] * self.torn
        elif fault.news and act == "write":
            return
        elif fault.code == errno.EIO or fault.syncs or act in ("write", "allocate", "create", "mkdir"):
            # A full disk does not affect other operations. An index is rebuilt.
            self.failed.append("index" if self._index else act)
            raise OSError(fault.code, os.strerror(fault.code))

    def look(self, act: str, path: Path) -> None:
        """Fail in an operation that changes nothing; these have no gate."""
        if self.fault.code == errno.EIO:
            try:
                self.gate(act, path)
            except OSError as exc:
                raise _to_error(act, path, exc) from exc

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        file = super().open(path, create=create, write=write)
        fd, file.fd = file.fd, -1  # only one file owns a descriptor
        return FaultyFile(self, file.path, fd)

    def read_whole(self, path: Path) -> bytes:
        self.look("read", path)
        return super().read_whole(path)

    def sync_all(self, files: Iterable[File], folders: Iterable[Path], pool: Any) -> None:
        for file in sorted(files, key=lambda file: str(file.path)):
            file.sync()
        for folder in sorted(folders):
            self.sync_dir(folder)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the constants that `fit_constants` changes, and write no checkpoints in the background."""
    monkeypatch.setattr(store, "Keeper", NoKeeper)
    for module, name in CONSTANTS:
        monkeypatch.setattr(module, name, getattr(module, name))


class Life:
    """One store on a failing disk, from the first opening to its content on a working disk."""

    def __init__(self, spec: Spec, path: Path, disk: FaultyDisk) -> None:
        self.spec, self.path, self.disk = spec, path, disk
        self.state = new_ledger(spec)
        self.seen: Counter[str] = Counter()

    def run(self, ops: Sequence[Op], *, index: bool) -> None:
        """Run the operations, then check the store."""
        states = [self.state]
        try:
            rb = open_store(self.spec, self.path, self.disk, index=index)
        except ExpStoreError as exc:
            self.judge(exc)
            self.seen["open"] += 1
        else:
            self.state.reopen()
            states = self._work(rb, ops, index=index)
        self.disk.heal()
        rb = open_store(self.spec, self.path, Disk(), index=index)
        self.state = matching(rb, [state.copy() for state in states])
        for op in facts.extends(self.state, np.random.default_rng(1), 1):
            perform(rb, self.state, op)
            self.state.apply(op)
        check_keys(rb, self.state)
        check_rows(rb, self.state)
        (rb if index else rb.storage).close()

    def _work(self, rb: TensorDictReplayBuffer, ops: Sequence[Op], *, index: bool) -> list[Ledger]:
        """Run the operations until one fails; then more, if possible. Return the states that may be found."""
        states = [self.state]
        for op in [*ops, None]:
            try:
                if op is None:
                    (rb if index else rb.storage).close()
                else:
                    perform(rb, self.state, op)
            except ExpStoreError as exc:
                self.judge(exc)
                self.seen["close" if op is None else op.kind] += 1
                states = candidates(self.state.copy(), op)
                if op is not None:
                    states = self._after(rb, states)
                (rb if index else rb.storage).close()
                break
            if op is not None:
                self.state.apply(op)
        return states

    def _after(self, rb: TensorDictReplayBuffer, states: list[Ledger]) -> list[Ledger]:
        """Check a handle after a failure: it continues, or its error says why it cannot."""
        synced = self.disk.failed[-1] in ("sync", "sync_dir")
        for _ in range(2 * self.disk.fault.lasting):
            # The interrupted operation is read again, which fails too: the old state must remain.
            try:
                rb.flush()
            except ExpStoreError as exc:
                self.judge(exc)
            self._read(rb, states)
        self.disk.heal()
        try:
            rb.flush()
        except StateError as exc:
            expect(exc.kind == "poisoned", f"kind {exc.kind}: {exc}")
            expect(synced, f"poisoned by {self.disk.failed}")
            self._read(rb, states)
            self.seen["poisoned"] += 1
            return states
        expect(not synced, "a failed sync was forgiven")
        self.seen["went on"] += 1
        state = self._read(rb, states)
        state.draw = rb.storage.draws.number
        if state.taking:  # a batch that was not returned does not count
            state.sampled, state.taking = self.state.sampled, ()
        rng = np.random.default_rng(2)
        for op in [*facts.extends(state, rng, 2), Op("flush"), Op("sample")]:
            perform(rb, state, op)
            state.apply(op)
        check_keys(rb, state)
        check_rows(rb, state)
        check_sampled(rb, state)
        return [state]

    def _read(self, rb: TensorDictReplayBuffer, states: list[Ledger]) -> Ledger:
        """Return the state that a handle shows."""
        reasons = []
        for state in states:
            try:
                check_rows(rb, state)
                check_info(rb, state)
            except (Wrong, StorageError) as exc:
                reasons.append(str(exc))
            else:
                return state
        if self.disk.at and any("No space" in reason for reason in reasons):
            return states[0]  # rows that were kept back cannot be viewed while the disk is full
        raise Wrong(" | ".join(reasons))

    def judge(self, exc: ExpStoreError) -> None:
        """Check the content of an error."""
        code = self.disk.fault.code
        expect(not isinstance(exc, LockedError), f"{exc!r}")
        if isinstance(exc, StateError):
            expect(exc.kind == "poisoned" and os.strerror(code) in exc.message, f"{exc!r}")
            return
        expect(isinstance(exc, StorageError), f"{exc!r}")
        expect(exc.errno == code, f"errno {exc.errno}, the disk said {code}: {exc}")
        expect(exc.kind == ("disk_full" if code == errno.ENOSPC else "storage"), f"kind {exc.kind}: {exc}")


def plan(spec: Spec, *, sql: bool = False) -> list[Op]:
    """Return calls that cover all file operations of a store: shards, journal rotation, changes."""
    state = new_ledger(spec)
    state.reopen()
    rng = np.random.default_rng(5)
    weights = WEIGHTS | ({"sql": 2} if sql else {}) | ({"sample": 3} if spec.consume else {})
    weights |= {"add": 6} if spec.late else {}
    return facts.plan(state, rng, 16, weights=weights)


def enumerate_faults(
    spec: Spec, fault: Fault, folder: Path, *, stride: int, start: int = 1, sql: bool = False
) -> tuple[int, Counter[str]]:
    """Fail operation `start`, then those `stride` later, until there are no more operations.

    Returns:
        The number of operations, and how often each kind failed and the store continued.
    """
    fit_constants(spec)
    ops = plan(spec, sql=sql)
    seen: Counter[str] = Counter()
    for at in itertools.count(start, stride):
        path = folder / f"{at}.exp"
        life = Life(spec, path, FaultyDisk(fault, at))
        try:
            life.run(ops, index=sql)
        except BaseException as exc:
            exc.add_note(f"{spec.name}, {fault}, act {at}, {life.disk.failed}, {life.seen}")
            raise
        seen += life.seen
        shutil.rmtree(path)
        if life.disk.acts < at:
            return life.disk.acts, seen
    raise AssertionError


CASES = [pytest.param(spec, name, id=f"{spec.name}-{name}") for spec in SPECS for name in FAULTS]


@pytest.mark.slow
def test_some_acts_of_every_kind(tmp_path: Path) -> None:
    """The short form: some operations for each kind of store and fault. The long run has all of them."""
    seen: Counter[str] = Counter()
    for number, (spec, name) in enumerate(itertools.product(SPECS, FAULTS)):
        folder = tmp_path / str(number)
        folder.mkdir()
        acts, found = enumerate_faults(spec, FAULTS[name], folder, start=1 + 7 * number, stride=131)
        assert acts > 300
        assert not found or name != "short"
        seen += found
    assert seen["went on"] > 12
    assert seen["poisoned"] > 5
    assert seen.keys() >= {"extend", "flush", "open"}


@pytest.mark.slow
def test_an_index_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """With SQL between the calls; DuckDB's own writes do not fail, but renaming the file does."""
    _, seen = enumerate_faults(SPECS[0], FAULTS["EIO"], tmp_path, stride=67, sql=True)
    assert seen["went on"]


@pytest.mark.guarantee(
    "disk/errors",
    "Whichever file operation fails, the error is one of expstore's, and no row of a call that returned "
    "is lost.",
)
@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("spec", "name"), CASES)
def test_every_act(spec: Spec, name: str, tmp_path: Path, count_cases: Callable[..., None]) -> None:
    acts, seen = enumerate_faults(spec, FAULTS[name], tmp_path, stride=1)
    count_cases(acts)
    assert acts > 300
    assert bool(seen) == (name != "short")


@pytest.mark.guarantee("disk/errors")
@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAULTS)
def test_every_act_with_an_index(name: str, tmp_path: Path, count_cases: Callable[..., None]) -> None:
    acts, seen = enumerate_faults(SPECS[0], FAULTS[name], tmp_path, stride=3, sql=True)
    count_cases(acts // 3)
    assert acts > 300
    assert bool(seen) == (name != "short")


@pytest.mark.parametrize("step", ["_recover_rows", "_load_priorities", "_make_durable", "_claim"])
def test_a_reading_again_that_fails_leaves_what_was_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """After a failure at any place all rows and episodes are unchanged; the next attempt finds them too."""
    spec = SPECS[0]
    fit_constants(spec)
    rb, state = open_store(spec, tmp_path / "run.exp", Disk(), index=True), new_ledger(spec)
    state.reopen()
    for op in facts.extends(state, np.random.default_rng(3), 1):
        perform(rb, state, op)
        state.apply(op)
    rb.sql("SELECT 1")
    rb.storage.health.note_interruption()

    def fail(*given: Any) -> Any:
        raise StorageError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(Opening, step, fail)
        for _ in range(2):
            with pytest.raises(StorageError, match="not now"):
                rb.flush()
            check_rows(rb, state)
            check_episodes(rb, state)
            check_sql(rb, state)
    rb.flush()
    check_rows(rb, state)
    check_episodes(rb, state)
    rb.close()


@pytest.mark.parametrize("name", ["ENOSPC", "full"])
def test_half_a_change_is_never_read(tmp_path: Path, name: str) -> None:
    """After a failure of `[]=` at any place, its rows are the old ones or the new ones."""
    spec = SPECS[0]
    fit_constants(spec)
    disk = FaultyDisk(FAULTS[name], 0)
    rb, state = open_store(spec, tmp_path / "run.exp", disk, index=False), new_ledger(spec)
    state.reopen()
    for op in facts.extends(state, np.random.default_rng(3), 3):
        perform(rb, state, op)
        state.apply(op)
    rb.flush()
    seen: Counter[int] = Counter()
    for number in itertools.count(1):
        op = Op("change", ids=state.ids[[-1, 3, 4, -7]], version=number)
        disk.at, disk.failed = disk.acts + number, []
        with contextlib.suppress(StorageError):
            perform(rb, state, op)
        if disk.acts < disk.at:
            disk.heal()
            break
        states = candidates(state, op)
        matches = [_shows(rb, known) for known in states]
        assert any(matches), f"act {number}, {disk.failed}"
        disk.heal()
        rb.flush()
        state = matching(rb, [known.copy() for known in states])
        seen[matches.index(True)] += 1
    assert seen[0] > 3  # the new rows
    assert seen[1] > 0
    rb.storage.close()


def _shows(rb: TensorDictReplayBuffer, state: Ledger) -> bool:
    """Return whether all rows match the ledger, viewed and gathered."""
    wanted = state.fields(state.ids)
    taken = rb[torch.from_numpy((state.ids - 1) % state.spec.capacity)]
    try:
        check_rows(rb, state.copy())
    except Wrong:
        return False
    return all(np.array_equal(taken[key].numpy(), rows) for key, rows in wanted.items())
