"""The suites of the long run: units with commands and seeds.

Used by torture.py. Kills and power cuts are harness.py's; the other units are tests marked `torture`, which
are found by collecting them, so that none is forgotten. This module runs nothing but the collection.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.support.paths import ROOT

HARNESS = ("-m", "tests.crash.harness")

#: Name of a suite -> description of its cases.
KINDS = {
    "kills": "kill -9 at random times or at some file operation, with the background thread",
    "gaps": "kill -9 before every act on files, and in the middle of every write",
    "reshaping": "kill -9 before every act of resize, merge, retention and repair",
    "cuts": "power cuts: disks that recorded lives may leave behind",
    "reshaping cuts": "power cuts while stores are resized and merged",
    "faults": "acts on files that fail, each one, in seven ways",
    "damage": "bits that are flipped, files that are cut or gone, chunks and frames damaged",
    "bodies": "damaged bodies sent to a server",
    "sql": "calls of SQL's functions with any arguments",
    "clients": "kill -9 of a server among its 32 clients",
    "lives": "lives of whole stores thought up by Hypothesis, with kills and reopenings",
    "crowds": "threads and processes that sample next to a writer, half a minute each",
    "long": "long forms of other tests",
    "rest": "cases that `make test` leaves out of tests of which it runs some",
    "examples": "properties of which Hypothesis looks for other examples than those of `make test`",
    "model": "stops of the protocol's model, which is no process and has no files",
    "teeth": "rules of the protocol broken in the code: each must be found",
}
#: Suites that do not contribute to the failure rate.
APART = ("model", "teeth", "rest", "examples")


@dataclass(frozen=True)
class Unit:
    """A part of a suite that runs in one process.

    Args:
        name: The same name in every run: "cuts/17".
        command: Arguments of the interpreter.
        reads: Kind of output: the harness's JSON, or pytest's report.
        memory: Whether its files may be in memory.
        alone: Whether it needs the whole machine.
        more: Additional environment variables.
    """

    name: str
    command: list[str]
    seed: int
    reads: Literal["harness", "pytest"] = "pytest"
    memory: bool = True
    alone: bool = False
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def suite(self) -> str:
        """Name of its suite."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class Suite:
    """Units that test one kind of failure."""

    name: str
    units: list[Unit]


@dataclass(frozen=True)
class Group:
    """How the torture forms of a test are run.

    Args:
        suite: Their suite.
        together: Number of tests per unit.
        again: Whether another seed means other cases.
        alone: Whether they need the whole machine.
    """

    suite: str
    together: int = 1
    again: bool = False
    alone: bool = False


