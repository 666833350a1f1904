"""What cannot be built: states of later versions, and damaged parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, StateError
from expstore.storages.engine.increment import capture
from expstore.storages.snapshots.rebuild import build, parts_of


def ship(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    with expstore.open(path, layout="flat") as rb:
        rb.extend({"x": np.arange(50), "done": np.arange(50) % 10 == 9})
        increment = capture(rb.storage, None, name=map(str, itertools.count()).__next__, part_bytes=500)
        assert increment is not None
        parts = dict(increment.parts)
        return json.loads(json.dumps(increment.state)), parts


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
