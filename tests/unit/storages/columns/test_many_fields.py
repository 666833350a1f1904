"""Stores of many fields: creating one takes little work for each field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import warm_processes

PROGRAM = """
import sys
import numpy as np
import expstore
from expstore.data import row_cells
from expstore.disk.files import Disk

def no_codec(*_):
    raise AssertionError("extend() compiles no code for single rows")

row_cells.compile_function = no_codec
syncs = []
File = expstore.disk.files.File
whole = File.sync_file_system
File.sync_file_system = lambda file: syncs.append(file) or whole(file)
for count, wholes in ((40, 0), (300, 2)):
    with expstore.open(f"{sys.argv[1]}/{count}.exp") as rb:
        rb.extend({f"f{n}": np.arange(3) for n in range(count)})
        rb.flush()
        assert len(syncs) == wholes, (count, syncs)
    with expstore.open(f"{sys.argv[1]}/{count}.exp") as rb:
        assert rb[:][f"f{count - 1}"].tolist() == [0, 1, 2]
assert "zarr" not in sys.modules
"""


def test_many_fields_need_neither_zarr_python_nor_code_nor_a_sync_each(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with warm_processes.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        _, err = program.communicate(timeout=110)
    assert program.returncode == 0, err
