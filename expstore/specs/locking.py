"""Locking of composite specs: a locked composite refuses to set or remove entries.

Mixed into the composite specs. This module does not depend on what they contain.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self


class Lockable:
    """Lock a tree of specs as TensorDicts are locked.

    A spec that was locked together with its parent can only be unlocked through the parent. The lock
    guards against mistakes, not against other threads. Pickled copies are locked too; clones are not.

    Example:
        >>> from expstore import Categorical, Composite
        >>> spec = Composite(a=Composite(b=Categorical(3))).lock_()
        >>> spec["a"].is_locked
        True
    """

    _is_locked: bool = False
    #: Weak references to the composites that locked this one.
    _lockers: tuple[weakref.ref[Lockable], ...] = ()

    @abstractmethod
    def _branches(self) -> Iterator[Lockable]:
        """Yield the lockable children."""

    @property
    def is_locked(self) -> bool:
        """Whether entries can neither be set nor removed."""
        return self._is_locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        self.lock_() if value else self.unlock_()

    @property
    def locked(self) -> bool:
        """The same as `is_locked`."""
        return self._is_locked

    def lock_(self, recurse: bool | None = None) -> Self:
        """Refuse changes from now on.

        Args:
            recurse: Whether to lock nested composites too; None means yes.
        """
        if not self._is_locked:
            self._lock((), recurse is not False)
        return self

    def _lock(self, lockers: tuple[weakref.ref[Lockable], ...], recurse: bool) -> None:
        self._is_locked = True
        self._lockers = (*self._lockers, *(ref for ref in lockers if ref not in self._lockers))
        if recurse:
            for branch in self._branches():
                branch._lock((*lockers, weakref.ref(self)), recurse)

    def unlock_(self, recurse: bool | None = None) -> Self:
        """Allow changes again.

        Args:
            recurse: Whether to unlock nested composites too; None means yes.

        Raises:
            RuntimeError: The composite was locked by a parent that is still locked; nothing has changed.
        """
        below: list[Lockable] = list(self._iterate_below()) if recurse is not False else []
        tree: list[Lockable] = [self, *below]
        for one in tree:
            one._check_unlock(tree)
        for one in tree:
            one._is_locked, one._lockers = False, ()
        return self

    def _check_unlock(self, tree: Sequence[Lockable] = ()) -> None:
        """Raise a RuntimeError if a composite outside of `tree` that locked this one is locked."""
        above = [locker for ref in self._lockers if (locker := ref()) is not None and locker._is_locked]
        if any(all(locker is not freed for freed in tree) for locker in above):
            raise RuntimeError(
                "Cannot unlock a Composite that is part of a locked graph: unlock the one above it, with "
                "which it was locked"
            )

    # TorchRL's composites call these two, and `_check_unlock`, to lock and unlock the composites in them.

    def _propagate_lock(
        self,
        *,
        recurse: bool,
        lock_parents_weakrefs: Sequence[weakref.ref[Lockable]],
        is_compiling: bool,
    ) -> None:
        self._lock(tuple(lock_parents_weakrefs), recurse)

    def _propagate_unlock(self, recurse: bool) -> list[Lockable]:
        below: list[Lockable] = list(self._iterate_below()) if recurse else []
        for one in (self, *below):
            one._is_locked = False
        return below

    def _iterate_below(self) -> Iterator[Lockable]:
        for branch in self._branches():
            yield branch
            yield from branch._iterate_below()

    def _check_unlocked(self) -> None:
        if self._is_locked:
            raise RuntimeError("Cannot modify a locked Composite.")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without references to the composites that locked this one."""
        return {name: value for name, value in self.__dict__.items() if name != "_lockers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state from `__getstate__`; a locked composite locks its children."""
        self.__dict__.update(state)
        if self._is_locked:
            for branch in self._branches():
                if branch._is_locked:
                    branch._lock((weakref.ref(self),), recurse=False)
