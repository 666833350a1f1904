"""Stores, and object storage in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import expstore
from tests.support.batches import episode_rows

if TYPE_CHECKING:
    from tests.support.s3_server import S3Server

pytest.importorskip("obstore", reason="the extra expstore[s3] is not installed")


@pytest.fixture
def storage() -> Any:
    from tests.support.object_stores import WatchedStorage

    return WatchedStorage()


@pytest.fixture
def rb(tmp_path: Path) -> Iterator[expstore.TensorDictReplayBuffer]:
    """A small store that is open for writing."""
    with expstore.open(tmp_path / "run.exp", batch_size=8, seed=0) as buffer:
        buffer.extend(episode_rows(50, length=10))
        yield buffer


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    """The port of a server of objects."""
    from tests.support.s3_server import start_moto

    with start_moto() as port:
        yield port


@pytest.fixture
def server(moto: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A proxy before the server; the environment has its address and credentials."""
    from tests.support.s3_server import S3Server

    with S3Server(moto, "bucket") as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """An address that no other test uses."""
    return f"s3://bucket/{request.node.name.replace('[', '-').replace(']', '')}"
