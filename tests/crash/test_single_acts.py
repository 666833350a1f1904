"""Every operation is one act: a process that is killed leaves the state before it, or the state after.

An operation runs once. After each of its file operations, in the middle of its writes, and whenever it has
changed STATE, its folder is copied: a kill at that moment leaves these files. Each copy is read by a reader,
opened by a writer and verified; all must agree on one of the two states, and once one copy has the new state,
later copies have it too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.disk.files import Disk, File
from expstore.maintenance import verify
from expstore.storages.engine import delete
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import open_storage
from tests.support.stores import copy_folder

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs", "small_files")]


# -- states ----------------------------------------------------------------------------------------------


class _CopiedFile(File):
    disk: CopyingDisk

    def write(self, data: Any, offset: int) -> None:
        raw = data if isinstance(data, bytes) else data.tobytes()
        half = len(raw) // 2 // 8 * 8  # no machine tears an aligned word
        with self.disk.acts:
            self.disk.gate("write", self.path)
            if half and self.disk.place is not None:
                os.pwrite(self.fd, raw[:half], offset)
                self.disk.take("half of write", self.path)
            super().write(raw, offset)
            self.disk.take("write", self.path)

    def truncate(self, size: int) -> None:
        super().truncate(size)
        self.disk.take("truncate", self.path)

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.disk.take("allocate", self.path)


class CopyingDisk(Disk):
    """Copy a folder after each operation that changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.acts = threading.RLock()
        #: The folder; None: nothing is copied at the moment.
        self.place: Path | None = None
        #: The copies, each with the operation that it follows.
        self.states: list[tuple[str, Path]] = []
        self._state = b""

    def begin(self, place: Path, states: Path) -> None:
        """Copy `place` into numbered folders in `states` from now on."""
        self.place, self._into = place, states
        self.take("nothing")

    def end(self) -> None:
        """Copy no more."""
        self.take("all")
        self.place = None

    def take(self, act: str, path: Path = Path()) -> None:
        """Copy the folder."""
        if self.place is None:
            return
        if path.is_relative_to(self.place):
            act = f"{act} {path.relative_to(self.place)}"
        with self.acts:
            target = self._into / str(len(self.states))
            copy_folder(self.place, target)
            self.states.append((act, target))
            self._state = self._read_state()

    def gate(self, act: str, path: Path) -> None:
        # Stores into STATE since the last operation leave another state; syncs leave none.
        if self.place is not None and self._read_state() != self._state:
            self.take(f"STATE before {act}", path)

    def _read_state(self) -> bytes:
        assert self.place is not None
        path = self.place / "run.exp" / "STATE"
        return path.read_bytes() if path.exists() else b""

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        new = create and not path.exists()
        file = super().open(path, create=create, write=write)
        fd, file.fd = file.fd, -1  # only one file owns a descriptor
        if new:
            self.take("create", path)
        return _CopiedFile(self, file.path, fd)

    def link(self, old: Path, new: Path) -> bool:
        done = super().link(old, new)
        self.take("link", new)
        return done

    def remove_tree(self, path: Path) -> None:
        if not path.exists():
            return
        for folder, folders, names in os.walk(path, topdown=False):
            for name in names:
                (Path(folder) / name).unlink()
            for name in folders:
                (Path(folder) / name).rmdir()
            self.take("rmtree", Path(folder))
        path.rmdir()
        self.take("rmtree", path)

    def write_beside(self, pool: Any, file: File, data: Any, offset: int) -> None:
        file.write(data, offset)

    def _do(self, act: str, path: Path, call: Callable[[], object]) -> None:
        super()._do(act, path, call)
        if act not in ("sync", "sync_dir"):
            self.take(act, path)


# -- stores ----------------------------------------------------------------------------------------------


