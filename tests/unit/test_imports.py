"""The cost of imports, and the names of the package.

Run with the other tests, each check in a fresh interpreter; no store is opened.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest

import expstore

#: CPU seconds of `expstore --help`, which takes half a second.
HELP_BOUND = 1.0

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

LOW = """errors core.values disk.files schema.schema storages.format.manifest disk.writer_lock storages
storages.format.control_page storages.format.journal episodes.table episodes.log sql.index sql.migrate"""

#: What a fresh interpreter runs step by step, and what it must not have loaded after a step.
STEPS = [
    ("import expstore", SLOW),
    ("hasattr(expstore, 'ExpStorage'), hasattr(expstore, 'Record')  # the error names a module", SLOW),
    ("import expstore.datasets; expstore.datasets", SLOW),
    (HELP, SLOW),
    ("expstore.errors.LockedError, expstore.Schema", ["torch", "zarr"]),
    (
        "\n".join(f"import expstore.{name}" for name in LOW.split()),
        ["torch", "tensordict", "torchrl", "gymnasium", "fastapi"],
    ),
    (
        "import torch; from expstore.specs.categorical import Categorical\n"
        "assert type(torch.stack([Categorical(2), Categorical(3)])).__name__ == 'Stacked'\n"
        "import expstore.specs.torchrl_specs, expstore.specs.json_text\n"
        "import expstore.specs.gymnasium_spaces as spaces",
        ["gymnasium", "torchrl"],
    ),
    ("assert str(spaces.to_space(Categorical(3))) == 'Discrete(3)'", ["torchrl"]),
    ("expstore.rate_limiters.MinSize(3), expstore.schedulers, expstore.trainers, expstore.MinSize(2)", []),
]


def test_nothing_slow_is_loaded_before_it_is_needed() -> None:
    tail = "\nimport json, sys\nprint('\\0' + json.dumps(sorted({m.split('.')[0] for m in sys.modules})))\n"
    code = "".join(step + tail for step, _ in STEPS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line[1:] for line in done.stdout.splitlines() if line.startswith("\0")]
    for (step, slow), line in zip(STEPS, told, strict=True):
        assert set(json.loads(line)).isdisjoint(slow), step


def test_imports_run_without_garbage_collections_and_a_server_without_pandas() -> None:
    code = """
import gc, sys
import expstore
events = []
gc.callbacks.append(lambda *event: events.append(event))
expstore.open
assert gc.isenabled() and len(events) <= 20, len(events)  # hundreds with them
import torch
from tensordict import TensorDict
import expstore.api.app
from expstore.wire.codec import Decoder, Encoder
batch = Encoder().encode(TensorDict({"flag": torch.ones(3, dtype=torch.bool), "x": torch.ones(3, 2)}, [3]))
Decoder().decode(batch)
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_help_is_quick() -> None:
    took = []
    for _ in range(3):
        began = os.times()
        done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, check=False)
        ended = os.times()
        took.append(sum(ended[2:4]) - sum(began[2:4]))  # not the time that other programs take
        assert done.returncode == 0, done.stderr
    assert min(took) < HELP_BOUND


def test_public_names_are_sorted_and_unique() -> None:
    assert list(expstore.__all__) == sorted(set(expstore.__all__))


def test_every_public_name_resolves() -> None:
    assert [name for name in expstore.__all__ if getattr(expstore, name) is None] == []
    assert set(expstore.__all__) <= set(dir(expstore))


def test_every_name_of_a_lazy_package_resolves() -> None:
    for name in (
        *("buffers", "cluster", "cold", "collectors", "datasets", "exchange", "remote", "schema", "specs"),
        *("storages", "trajectories", "writers"),
    ):
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


def test_the_error_of_a_name_says_which_module_has_it() -> None:
    for name, place in [
        ("no_such_name", ""),
        ("Stacked", "; it is expstore.specs.Stacked"),  # a package with a stub
        ("SamplerEnsemble", "; it is expstore.samplers.SamplerEnsemble"),  # a package with `__all__`
        ("LockedError", "; it is expstore.errors.LockedError"),  # a module
        ("to_torchrl", "; it is expstore.specs.to_torchrl or expstore.trainers.to_torchrl"),
    ]:
        message = f"^module 'expstore' has no attribute '{name}'{place}$"
        with pytest.raises(AttributeError, match=message):
            getattr(expstore, name)
        if place:
            with pytest.raises(ImportError, match=message):
                exec(f"from expstore import {name}")


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert expstore.__version__ == version("expstore")


def test_what_users_import_is_a_module() -> None:
    """`from expstore.sb3 import ReplayBuffer`, and the same object as an attribute."""
    for module, name in (
        *(("gym", "Record"), ("plot", "returns"), ("rate_limiters", "MinSize"), ("sb3", "ReplayBuffer")),
        *(("schedulers", "LinearScheduler"), ("torchrl", "ExpStorage"), ("trackers", "Tracker")),
        ("trainers", "ReplayBufferTrainer"),
    ):
        found = importlib.import_module(f"expstore.{module}")
        assert getattr(found, name).__module__ == f"expstore.{module}"
        assert getattr(expstore, module) is found
