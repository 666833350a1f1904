"""The names that programs give to the parts of a transition, and the fields that these names stand for.

Used by the flat formats (NPZ, HDF5, Parquet, Arrow, CSV), whose rows are transitions, and by readers of files
with one group per episode. It knows names only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from expstore.core.values import Key, key_name
from expstore.errors import SchemaError

#: The field with the ids of episodes. A store takes it for the trajectory ids of its rows.
EPISODE: Key = ("episode",)
#: Each field, or group of fields, and its names in files, in lower case. Exports write the first name, which
#: is D4RL's if D4RL has the field. Other names are those of Gym, Spinning Up, Stable-Baselines3, Tianshou,
#: CleanRL, RLlib and TorchRL.
SYNONYMS: Mapping[Key, tuple[str, ...]] = {
    ("observation",): ("observations", "observation", "obs"),
    ("action",): ("actions", "action", "act", "acts"),
    ("next", "reward"): ("rewards", "reward", "rew", "rews"),
    ("next", "terminated"): ("terminals", "terminal", "terminated", "terminateds", "terminations"),
    ("next", "truncated"): ("timeouts", "timeout", "truncated", "truncateds", "truncations"),
    ("next", "observation"): (
        *("next_observations", "next_observation", "next_obs", "new_observations", "new_observation"),
        *("new_obs", "obs_next", "observations_next", "observation_next", "obs2"),
    ),
    ("info",): ("infos", "info"),
    # d3rlpy 1.x marks every end by episode_terminals, and some by terminals, too.
    ("next", "done"): ("dones", "done", "episode_terminals"),
    EPISODE: ("episode", "episodes", "episode_id", "episode_ids", "eps_id"),
}
#: Names that stand for a field only in files that have no other name for it: a robot's file may have
#: observations and, as another field, the state. `episode_index` is LeRobot's.
_FALLBACKS: Mapping[Key, tuple[str, ...]] = {
    ("observation",): ("state", "states"),
    ("next", "observation"): ("next_state", "next_states"),
    EPISODE: ("episode_index",),
}
#: Columns, in lower case, that count the steps: an episode begins where they are 0, or less than before.
TIMES = ("t", "step", "step_count")
#: Fields with one value per row: shape `(1,)` in a store, `()` in a file. All but the first are flags.
SCALARS: tuple[Key, ...] = (
    ("next", "reward"),
    ("next", "terminated"),
    ("next", "truncated"),
    ("next", "done"),
)
FLAGS = SCALARS[1:]
#: Spinning Up's arrays are called obs_buf, act_buf, ...
_BUFFER = "_buf"


def split_name(path: Key) -> Key:
    """Return a path with dots in its names as groups: other programs write the column next.reward.

    >>> from expstore.exchange.field_names import split_name
    >>> split_name(("next.reward",)), split_name(("v1.",))
    (('next', 'reward'), ('v1.',))
    """
    parts = tuple(part for name in path for part in name.split("."))
    return parts if all(parts) else path


def _invert(names: Mapping[Key, tuple[str, ...]]) -> dict[str, Key]:
    return {theirs: ours for ours, synonyms in names.items() for theirs in synonyms}


_FIELDS, _FALLBACK_FIELDS = _invert(SYNONYMS), _invert(_FALLBACKS)


def their_path(key: Key) -> Key:
    """Return the path of a field in files: groups, then the name.

    >>> from expstore.exchange.field_names import their_path
    >>> their_path(("next", "observation", "pixels")), their_path(("next", "reward"))
    (('next_observations', 'pixels'), ('rewards',))
    """
    named = (ours for ours in SYNONYMS if ours != EPISODE and key[: len(ours)] == ours)
    best = max(named, key=len, default=None)
    return key if best is None else (SYNONYMS[best][0], *key[len(best) :])


def name_fields(paths: Sequence[Key], given: Mapping[str, str]) -> dict[Key, Key | None]:
    """Return the field of each path in a file; None for a path that the user leaves out.

    Names of the table are understood at the top of the file and in a group `next`, in any case. A name at the
    top keeps its meaning of TorchRL's layout, a value of the state before the step, if `next` has the value
    after it: with `next.done` in the file, `done` is the field `done`.

    Args:
        paths: The paths: groups, then the name.
        given: The user's mapping from names, or groups, to fields, as in `{"rew": "next.reward"}`; "": left
            out. The rest of the paths follows the table.

    Raises:
        SchemaError: The mapping contains a name that is not in the file, or two paths stand for one field.

    >>> from expstore.exchange.field_names import name_fields
    >>> name_fields([("obs",), ("Done",), ("speed",)], {})
    {('obs',): ('observation',), ('Done',): ('next', 'done'), ('speed',): ('speed',)}
    """
    given = _find_names(given, paths)
    found: dict[Key, Key | None] = {}
    for path in paths:
        mapped, ours = _find_mapping(path, given)
        found[path] = ours if mapped else _by_table(path, _FIELDS)
    fields = set(found.values())
    after = {key for path, key in found.items() if path[0] == "next"}
    for path, key in found.items():
        if path[0] == "next" or key is None or _find_mapping(path, given)[0]:
            continue
        if key in after or (key in FLAGS and after.intersection(FLAGS)):
            found[path] = path  # TorchRL's layout: the value before the step
        elif key == path and (other := _by_table(path, _FALLBACK_FIELDS)) != path:
            top = other[:2] if other[0] == "next" else other[:1]
            if not any(one is not None and one[: len(top)] == top for one in fields):
                found[path] = other
    check_keys(key for key in found.values() if key is not None)
    return found


def _find_mapping(path: Key, given: Mapping[str, str]) -> tuple[bool, Key | None]:
    """Return whether the user mapped a path, and its field."""
    for length in range(len(path), 0, -1):
        name = "/".join(path[:length])
        if name in given:
            ours = given[name]
            return True, (*ours.split("."), *path[length:]) if ours else None
    return False, None


def _by_table(path: Key, table: Mapping[str, Key]) -> Key:
    """Return the field of a path according to a table of names; the path itself if no name fits."""
    place = 1 if path[0] == "next" and len(path) > 1 else 0
    name = path[place].lower()
    ours = table.get(name) or table.get(name.removesuffix(_BUFFER))
    if ours is None or (ours == EPISODE and (place or len(path) > 1)):
        return path
    if place and ours[0] != "next":
        ours = ("next", *ours)
    return (*ours, *path[place + 1 :])


def _find_names(given: Mapping[str, str], paths: Iterable[Key]) -> dict[str, str]:
    """Return the user's mapping with groups separated by /; users may write dots.

    Raises:
        SchemaError: A name is not in the file.
    """
    known = {"/".join(path[:length]) for path in paths for length in range(1, len(path) + 1)}
    found = {}
    for theirs, ours in given.items():
        name = next((one for one in (theirs, theirs.replace(".", "/")) if one in known), None)
        if name is None:
            raise SchemaError(f"there is no {theirs!r} to map", hint="there are " + ", ".join(sorted(known)))
        found[name] = ours
    return found


def check_keys(keys: Iterable[Key]) -> None:
    """Raise SchemaError if two names in the file stand for the same field."""
    seen: set[Key] = set()
    for key in keys:
        if key in seen:
            raise SchemaError(
                f"two of the file's names stand for {key_name(key)!r}",
                hint="map one to another field, or leave it out: --map NAME=",
            )
        seen.add(key)
