"""The specs of a store's fields, and checks of rows against them.

Implements `specs`, `set_specs` and `extend(validate="domain")` of buffers. It reads no stored rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData

from expstore.core.values import Key, key_name
from expstore.data.batch import Batch, StepReader
from expstore.data.leaves import UNKNOWN, column_of_rows, to_objects
from expstore.data.nested_tensors import to_tensor
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.schema.arrow_types import ragged_of, ragged_text
from expstore.schema.casting import fit_arrow
from expstore.schema.row_selection import pick
from expstore.schema.schema import ARROW, Field, Schema, arrow_dtype
from expstore.schema.spec_text import describe, unpack_specs
from expstore.specs import Composite, NonTensor, TensorSpec
from expstore.specs.base import LeafSpec
from expstore.specs.json_text import read_stored, to_text
from expstore.specs.shapes import safe
from expstore.storages.read_view import ReadView, keys_for

#: The type of a NonTensor field without an example, if its first rows are None.
_TEXT = arrow_dtype('"string"')
_MAX_CHARACTERS = 200  # characters of a value in a message

#: The text of specs, and the parsed specs: parsing takes as long as checking a row.
Domain = tuple[str, Composite | None]
NO_DOMAIN: Domain = ("", None)


def row_text(specs: Composite | None) -> str:
    """Return the text of the specs of one row; "" for None.

    Raises:
        ArgumentError: The argument is not a Composite.
        SchemaError: The specs have a batch size, or cannot be stored as text.
    """
    if specs is None:
        return ""
    if not isinstance(specs, Composite):
        raise ArgumentError(
            f"specs is a {type(specs).__module__}.{type(specs).__name__}; give a Composite of expstore, for "
            "the row's fields. from_torchrl and from_space of expstore.specs convert specs of TorchRL and "
            "spaces of gymnasium"
        )
    if specs.shape:
        raise SchemaError(
            f"the specs have batch size {list(specs.shape)}, and a row has none",
            hint=f"give the specs of one row: specs[{', '.join('0' for _ in specs.shape)}]",
        )
    return to_text(specs.clone().to("cpu").clear_device_())


def specs_of(storage: ReadView) -> Composite | None:
    """Return a copy of the current specs of a storage's fields; None: it has no specs."""
    text = storage.settings.specs()
    found: Composite | None = read_stored(text) if text else None
    return found


def select_specs(specs: Mapping[Key, TensorSpec], schema: Schema) -> Composite:
    """Return the specs of fields that the schema has with the same dtype and shape."""
    kinds = {(field.key, f"torch.{field.dtype}", field.shape) for field in schema.fields}
    fits = {key: spec for key, spec in specs.items() if (key, str(spec.dtype), tuple(spec.shape)) in kinds}
    return Composite(fits)


def set_types(batch: Batch, storage: ReadView) -> None:
    """Give columns whose rows are all None or empty the types of their specs.

    A NonTensor spec has the type of its example, or text without one.

    Args:
        batch: The first rows of the storage.
        storage: The storage.
    """
    places = [
        place
        for place, (dtype, array) in enumerate(zip(batch.dtypes, batch.arrays, strict=True))
        if dtype == UNKNOWN or 0 in getattr(array, "shape", ())[1:]
    ]
    specs = specs_of(storage) if places else None
    known = {} if specs is None else dict(specs.items(include_nested=True, leaves_only=True))
    for place in places:
        key, dtype, array = batch.keys[place], batch.dtypes[place], batch.arrays[place]
        spec = known.get(key if len(key) > 1 else key[0])
        if isinstance(spec, NonTensor):
            _, dtype = column_of_rows(key, [spec.example_data], typed=True)
            dtype = _TEXT if dtype == UNKNOWN else dtype
        elif spec is not None and spec.dtype is not None and any(size < 0 for size in spec.shape):
            sizes = tuple(None if size < 0 else size for size in spec.shape)
            dtype = arrow_dtype(ragged_text(str(spec.dtype).removeprefix("torch."), sizes))
        if dtype != batch.dtypes[place] and dtype.startswith(ARROW):
            text = dtype.removeprefix(arrow_dtype(""))
            batch.arrays[place] = fit_arrow(key, text, array, batch.dtypes[place])
            batch.dtypes[place] = dtype


