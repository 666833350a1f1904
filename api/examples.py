"""Examples for the OpenAPI document: rows as in requests and in responses.

Used by the routes. `tests/api/test_openapi.py` sends the requests to a server.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from expstore.buffers.annotations import pack_annotations
from expstore.wire.codec import Encoder
from expstore.wire.stream import write_stream

#: Fields of the store `demo`.
FIELDS: dict[str, Any] = {"observation": ["float32", [2]], "action": "int64", "next.reward": ["float32", [1]]}
#: Two rows of that store, as JSON.
ROWS: dict[str, Any] = {"observation": [[0.0, 1.0], [0.5, 0.5]], "action": [0, 1], "next.reward": [1.0, 0.5]}
#: Annotations of these rows, as JSON.
ANNOTATIONS: dict[str, Any] = {"ids": [1, 2], "values": {"advantage": [0.5, -1.0]}, "by": "trainer-3"}
#: A batch, as JSON.
BATCH: dict[str, Any] = {"rows": ROWS | {"index": [0, 1], "id": [1, 2]}}
#: A result of SQL, as JSON.
EPISODES: dict[str, Any] = {"columns": ["episode_id", "length"], "rows": [[1, 200], [2, 187]]}

#: Python code that makes the Arrow stream of rows.
ARROW_CODE = """\
import pyarrow as pa

table = pa.table({
    "observation": pa.array([[0.0, 1.0], [0.5, 0.5]], pa.list_(pa.float32(), 2)),
    "action": pa.array([0, 1], pa.int64()),
    "next.reward": pa.array([1.0, 0.5], pa.float32()),
})
sink = pa.BufferOutputStream()
with pa.ipc.new_stream(sink, table.schema) as writer:
    writer.write_table(table)
body = sink.getvalue().to_pybytes()
"""


def arrow_examples(rows: int) -> dict[str, Any]:
    """Return the first rows of `ROWS` as an example of a body that is an Arrow stream, in base64."""
    columns = {name: torch.tensor(values[:rows]) for name, values in ROWS.items()}
    reward = columns.pop("next.reward")[:, None]
    stream = write_stream(Encoder().encode(TensorDict({**columns, "next": {"reward": reward}}, [rows])))
    return {
        "stream": {
            "summary": f"{rows} rows, in base64" if rows > 1 else "1 row, in base64",
            "description": "Send the decoded bytes. This Python makes such a stream of two rows:\n\n"
            f"```python\n{ARROW_CODE}```",
            "value": base64.b64encode(stream).decode(),
        }
    }


def arrow_annotations() -> dict[str, Any]:
    """Return `ANNOTATIONS` as an example of a body that is an Arrow stream, in base64."""
    values = {name: np.array(found, np.float32) for name, found in ANNOTATIONS["values"].items()}
    stream = pack_annotations(ANNOTATIONS["ids"], values, ANNOTATIONS["by"], None)
    return {
        "stream": {
            "summary": "Values of 2 rows, in base64",
            "description": "Send the decoded bytes. `by` and `like` are in the metadata of the schema under "
            "`expstore.wishes`, as JSON.",
            "value": base64.b64encode(stream).decode(),
        }
    }
