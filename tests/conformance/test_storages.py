"""Every storage of the library passes the public test suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from expstore import ArrowStorage, MemoryStorage, Storage, ZarrStorage
from expstore.storages.engine.open_settings import Settings
from expstore.storages.format.layout import ColumnLayout
from expstore.testing import StorageSuite

pytestmark = pytest.mark.usefixtures("no_syncs")


class TestMemory(StorageSuite):
    variable = variable_patches = True

    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> Storage:
        return MemoryStorage(capacity, ndim=ndim, seed=seed)


class TestZarrFlat(StorageSuite):
    persistent = follows = True

    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> Storage:
        return ZarrStorage(path, capacity, layout="flat", ndim=ndim, settings=Settings(seed=seed))


class Packed(StorageSuite):
    persistent = follows = True
    patches = ranks = False
    share_next = False

    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> Storage:
        layout = ColumnLayout("packed", share_next=self.share_next)
        return ZarrStorage(path, capacity, ndim=ndim, settings=Settings(seed=seed, layout=layout))


@pytest.mark.rest  # sharing is packing, and more
@pytest.mark.torture
class TestZarrPacked(Packed):
    pass


class TestZarrShared(Packed):
    share_next = True


class TestArrow(StorageSuite):
    persistent = follows = variable = True

    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> Storage:
        return ArrowStorage(path, capacity, ndim=ndim, settings=Settings(seed=seed))
