"""Tables as streams: what lies under their nulls stays here."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from expstore.sql.result import Result, table_stream, widen_unsigned

SECRET = b"\xa5secret\xa5"


def array_over_secrets(kind: Any, count: int = 4) -> pa.Array:
    """Return an array of nulls under which the bytes of SECRET lie; every second value is zero instead."""
    present = pa.py_buffer(np.packbits(np.arange(count) % 2 == 1, bitorder="little"))
    width = kind.bit_width // 8
    secrets = (SECRET * 4)[:width]
    data = b"".join(bytes(width) if n % 2 else secrets for n in range(count))
    return pa.Array.from_buffers(kind, count, [present, pa.py_buffer(data)])


@pytest.mark.parametrize(
    "kind",
    [pa.int64(), pa.float64(), pa.timestamp("us"), pa.time64("us"), pa.decimal128(38, 3), pa.binary(8)],
    ids=str,
)
@pytest.mark.parametrize("shape", ["flat", "list", "fixed", "struct", "map", "two chunks"])
def test_bytes_under_nulls_are_not_in_the_stream(kind: Any, shape: str) -> None:
    flat = array_over_secrets(kind)
    column: Any = {
        "flat": lambda: flat,
        "list": lambda: pa.ListArray.from_arrays(pa.array([0, 1, 4], pa.int32()), flat),
        "fixed": lambda: pa.FixedSizeListArray.from_arrays(flat, 2),
        "struct": lambda: pa.StructArray.from_arrays([flat, flat], ["a", "b"]),
        "map": lambda: pa.MapArray.from_arrays(pa.array([0, 1, 4], pa.int32()), pa.array([1, 2, 3, 4]), flat),
        "two chunks": lambda: pa.chunked_array([flat, flat]),
    }[shape]()
    table = pa.table({"x": column})
    plain = pa.BufferOutputStream()
    with pa.ipc.new_stream(plain, table.schema) as writer:
        writer.write_table(table)
    assert SECRET in plain.getvalue().to_pybytes()
    stream = table_stream(table)
    assert SECRET not in stream.to_pybytes()
    assert pa.ipc.open_stream(stream).read_all() == table


def test_tables_are_streams() -> None:
    values = {"n": [1, None, 3], "name": ["a", None, "c"], "part": [Decimal("1.5"), None, Decimal(2)]}
    batch = pa.RecordBatch.from_pydict(values)
    table = pa.Table.from_batches([batch, batch.slice(1)])
    same_names = table.append_column("n", pa.chunked_array([pa.array([True, None, False, None, True])]))
    for one in (
        table,
        same_names,
        table.slice(0, 0),
        pa.table({"words": pa.array(["x", None]).dictionary_encode()}),
    ):
        assert pa.ipc.open_stream(table_stream(one)).read_all() == one


def test_integers_of_128_bits_keep_their_values() -> None:
    with duckdb.connect() as con:
        relation = con.sql(
            "SELECT 340282366920938463463374607431768211455::UHUGEINT - n::UHUGEINT AS u, n::UHUGEINT AS v, "
            "9223372036854775807::HUGEINT + n AS h FROM range(2) AS t(n) UNION ALL SELECT NULL, NULL, NULL"
        )
        result = Result(widen_unsigned(relation.to_arrow_table(), relation.types))
    assert result.fetchall() == [
        (2**128 - 1, 0, 2**63 - 1),
        (2**128 - 2, 1, 2**63),
        (None, None, None),
    ]
    assert [type(value) for value in result.fetchall()[1]] == [int, int, int]
