"""What a storage knows of its fields: their values' specs, which are packed, which it keeps, how more come.

Mixed into `Storage`. It reads no spec: `expstore.schema.spec_text` says which fields the text speaks of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from expstore.core.values import Key, key_name
from expstore.errors import SchemaError, StateError
from expstore.schema.schema import Schema
from expstore.schema.spec_text import check_specs

if TYPE_CHECKING:
    from expstore.storages.base import Storage
    from expstore.storages.new_field import Coming

__all__ = ["Described"]


class Described:
    """Keep the specs of the fields.

    Threads, processes and crashes: as the storage; what `describe_fields` has returned from stays.

    Example:
        >>> storage = MemoryStorage(10)
        >>> storage.describe_fields(specs.text.to_text(Composite(action=Categorical(2))))
    """

    kind: str
    lock: threading.RLock
    #: Whether rows may be of no fixed size.
    keeps_variable = False
    #: Whether fields may hold any Python object; otherwise values become columns of Arrow.
    keeps_objects = False
    schema: Schema | None
    #: Moves, twice, when fields come or go: their places are others then. Odd meanwhile.
    reshapes: int = 0
    #: As `expstore.schema.spec_text` has them; "": nothing is known.
    specs: str = ""

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Fields of which rows are unpacked or put together where they are read: no views cost nothing."""
        return frozenset()

    def archived(self) -> Storage | None:
        """Return where rows are that have left; None: nowhere."""
        return None

    @contextmanager
    def moving_places(self, moves: bool = True) -> Iterator[None]:
        """Let who reads fields by their places know that these are others afterwards, if they are."""
        self.reshapes += moves
        try:
            yield
        finally:
            self.reshapes += moves

    def check_writable(self) -> None:
        """Raise StateError if nothing can be written."""

    def check_described(self, schema: Schema) -> None:
        """Raise SchemaError if fields are not those of the specs, or none that this storage keeps."""
        self.check_kept(schema)
        check_specs(self.specs, schema)

    def check_kept(self, schema: Schema) -> None:
        """Raise SchemaError if there are fields that this storage does not keep."""
        if schema.variable and not self.keeps_variable:
            entry = schema[schema.variable[0]]
            raise SchemaError(
                f"field {key_name(entry.key)!r} is {entry}: its rows have no fixed size, which a {self.kind} "
                "storage cannot keep",
                hint='make the store with expstore.open(..., storage="arrow")',
            )

    def describe_fields(self, specs: str) -> None:
        """Keep the specs of the fields in the place of those that there are.

        Args:
            specs: Their text; "": nothing is known of them any more.

        Raises:
            SchemaError: The rows have other fields.
            StateError: Nothing can be written here.
            StorageError: The disk failed; nothing was changed.
        """
        with self.lock:
            self.check_writable()
            if self.schema is not None:
                check_specs(specs, self.schema)
            self._note_specs(specs)
            self.specs = specs

    def stored_specs(self) -> str:
        """Return the text of the specs as it is just now."""
        return self.specs

    def _note_specs(self, specs: str) -> None:
        """Bring the text to where the storage's settings are."""

    def add_field(self, coming: Coming) -> None:
        """Have one more field: all of it, or nothing.

        Args:
            coming: Which one, and the values of the rows that are there.

        Raises:
            StateError: Nothing can be written here, or this kind of storage cannot.
        """
        self.check_writable()
        raise StateError(f"a {self.kind} storage cannot get other fields", hint="make another store")

    def drop_field(self, key: Key, specs: str) -> None:
        """Have one field less: all of it goes, or nothing.

        Args:
            key: Which one.
            specs: What values fields may have from then on, as `expstore.schema.spec_text` has it.

        Raises:
            StateError: Nothing can be written here, or this kind of storage cannot.
        """
        self.check_writable()
        raise StateError(f"a {self.kind} storage cannot get other fields", hint="make another store")
