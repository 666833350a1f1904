"""The suite that a storage passes, and the wrong ones do not.

What users subclass. Every test is in a part of it; this one only puts them together.
"""

from __future__ import annotations

from expstore.testing.episodes import EpisodeSuite
from expstore.testing.persistence import OutlivingSuite
from expstore.testing.rings import RingSuite
from expstore.testing.sampling import DrawingSuite
from expstore.testing.state_machine import LifeSuite
from expstore.testing.updates import ChangeSuite
from expstore.testing.variable_length import AnyLengthSuite

__all__ = ["StorageSuite"]


class StorageSuite(
    RingSuite, DrawingSuite, EpisodeSuite, ChangeSuite, OutlivingSuite, AnyLengthSuite, LifeSuite
):
    """Hold a storage to everything that buffers promise of their rows.

    Subclass it in a test module, under a name that pytest collects, and say how a storage is made and what it
    can do; what it cannot do it must refuse by an error of expstore's own, which is tested as well. Each test
    is given pytest's `tmp_path` and needs nothing else of pytest, so that it can be called by hand; one that
    lets Hypothesis think up lives is skipped where that is not installed.

    Processes: persistent storages are opened in forked children, which are killed. Threads: two read while
    one writes.

    Example:
        >>> class TestMine(StorageSuite):
        ...     persistent = True  # `make` with the same path finds the rows again
        ...     patches = False  # rb[i] = rows is refused
        ...
        ...     def make(self, path, capacity, *, ndim, seed):
        ...         return MyStorage(path / "rows", capacity, ndim=ndim, seed=seed)
    """