def asks_for_domain(validate: str) -> bool:
    """Return whether values must be checked against specs.

    Raises:
        ArgumentError: `validate` is neither "schema" nor "domain".
    """
    if validate not in ("schema", "domain"):
        raise ArgumentError(
            f"validate is {validate!r}; use 'schema' to check fields, dtypes and shapes, or 'domain' to "
            "check values too"
        )
    return validate == "domain"


def check_domain(storage: ReadView, batch: Batch, known: Domain) -> Domain:
    """Raise SchemaError if a row has a value that its field's spec does not allow.

    Dropped rows are not checked. The caller holds the storage's lock; nothing is written.

    Args:
        storage: Storage to which the rows will be appended; it may be empty.
        batch: The rows.
        known: Result of the last check.

    Returns:
        The current specs and their text, for the next check.

    Raises:
        SchemaError: The batch does not fit the schema, or a value is not allowed; the message says which.
        StateError: The storage has no specs.
    """
    text = storage.settings.specs()
    specs = known[1] if known[0] == text else specs_of(storage)
    if specs is None:
        raise StateError(
            'validate="domain" checks values against specs, and this store has none',
            hint="give a Composite to expstore.open(schema=...), or use set_specs() of the buffer",
        )
    schema = storage.schema or Schema.infer(batch.signature(), batch.form)
    columns = batch.columns(schema)
    if storage.schema is None:  # otherwise the specs were compared with the schema when either was set
        storage.writer().settings.check(schema)
    keys = keys_for(storage, schema) if storage.schema is None else storage.keys
    kept = StepReader(schema, keys).transitions(columns)
    rows = np.arange(batch.count) if kept is None else np.flatnonzero(kept)
    for key in specs.keys(include_nested=True, leaves_only=True):
        place = schema.place((key,) if isinstance(key, str) else key)
        spec = specs[key]
        if spec is None or place < 0:
            continue
        column = columns[place] if kept is None else pick(columns[place], kept)
        values = _values(column, schema.fields[place])
        bad = _first_bad(spec, values)
        if bad >= 0:
            allowed = describe(unpack_specs(to_text(spec)))
            raise SchemaError(
                f"row {rows[bad]}: field {key_name(schema.fields[place].key)!r} is "
                f"{_short(_describe(values, bad))}, which its spec does not allow: {allowed}",
                hint="no row was written; project() of the spec returns values that it allows",
            )
    return text, specs


def _values(column: Any, field: Field) -> Any:
    """Return a column as its spec expects it: a tensor, a list of tensors, or an array of objects."""
    dtype = field.dtype
    if dtype == "object":
        return column
    if field.variable:
        found = ragged_of(field.arrow)
        return to_objects(column.to_pylist()) if found is None else list(to_tensor(column, found).unbind(0))
    values = torch.from_numpy(column if column.flags.writeable else column.copy())
    return values.view(torch.bfloat16) if dtype == "bfloat16" else values


def _describe(values: Any, row: int) -> Any:
    value = values[row]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _first_bad(spec: TensorSpec, values: Any) -> int:
    """Return the position of the first row that a spec does not allow, or -1 if it allows all rows."""
    if isinstance(values, np.ndarray):
        values = [NonTensorData(value, batch_size=safe(spec.shape)) for value in values]
    elif isinstance(values, torch.Tensor) and spec.is_in(values):
        return -1
    if not isinstance(values, torch.Tensor) or not isinstance(spec, LeafSpec):
        return next((number for number, value in enumerate(values) if not spec.is_in(value)), -1)
    low, high = 0, len(values)  # the first `low` rows are allowed, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spec.is_in(values[low:middle]) else (low, middle)
    return low


def _short(thing: Any) -> str:
    text = " ".join(str(thing).split())
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
