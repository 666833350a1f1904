"""An ordered collection: an integer selects a member, several integers select a smaller collection.

Base class of the parts of ensembles. It does not depend on what the members do.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import indent
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from expstore.core.torchrl_members import find_member
from expstore.errors import ArgumentError


def find_members(index: Any, count: int, owner: str) -> int | list[int]:
    """Return the numbers of the members that an index selects: one number, or several.

    Args:
        index: An integer; a slice or an ellipsis; integers or a mask in a list, range, array or tensor.
        count: Number of members.
        owner: Name of the collection, for the message.

    Raises:
        IndexError: There is no such member, or the value is not an index.
        RuntimeError: The index has more than one dim.
        ArgumentError: The index has floating-point numbers.
    """
    if index is Ellipsis:
        index = slice(None)
    if isinstance(index, slice):
        return list(range(count))[index]
    if isinstance(index, str) or index is None:
        raise _wrong(index)
    numbers = np.asarray(index.detach().cpu() if hasattr(index, "detach") else index)
    if numbers.ndim > 1:
        raise RuntimeError(f"Cannot index a {owner} with tensor indices that have more than one dimension.")
    if numbers.dtype.kind == "f" and numbers.size:
        raise ArgumentError("A floating point index was received when an integer dtype was expected.")
    if numbers.dtype.kind == "b" and numbers.shape == (count,):
        numbers = np.flatnonzero(numbers)
    if numbers.dtype.kind not in "iuf":
        raise _wrong(index)
    found = [int(number) for number in numbers.reshape(-1).tolist()]
    for number in found:
        if not -count <= number < count:
            raise IndexError(f"there is no member {number}: {owner} has {count}")
    found = [number % count for number in found]
    return found if numbers.ndim else found[0]


def _wrong(index: Any) -> IndexError:
    return IndexError(
        "Expected an index of type torch.Tensor, range, np.ndarray, int, slice or ellipsis, got "
        f"{type(index)} instead."
    )


class Members:
    """Members of one kind, in order.

    Threads, processes and crashes: as for the members.

    Args:
        members: The members, in the order of their numbers.
    """

    #: The word for the members in messages.
    _word: ClassVar[str] = "members"

    if not TYPE_CHECKING:  # mypy would accept any attribute
        __getattr__ = find_member

    def __init__(self, *members: Any) -> None:
        self._members = members

    def _select_members(self, numbers: list[int]) -> Members:
        """Return a collection of some members."""
        return type(self)(*[self._members[number] for number in numbers])

    def __getitem__(self, index: Any) -> Any:
        """Return a member by its number, or a collection of several members."""
        if isinstance(index, tuple):
            if len(index) > 1:
                raise IndexError(
                    f"Tuple of length greater than 1 are not accepted to index {self._word} of type "
                    f"{type(self)}."
                )
            index = index[0]
        if isinstance(index, slice) and index == slice(None):
            return self
        found = find_members(index, len(self), type(self).__name__)
        return self._members[found] if isinstance(found, int) else self._select_members(found)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members)

    def __repr__(self) -> str:
        inner = ",\n".join(repr(member) for member in self._members)
        return f"{type(self).__name__}(\n{indent(inner, '    ')})"
