"""The cost of imports, and the names of the package.

Run with the other tests, each check in a fresh interpreter; no store is opened.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time

import pytest

import expstore

#: Seconds for `expstore --help`: half a second on a quiet machine; three times that on a busy one.
HELP_BOUND = 1.5

SLOW = ["torch", "tensordict", "torchrl", "duckdb", "zarr", "numba", "pyarrow", "pandas", "gymnasium"]

HELP = """
import sys
sys.argv = ["expstore", "--help"]
from expstore.cli.app import main
try:
    main()
except SystemExit as stop:
    if stop.code:
        raise
"""


def loaded_after(code: str) -> set[str]:
    """Return the top-level names of the modules that a fresh interpreter has after running code."""
    tail = "\nimport json, sys\nprint()\nprint(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_slow() -> None:
    assert loaded_after("import expstore").isdisjoint(SLOW)
    assert loaded_after("import expstore.datasets, expstore\nexpstore.datasets").isdisjoint(SLOW)


def test_imports_run_without_garbage_collections() -> None:
    loaded_after("""
import gc, expstore
events = []
gc.callbacks.append(lambda *event: events.append(event))
expstore.open
assert gc.isenabled() and len(events) <= 20, len(events)  # hundreds with them""")


def test_help_loads_nothing_slow() -> None:
    assert loaded_after(HELP).isdisjoint(SLOW)


def test_a_server_and_its_rows_do_not_load_pandas() -> None:
    code = """
import torch
from tensordict import TensorDict
import expstore.api.app
from expstore.wire.codec import Decoder, Encoder
batch = Encoder().encode(TensorDict({"flag": torch.ones(3, dtype=torch.bool), "x": torch.ones(3, 2)}, [3]))
Decoder().decode(batch)"""
    assert "pandas" not in loaded_after(code)


def test_the_lines_below_the_writers_do_not_load_torch() -> None:
    lines = """errors core.values disk.files schema.schema storages.format.manifest disk.writer_lock
    storages.format.control_page storages.format.journal episodes.table episodes.log sql.index sql.migrate
    storages"""
    code = "import importlib\n" + "\n".join(
        f"importlib.import_module('expstore.{name}')" for name in lines.split()
    )
    assert loaded_after(code).isdisjoint({"torch", "tensordict", "torchrl", "gymnasium", "fastapi"})


def test_errors_can_be_named_without_torch() -> None:
    assert loaded_after("import expstore\nexpstore.errors.LockedError, expstore.Schema").isdisjoint(
        {"torch", "zarr"}
    )


@pytest.mark.slow
def test_help_is_quick() -> None:
    took = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, check=False)
        took.append(time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
    assert min(took) < HELP_BOUND


def test_public_names_are_sorted_and_unique() -> None:
    assert list(expstore.__all__) == sorted(set(expstore.__all__))


def test_every_public_name_resolves() -> None:
    assert [name for name in expstore.__all__ if getattr(expstore, name) is None] == []
    assert set(expstore.__all__) <= set(dir(expstore))


@pytest.mark.parametrize(
    "name",
    [
        *("buffers", "cluster", "cold", "collectors", "datasets", "exchange", "remote", "schema", "specs"),
        *("storages", "trajectories", "writers"),
    ],
)
def test_every_name_of_a_lazy_package_resolves(name: str) -> None:
    package = importlib.import_module(f"expstore.{name}")
    assert [item for item in package.__all__ if getattr(package, item) is None] == []
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"'expstore.{name}' has no attribute 'no_such_name'"):
        package.no_such_name  # noqa: B018


def test_the_data_set_classes_are_names_of_their_module() -> None:
    names = [name for name in expstore.datasets.__all__ if name.endswith("ExperienceReplay")]
    assert len(names) == 11
    assert expstore.load_dataset is expstore.datasets.load_dataset
    assert set(expstore.__all__).isdisjoint({*names, "register_dataset"})


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        expstore.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("Stacked", "expstore.specs.Stacked"),  # a package with a stub
        ("SamplerEnsemble", "expstore.samplers.SamplerEnsemble"),  # a package with `__all__`
        ("LockedError", "expstore.errors.LockedError"),  # a module
        ("to_torchrl", "expstore.specs.to_torchrl or expstore.trainers.to_torchrl"),
    ],
)
def test_the_error_of_a_name_says_which_module_has_it(name: str, place: str) -> None:
    message = f"^module 'expstore' has no attribute '{name}'; it is {place}$"
    with pytest.raises(AttributeError, match=message):
        getattr(expstore, name)
    with pytest.raises(ImportError, match=message):
        exec(f"from expstore import {name}")
    assert not hasattr(expstore, name)


def test_the_error_of_a_name_imports_no_module() -> None:
    code = "import expstore\nhasattr(expstore, 'ExpStorage')\nhasattr(expstore, 'Record')"
    assert loaded_after(code).isdisjoint(SLOW)


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert expstore.__version__ == version("expstore")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("gym", "Record"),
        ("plot", "returns"),
        ("rate_limiters", "MinSize"),
        ("sb3", "ReplayBuffer"),
        ("schedulers", "LinearScheduler"),
        ("torchrl", "ExpStorage"),
        ("trackers", "Tracker"),
        ("trainers", "ReplayBufferTrainer"),
    ],
)
def test_what_users_import_is_a_module(module: str, name: str) -> None:
    """`from expstore.sb3 import ReplayBuffer`, and the same object as an attribute."""
    found = importlib.import_module(f"expstore.{module}")
    assert getattr(found, name).__module__ == f"expstore.{module}"
    assert getattr(expstore, module) is found


@pytest.mark.slow
def test_modules_are_there_by_name_from_the_start() -> None:
    names = "expstore.rate_limiters.MinSize(3), expstore.schedulers, expstore.trainers, expstore.MinSize(2)"
    code = f"import expstore; {names}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
