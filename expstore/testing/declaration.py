"""What a storage under test says of itself, and how the suite comes by one.

Base of the suite's parts. It tests nothing itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expstore.maintenance import verify
from expstore.storages.follower import FollowerStorage
from expstore.storages.read_view import ReadView
from expstore.testing.buffer_and_model import Life

__all__ = ["Declared"]


class Declared:
    """Declare what a storage can do; what it cannot, it must refuse by an error of expstore's own.

    Example:
        >>> class TestMine(StorageSuite):
        ...     persistent = True
        ...     def make(self, path, capacity, *, ndim, seed):
        ...         return MyStorage(path, capacity, ndim=ndim, seed=seed)
    """

    #: Whether rows outlive the process: `make` with the same path finds them, after a kill, too.
    persistent = False
    #: Whether others follow while one writes; otherwise a copy of a buffer has rows of its own.
    follows = False
    #: Whether fields of fixed size can be changed in rows that are there.
    patches = True
    #: Whether the best rows may stay in the place of the newest.
    ranks = True
    #: Whether fields may have no fixed size; and whether those can be changed.
    variable = False
    variable_patches = False
    #: Whether fields may come and go while rows are there.
    late_fields = True
    #: Whether a copy of a buffer, pickled or in another process, has the rows; otherwise it is refused.
    copies = True
    #: Whether snapshots can be loaded; every storage can be dumped whose rows are no objects.
    versions = True
    #: How many lives the state machine leads; None: a twentieth of the Hypothesis profile's
    #: `max_examples`.
    lives: int | None = None

    _made = 0

    @abstractmethod
    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> ReadView:
        """Make a storage, or open what a persistent one has left there.

        Args:
            path: A folder for it, which need not be there yet.
            capacity: Most readable rows; None: unbounded.
            ndim: How many dims of a batch are rows.
            seed: Key of all draws.
        """

    def follow(self, storage: ReadView) -> ReadView:
        """Return a storage that reads what another one writes, as another process would."""
        if storage.path is None:
            raise NotImplementedError(f"say how a {type(storage).__name__} is followed: override follow()")
        return FollowerStorage(storage.path)

    def verify(self, storage: ReadView) -> Sequence[object]:
        """Return what is wrong with the files of a closed storage."""
        return [] if storage.path is None else verify(storage.path)

    def life(self, path: Path, capacity: int | None = 20, **options: Any) -> Life:
        """Return a buffer over a new storage, with its model.

        Args:
            path: Where the test may put files.
            capacity: Most readable rows.
            options: As `Life`.
        """
        self._made += 1
        return Life(self, path / f"life{self._made}", capacity, **options)
