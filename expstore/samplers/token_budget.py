"""How many rows of a draw fit into a batch, by their lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.arguments import check_whole
from expstore.core.values import IntArray, Key, check_key, key_name
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.schema.ragged_fields import build_no_ragged_error, find_ragged
from expstore.schema.schema import Schema

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The largest number of tokens of a batch.

    Args:
        tokens: The number, at least 1. A single row may have more.
        key: The field whose lengths count; None: the first field of tensors that differ in their first dim.
    """

    tokens: int
    key: Key | None = None

    @classmethod
    def of(cls, tokens: Any, key: Any) -> TokenBudget | None:
        """Convert the arguments `batch_tokens` and `tokens_key`; None if there is no limit.

        Raises:
            ArgumentError: The number is not a whole one or below 1, or there is only a key.
        """
        found = None if key is None else check_key("tokens_key", key)
        if tokens is None:
            if found is not None:
                raise ArgumentError("tokens_key has no effect without batch_tokens; pass both or neither")
            return None
        count = check_whole("batch_tokens", tokens, hint="use a number such as 65536")
        if count < 1:
            raise ArgumentError(f"batch_tokens must be at least 1, got {count}")
        return cls(count, found)

    def count_fitting(self, storage: ReadView, ids: IntArray) -> int:
        """Return how many of these rows, from the first one on, make a batch: at least one.

        Args:
            storage: The storage with the rows.
            ids: Their ids. Shape `(n,)`.

        Raises:
            SchemaError: The store has no such field.
            StateError: A field was added or dropped meanwhile, so that other lengths may have been read.
        """
        fields = storage.epochs.fields
        column: Any = storage.read(ids, [self.find_place(storage.require_schema())])[0]
        if storage.epochs.fields != fields or fields & 1:
            raise StateError("fields were added or dropped while a batch was drawn", hint="draw it again")
        ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
        return max(1, int(np.searchsorted(ends, self.tokens, side="right")))

    def find_place(self, schema: Schema) -> int:
        """Return the position of the field whose lengths count.

        Raises:
            SchemaError: There is no such field.
        """
        keys = find_ragged(schema)
        if not keys:
            raise build_no_ragged_error(f"batch_tokens={self.tokens}")
        if self.key is not None and self.key not in keys:
            raise SchemaError(
                f"tokens_key={key_name(self.key)!r} is not a field of tensors that differ in their first dim",
                hint=f"the store has {', '.join(repr(key_name(key)) for key in keys)}",
            )
        return schema.place(self.key or keys[0])
