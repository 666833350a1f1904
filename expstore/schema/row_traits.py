"""What the rows of a storage may be, and how they are put together when they are read.

A storage has one `RowTraits`; it is replaced as a whole. No value is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from expstore.core.values import Key, key_name
from expstore.errors import SchemaError
from expstore.schema.schema import Schema

__all__ = ["DATA", "RowTraits"]

#: The field of rows that are one tensor, or one object, each.
DATA: Key = ("_data",)


@dataclass(frozen=True, kw_only=True)
class RowTraits:
    """Describe the rows that a storage keeps.

    Args:
        variable: Whether rows may be of no fixed size.
        objects: Whether fields may hold any Python object; otherwise such values become columns of Arrow.
        whole: Whether a row is one object, in the field `DATA`, instead of a set of tensors.
        stack_dim: The dim along which rows that are TensorDicts of any shapes are stacked; None: they are
            returned as a list.
        row_class: The tensorclass of the rows; None: it is unknown, or they are no tensorclass.
    """

    variable: bool = False
    objects: bool = False
    whole: bool = False
    stack_dim: int | None = None
    row_class: type | None = None

    def check(self, schema: Schema, kind: str) -> None:
        """Check that fields can be kept.

        Args:
            schema: The fields.
            kind: What the storage is called.

        Raises:
            SchemaError: One of them cannot.
        """
        if schema.variable and not self.variable:
            entry = schema[schema.variable[0]]
            raise SchemaError(
                f"field {key_name(entry.key)!r} is {entry}: its rows have no fixed size, which a {kind} "
                "storage cannot keep",
                hint='make the store with expstore.open(..., layout="arrow")',
            )
