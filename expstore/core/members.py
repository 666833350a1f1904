"""Some of a kind, found by number as in a list, by several numbers as an ensemble of their own.

Base of the parts of ensembles. It knows nothing of what the members do.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import indent
from typing import Any, ClassVar

import numpy as np

__all__ = ["Members", "find_members"]


def find_members(index: Any, count: int, owner: str) -> int | list[int]:
    """Return which members an index means: one, or several.

    Args:
        index: An integer; a slice or an ellipsis; integers, or a mask, in a list, range, array or tensor.
        count: How many members there are.
        owner: What they are members of, for the message.

    Raises:
        IndexError: There is no such member, or it is no index.
        RuntimeError: It has more than one dim.
        TypeError: It is made of floating point numbers.
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
        raise TypeError("A floating point index was received when an integer dtype was expected.")
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
    """Hold members of one kind, in order.

    Threads and processes: as the members. Crashes: as the members.

    Args:
        members: In the order of their numbers.
    """

    #: What the members are called.
    _word: ClassVar[str] = "members"

    def __init__(self, *members: Any) -> None:
        self._members = members

    def _select_members(self, numbers: list[int]) -> Members:
        """Return an ensemble of some of them."""
        return type(self)(*[self._members[number] for number in numbers])

    def __getitem__(self, index: Any) -> Any:
        """Return a member by its number, or some of them as an ensemble."""
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
