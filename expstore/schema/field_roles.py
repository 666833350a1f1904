"""Find the fields that describe a row's role in its episode: trajectory ids, ends, rewards.

Used by storages when the fields are fixed, and by code that reads steps from batches. This module uses names
and shapes, never values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expstore.core.values import Key, key_name
from expstore.errors import SchemaError
from expstore.schema.schema import OBJECT, Field, Schema


@dataclass(frozen=True, slots=True)
class Keys:
    """Name the fields that describe a row's role in its episode; None for fields that a store lacks.

    `reward_reduce` and `done_reduce` say how several values of a row become one; None uses the default.
    `group` is a field, or the name of a fact of episodes; `group_size` is how many episodes a group has.
    """

    trajectory: Key | None = None
    terminated: Key | None = None
    truncated: Key | None = None
    done: Key | None = None
    start: Key | None = None
    reward: Key | None = None
    mask: Key | None = None
    reward_reduce: str | None = None
    done_reduce: str | None = None
    group: Key | None = None
    group_size: int | None = None
    version: Key | None = None


#: How several rewards, or several flags, of a row become one. The first is the default.
REWARD_REDUCTIONS = ("sum", "mean", "min", "max")
DONE_REDUCTIONS = ("any", "all")

REWARD: Key = ("next", "reward")


def find_keys(
    schema: Schema,
    *,
    trajectory: Key | None = None,
    ends: Sequence[Key] | None = None,
    reward: Key = REWARD,
    reward_reduce: str | None = None,
    done_reduce: str | None = None,
    group: Key | None = None,
    group_size: int | None = None,
) -> Keys:
    """Find the fields that describe a row's role in its episode.

    TorchRL's names are the default. A field that is found by its default name has one value per row. Reward
    and end fields that are passed, or that are reduced, may have several, for instance one per agent.

    Args:
        schema: The fields.
        trajectory: Field with the collector's trajectory ids.
        ends: Fields that end an episode. The last part of a key says which: terminated, truncated, or any
            other name for done.
        reward: Field that is summed up.
        reward_reduce: How several rewards of a row become one, see `REWARD_REDUCTIONS`.
        done_reduce: How several flags of a row become one, see `DONE_REDUCTIONS`.
        group: Field that says which episodes are a group; if there is no such field, the name of a fact.
        group_size: How many episodes a group has.

    Raises:
        SchemaError: A key that was passed does not name a suitable field, or end fields have different
            numbers of values per row.
    """

    def usable(key: Key, several: bool = False) -> bool:
        if key not in schema or schema[key].dtype == OBJECT:
            return False
        items = schema[key].row_items
        return (items > 0 and schema[key].numpy_dtype.kind in "fiub") if several else items == 1

    def demand(key: Key | None, several: bool = False) -> Key | None:
        if key is not None and not usable(key, several):
            wanted = "a field of numbers of a fixed size" if several else "a field with one value per row"
            raise SchemaError(f"{key_name(key)!r} is not {wanted}, as it must be here")
        return key

    def first(*keys: Key, integer: bool = False, several: bool = False) -> Key | None:
        return next(
            (k for k in keys if usable(k, several) and (not integer or "int" in schema[k].dtype)), None
        )

    if ends is not None:
        named = {key[-1]: demand(key, several=True) for key in ends}
        terminated, truncated = named.pop("terminated", None), named.pop("truncated", None)
        done = next(iter(named.values()), None)
    else:
        # Root flags describe the observation before the step; they count only if there is no "next".
        root: Key = ("next",) if any(key[0] == "next" for key in schema.keys) else ()
        several = done_reduce is not None
        terminated, truncated, done = (
            first((*root, name), several=several) for name in ("terminated", "truncated", "done")
        )
    _check_alike(schema, [terminated, truncated, done])
    if group is not None and group in schema and not _can_name(schema[group]):
        raise SchemaError(
            f"{key_name(group)!r} names groups, and is not a field with one integer or text per row"
        )
    several = reward_reduce is not None
    if reward == REWARD:
        rewarded = first(reward, ("reward",), several=several)
    else:
        rewarded = demand(reward, several=True)
    if rewarded is not None and schema[rewarded].numpy_dtype.kind not in "fiub":
        rewarded = None  # complex numbers have no order
    return Keys(
        trajectory=demand(trajectory) or first(("collector", "traj_ids"), ("episode",), integer=True),
        terminated=terminated,
        truncated=truncated,
        done=done,
        start=first(("is_init",), ("step_count",)),
        reward=rewarded,
        mask=first(("collector", "mask")),
        reward_reduce=reward_reduce,
        done_reduce=done_reduce,
        group=group,
        group_size=group_size,
        version=None if group is None else first(("policy_version",), integer=True),
    )


def _can_name(field: Field) -> bool:
    """Return whether the values of a field can be names of groups."""
    if field.variable:
        return field.arrow.strip('"') in ("string", "large_string")
    return field.dtype != OBJECT and field.row_items == 1 and field.numpy_dtype.kind in "iu"


def _check_alike(schema: Schema, ends: Sequence[Key | None]) -> None:
    """Raise SchemaError if end fields with several values per row have different numbers of them."""
    found = {key_name(key): schema[key].row_items for key in ends if key is not None}
    if len(set(found.values()) - {1}) > 1:
        raise SchemaError(
            f"the fields that end episodes have different numbers of values per row: {found}",
            hint="name fields in EpisodeKeys(done=[...]) that have one flag per row, or one for each of the "
            "same agents",
        )


#: Last parts of keys of fields that are not observations, even if they are stored under `next` too.
_NO_OBSERVATIONS = frozenset({"reward", "done", "terminated", "truncated", "is_init", "step_count"})


def find_observations(schema: Schema, keys: Keys) -> list[tuple[int, int]]:
    """Return the positions of each observation field and of its next observation.

    Only fixed-size fields count that are stored both as `name` and as `("next", name)`.

    Args:
        schema: The fields.
        keys: The fields with a role in episodes; these are not observations.
    """
    roles = {key for name in Keys.__slots__ if (key := getattr(keys, name)) is not None}
    found = []
    for place, entry in enumerate(schema.fields):
        after = ("next", *entry.key)
        if after not in schema or {entry.key, after} & roles or entry.key[-1] in _NO_OBSERVATIONS:
            continue
        other = schema[after]
        fixed = not (entry.variable or other.variable or OBJECT in (entry.dtype, other.dtype))
        if fixed and (entry.dtype, entry.shape) == (other.dtype, other.shape):
            found.append((place, schema.place(after)))
    return found
