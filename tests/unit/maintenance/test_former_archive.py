"""A ring with an archive, as earlier versions wrote it, is only read; the advice in the error keeps all rows.

`tests/fixtures/archive.tar.xz` has a ring of 8 rows, `ring.exp`, and its archive, `old.exp`, both closed: 30
rows were written, of which row i has action 3 * (i - 1); an episode has seven rows.
"""

from __future__ import annotations

import re
import shlex
import tarfile
from pathlib import Path

import pytest

import expstore
from expstore.errors import MigrationError
from expstore.maintenance import verify
from expstore.maintenance.repair import repair
from tests.fixtures.make_format import FORMATS
from tests.support.commands import Cli
from tests.support.stores import read_files

pytestmark = pytest.mark.index


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    with tarfile.open(FORMATS.parent / "archive.tar.xz") as file:
        file.extractall(tmp_path, filter="data")
    return tmp_path / "ring.exp"


def test_the_advice_keeps_all_rows(ring: Path, cli: Cli) -> None:
    before = read_files(ring)
    with pytest.raises(MigrationError, match="has an archive") as caught:
        expstore.open(ring)
    with pytest.raises(MigrationError, match="has an archive"):
        repair(ring)
    assert read_files(ring) == before
    commands = re.findall(r"`expstore (.*?)`", caught.value.hint)
    assert len(commands) == 2
    new = ring.with_name("new.exp")
    for command in commands:
        result = cli(*shlex.split(command.replace("NEW", str(new))))
        assert result.code == 0, result
    assert verify(new) == []
    with expstore.open(new) as rb:
        assert rb.storage.capacity is None
        assert rb[:]["action"].tolist() == [3 * number for number in range(30)]
        found = rb.sql("SELECT _step FROM transitions ORDER BY _id").fetchall()
        assert found == [(number % 7,) for number in range(30)]
    assert verify(ring) == []


def test_the_ring_alone_is_read_and_replaced(ring: Path) -> None:
    with expstore.open(ring, mode="r") as rb:
        assert rb[:]["action"].tolist() == [3 * number for number in range(24, 30)] + [66, 69]
    with expstore.open(ring, mode="w") as rb:
        assert len(rb) == 0
