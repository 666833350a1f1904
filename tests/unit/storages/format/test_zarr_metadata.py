"""The zarr.json files of columns, which zarr-python would write with the same bytes."""

import asyncio
from collections.abc import Sequence

import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from expstore.schema.schema import DTYPES, Field
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.codecs import CODECS
from expstore.storages.format.zarr_metadata import CHUNK_ROWS, make_metadata


def _by_zarr(
    fields: Sequence[Field], slots: int | None, separator: str, packing: Packing | None
) -> dict[str, bytes]:
    store = MemoryStore()
    group = zarr.create_group(store=store, attributes={"expstore": {"capacity": slots}})
    for entry in fields:
        group.create_array(
            entry.path,
            shape=(slots or CHUNK_ROWS, *entry.shape),
            chunks=(CHUNK_ROWS if packing is None else packing.rows, *entry.shape),
            shards=(CHUNK_ROWS, *entry.shape),
            dtype=entry.numpy_dtype,
            compressors=None if packing is None else packing.zarr_codecs,
            filters=None,
            chunk_key_encoding={"name": "default", "separator": separator if packing is None else "."},
        )

    async def collect() -> dict[str, bytes]:
        found = {}
        async for name in store.list():
            data = await store.get(name, default_buffer_prototype())
            found[name] = data.to_bytes()
        return found

    return asyncio.run(collect())


@pytest.mark.some(4)
@pytest.mark.parametrize("codec", [None, *CODECS])
@pytest.mark.parametrize("slots", [None, 2 * CHUNK_ROWS])
def test_zarr_python_would_write_the_same_metadata(codec: str | None, slots: int | None) -> None:
    fields = [
        Field((*key, dtype), dtype, shape)
        for dtype in DTYPES
        if dtype != "object"
        for key, shape in (((), ()), (("a", "b"), (3,)), (("é x",), (2, 1, 4)))
    ]
    packing = None if codec is None else Packing(codec, rows=16, shard=CHUNK_ROWS)
    made = make_metadata(
        fields,
        [CHUNK_ROWS] * len(fields),
        slots,
        {"expstore": {"capacity": slots}},
        packings=[packing] * len(fields),
    )
    wanted = _by_zarr(fields, slots, "/", packing)
    assert list(made) == list(wanted)
    for name, data in made.items():
        text = data.decode()
        if (start := text.find('"attributes": {\n    "expstore": {\n      "dtype"')) >= 0:
            stop = text.index('  "zarr_format"', start)
            text = text[:start] + '"attributes": {},\n' + text[stop:]
        assert text == wanted[name].decode(), name
