"""The law of foreign files: a mutated file is read, or raises an error of expstore.

It does not raise another error, use over 2 s of CPU time or 200 MB of memory, end the process, or open a file
outside of its source. A case is a seed: `run_case(FORMATS["hdf5"], source, work, 17)` repeats case 17.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.forks import run_cases
from tests.fuzz.sources import FORMATS, make_source, read_intact, run_case

pytest.importorskip("h5py")
pytest.importorskip("obstore")
pytest.importorskip("stable_baselines3")

#: Cases of each format in `make test-slow`. Those of some formats take half a second each.
FEW, FEW_SLOW = 64, 20
_SLOW = ("index", "csv", "rings", "sb3")
#: The cases up to this number run at night: they are random, and a day's run needs some of every format.
MANY = 2200


def _few(name: str) -> int:
    return FEW_SLOW if name in _SLOW else FEW


def _check(folder: Path, name: str, numbers: range) -> None:
    form, source = FORMATS[name], folder / "source"
    source.mkdir()
    pid = os.fork()
    if pid == 0:  # threads of the program that writes the source are not in the processes that read it
        code = 1
        try:
            make_source(form, source)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    report = run_cases(
        numbers,
        lambda number: run_case(form, source, folder / "work", number),
        lambda: read_intact(form, source, folder / "warm"),
        inside=[folder],
    )
    assert not report.faults
    assert report.read + sum(report.refused.values()) == len(numbers)
    assert report.read
    assert report.refused or name in ("index", "state")  # both are made again if they are damaged


@pytest.mark.guarantee(
    "exchange/bounded",
    "A file of any format, changed in any way, is read or raises an error of expstore, within 2 s of CPU "
    "time and 200 MB.",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", list(FORMATS))
def test_mutated_files(tmp_path: Path, name: str) -> None:
    _check(tmp_path, name, range(_few(name)))


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(FORMATS))
def test_many_mutated_files(tmp_path: Path, name: str) -> None:
    _check(tmp_path, name, range(_few(name), MANY))