GROUPS = {
    "crash/test_disk_faults.py::test_every_act": Group("faults", 7),
    "crash/test_disk_faults.py::test_every_act_with_an_index": Group("faults", 4),
    "crash/test_resize_and_merge.py::test_a_resize_is_killed": Group("reshaping"),
    "crash/test_resize_and_merge.py::test_a_merge_is_killed": Group("reshaping"),
    "crash/test_resize_and_merge.py::test_the_power_goes_while_a_store_is_resized": Group(
        "reshaping cuts", again=True
    ),
    "crash/test_resize_and_merge.py::test_the_power_goes_while_stores_are_merged": Group(
        "reshaping cuts", again=True
    ),
    "crash/test_retention.py::test_killed_before_every_act": Group("reshaping", 3),
    "crash/test_single_acts.py::test_an_operation_is_one_act": Group("reshaping"),
    "unit/storages/engine/test_hard_links.py::test_killed_while_files_are_copied": Group("reshaping"),
    "unit/maintenance/test_repair.py::test_killed_before_every_act_it_can_be_run_again": Group("reshaping"),
    "unit/maintenance/test_verify.py::test_many_more_single_bits_are_found": Group("damage", 5, again=True),
    "unit/maintenance/test_damage.py::test_many_files_that_are_cut_or_gone": Group("damage", 5, again=True),
    "unit/maintenance/test_packed.py::test_a_thousand_damages": Group("damage", 6, again=True),
    "api/test_hostile_requests.py::test_damaged_bodies_store_nothing_ever": Group("bodies", 10, again=True),
    "unit/sql/sandbox/test_pool.py::test_all_functions_with_any_arguments": Group("sql", again=True),
    "unit/remote/test_client.py::test_32_clients_and_a_kill": Group("clients", alone=True),
    "property/test_lossless.py::test_rows_come_back_bit_by_bit_in_thousands_of_lives": Group(
        "lives", again=True
    ),
    "unit/maintenance/test_resize.py::test_many_lists_of_rows": Group("lives", again=True),
    "property/test_whole_buffer.py::test_thousands_of_lives": Group("lives", again=True),
    "unit/samplers/test_slices_stress.py::test_threads_sample_while_a_writer_writes": Group(
        "crowds", 4, alone=True
    ),
    "unit/samplers/test_slices_stress.py::test_a_follower_reads_while_a_writer_writes": Group(
        "crowds", 4, alone=True
    ),
    "unit/storages/test_follower_stress.py::test_followers_read_while_a_writer_writes": Group(
        "crowds", alone=True
    ),
    "unit/buffers/test_stress.py::test_sampling_while_a_writer_writes": Group("crowds", 3, alone=True),
    "crash/test_protocol_model.py::test_no_cut_breaks_a_promise_and_the_cuts_do_cost_something": Group(
        "model"
    ),
    # Cases of seconds, which is less than their processes take to start.
    "crash/test_resume.py::test_killed_at_any_moment": Group("long", 11),
    "unit/buffers/test_idempotency.py::test_a_failed_write_is_repeated_under_its_key": Group("long", 19),
    "unit/storages/columns/packed/test_capture.py::test_versions_are_restored_between_all_layouts": Group(
        "long", 8
    ),
    "unit/storages/test_arrow.py::test_returned_rows_survive_without_close": Group("long", 20),
    "unit/storages/test_follower_files.py::test_a_hundred_loads_leave_no_file_open": Group("long", 3),
    "unit/storages/test_follower_files.py::test_a_thousand_openings_leave_no_file_open": Group("long", 3),
    "unit/storages/test_other_readers.py::test_zarr_and_tensorstore_read_packed_shards": Group("long", 7),
    "unit/storages/test_variable_fields.py::test_rows_come_back_as_they_were_in_full": Group("long", 10),
}
_PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
#: Environment of units that look for examples of properties.
EXAMPLES_PROFILE = {"HYPOTHESIS_PROFILE": "long"}
#: Numbers for the harness at scale 1: random kills and kills per unit, power cuts per unit.
KILLS, KILLS_TOGETHER, STORE_KILLS = 1200, 60, 6
CUTS, CUTS_TOGETHER, ROUND_CUTS = 12_000, 400, 40
#: Number of phases per unit, in which every operation is a kill point.
PHASES_TOGETHER = 4


def all_suites(seed: int, scale: float, names: Sequence[str]) -> list[Suite]:
    """Return the suites of a run.

    seed: Seed from which those of all units follow.
    scale: 2 runs twice as many cases wherever another seed means other cases. Exhaustive suites run once, or
        in part at a scale below 1.
    names: Names of the suites to run.
    """
    made: list[Unit] = []
    if {"kills", "gaps", "cuts", "teeth"} & set(names):
        made += _harness(seed, scale)
    if set(names) - {"kills", "gaps", "cuts", "teeth"}:
        made += _tests(seed, scale)
    suites = [Suite(name, [unit for unit in made if unit.suite == name]) for name in names]
    return [suite for suite in suites if suite.units]