def rows(first: int, count: int, layout: str = "flat") -> TensorDict:
    """Return episodes of 4 rows that follow from their numbers."""
    number = torch.arange(first, first + count)
    frame: Any = number[:, None].expand(count, 16).to(torch.uint8).contiguous()
    if layout == "arrow":
        frame = NonTensorStack(*[f"frame {n}" * (n % 3) for n in number.tolist()])
    done = (number % 4 == 3)[:, None]
    data = {"number": number, "frame": frame, "next": {"reward": number[:, None].float(), "done": done}}
    if layout == "stacks":  # so long that a single row is compressed in its record
        both = (number[:, None] + torch.arange(5)).to(torch.uint8)[..., None, None].expand(count, 5, 50, 50)
        data["frame"], data["next"]["frame"] = both[:, :4].contiguous(), both[:, 1:].contiguous()
    return TensorDict(data, [count])


_LAYOUTS: dict[str, Any] = {
    "flat": "flat",
    "packed": expstore.Layout(fields={"frame": {"layout": "packed", "rows": 4}}),
    "stacks": expstore.Layout(
        fields={name: {"layout": "packed", "rows": 4} for name in ("frame", "next.frame")}
    ),
    "arrow": "arrow",
}


def make(
    capacity: int | None = None, layout: str = "flat", count: int = 38, **options: Any
) -> Callable[[Path], None]:
    """Return a function that makes the store run.exp in a folder."""

    def build(place: Path) -> None:
        with expstore.open(
            place / "run.exp", capacity=capacity, layout=_LAYOUTS[layout], seed=1, batch_size=4, **options
        ) as rb:
            for first in range(0, count, 8):
                rb.extend(rows(first, min(8, count - first), layout), source="arm")

    return build


