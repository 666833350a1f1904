"""What fields are called in flat files, as D4RL has it: `observations`, `actions`, `rewards`, ...

Used by the HDF5 and NPZ formats. It knows names only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from expstore.core.values import Key, key_name
from expstore.errors import SchemaError

__all__ = ["FLAGS", "SCALARS", "check_keys", "check_map", "our_key", "their_path"]

#: Theirs (first the one that is written), and the field or group of fields that it stands for.
_NAMES: tuple[tuple[str, Key], ...] = (
    ("observations", ("observation",)),
    ("actions", ("action",)),
    ("rewards", ("next", "reward")),
    ("terminals", ("next", "terminated")),
    ("timeouts", ("next", "truncated")),
    ("next_observations", ("next", "observation")),
    ("infos", ("info",)),
    ("obs", ("observation",)),
    ("next_obs", ("next", "observation")),
    ("terminations", ("next", "terminated")),
    ("truncations", ("next", "truncated")),
    ("dones", ("next", "done")),
)
#: Fields of one value per row, of shape `(1,)` here and `()` there; and those of them that are flags.
SCALARS: tuple[Key, ...] = (
    ("next", "reward"),
    ("next", "terminated"),
    ("next", "truncated"),
    ("next", "done"),
)
FLAGS = SCALARS[1:]


def their_path(key: Key) -> Key:
    """Return what a field is called there: groups, then the name.

    >>> their_path(("next", "observation", "pixels")), their_path(("next", "reward"))
    (('next_observations', 'pixels'), ('rewards',))
    """
    best = max((ours for _, ours in _NAMES if key[: len(ours)] == ours), key=len, default=None)
    if best is None:
        return key
    return (next(theirs for theirs, ours in _NAMES if ours == best), *key[len(best) :])


def our_key(path: Key, given: Mapping[str, str]) -> Key | None:
    """Return the field that something there stands for; None: it is left out.

    Args:
        path: Groups, then the name.
        given: What the user has said: their names, or groups, to ours; "": left out.
    """
    for length in range(len(path), 0, -1):
        name = "/".join(path[:length])
        if name in given:
            ours = given[name]
            return (*ours.split("."), *path[length:]) if ours else None
    for theirs, key in _NAMES:
        if path[0] == theirs:
            return (*key, *path[1:])
    return path


def check_map(given: Mapping[str, str], there: Iterable[Key]) -> None:
    """Raise SchemaError if the user speaks of names that are not there."""
    known = {"/".join(path[:length]) for path in there for length in range(1, len(path) + 1)}
    for theirs in given:
        if theirs not in known:
            raise SchemaError(f"there is no {theirs!r} to map", hint="there are " + ", ".join(sorted(known)))


def check_keys(keys: Iterable[Key]) -> None:
    """Raise SchemaError if two things there stand for one field."""
    seen: set[Key] = set()
    for key in keys:
        if key in seen:
            raise SchemaError(
                f"two of the names there stand for {key_name(key)!r}", hint="say which: map one of them"
            )
        seen.add(key)
