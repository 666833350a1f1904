"""Processes that write to one store and follow it, for the stress tests; every row is a function of its id.

Used by the stress tests in separate processes. They return errors as text.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import expstore

CAPACITY = 4000
EPISODE = 25


def rows(first_id: int, count: int) -> TensorDict:
    """Return the rows of these ids; `version` is 0 until a row is changed in place."""
    number = torch.arange(first_id, first_id + count)
    return TensorDict(
        {
            "number": number,
            "frame": (number[:, None] * 31 + torch.arange(300)) % 251,
            "version": torch.zeros(count, dtype=torch.int64),
            "again": number * 7,
            "next": {
                "reward": (number % 5)[:, None].float(),
                "terminated": (number % EPISODE == 0)[:, None],
            },
        },
        [count],
    )


def write(path: Path, seconds: float, made: Any, ready: Any) -> dict[str, float]:
    """Extend, add and change for some seconds; return the number of operations."""
    rng = np.random.default_rng(1)
    extends, changes = 0, 0
    with expstore.open(path, capacity=CAPACITY, batch_size=8, layout="flat") as rb:
        rb.extend(rows(1, CAPACITY))
        made.set()
        ready.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            last = rb.storage.last
            batch = rows(last + 1, int(rng.integers(1, 400)))
            rb.extend(batch)
            extends += 1
            if extends % 7 == 0:
                for _ in range(5):
                    rb.add(rows(rb.storage.last + 1, 1)[0])
            if extends % 20 == 0:
                change(rb, rng)
                changes += 1
        return {"extends": extends, "changes": changes, "laps": rb.storage.last / CAPACITY}


def change(rb: Any, rng: np.random.Generator) -> None:
    """Change some rows in place: `again` and `version` change together."""
    window = rb.storage.window
    ids = np.unique(rng.integers(window.low + 1, window.last + 1, 40))
    index = rb.storage.geometry.index_of(ids)
    old = rb[index]
    version = int(rng.integers(1, 1000))
    new = old.clone()
    new["version"] = torch.full((ids.size,), version)
    new["again"] = old["number"] * 7 + version
    rb[index] = new


def faults(batch: TensorDict, ids: torch.Tensor) -> str:
    """Return what is wrong with rows; "" if they are correct."""
    number = batch["number"]
    if not torch.equal(number, ids):
        return f"ids {ids.tolist()} hold {number.tolist()}"
    if not torch.equal(batch["frame"], (number[:, None] * 31 + torch.arange(300)) % 251):
        return f"torn frame in {ids.tolist()}"
    if not torch.equal(batch["again"], number * 7 + batch["version"]):
        return f"half a change in {ids.tolist()}"
    if not torch.equal(batch["next", "reward"], (number % 5)[:, None].float()):
        return f"torn reward in {ids.tolist()}"
    return ""


QUERY = """
SELECT count(*) AS n, min(_id) AS low, max(_id) AS high,
    count(*) FILTER (number <> _id OR again <> 7 * _id + version OR next.reward <> _id % 5
        OR _step <> (_id - 1) % 25 OR _episode <> (_id - 1) // 25 + 1) AS wrong
FROM transitions
"""


def follow(path: Path, seconds: float, made: Any, ready: Any, seed: int) -> dict[str, Any]:
    """Sample, index and query for some seconds; return errors and the number of operations."""
    found: dict[str, Any] = {"wrong": "", "samples": 0, "queries": 0, "overtaken": 0, "first": 0, "last": 0}
    made.wait()
    with expstore.open(path, mode="r", batch_size=64, seed=seed) as rb:
        rb.sample(), rb.sql(QUERY)
        ready.wait()
        found["first"] = rb.storage.window.last
        end = time.monotonic() + seconds
        while time.monotonic() < end and not found["wrong"]:
            for _ in range(20):
                batch = rb.sample()
                found["wrong"] = found["wrong"] or faults(batch, batch["id"])
                found["samples"] += 1
            try:
                index = torch.arange(0, len(rb), 97)
                batch = rb[index]
                if not torch.equal((batch["number"] - 1) % CAPACITY, index):
                    found["wrong"] = "an index held another row"
                ((n, low, high, wrong),) = rb.sql(QUERY).fetchall()
                found["queries"] += 1
                if wrong or n != high - low + 1:
                    found["wrong"] = f"sql saw {wrong} wrong rows of {n}, ids {low} to {high}"
                episodes = "SELECT count(*) FROM episodes WHERE status = 'terminated' AND length <> 25"
                if rb.sql(episodes).fetchall() != [(0,)]:
                    found["wrong"] = "an episode had another length"
            except expstore.errors.StateError:
                found["overtaken"] += 1
        found["last"] = rb.storage.window.last
        found["redraws"] = rb.stats()["redraws"]
    return found
