"""Flags that follow from others: their columns keep only where they do not.

A step is done if it is terminated or truncated, in nearly every row of nearly every store. The column of
such a flag keeps its value XOR what follows from the others: nothing but False as long as that is so, which
takes no space. Used by the storage on disk and by followers: columns, records and checksums know nothing but
what is kept, whoever hands rows out asks here for their values. It touches no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expstore.core.values import Array, Key
from expstore.schema.field_roles import Keys
from expstore.schema.schema import Field

__all__ = ["Implied", "causes_of", "implied_keys"]

#: Copies columns out, by their places.
Take = Callable[[Sequence[int]], list[Array]]
#: Returns the parts of a flag's values, given those of what is kept of it and of its causes.
Mix = Callable[[Any, Any, Any], Any]


def causes_of(key: Key) -> tuple[Key, Key]:
    """Return the fields from which a flag follows: it is set where one of them is.

    >>> causes_of(("next", "done"))
    (('next', 'terminated'), ('next', 'truncated'))
    """
    return (*key[:-1], "terminated"), (*key[:-1], "truncated")


def implied_keys(fields: Sequence[Field], keys: Keys, packings: Sequence[object]) -> tuple[Key, ...]:
    """Return the flags of a new store that are kept as what does not follow from others.

    Args:
        fields: The store's.
        keys: Which of them end episodes.
        packings: How each is packed, where such a flag takes next to nothing anyway; None: it is not.
    """
    done = keys.done
    if done is None or done[-1] != "done" or (keys.terminated, keys.truncated) != causes_of(done):
        return ()
    flags = [
        (entry.dtype, entry.shape, packing)
        for entry, packing in zip(fields, packings, strict=True)
        if entry.key in (done, *causes_of(done))
    ]
    return (done,) if flags == [("bool", flags[0][1], None)] * 3 else ()


@dataclass(frozen=True, slots=True)
class Implied:
    """Say of which columns not the values are kept.

    Args:
        places: Of each such column the places of the two from which it follows.
    """

    places: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, keys: Collection[Key], fields: Sequence[Field]) -> Implied:
        """Return where the fields of these keys and their causes are among others."""
        if not keys:
            return cls({})
        at = {entry.key: place for place, entry in enumerate(fields)}
        found = {at[key]: causes_of(key) for key in keys if key in at}
        return cls({place: (at[one], at[other]) for place, (one, other) in found.items()})

    def __bool__(self) -> bool:
        return bool(self.places)

    def kept(self, columns: Sequence[Array]) -> Sequence[Array]:
        """Return what is kept of rows.

        Args:
            columns: Their values, one array per column from the first one on. Shapes `(n, *row shape)`.
        """
        if not self.places:
            return columns
        found = list(columns)
        for place, (one, other) in self.places.items():
            found[place] = _mix(columns[place], columns[one], columns[other])
        return found

    def values(
        self, wanted: Sequence[int], take: Callable[[Sequence[int]], list[Any]], mix: Mix | None = None
    ) -> list[Any]:
        """Return the values of rows; all columns that are needed are taken at once.

        Args:
            wanted: Places of the columns.
            take: Copies out what is kept of them.
            mix: Puts a flag together whose rows come in parts; None: they come as one array.

        Returns:
            One array per column, or what `take` returns of one. Shapes `(n, *row shape)`.
        """
        needed = wanted
        for place, causes in self.places.items():
            if place in wanted:
                for cause in causes:
                    if cause not in needed:
                        needed = [*needed, cause]
        taken = take(needed)
        at = needed.index
        for place, (one, other) in self.places.items():
            if place in wanted:
                flag, first, second = taken[at(place)], taken[at(one)], taken[at(other)]
                if mix is None:  # in place: every sample comes through here, and a call costs it 1%
                    taken[at(place)] = np.bitwise_xor(flag, np.bitwise_or(first, second))
                else:
                    taken[at(place)] = mix(flag, first, second)
        return taken if needed is wanted else taken[: len(wanted)]

    def views(
        self, wanted: Sequence[int], view: Callable[[Sequence[int]], list[list[Array]]]
    ) -> list[list[Array]]:
        """Return the values of a run of rows in parts, those of flags as copies.

        Args:
            wanted: Places of the columns.
            view: Views what is kept of them, in one or more parts each.
        """
        return self.values(wanted, view, _mix_parts)

    def changed(
        self, places: Sequence[int], columns: Sequence[Array], take: Take
    ) -> tuple[Sequence[int], Sequence[Array]]:
        """Return what is kept of rows whose fields get other values: others than these stay as they are.

        Args:
            places: Of the fields.
            columns: Their new values. Shapes `(n, *row shape)`.
            take: Copies out the values that other fields of these rows have.

        Returns:
            Places and columns of all that changes on the disk: in one record, of which all counts or nothing.
        """
        given = dict(zip(places, columns, strict=True))
        found = given.copy()
        for place, causes in self.places.items():
            flags = (place, *causes)
            lacking = [flag for flag in flags if flag not in given]
            if len(lacking) < len(flags):
                known = given | dict(zip(lacking, take(lacking) if lacking else (), strict=True))
                found[place] = _mix(*(known[flag] for flag in flags))
        return list(found), list(found.values())


def _mix(flag: Array, one: Array, other: Array) -> Array:
    """Return what is kept of a flag, given its values; and these, given what is kept."""
    mixed: Array = np.bitwise_xor(flag, np.bitwise_or(one, other))  # half the time of operators on few rows
    return mixed


def _mix_parts(*flags: list[Array]) -> list[Array]:
    if len({tuple(map(len, parts)) for parts in flags}) > 1:  # cut where rows lie over a column
        flags = tuple([np.concatenate(parts)] for parts in flags)
    return list(map(_mix, *flags))
