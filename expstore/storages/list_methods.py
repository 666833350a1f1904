"""A storage as a list of rows: `get`, `set` and `[]`, under torchrl's names.

Base of every storage. The work is done in `expstore.storages.indexing`, which is loaded with torch when first
needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from expstore.storages.base import Storage

__all__ = ["Indexed"]


class Indexed:
    """Read and replace rows by index.

    Threads, processes and crashes as the storage. What is set is there whole or not at all.

    Example:
        >>> storage = MemoryStorage(10)
        >>> storage.set(range(3), TensorDict({"a": torch.arange(3)}, [3]))
        >>> storage.get(1)["a"]
        tensor(1)
    """

    #: Whether a row is one object, in the field `("_data",)`, and not a set of tensors.
    object_rows = False
    #: The dim along which rows that are TensorDicts of any shapes are stacked; None: they are not.
    stack_dim: int | None = None
    #: The tensorclass that rows came in, if it is known.
    row_class: type | None = None

    def get(self, index: Any) -> Any:
        """Read rows by index, put together as they came: TensorDicts, tensors, trees of them, objects.

        Args:
            index: An integer for one row (of time, where `ndim` is larger than 1); a slice, integers, or a
                mask for several.

        Returns:
            One row, or as many as asked for; objects in a list.

        Raises:
            NotFoundError: There is no such row.
            StateError: The storage is closed, or has no fields yet.
        """
        from expstore.storages.indexing import get

        return get(cast("Storage", self), index)

    def set(self, cursor: Any, data: Any) -> None:
        """Replace rows by index; rows right behind the last one are appended.

        Args:
            cursor: An integer, several, or a slice.
            data: One row for one integer, otherwise as many.

        Raises:
            NotFoundError: There is no such row, nor would it be the next.
            SchemaError: The rows do not fit.
        """
        from expstore.storages.indexing import put

        put(cast("Storage", self), cursor, data)

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, data: Any) -> None:
        self.set(index, data)

    def contains(self, item: Any) -> Any:
        """Say which indices rows can be read at.

        Args:
            item: An integer, or a tensor of them; negative ones count from the end.

        Returns:
            A bool, or a tensor of bools.
        """
        from expstore.storages.indexing import contains

        return contains(cast("Storage", self), item)

    def __contains__(self, item: object) -> bool:
        return bool(self.contains(item))

    def __iter__(self) -> Iterator[Any]:
        """Yield row after row, in the order of their indices."""
        from expstore.storages.indexing import rows_of

        return rows_of(cast("Storage", self))
