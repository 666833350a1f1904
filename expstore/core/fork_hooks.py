"""Call hooks of objects around a fork, each of them even if others fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

_log = logging.getLogger("expstore")
_Owner = TypeVar("_Owner")


def call_each(owners: Iterable[_Owner], hook: Callable[[_Owner], object]) -> None:
    """Call a hook with each object; log the errors of those that fail.

    A hook that fails must not prevent the others: in a forked child, an object that is left out would
    continue to use the locks, the files and the database connections of the parent process.

    Args:
        owners: The objects, usually a weak set. Other threads may add objects to it.
        hook: Called with each object.
    """
    for owner in _list(owners):
        try:
            hook(owner)
        except Exception:
            # Not the object's repr, which may use what belongs to the parent.
            _log.exception(
                "a forked process may not be able to use an object of type %s", type(owner).__name__
            )


def _list(owners: Iterable[_Owner]) -> list[_Owner]:
    while True:
        try:
            return list(owners)
        except RuntimeError:  # another thread has added an object meanwhile
            continue
