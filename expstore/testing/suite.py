"""The whole test suite for a storage.

Users subclass it. Every test is in one of its base classes.
"""

from __future__ import annotations

from expstore.testing.episodes import EpisodeSuite
from expstore.testing.persistence import OutlivingSuite
from expstore.testing.rings import RingSuite
from expstore.testing.sampling import DrawingSuite
from expstore.testing.state_machine import LifeSuite
from expstore.testing.updates import ChangeSuite
from expstore.testing.variable_length import AnyLengthSuite


class StorageSuite(
    RingSuite, DrawingSuite, EpisodeSuite, ChangeSuite, OutlivingSuite, AnyLengthSuite, LifeSuite
):
    """Test everything that buffers promise about the rows of a storage.

    Subclass it in a test module, under a name that pytest collects. Implement `make` and declare what the
    storage can do. The storage must refuse everything else with an error of expstore; the suite tests that
    too. Tests need only pytest's `tmp_path`, so they can also be called by hand. The state machine test is
    skipped if Hypothesis is not installed.

    Processes: persistent storages are opened in forked children, which are killed. Threads: two read while
    one writes.

    Example:
        >>> from expstore.testing.suite import StorageSuite
        >>> class TestMine(StorageSuite):
        ...     persistent = True  # `make` with the same path finds the rows again
        ...     patches = False  # rb[i] = rows is refused
        ...
        ...     def make(self, path, capacity, *, ndim, seed):
        ...         return MyStorage(path / "rows", capacity, ndim=ndim, seed=seed)
    """
