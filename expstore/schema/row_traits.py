"""What kinds of rows a storage accepts, and how rows are combined when they are read.

A storage has one `RowTraits`, which is replaced as a whole. This module never reads values.
"""

from __future__ import annotations

from dataclasses import dataclass

from expstore.core.values import Key, key_name
from expstore.errors import SchemaError
from expstore.schema.schema import Schema

#: The field of rows that consist of one tensor or one object.
DATA: Key = ("_data",)


@dataclass(frozen=True, kw_only=True)
class RowTraits:
    """Describe the rows that a storage keeps.

    Args:
        variable: Whether fields may be of variable length.
        objects: Whether fields may hold any Python object; otherwise such values become Arrow columns.
        whole: Whether a row is one object, in the field `DATA`, instead of a set of tensors.
        stack_dim: The dim along which rows that are TensorDicts of any shapes are stacked; None returns them
            as a list.
        grows: Whether written rows with fields that the storage lacks add the fields.
        row_class: The tensorclass of the rows; None if it is unknown, or if the rows are not tensorclasses.
        undecided: Whether the first rows decide if fields may be of variable length.
    """

    variable: bool = False
    objects: bool = False
    whole: bool = False
    stack_dim: int | None = None
    grows: bool = False
    row_class: type | None = None
    undecided: bool = False

    def check(self, schema: Schema, kind: str) -> None:
        """Raise SchemaError if a field cannot be stored.

        Args:
            schema: The fields.
            kind: Name of the kind of storage, for messages.

        Raises:
            SchemaError: A field cannot be stored.
        """
        if (found := schema.written.variable) and not (self.variable or self.undecided):
            entry = schema[found[0]]
            raise SchemaError(
                f"field {key_name(entry.key)!r} is {entry}: its rows have no fixed size, which a {kind} "
                "storage cannot keep",
                hint='make the store with expstore.open(..., layout="arrow")',
            )
