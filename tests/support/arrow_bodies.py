"""Rows as bodies of HTTP requests and responses, for the tests of the server and its client."""

from __future__ import annotations

from typing import Any

import httpx
import pyarrow as pa
import torch
from tensordict import TensorDict

from expstore.wire.codec import Codec, Encoder, meaning_of
from expstore.wire.stream import write_stream

#: Header of a request whose body is an Arrow stream.
ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}
#: Header of a request for an Arrow stream.
ACCEPT_ARROW = {"Accept": "application/vnd.apache.arrow.stream"}


def batch_of(count: int, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + count)
    done = (numbers % 10 == 9)[:, None]
    return TensorDict(
        {
            "observation": torch.stack([numbers, numbers * 2], 1).float(),
            "action": numbers,
            "next": {
                "observation": torch.stack([numbers + 1, numbers * 2 + 2], 1).float(),
                "reward": numbers[:, None].float(),
                "done": done,
                "terminated": done,
            },
        },
        [count],
    )


def body_of(data: TensorDict) -> bytes:
    return write_stream(Encoder().encode(data)).to_pybytes()


def post_rows(client: httpx.Client, count: int, first: int = 0, **params: Any) -> httpx.Response:
    """Append rows of `batch_of` to the store `run`; `params` are request parameters."""
    body = body_of(batch_of(count, first))
    return client.post("/v1/stores/run/extend", content=body, headers=ARROW, params=params)


def rows_of(content: bytes) -> TensorDict:
    with pa.ipc.open_stream(content) as reader:
        told, table = meaning_of(reader.schema), reader.read_all()
    codec = Codec(told.schema)
    return codec.build(codec.decode(table.combine_chunks().to_batches()[0]), told.batch_size, told.names)
