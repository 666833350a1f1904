"""A server of stores, and new stores of it, for the tests of buffers over several stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import expstore
from expstore.api import Settings
from expstore.cluster.routing import Place, choose_shard
from tests.support.servers import Serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stores of a module."""
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    """A server without limits; a module that needs others has a fixture of its own."""
    with Serving(Settings(path=folder, sql_seconds=60.0)) as server:
        yield server


@pytest.fixture
def urls(server: Serving, folder: Path, request: pytest.FixtureRequest) -> list[str]:
    """Return the addresses of three new stores, each of which gets some of `actor-0` to `actor-11`.

    Uuids of stores are random, and with 2% of them one of three shards would get none.
    """
    name = "".join(letter for letter in request.node.name if letter.isalnum())[:60]
    for lap in range(20):
        places = {}
        for shard in range(3):
            with expstore.open(folder / f"{name}-{lap}{shard}.exp", mode="x", seed=shard) as rb:
                places[shard] = Place(rb.storage.description.uuid)
        if {choose_shard(f"actor-{n}", places) for n in range(12)} == {0, 1, 2}:
            break
    return [f"{server.url}/{name}-{lap}{shard}" for shard in range(3)]