def _share(units: list[Unit], scale: float) -> list[Unit]:
    """Return an evenly spread share of units for scales below 1."""
    count = max(1, math.ceil(len(units) * min(1.0, scale)))
    return [units[number * len(units) // count] for number in range(count)]


def _ask(command: Sequence[str]) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def _harness(seed: int, scale: float) -> list[Unit]:
    named = json.loads(_ask([*HARNESS, "names"]))

    def unit(name: str, *command: str, memory: bool = True) -> Unit:
        return Unit(name, [*HARNESS, *command, "--seed", str(seed)], seed, "harness", memory)

    kills = [
        # Half of them on the real disk, some with the library's own file layer and its syncs.
        unit(
            f"kills/{n}", "random", "--kills", str(KILLS_TOGETHER), "--plain", "0.3",
            "--first", str(n * KILLS_TOGETHER // STORE_KILLS), memory=bool(n % 2),
        )
        for n in range(max(1, math.ceil(KILLS * scale / KILLS_TOGETHER)))
    ]  # fmt: skip
    cuts = [
        unit(
            f"cuts/{n}", "power", "--cuts", str(CUTS_TOGETHER), "--free", "0.3",
            "--first", str(n * CUTS_TOGETHER // ROUND_CUTS), "--names", *named["power"],
        )
        for n in range(max(1, math.ceil(CUTS * scale / CUTS_TOGETHER)))
    ]  # fmt: skip
    phases = named["phases"]
    kill_points = [
        unit(
            f"gaps/{n // PHASES_TOGETHER}", "gaps", "--torn", "also", "--again", "0.5",
            "--names", *phases[n : n + PHASES_TOGETHER],
        )
        for n in range(0, len(phases), PHASES_TOGETHER)
    ]  # fmt: skip
    return [*kills, *cuts, *_share(kill_points, scale), unit("teeth/all", "teeth")]


def _tests(seed: int, scale: float) -> list[Unit]:
    """Find the marked tests, and group them into units."""
    by_test: dict[str, list[str]] = {}
    for case in _marked("torture and not rest", "mark.torture"):
        by_test.setdefault(case.partition("[")[0], []).append(case)
    if renamed := {f"tests/{test}" for test in GROUPS} - by_test.keys():
        raise RuntimeError(f"no tests with these names are marked torture: {sorted(renamed)}")
    units: list[Unit] = []
    for test, cases in by_test.items():
        units += _units_of(test, cases, seed, scale)
    return units + _rest(seed, scale) + _examples(seed, scale)


def _files(*texts: str) -> list[str]:
    """Return the test files that contain one of some texts."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if any(map(path.read_text().__contains__, texts))]


def _marked(marks: str, *texts: str) -> list[str]:
    """Return the ids of all cases with some marks, in files that contain one of some texts."""
    printed = _ask(
        ["-m", "pytest", "--collect-only", "-q", "-m", marks, "-p", "no:cacheprovider", *_files(*texts)]
    )
    return [line for line in printed.splitlines() if "::" in line]


def _rest(seed: int, scale: float) -> list[Unit]:
    """Return one unit per folder of the cases that `make test` leaves out."""
    folders: dict[str, list[str]] = {}
    for path in dict.fromkeys(case.partition("::")[0] for case in _marked("rest", "mark.some", "mark.rest")):
        folders.setdefault(path.rpartition("/")[0], []).append(path)
    units = []
    for folder, paths in folders.items():
        name = f"rest/{folder.removeprefix('tests/')}"
        units.append(Unit(name, [*_PYTEST, "-m", "rest", *paths], _own_seed(seed, name)))
    return _share(units, scale)


def _place(path: str) -> str:
    """Return the short name of a test file, for instance "unit/core/id_set"."""
    return path.removeprefix("tests/").removesuffix(".py").replace("/test_", "/")


def _examples(seed: int, scale: float) -> list[Unit]:
    """Return units of properties, with other examples in each run."""
    files = dict.fromkeys(
        case.partition("::")[0] for case in _marked("hypothesis and not torture", "hypothesis")
    )
    units = []
    for time in range(max(1, math.ceil(scale))):
        for number, path in enumerate(files):
            name = f"examples/{_place(path)}-{number + time * len(files)}"
            own = _own_seed(seed, name)
            command = [*_PYTEST, "-m", "hypothesis and not torture", f"--hypothesis-seed={own}", path]
            units.append(Unit(name, command, own, more=EXAMPLES_PROFILE))
    return _share(units, scale) if scale < 1 else units


def _own_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big")


def _units_of(test: str, cases: list[str], seed: int, scale: float) -> list[Unit]:
    path, function = test.split("::")
    group = GROUPS.get(f"{path.removeprefix('tests/')}::{function}", Group("long"))
    made = []
    for time in range(max(1, math.ceil(scale)) if group.again else 1):
        for first in range(0, len(cases), group.together):
            number = first // group.together + time * math.ceil(len(cases) / group.together)
            name = f"{group.suite}/{function.removeprefix('test_')}-{number}"
            own = _own_seed(seed, name)
            command = [*_PYTEST, f"--hypothesis-seed={own}", *cases[first : first + group.together]]
            made.append(Unit(name, command, own, alone=group.alone))
    return _share(made, scale) if scale < 1 else made
