"""What cannot be built: states of later versions, and damaged parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, StateError
from expstore.maintenance.verify import verify
from expstore.storages.engine import increment
from expstore.storages.engine.increment import capture
from expstore.storages.snapshots.rebuild import build, parts_of


def ship(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    with expstore.open(path, layout="flat") as rb:
        rb.extend({"x": np.arange(50), "done": np.arange(50) % 10 == 9})
        found = capture(rb.storage, None, name=map(str, itertools.count()).__next__, part_bytes=500)
        assert found is not None
        parts = dict(found.parts)
        return json.loads(json.dumps(found.state)), parts


def test_a_damaged_part_is_named_and_nothing_is_built(tmp_path: Path) -> None:
    state, parts = ship(tmp_path / "run.exp")
    assert parts_of(state, parts.__getitem__) == parts.keys()
    for name, data in parts.items():
        for at in (0, 10, len(data) - 1):
            damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            with pytest.raises(CorruptionError, match=f"^{name} is "):
                build(tmp_path / "built.exp", state, (parts | {name: damaged}).__getitem__, disk=Disk())
    assert [path.name for path in tmp_path.iterdir()] == ["run.exp"]


def test_a_state_of_a_later_version_is_refused(tmp_path: Path) -> None:
    state, parts = ship(tmp_path / "run.exp")
    with pytest.raises(StateError, match="format 2"):
        build(tmp_path / "built.exp", state | {"format": 2}, parts.__getitem__, disk=Disk())


@pytest.mark.parametrize("layout", ["flat", "packed", "arrow"])
def test_rows_that_were_deleted_take_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    """A built store is not larger than the lost one, and parts with deleted rows are replaced in the end."""
    monkeypatch.setattr(tuning, "ARROW_SEGMENT_BATCHES", 2)
    monkeypatch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 64)
    monkeypatch.setattr(increment, "MOST_TIMES", 1)
    monkeypatch.setattr(increment, "BLOCK_ROWS", 1)
    rng, names = np.random.default_rng(0), map(str, itertools.count())
    parts: dict[str, bytes] = {}
    state: dict[str, Any] | None = None

    def ship(rb: expstore.TensorDictReplayBuffer) -> int:
        """Ship what has changed; return how many bytes the state needs."""
        nonlocal state
        found = capture(rb.storage, state, name=names.__next__, part_bytes=100_000)
        assert found is not None
        parts.update(found.parts)
        state = json.loads(json.dumps(found.state))
        return sum(len(parts[name]) for name in parts_of(state, parts.__getitem__))

    path, built = tmp_path / "run.exp", tmp_path / "built.exp"
    with expstore.open(path, layout=layout) as rb:
        for _ in range(20):
            x: Any = rng.integers(0, 256, (100, 4096), np.uint8)
            if layout == "arrow":
                x = [row.tobytes().hex() for row in x]
            rb.extend({"x": x, "done": np.arange(100) % 50 == 49})
            whole = ship(rb)
        rb.episodes.delete("episode_id BETWEEN 3 AND 38")
        ship(rb)
        rb.extend({"done": [True], "x": x[:1]})
        assert ship(rb) < 0.3 * whole
        rows = rb.sql("SELECT * FROM transitions ORDER BY _id").fetchall()
    assert state is not None
    build(built, state, parts.__getitem__, disk=Disk())
    assert verify(built) == []
    with expstore.open(built, mode="r") as rb:
        assert rb.sql("SELECT * FROM transitions ORDER BY _id").fetchall() == rows
    space = [Disk().measure_space(one) for one in (path, built)]
    assert space[1] <= 1.05 * space[0] < 0.5 * 2000 * 4096
