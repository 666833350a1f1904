"""Programs that used SQL end without leak reports of DuckDB (nanobind) on stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_BEGIN = """
import sys, threading, time
import torch
from tensordict import TensorDict
import expstore
from expstore.samplers import RandomSampler

path = sys.argv[1]
rows = TensorDict({"a": torch.arange(300), "image": torch.zeros(300, 2000, dtype=torch.uint8)}, [300])
rb = expstore.open(path, batch_size=8)
rb.extend(rows)
assert len(rb.sql("SELECT * FROM transitions LIMIT 2")) == 2
"""

ENDS = {
    "closed": "rb.close()",
    "left open": "",
    "a follower left open": """
follower = expstore.open(path, mode="r")
follower.sql("SELECT image FROM transitions LIMIT 1")
""",
    "an error that is kept": """
try:
    rb.sql("SELECT nothing FROM transitions")
except expstore.errors.QueryError as exc:
    kept = exc
""",
    "an error that ends it": "rb.sql('SELECT nothing FROM transitions')",
    "an error beside it": "raise ValueError",
    "a filter": """
expstore.open(path, mode="r", batch_size=2, sampler=RandomSampler(where="a > 3")).sample()
""",
    "batches ahead of a filter": """
rb.close()
rb = expstore.open(path, batch_size=2, batches={"prefetch": 2}, sampler=RandomSampler(where="a > 3"))
for _ in range(3):
    rb.sample()
""",
    "rows in RAM": """
ram = expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(10))
ram.extend(rows[:5])
assert len(ram.sql("SELECT a FROM transitions")) == 5
""",
    "retention": "rb.retention.set({'where': 'a > 7'}); rb.retention.apply()",
    "a thread": "t = threading.Thread(target=lambda: rb.sql('SELECT * FROM transitions')); t.start()",
}


@pytest.mark.slow
@pytest.mark.index
@pytest.mark.some(3)
@pytest.mark.parametrize("end", ENDS)
def test_duckdb_reports_nothing_as_leaked(store_path: Path, end: str) -> None:
    code = _BEGIN + ENDS[end] + "\nprint('the end')\n"
    done = subprocess.run(
        [sys.executable, "-c", code, str(store_path)], capture_output=True, text=True, timeout=120
    )
    fails = {"an error that ends it": "QueryError", "an error beside it": "ValueError"}
    assert "nanobind" not in done.stderr
    assert done.returncode == (end in fails), done.stderr
    assert fails.get(end, "") in done.stderr
    assert ("the end" in done.stdout) == (end not in fails)
