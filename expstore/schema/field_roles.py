"""Which fields say what a row is to its episode.

Used by storages when the fields are fixed, and by what reads steps out of batches. It knows names and
shapes, never rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expstore.core.values import Key, key_name
from expstore.errors import SchemaError
from expstore.schema.schema import OBJECT, Schema

__all__ = ["REWARD", "Keys", "find_keys"]


@dataclass(frozen=True, slots=True)
class Keys:
    """Name the fields that say what a row is to its episode; None where a store has none."""

    trajectory: Key | None = None
    terminated: Key | None = None
    truncated: Key | None = None
    done: Key | None = None
    start: Key | None = None
    reward: Key | None = None
    mask: Key | None = None


REWARD: Key = ("next", "reward")


def find_keys(
    schema: Schema,
    *,
    trajectory: Key | None = None,
    ends: Sequence[Key] | None = None,
    reward: Key = REWARD,
) -> Keys:
    """Find the fields that say what a row is to its episode.

    Only fields with one value per row count. TorchRL's names serve unless others are asked for.

    Args:
        schema: The fields.
        trajectory: Field with the collector's trajectory ids.
        ends: Fields that end an episode, known by their last part: terminated, truncated, or another.
        reward: Field that is summed up.

    Raises:
        SchemaError: A key that was asked for is no field with one value per row.
    """

    def usable(key: Key) -> bool:
        return key in schema and schema[key].row_items == 1 and schema[key].dtype != OBJECT

    def demand(key: Key | None) -> Key | None:
        if key is not None and not usable(key):
            raise SchemaError(f"{key_name(key)!r} is not a field with one value per row, as it must be here")
        return key

    def first(*keys: Key, integer: bool = False) -> Key | None:
        return next((k for k in keys if usable(k) and (not integer or "int" in schema[k].dtype)), None)

    if ends is not None:
        named = {key[-1]: demand(key) for key in ends}
        terminated, truncated = named.pop("terminated", None), named.pop("truncated", None)
        done = next(iter(named.values()), None)
    else:
        # Root flags speak of the observation before the step; they count only where there is no "next".
        group: Key = ("next",) if any(key[0] == "next" for key in schema.keys) else ()
        terminated, truncated, done = (first((*group, name)) for name in ("terminated", "truncated", "done"))
    return Keys(
        trajectory=demand(trajectory) or first(("collector", "traj_ids"), ("episode",), integer=True),
        terminated=terminated,
        truncated=truncated,
        done=done,
        start=first(("is_init",), ("step_count",)),
        reward=first(reward, ("reward",)) if reward == REWARD else demand(reward),
        mask=first(("collector", "mask")),
    )
