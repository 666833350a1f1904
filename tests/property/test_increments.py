"""A store that is built of captures is the one that a kill at the moment of the last one would have left."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.disk.files import Disk
from expstore.errors import ExpStoreError
from expstore.maintenance.verify import verify
from expstore.specs import Continued
from expstore.storages.engine.increment import Increment, capture
from expstore.storages.engine.open_settings import Settings
from expstore.storages.snapshots import increment_parts
from expstore.storages.snapshots.rebuild import build, parts_of
from expstore.writers.writers import TensorDictMaxValueWriter
from tests.support.tuned import few_rows_in_memory, set_spare_slots

pytestmark = pytest.mark.index

_PACKED = {"layout": "packed", "rows": 4}
_SHARED = {"columns": "flat", "fields": {"pixels": _PACKED, "next.pixels": _PACKED}}
_WHOLE = {"columns": "flat", "fields": {"pixels": _PACKED | {"share_next": False}, "next.pixels": _PACKED}}
_GROUPS = {"group": "prompt", "group_size": 3, "traj": "answer"}
_TALKS = {
    "number": "int64",
    "x": ("float32", (3,)),
    ("next", "done"): bool,
    "tokens": Continued("int32"),
}
#: Settings of a store, and how long its rows are: text, or arrays of this shape.
KINDS: dict[str, dict[str, Any]] = {
    "ring": {"capacity": 60, "sampler": "prioritized", "layout": "flat"},
    "consuming": {"capacity": 50, "sampler": lambda: expstore.ConsumingSampler(max_sample_count=2)},
    "growing": {"layout": "flat"},
    "window": {"window": 40, "sampler": "prioritized", "layout": "flat"},
    "packed": {"capacity": 64, "layout": _SHARED},
    "packed growing": {"layout": _SHARED},
    "packed whole": {"capacity": 64, "layout": _WHOLE},
    "packed stacks": {"capacity": 64, "layout": _SHARED},
    "packed stacks growing": {"window": 40, "layout": _SHARED},
    "lanes": {"capacity": 60},
    "groups": {"layout": "flat", "episodes": _GROUPS},
    "groups arrow": {"capacity": 60, "layout": "arrow", "episodes": _GROUPS},
    "arrow": {"capacity": 60, "layout": "arrow"},
    "arrow growing": {"layout": "arrow"},
    "compressed": {"layout": {"kind": "arrow", "compression": "zstd"}},
    "continued": {"capacity": 40, "layout": "arrow", "schema": _TALKS},
    "continued growing": {"layout": "arrow", "schema": _TALKS},
    "best": {"capacity": 30, "writer": lambda: TensorDictMaxValueWriter(rank_key="number")},
}


class Bucket:
    """The parts that were uploaded, and the newest state."""

    def __init__(self, part_bytes: int) -> None:
        self.parts: dict[str, bytes] = {}
        self.state: dict[str, Any] | None = None
        self._part_bytes, self._numbers = part_bytes, itertools.count()
        self.rows = 0

    def ship(self, rb: Any, *, lose: bool = False) -> Increment | None:
        """Upload what has changed; with `lose`, fail before the state is uploaded."""
        name = (f"part{n}" for n in self._numbers).__next__
        increment = capture(rb.storage, self.state, name=name, part_bytes=self._part_bytes)
        if increment is None:
            return None
        parts = dict(increment.parts)
        if not lose:
            self.parts |= parts
            self.state = json.loads(json.dumps(increment.state))
            need = parts_of(self.state, self.parts.__getitem__)
            self.parts = {name: data for name, data in self.parts.items() if name in need}
            self.rows += increment.row_bytes
        return increment

    def build(self, folder: Path) -> None:
        assert self.state is not None
        build(folder, self.state, self.parts.__getitem__, disk=Disk())


class Life:
    """A store to which random things happen, all of them chosen by a seed."""

    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        self.folder, self.kind, self.seed = folder, kind, seed
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.settings = {name: value() if callable(value) else value for name, value in KINDS[kind].items()}
        self.number = 0
        self.open()

    def open(self) -> None:
        path = self.folder / "run.exp"
        if self.kind == "lanes" and not path.exists():
            expstore.ZarrStorage(path, 60, ndim=2, settings=Settings(seed=3)).close()
        self.rb: Any = expstore.open(path, batch_size=5, seed=3, **self.settings)
        self.readers: list[Any] = []
        if self.rb.storage.last:
            self.readers = open_readers(self.rb)

    def rows(self, count: int) -> dict[str, Any]:
        numbers = np.arange(self.number, self.number + count)
        self.number += count
        if self.kind == "best":
            numbers = self.rng.permutation(count) + self.rng.integers(0, 100)
        found = {"number": numbers, "x": self.rng.normal(size=(count, 3)).astype(np.float32)}
        found["next"] = {"done": self.rng.random(count) < 0.2}
        if "packed" in self.kind:
            depth = 4 if "stacks" in self.kind else 1
            frames = (np.arange(self.number - count, self.number + depth) % 251).astype(np.uint8)
            frames = np.tile(frames[:, None, None], (1, 12, 12))
            if depth > 1:
                frames = np.lib.stride_tricks.sliding_window_view(frames, depth, 0).transpose(0, 3, 1, 2)
            found = {"pixels": frames[:-1]} | found  # before the next ones, unlike the order of writing
            found["next"]["pixels"] = frames[1:]
        if "groups" in self.kind:
            found |= {"prompt": numbers % 4, "answer": numbers // 3, "policy_version": numbers // 30}
        if self.kind.startswith(("arrow", "compressed")):
            found["text"] = [None if n % 5 == 3 else "é" * (n % 9) + str(n) for n in numbers.tolist()]
        if "continued" in self.kind:
            found["tokens"] = [[*range(n // 16 * 16, n + 1)] for n in numbers.tolist()]
        if self.kind == "lanes":
            found = to_lanes(found)
        return found

    def act(self) -> None:
        """Do one random thing."""
        ids = self.rb.storage.window.ids()
        acts = [self.extend, self.extend, self.add, self.add]
        if ids.size:
            acts += [self.sample, self.change, self.weigh, self.draw, self.fact, self.key]
            acts += [self.delete] if self.rb.storage.capacity is None else []
            acts += [self.annotate, self.select]
            acts += [self.end_group] if "groups" in self.kind else []
        self.random.choice(acts)()

    def extend(self) -> None:
        counts = [2, 4, 18, 44] if self.kind == "lanes" else [1, 3, 17, 45]
        self.rb.extend(self.rows(self.random.choice(counts)), source=self.random.choice("ab"))

    def add(self) -> None:
        rows = self.rows(2 if self.kind == "lanes" else 1)
        self.rb.extend(rows)

    def some(self, count: int) -> np.ndarray:
        ids = self.rb.storage.window.ids()
        return np.sort(self.rng.choice(ids, min(count, ids.size), replace=False))

    def sample(self) -> None:
        with contextlib.suppress(ExpStoreError):  # a sampler that consumes has nothing left
            self.rb.sample()

    def change(self) -> None:
        if self.kind in ("best", "compressed"):
            return
        ids = self.some(4)
        self.rb.update_if_present(id=ids, patch={"x": self.rng.normal(size=(ids.size, 3)).astype(np.float32)})

    def weigh(self) -> None:
        ids = self.some(6)
        self.rb.update_priority(id=ids, priority=self.rng.random(ids.size))

    def draw(self) -> None:
        self.readers = self.readers or open_readers(self.rb)
        for _ in range(self.random.randrange(3)):
            draw_all(self.readers)
        for reader in self.readers:
            if self.random.random() < 0.3:
                with contextlib.suppress(ExpStoreError):  # this rank had committed more before the kill
                    reader.commit()

    def fact(self) -> None:
        episode = int(self.rb.sql("SELECT max(episode_id) FROM episodes").fetchall()[0][0])
        self.rb.episodes.annotate(episode, score=self.random.random())

    def key(self) -> None:
        if self.kind == "best":
            return
        self.rb.extend(self.rows(2), idempotency_key=f"key {self.number}")

    def delete(self) -> None:
        self.rb.episodes.delete(f"episode_id % 7 = {self.random.randrange(7)}")

    def annotate(self) -> None:
        ids = self.some(3)
        self.rb.annotate(ids, {"advantage": self.rng.normal(size=ids.size).astype(np.float32)})

    def select(self) -> None:
        episodes = [one for (one,) in self.rb.sql("SELECT episode_id FROM episodes").fetchall()]
        if not self.rb.sql("SELECT * FROM selections").fetchall():
            self.rb.selections.create("some", episodes=episodes[:2])
        self.rb.selections.exclude("some", self.random.choice(episodes), reason="by hand")

    def end_group(self) -> None:
        ids = [id for (id,) in self.rb.sql("SELECT group_id FROM groups WHERE status = 'open'").fetchall()]
        for id in ids[:1]:
            with contextlib.suppress(ExpStoreError):  # no member has ended
                self.rb.groups.close(id)
        if len(ids) > 3:
            self.rb.groups.discard(ids[-1], reason="late")

    def kill(self) -> None:
        """Go on in a copy, as after a kill."""
        copy = self.folder / "copy.exp"
        self.copy(copy)
        self.close()
        shutil.rmtree(self.folder / "run.exp")
        copy.rename(self.folder / "run.exp")
        self.open()

    def close(self) -> None:
        for reader in self.readers[::-1]:
            reader.close()
        self.rb.close()

    def copy(self, target: Path) -> None:
        """Copy the folder as a kill would leave it now."""
        shutil.copytree(self.folder / "run.exp", target)


def to_lanes(rows: dict[str, Any]) -> dict[str, Any]:
    """Divide rows into two lanes; the shape of a field becomes `(2, time, *row shape)`."""
    return {
        name: to_lanes(value) if isinstance(value, dict) else value.reshape(2, -1, *value.shape[1:])
        for name, value in rows.items()
    }


def open_readers(rb: Any) -> list[Any]:
    """Open two consumers, one of which has two ranks; rank 1 comes last."""
    ranks = [rb.consumer("ranks", seed=5, missing="skip", batch_size=6, rank=k, world=2) for k in (0, 1)]
    return [rb.consumer("learner", seed=9, missing="skip"), *ranks]


def draw_all(readers: list[Any]) -> list[Any]:
    """Draw a batch of each consumer; rank 1 waits for a draw of rank 0, which may have failed."""
    found = [draw(reader) for reader in readers[:-1]]
    first, second = (reader.position["draw"] for reader in readers[1:])
    return [*found, draw(readers[-1]) if second < first else None]


def draw(reader: Any) -> Any:
    try:
        return reader.sample()["number"].tolist()
    except ExpStoreError as exc:  # its rows were changed or overwritten since
        return str(exc)


_FRAGMENTS = """SELECT episode_id, first_step + n, first_id + n * stride
    FROM (SELECT *, unnest(range(length)) AS n FROM fragments)"""
#: Relations that a restored store has as the lost one, and columns that depend on the moment of an opening.
RELATIONS = {
    f"({_FRAGMENTS})": "",
    "sources": "ended",
    "priorities": "",
    "draws": "",
    "annotations": "",
    "groups": "end_time",
    "selections": "",
    "lineage": "",
    "meta": "",
}


def look(path: Path) -> dict[str, Any]:
    """Return all that can be seen of a store, and what it does next."""
    with expstore.open(path, batch_size=5) as rb:
        storage = rb.storage
        window = storage.stored
        found: dict[str, Any] = {
            "window": (window.low, window.last, list(window.deleted.between(window.low, window.last))),
            "draw": storage.draws.number,
            "write_count": storage.write_count,
            "largest": storage.priorities.largest,
            "rows": rb.sql("SELECT * EXCLUDE (_time) FROM transitions ORDER BY _id").fetchall(),
            "times": rb.sql("SELECT _time FROM transitions ORDER BY _id").fetchall(),
            "episodes": rb.sql("SELECT * EXCLUDE (end_time) FROM episodes ORDER BY episode_id").fetchall(),
            "keys": storage.state.write_keys.entries_since(0),
        }
        for relation, excluded in RELATIONS.items():
            query = f"SELECT * {f'EXCLUDE ({excluded})' if excluded else ''} FROM {relation} ORDER BY ALL"
            found[relation] = rb.sql(query).fetchall()
        slots = storage.geometry.slot_of(window.ids())
        found["priority"] = storage.priorities.values_at(slots).tolist()
        counts = storage.state.sampled
        found["counts"] = None if counts is None else counts.values[slots].tolist()
        for place in ("sample", "again"):
            with contextlib.suppress(ExpStoreError):
                found[place] = rb.sample()["number"].tolist()
        if (path / "consumers" / "learner").exists():
            readers = open_readers(rb)
            found["positions"] = [(reader.position["draw"], reader.committed) for reader in readers]
            found["batches"] = [draw_all(readers) for _ in range(8)]
            for reader in readers[::-1]:
                reader.close()
        return found


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill chunks, pages and the memtable with few rows."""
    set_spare_slots(monkeypatch, 64)
    few_rows_in_memory(monkeypatch)
    monkeypatch.setattr(increment_parts, "PAGE_ENTRIES", 4)


