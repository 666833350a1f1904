"""Which Arrow types can be widened to which."""

from __future__ import annotations

import pyarrow as pa

from expstore.schema.casting import fits

STRUCT = pa.struct([("a", pa.int64()), ("b", pa.string())])


def test_wider_types_take_values() -> None:
    for found, wanted in [
        (pa.null(), STRUCT),
        (pa.int64(), pa.int32()),
        (pa.int64(), pa.float32()),
        (pa.float64(), pa.float32()),
        (pa.string(), pa.large_string()),
        (pa.binary(), pa.binary(3)),
        (pa.list_(pa.null()), pa.list_(pa.int8())),
        (pa.list_(pa.int64()), pa.large_list(pa.float64())),
        (pa.list_(pa.int64()), pa.list_(pa.int64(), 2)),
        (pa.struct([("b", pa.null())]), STRUCT),
        (pa.struct([("b", pa.string()), ("a", pa.int8())]), STRUCT),
        (pa.timestamp("us"), pa.timestamp("ns")),
        (pa.timestamp("us", "UTC"), pa.timestamp("us", "+02:00")),
        (pa.decimal128(3, 1), pa.decimal128(9, 2)),
    ]:
        assert fits(found, wanted)


def test_others_do_not() -> None:
    for found, wanted in [
        (pa.float64(), pa.int64()),
        (pa.bool_(), pa.int64()),
        (pa.int64(), pa.bool_()),
        (pa.int64(), pa.string()),
        (pa.string(), pa.int64()),
        (pa.string(), pa.binary()),
        (pa.binary(), pa.string()),
        (pa.timestamp("us"), pa.string()),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us", "UTC"), pa.timestamp("us")),
        (pa.date32(), pa.timestamp("us")),
        (pa.list_(pa.string()), pa.string()),
        (pa.string(), pa.list_(pa.string())),
        (pa.list_(pa.string()), pa.list_(pa.int64())),
        (pa.struct([("c", pa.int64())]), STRUCT),
        (pa.struct([("a", pa.string())]), STRUCT),
        (STRUCT, pa.string()),
    ]:
        assert not fits(found, wanted)
