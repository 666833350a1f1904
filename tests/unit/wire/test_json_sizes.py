"""The size of values as JSON is bounded without converting them."""

from __future__ import annotations

import json
from typing import Any

import duckdb

from expstore.api.bodies import to_json
from expstore.wire.json_sizes import json_bytes

VALUES = (
    "true", "NULL", "255::UTINYINT", "'-128'::TINYINT", "-9223372036854775808",
    "18446744073709551615::UBIGINT",
    "'NaN'::FLOAT", "-1.1754943508222875e-38::FLOAT", "-2.2250738585072014e-308::DOUBLE",
    "-1.5::DECIMAL(5, 2)", "-170141183460469231731687303715884105727::HUGEINT", "'1'::BIGNUM",
    "''", "chr(1) || 'äö🦆'", "'x'::BLOB", "'101'::BIT", "uuid()", "'{}'::JSON",
    "TIMESTAMPTZ '2020-01-01 00:00:00.123456+00'", "TIMESTAMP_NS '2020-01-01'",
    "TIMESTAMP '290000-01-01'", "DATE '5877642-06-25 (BC)'", "TIME '12:00:01.123456'",
    "INTERVAL '-99999 months -99999 days -99999999999 us'",
    "'a text'::ENUM('a text', 'b')", "NULL::ENUM('a', 'b')",
    "repeat(['a text of an enum'::ENUM('a text of an enum')], 1000)",
    "[]", "repeat([true], 1000)", "[[1, NULL], NULL]", "[1, 2]::INT[2]",
    "repeat([{'a long name of a member': true}], 1000)", "NULL::STRUCT(a INT)", "{'a': [1, 2]}",
    "MAP {'key': [1, 2], 'other': NULL}", "NULL::MAP(INT, INT)",
    "union_value(a := 'text')", "[union_value(a := MAP {1: 2})]",
)  # fmt: skip


def test_no_value_is_larger_than_its_bound() -> None:
    with duckdb.connect() as con:
        for value in VALUES:
            (batch,) = con.sql(f"SELECT {value} AS x FROM range(5)").to_arrow_table().to_batches()
            ((column,), values) = batch.columns, to_json(batch)[0]
            for part, of in ((column, values), (column.slice(1, 2), values[1:3]), (column.slice(0, 0), [])):
                size = len(_write(of))
                assert size <= json_bytes(part) <= 30 * size + 1000, value


def _write(values: Any) -> bytes:
    return b"".join(json.dumps(value, separators=(",", ":")).encode() + b"," for value in values)
