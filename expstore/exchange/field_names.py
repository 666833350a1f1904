"""Map field names to D4RL's names in flat files: `observations`, `actions`, `rewards`, ...

Used by the HDF5 and NPZ formats. It knows names only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from expstore.core.values import Key, key_name
from expstore.errors import SchemaError

__all__ = ["FLAGS", "SCALARS", "check_keys", "check_map", "our_key", "their_path"]

#: Names in files and the fields, or groups of fields, that they stand for. The first name of a field is
#: written.
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
#: Fields with one value per row: shape `(1,)` in a store, `()` in a file. All but the first are flags.
SCALARS: tuple[Key, ...] = (
    ("next", "reward"),
    ("next", "terminated"),
    ("next", "truncated"),
    ("next", "done"),
)
FLAGS = SCALARS[1:]


def their_path(key: Key) -> Key:
    """Return the path of a field in files: groups, then the name.

    >>> their_path(("next", "observation", "pixels")), their_path(("next", "reward"))
    (('next_observations', 'pixels'), ('rewards',))
    """
    best = max((ours for _, ours in _NAMES if key[: len(ours)] == ours), key=len, default=None)
    if best is None:
        return key
    return (next(theirs for theirs, ours in _NAMES if ours == best), *key[len(best) :])


def our_key(path: Key, given: Mapping[str, str]) -> Key | None:
    """Return the field for a path in a file, or None if it is left out.

    Args:
        path: Groups, then the name.
        given: The user's mapping from names, or groups, in the file to fields; "": left out.
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
    """Raise SchemaError if the mapping contains names that are not in the file."""
    known = {"/".join(path[:length]) for path in there for length in range(1, len(path) + 1)}
    for theirs in given:
        if theirs not in known:
            raise SchemaError(f"there is no {theirs!r} to map", hint="there are " + ", ".join(sorted(known)))


def check_keys(keys: Iterable[Key]) -> None:
    """Raise SchemaError if two names in the file stand for the same field."""
    seen: set[Key] = set()
    for key in keys:
        if key in seen:
            raise SchemaError(
                f"two of the file's names stand for {key_name(key)!r}", hint="map one to another field"
            )
        seen.add(key)
