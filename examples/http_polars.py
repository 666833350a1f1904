"""Read batches of a served store into polars, without expstore in this process.

Start the server first:  expstore serve runs     Then:  python examples/http_polars.py
http://127.0.0.1:8420/v1/stores/curl
"""

from __future__ import annotations

import io
import json
import sys
import urllib.request

import polars as pl

ARROW = "application/vnd.apache.arrow.stream"


def fetch(url: str, asked: dict[str, object]) -> pl.DataFrame:
    """Return the rows that a route responds with."""
    headers = {"Content-Type": "application/json", "Accept": ARROW}
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        frame: pl.DataFrame = pl.read_ipc_stream(io.BytesIO(answer.read()))
    return frame


def main(store: str) -> None:
    """Sample a batch and run an SQL query; print both as tables."""
    batch = fetch(f"{store}/sample", {"batch_size": 64, "seed": 7, "draw": 0})
    print(batch.group_by("action").agg(pl.col("next.reward").mean(), pl.len()).sort("action"))
    episodes = fetch(f"{store}/sql", {"query": 'SELECT episode_id, length, "return" FROM episodes'})
    print(episodes)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8420/v1/stores/curl")