def check(life: Life, bucket: Bucket, folder: Path) -> None:
    """Compare what is built with a copy of the store, unchanged since the last capture."""
    killed, built = folder / "killed.exp", folder / "built.exp"
    life.copy(killed)
    bucket.build(built)
    assert not verify(built)
    wanted, found = look(killed), look(built)
    for name, value in wanted.items():
        assert found[name] == value, name
    for path in (killed, built):
        shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_built_is_the_store_at_that_moment(tmp_path: Path, kind: str, seed: int) -> None:
    life, bucket = Life(tmp_path, kind, seed), Bucket(2000)
    with contextlib.closing(life):
        for number in range(8):
            acts = [life.act, life.act, life.act, life.change, life.weigh, life.draw]
            for act in acts if life.rb.storage.last else acts[:3]:
                act()
            if number == 4:
                life.kill()
            bucket.ship(life.rb, lose=number in (2, 5))
            if number in (4, 7):
                assert bucket.ship(life.rb) is None
                check(life, bucket, tmp_path)


@pytest.mark.slow
def test_captures_of_another_thread_are_states_that_existed(tmp_path: Path) -> None:
    """A change gives all rows one value: a state in between would have two."""
    states: list[tuple[dict[str, Any], dict[str, bytes]]] = []
    done = threading.Event()
    with expstore.open(tmp_path / "run.exp", capacity=200, layout="flat") as rb:
        rb.extend({"number": np.arange(30), "x": np.zeros(30)})

        def ship() -> None:
            bucket = Bucket(3000)
            while not done.is_set() or len(states) < 3:
                if bucket.ship(rb) is not None and bucket.state is not None:
                    states.append((bucket.state, dict(bucket.parts)))

        shipper = threading.Thread(target=ship)
        shipper.start()
        try:
            for number in range(1, 150):
                first = int(rb.storage.last)
                rb.extend({"number": np.arange(first, first + 9), "x": np.full(9, float(number - 1))})
                ids = rb.storage.window.ids()
                rb.update_if_present(id=ids, patch={"x": np.full(ids.size, float(number))})
        finally:
            done.set()
            shipper.join()
    for at in np.linspace(0, len(states) - 1, 4).astype(int).tolist():
        state, parts = states[at]
        built = tmp_path / f"{at}.exp"
        build(built, state, parts.__getitem__, disk=Disk())
        assert not verify(built)
        with expstore.open(built) as rb:
            rows = rb.sql("SELECT _id, number, x FROM transitions ORDER BY _id").fetchall()
            assert rows[-1][0] == state["last"]
            assert [id - 1 for id, _, _ in rows] == [number for _, number, _ in rows]
            values = [x for _, _, x in rows]
            assert len({*values[:-9]}) == 1  # the newest rows wait for the change
            assert {*values[-9:]} <= {values[0], values[-1]}


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 3000])
@pytest.mark.parametrize("layout", ["flat", "packed", "arrow"])
def test_rows_are_uploaded_once(tmp_path: Path, layout: str, capacity: int | None) -> None:
    """Of rows that cannot be compressed, at most a fifth more bytes than they have are uploaded."""
    rng, sent, bucket = np.random.default_rng(0), 0, Bucket(increment_parts.PART_BYTES)
    with expstore.open(tmp_path / "run.exp", capacity=capacity, layout=layout) as rb:  # type: ignore[arg-type]
        for _ in range(12):
            x = rng.integers(0, 256, (500, 1024), np.uint8)
            y = rng.normal(size=(500, 30)).astype(np.float32)
            rb.extend({"x": x, "y": y, "done": np.arange(500) % 50 == 49})
            before = set(bucket.parts)
            assert bucket.ship(rb) is not None
            sent += sum(len(data) for name, data in bucket.parts.items() if name not in before)
    assert sent <= 1.2 * 12 * 500 * (1024 + 120 + 1)