def with_version(build: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that makes a store, makes a version of it, and appends more rows."""

    def both(place: Path) -> None:
        build(place)
        with expstore.open(place / "run.exp") as rb:
            rb.dumps(place / "versions")
            rb.extend(rows(100, 8), source="arm")

    return both


def look(path: Path, mode: Any) -> dict[str, Any]:
    """Return what a store says of itself, without times and counts of openings."""
    with expstore.open(path, mode=mode, batch_size=4) as rb:
        storage = rb.storage
        schema, ids = storage.schema, storage.window.ids()
        columns = [] if schema is None or not ids.size else storage.read(ids, range(len(schema.fields) + 3))
        manifest = storage.manifest
        found = {
            "capacity": storage.capacity,
            # A first extend stores the fields before the rows.
            "fields": [str(entry) for entry in schema.fields]
            if schema is not None and storage.last
            else None,
            "ids": ids.tolist(),
            "deleted": list(storage.window.deleted),
            "columns": [
                (c.dtype.str, c.shape, c.tobytes()) if isinstance(c, np.ndarray) else c.to_pylist()
                for c in columns
            ],
            "episodes": rb.sql(
                "SELECT episode_id, source, length, live_rows, return, status, info FROM episodes ORDER BY 1"
            ).fetchall(),
            "lineage": rb.sql(
                "SELECT kind, first_id, last_id, rows, facts->>'policy', facts->>'field' FROM lineage"
            ).fetchall(),
            "sessions": sorted(map(str, storage.episodes.live_sessions())),
            "settings": (manifest.retain, manifest.specs, manifest.ranking),
        }
        if mode == "a":
            del found["sessions"]  # the session of a writer begins with its first row
        else:
            # Also that of a session without rows, which a writer drops.
            policies = [step.facts.get("policy") for step in manifest.lineage.steps]
            found["policies"] = [policy for policy in policies if policy is not None]
        return found


def picture(place: Path, mode: Any) -> dict[str, Any]:
    """Return all that a user finds in a folder."""
    found = {path.name: look(path, mode) for path in sorted(place.glob("*.exp"))}
    for folder in (place / "versions", place / "run.exp"):
        known = expstore.versions(folder) if folder.exists() else []
        found[f"versions in {folder.name}"] = [(one.number, one.tag, one.rows) for one in known]
        if known and folder.name == "versions":
            with expstore.open(folder, mode="r") as rb:
                found["newest"] = len(rb)
    return found


# -- operations ------------------------------------------------------------------------------------------

Run = Callable[[Any, Path], Any]


@dataclass(frozen=True)
class Act:
    """An operation.

    Args:
        make: Makes the stores in a folder.
        run: The operation; called with the buffer of run.exp, and the folder.
        ready: Called with the buffer before the operation.
        closed: Whether run.exp is closed; then `run` gets the disk instead of the buffer.
    """

    make: Callable[[Path], None]
    run: Run
    ready: Run = lambda rb, place: None
    closed: bool = False


def _delete(rb: Any, _: Path) -> None:
    rb.episodes.delete("episode_id IN (1, 2, 4, 7)")


def _apply(rb: Any, _: Path) -> None:
    rb.retention.apply()


def _with_policy(place: Path) -> None:
    make()(place)
    with expstore.open(place / "run.exp") as rb:
        rb.retention.set({"where": "number % 16 > 7"})


def _with_sessions(place: Path) -> None:
    """Make a store in which two remote sessions have ended, each with an open episode."""
    make()(place)
    with expstore.open(place / "run.exp") as rb:
        for session in ("one", "two"):
            rb.extend(rows(100, 6), source=session, session=session)
            rb.episodes.end_session([session])


def _two_open(rb: Any, _: Path) -> None:
    """Write two open episodes in remote sessions."""
    for session in ("one", "two"):
        rb.extend(rows(100, 6), source=session, session=session)


ACTS: dict[str, Act] = {
    "episodes.delete": Act(make(), _delete),
    "episodes.delete of packed rows": Act(make(layout="packed"), _delete),
    "episodes.delete of rows in segments": Act(make(layout="arrow"), _delete),
    "retention.set": Act(make(), lambda rb, _: rb.retention.set({"where": "number % 16 > 7"})),
    "retention.apply": Act(_with_policy, _apply),
    "episodes.annotate": Act(make(), lambda rb, _: rb.episodes.annotate(3, level=7, name="x")),
    "episodes.end": Act(make(), lambda rb, _: rb.episodes.end(), _two_open),
    "episodes.end_session": Act(make(), lambda rb, _: rb.episodes.end_session(["one", "two"]), _two_open),
    "episodes.resume": Act(_with_sessions, lambda rb, _: rb.episodes.resume("one", check=False)),
    "episodes.resume in an ended session": Act(
        _with_sessions, lambda rb, _: rb.episodes.resume("one", check=False, session="two")
    ),
    "extend": Act(make(), lambda rb, _: rb.extend(rows(100, 9), source="arm")),
    "extend with facts and a key": Act(
        make(40),
        lambda rb, _: rb.extend(rows(100, 9), source="b", episode_info={"a": 1}, idempotency_key="k"),
    ),
    "first extend": Act(make(40, count=0), lambda rb, _: rb.extend(rows(0, 9), source="arm")),
    "first extend of packed rows": Act(
        make(40, "packed", count=0), lambda rb, _: rb.extend(rows(0, 9), source="arm")
    ),
    "add a stack": Act(
        make(40, "stacks"),
        lambda rb, _: rb.add(rows(101, 1, "stacks")[0], source="arm"),
        lambda rb, _: rb.add(rows(100, 1, "stacks")[0], source="arm"),
    ),
    "extend after stacks that are in memory": Act(
        make(40, "stacks"),
        lambda rb, _: rb.extend(rows(103, 5, "stacks"), source="arm"),
        lambda rb, _: [rb.add(row, source="arm") for row in rows(100, 3, "stacks").unbind(0)],
    ),
    "change rows": Act(make(40), lambda rb, _: rb.__setitem__(torch.arange(3, 9), rows(200, 6))),
    "patch rows": Act(
        make(),
        lambda rb, _: rb.update_if_present(id=torch.tensor([2, 30]), patch={"number": torch.tensor([7, 8])}),
    ),
    "empty": Act(make(40), lambda rb, _: rb.empty()),
    "columns.add": Act(make(40), lambda rb, _: rb.columns.add("mark", fill=torch.tensor(0.5))),
    "columns.drop": Act(make(40), lambda rb, _: rb.columns.drop("frame")),
    "record_lineage": Act(
        make(40), lambda rb, _: rb.record_lineage(policy="b"), lambda rb, _: rb.extend(rows(100, 4))
    ),
    "set_specs": Act(
        make(40),
        lambda rb, _: rb.set_specs(
            expstore.specs.Composite(number=expstore.specs.Bounded(0, 99, (), dtype=torch.int64), shape=())
        ),
    ),
    "dumps": Act(with_version(make(40)), lambda rb, place: rb.dumps(place / "versions")),
    "first dumps": Act(make(40), lambda rb, place: rb.dumps(place / "versions")),
    "tag": Act(make(40), lambda rb, _: rb.snapshots.tag("first")),
    "loads": Act(with_version(make(40)), lambda rb, place: rb.loads(place / "versions")),
    "resize": Act(
        make(40), lambda disk, place: expstore.resize(place / "run.exp", capacity=9, disk=disk), closed=True
    ),
    "merge": Act(
        make(40),
        lambda disk, place: expstore.merge([place / "run.exp"] * 1, out=place / "out.exp", disk=disk),
        closed=True,
    ),
}


def states_of(act: Act, place: Path, states: Path) -> list[tuple[str, Path]]:
    """Run an operation; return the states that kills leave."""
    for folder in (place, states):
        folder.mkdir()
    act.make(place)
    disk = CopyingDisk()
    if act.closed:
        disk.begin(place, states)
        act.run(disk, place)
        disk.end()
        return disk.states
    kept = open_storage(place / "run.exp", settings=Settings(on_sigterm="ignore"), disk=disk)
    rb = TensorDictReplayBuffer(storage=kept, batch_size=4)
    act.ready(rb, place)
    disk.begin(place, states)
    act.run(rb, place)
    disk.end()
    rb.close()
    return disk.states


def check(states: list[tuple[str, Path]], stride: int) -> int:
    """Check the law; return how many states are those after the operation.

    Of the states after operations on temporary files one in `stride` is checked. Once the new state was
    found, only files that are no longer needed are removed: then one in `stride // 6` is checked.
    """
    wanted = {}
    for mode in ("r", "a"):  # a reader first: it changes nothing
        wanted[mode] = [picture(at, mode) for at in (states[0][1], states[-1][1])]
    assert wanted["r"][0] != wanted["r"][1], "the operation changes nothing"
    after = 0
    for number, (act, at) in enumerate(states[1:-1], 1):
        if number % (stride if ".tmp" in act else max(1, stride // 6) if after else 1):
            continue
        try:
            read = picture(at, "r")
        except expstore.errors.StorageError as exc:
            if exc.kind != "half_loaded":
                raise AssertionError(f"a reader after {act}") from exc
            read = None
        written = picture(at, "a")
        places = [place for place in (0, 1) if written == wanted["a"][place]]
        assert places, f"a writer after {act} finds neither state"
        if read is not None:
            places = [place for place in places if read == wanted["r"][place]]
            assert places, f"a reader after {act} finds neither state, or another one than a writer"
        assert not after or 1 in places, f"the operation was done before {act}, and is undone"
        after += 1 in places
        found = [one for path in at.glob("*.exp") for one in verify(path)]
        assert [one for one in found if one.kind not in ("index", "torn")] == [], f"after {act}"
    return after


@pytest.mark.guarantee("kill/whole")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stride", [24, pytest.param(1, marks=pytest.mark.torture)])
@pytest.mark.parametrize("name", ACTS)
def test_an_operation_is_one_act(
    tmp_path: Path, name: str, stride: int, count_cases: Callable[..., None]
) -> None:
    states = states_of(ACTS[name], tmp_path / "place", tmp_path / "states")
    count_cases(len(states))
    after = check(states, stride)
    print(f"{name}: {len(states)} states, {after} of them after it")
    assert len(states) > 3


@pytest.mark.slow
def test_a_deletion_in_two_records_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete, "pack_ids", lambda ids: [])
    states = states_of(ACTS["episodes.delete"], tmp_path / "place", tmp_path / "states")
    with pytest.raises(AssertionError, match=r"a writer after .* finds neither state"):
        check(states, 1)
