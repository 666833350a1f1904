"""Convert rows in requests and responses: Arrow streams or JSON, and TensorDicts in the library.

Used by the routes, in worker threads. A body is checked completely before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from fastapi.responses import Response
from tensordict import TensorDictBase

from expstore.api.bodies import ARROW, ROWS, arrow_answer, json_answer, load_json, rows_to_json
from expstore.api.errors import Refusal
from expstore.api.stores import Served
from expstore.core.values import key_name
from expstore.errors import SchemaError
from expstore.schema.schema import Field
from expstore.wire.annotations import read_annotations
from expstore.wire.codec import NOTE, Codec, Coded, Encoder, meaning_of, wishes_of, write_note
from expstore.wire.stream import StreamWriter, read_batches


def take_rows(
    served: Served, kind: str, body: bytearray, *, rows: int
) -> tuple[TensorDictBase, dict[str, Any]]:
    """Return the rows of a body, and the options in its metadata.

    Args:
        served: The store that the rows are for.
        kind: The media type of the body.
        body: The body.
        rows: Maximum number of rows.

    Raises:
        SchemaError: The body does not contain rows of this store.
        Refusal: 400: the body cannot be parsed.
    """
    if kind == ARROW:
        return _from_arrow(served, body, rows)
    return _from_json(served, load_json(body), rows), {}


def _from_arrow(served: Served, body: bytearray, rows: int) -> tuple[TensorDictBase, dict[str, Any]]:
    known: tuple[Codec, Coded] | None = None

    def check(arrow_schema: Any) -> None:
        nonlocal known
        if served.rb.schema is None:
            told = meaning_of(arrow_schema)
            known = Codec(told.schema), told
        else:
            codec = served.codec_of(arrow_schema.names)
            known = codec, meaning_of(arrow_schema, codec)

    arrow_schema, batches = read_batches(body, check, rows=rows)
    assert known is not None
    codec, told = known
    if not batches:
        raise SchemaError("the body has no rows", kind="empty", hint="send at least one batch")
    return codec.build(codec.decode_all(batches, body), told.batch_size, told.names), wishes_of(arrow_schema)


def _from_json(served: Served, data: Any, rows: int) -> TensorDictBase:
    codec = served.codec
    if not isinstance(data, Mapping) or not data:
        raise SchemaError(
            "the body is not an object of columns", hint=f"send lists of {', '.join(codec.names)}"
        )
    codec = served.codec_of(data)
    unknown, missing = set(data) - set(codec.names), set(codec.names) - set(data)
    if unknown or missing:
        trouble = f"misses {min(missing)!r}" if missing else f"has {min(unknown)!r}, which is not a field"
        raise SchemaError(f"the body {trouble}", hint=f"send {', '.join(codec.names)}")
    columns = [
        _column_of(entry, data[name]) for name, entry in zip(codec.names, codec.schema.fields, strict=True)
    ]
    counts = {len(column) for column in columns}
    if len(counts) != 1:
        raise SchemaError(f"the columns have {', '.join(map(str, sorted(counts)))} rows")
    if max(counts) > rows:
        raise SchemaError(f"the body has more than {rows:,} rows", kind="too_large")
    return codec.build(columns)


def _column_of(entry: Field, values: Any) -> Any:
    """Convert a column of JSON values; raise an error rather than change a value.

    Raises:
        SchemaError: The values are not values of the field.
    """
    name = key_name(entry.key)
    if not isinstance(values, list):
        raise SchemaError(f"column {name!r} is not a list", hint="send one value per row")
    if entry.variable:
        raise SchemaError(f"field {name!r} has variable length", hint="send an Arrow stream")
    if entry.dtype in ("bfloat16", "complex64"):
        raise SchemaError(
            f"field {name!r} is {entry}, which JSON cannot contain", hint="send an Arrow stream"
        )
    try:
        # As objects: in an array of texts, each value would take as much memory as the longest text.
        kinds = set(map(type, np.array(values, dtype=object).flat))
    except ValueError:
        kinds = {list}
    if list in kinds:
        raise SchemaError(f"column {name!r} has rows of different shapes", hint=f"the field is {entry}")
    if len(kinds) > 1 and bool in kinds:
        raise SchemaError(
            f"column {name!r} mixes true or false with other values", hint=f"the field is {entry}"
        )
    wanted = entry.numpy_dtype
    found = np.array(values if kinds <= {bool, int, float} else None)
    if found.size == 0:
        found = found.astype(wanted)
    if found.dtype.kind not in "biuf" or (found.dtype.kind == "b") != (wanted.kind == "b"):
        raise SchemaError(
            f"column {name!r} contains values that are not {entry.dtype}", hint=f"the field is {entry}"
        )
    if found.dtype.kind == "f" and wanted.kind in "iu":
        raise SchemaError(f"column {name!r} contains fractions", hint=f"the field is {entry}")
    with np.errstate(over="ignore", invalid="ignore"):
        column = found.astype(wanted)
    # Floats are rounded as everywhere, but a value out of range would become another value.
    same = np.isfinite(column) == np.isfinite(found) if wanted.kind == "f" else column == found
    if not np.all(same):
        raise SchemaError(f"column {name!r} has values out of the range of {entry.dtype}")
    if entry.shape == (1,) and column.ndim == 1:
        column = column[:, None]
    if column.shape[1:] != entry.shape:
        raise SchemaError(
            f"column {name!r} has rows of shape {list(column.shape[1:])}", hint=f"the field is {entry}"
        )
    return column


def annotate_from(served: Served, kind: str, body: bytearray, *, rows: int) -> int:
    """Annotate rows with the values in a body; return the number of ids.

    Args:
        served: The store with the rows.
        kind: The media type of the body.
        body: The body.
        rows: Maximum number of rows.

    Raises:
        SchemaError: The body has no annotations, or as `ReplayBuffer.annotate` raises it.
        Refusal: 400: the body cannot be parsed; 422: it is not an object of ids and values.
    """
    if kind == ARROW:
        packed = read_annotations(body, rows=rows)
        served.rb.annotate(packed.ids, packed.values, by=packed.by, like=packed.like)
        return len(packed.ids)
    asked = load_json(body)
    known = {"ids", "values", "by", "like"}
    if not isinstance(asked, Mapping) or not {"ids", "values"} <= set(asked) <= known:
        raise Refusal(422, "the body is not an object with ids and values",
                      hint='send {"ids": [1], "values": {"advantage": [0.5]}}')  # fmt: skip
    ids, values, by, like = (asked.get(name) for name in ("ids", "values", "by", "like"))
    numbers = check_ids(ids)
    if len(numbers) > rows:
        raise SchemaError(f"the body has more than {rows:,} rows", kind="too_large")
    if not isinstance(values, Mapping) or not values:
        raise Refusal(422, "values is not an object of lists by field")
    for name, text in {"by": by, "like": like}.items():
        if not isinstance(text, str | None):
            raise Refusal(422, f"{name} is {str(text)[:40]}", hint="send a text")
    fields = {tuple(name.split(".")): found for name, found in values.items()}
    served.rb.annotate(numbers, fields, by=by, like=None if like is None else tuple(like.split(".")))
    return len(numbers)


def answer_rows(
    data: TensorDictBase,
    kind: str,
    compression: str | None = None,
    encoder: Encoder | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Response:
    """Return a response with rows, of the media type that the client wants.

    Args:
        data: The rows.
        kind: The media type.
        compression: Compression of an Arrow stream; None: not compressed.
        encoder: Encodes the rows; None: a new one.
        facts: What the rows were drawn from; None: they were not drawn.
    """
    encoder = encoder or Encoder()
    if kind != ARROW:
        response = json_answer(rows_to_json(encoder.encode(data), facts))
    else:
        writer = StreamWriter(compression)
        write_batch(writer, encoder, data, facts, is_packed=compression is not None)
        writer.end()
        response = arrow_answer(writer.take())
    response.headers[ROWS] = str(data.numel())
    return response


def write_batch(
    writer: StreamWriter,
    encoder: Encoder,
    data: TensorDictBase,
    facts: Mapping[str, Any] | None,
    *,
    is_packed: bool,
) -> None:
    """Append rows to an Arrow stream, with facts about them in the metadata of their message."""
    note = None if facts is None else write_note(facts)
    if is_packed:
        writer.write(encoder.encode(data), None if note is None else {NOTE: note})
    else:
        writer.write_message(*encoder.message(data, note))


def check_ids(ids: Any) -> torch.Tensor:
    """Return the ids in a request as a tensor. Shape `(n,)`, int64.

    Raises:
        Refusal: 422: a value is not an id.
    """
    values = np.asarray(ids)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise Refusal(422, "ids must be a list of integers")
    return torch.from_numpy(values.astype(np.int64))
