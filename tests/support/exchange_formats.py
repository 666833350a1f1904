"""The formats whose exports can be imported again, and rows that every format can store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import expstore
from expstore import exchange

Pair = tuple[Callable[..., Any], Callable[..., Any]]


def _find_pair(name: str) -> Pair:
    return getattr(exchange, f"export_{name}"), getattr(exchange, f"import_{name}")


#: Export and import by format: files of one array per field, and tables.
FLAT = {name: _find_pair(name) for name in ("hdf5", "npz")}
TABLES = {name: _find_pair(name) for name in ("arrow", "parquet")}
ROUND_TRIPS = {**FLAT, **TABLES}

#: Arguments that an export needs.
NEEDED: dict[str, dict[str, Any]] = {"lerobot": {"fps": 10}}

#: Flat files have rows episode after episode.
BY_STEPS = "_episode, _step"
#: Fields of `control_rows` that every export can store, Minari's too.
CONTROL_FIELDS = ["observation.pixels", "next.observation.pixels", "action", "next.reward"]


def control_rows(first: int, count: int, every: int = 9) -> TensorDict:
    """Return rows of a control task, with pixels, bfloat16, complex numbers and negative zeros.

    Every `every`-th row terminates, every 20th is truncated; trajectories are named. Batch size `[count]`.
    """
    number = torch.arange(first, first + count)
    data = TensorDict({"action": number % 4}, [count])
    data["observation", "pixels"] = (number[:, None, None] + torch.arange(36).reshape(6, 6)).to(torch.uint8)
    data["observation", "state"] = number[:, None].to(torch.bfloat16) * torch.ones(3, dtype=torch.bfloat16)
    data["next", "observation", "pixels"] = data["observation", "pixels"] + 1
    data["next", "reward"] = torch.where(number % 5 == 0, -0.0, number.float())[:, None]
    data["next", "terminated"] = (number % every == every - 1)[:, None]
    data["next", "truncated"] = (number % 20 == 15)[:, None]
    data["collector", "traj_ids"] = number // every
    data["wave"] = torch.complex(number.float(), -number.float())
    return data


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as lines of JSON; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_fields(path: Path) -> list[dict[str, Any]]:
    """Return the fields of each row of a store, without the columns that the store adds."""
    with expstore.open(path, mode="r") as rb:
        found = rb.sql("SELECT * EXCLUDE (_id, _index, _episode, _step, _time, _priority) FROM transitions")
        return [dict(row) for row in found.arrow().to_pylist()]
