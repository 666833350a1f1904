"""Run the long suites: kills, power cuts, failing disks, damage, hostile requests. `make torture`.

Run as a program; torture_suites.py defines the suites. Work is split into units of a minute or two, each with
its own process and seed. Finished units are recorded in a folder, and an interrupted run continues with the
rest.

    python -m tests.support.torture                  continue the last run, or start one
    python -m tests.support.torture --again cuts/17  run one unit again
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.paths import MEMORY, ROOT, find_memory
from tests.support.torture_reports import Result, Summary, read_result, render
from tests.support.torture_suites import KINDS, Suite, Unit, all_suites

#: Large pages make the many forks cheap (ignored on other systems).
ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
#: A unit that takes longer is considered hanging.
UNIT_SECONDS = 2400
INTERRUPTED = 130
PREFIX = "torture-"


def fingerprint() -> str:
    """Return a hash of the library and its tests: results of other versions do not count."""
    found = hashlib.sha256()
    for folder in ("expstore", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


@dataclass(frozen=True)
class Header:
    """The description of a run, which is recorded first and compared when continuing."""

    seed: int
    scale: float
    sources: str
    suites: list[str]
    begun: str


@dataclass
class Run:
    """A run: its units, and the results so far.

    Args:
        folder: Folder of the record.
        header: Description of the run.
        units: All units, in the order in which they are started.
        results: Results of finished units, by name.
        before: Seconds of earlier parts of the run.
    """

    folder: Path
    header: Header
    units: list[Unit]
    results: dict[str, Result] = field(default_factory=dict)
    before: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _over: bool = False

    @property
    def log(self) -> Path:
        """File of the record: the header, then one line per unit."""
        return self.folder / "run.jsonl"

    @property
    def left(self) -> list[Unit]:
        """The units that are not finished."""
        return [unit for unit in self.units if unit.name not in self.results]

    # -- what is noted -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record a new run, or load the record of this one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = read_lines(self.log)
        if lines and lines[0] == asdict(self.header):
            known = {unit.name for unit in self.units}
            found = [Result(**line) for line in lines[1:] if "unit" in line]
            self.results = {result.unit: result for result in found if result.unit in known}
            self.before = sum(line["lasted"] for line in lines[1:] if "lasted" in line)
            # A truncated line would spoil the next one.
            whole = "".join(json.dumps(line) + "\n" for line in lines)
            self.log.write_text(whole)
            return
        self.log.write_text(json.dumps(asdict(self.header)) + "\n")

    def note(self, line: dict[str, Any]) -> None:
        """Append a line to the record."""
        with self.log.open("a") as out:
            out.write(json.dumps(line) + "\n")

    # -- work ----------------------------------------------------------------------------------------

    def work(self, jobs: int) -> None:
        """Run the remaining units: several at once, and at the end those that need the whole machine.

        Raises:
            KeyboardInterrupt: Interrupted. Running units were killed and run again next time.
        """
        started = time.monotonic()
        try:
            for alone, many in ((False, jobs), (True, 1)):
                units = [unit for unit in self.left if unit.alone == alone]
                with ThreadPoolExecutor(many) as pool:
                    try:
                        for _ in pool.map(self._run, units):
                            pass
                    except BaseException:
                        pool.shutdown(wait=False, cancel_futures=True)
                        self._stop()
                        raise
        finally:
            self.note({"lasted": round(time.monotonic() - started, 1)})

    def _stop(self) -> None:
        """Start no more units, and stop the running ones."""
        with self._lock:
            self._over = True
            for process in self._running.values():
                kill_group(process)

    def _run(self, unit: Unit) -> None:
        result = self.run(unit)
        with self._lock:
            if self._over or result is None:
                return
            self.results[unit.name] = result
            self.note(asdict(result))
            done, wrong = len(self.results), len(result.failures)
            say = f"[{done}/{len(self.units)}] {unit.name}: {result.cases} cases, {result.seconds:.0f} s"
            print(f"{say}, seed {unit.seed}" + (f", {wrong} FAILED" if wrong else ""), flush=True)
            for kind, text in result.failures[:3]:
                print(f"  {kind}: {text[:600]}\n  again: {again(unit, self.folder)}", flush=True)

    def run(self, unit: Unit, *, show: bool = False) -> Result | None:
        """Run a unit in a separate process; return its result, or None if the run is being stopped."""
        started = time.monotonic()
        place = find_memory() if unit.memory else None
        with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=place) as name:
            here = Path(name)
            out, err, report = here / "out", here / "err", here / "report.xml"
            # Test this checkout, not an installed version.
            paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths, "SEED": str(unit.seed)}
            environment |= {"TMPDIR": name, **unit.more}
            environment.pop("PYTEST_ADDOPTS", None)
            command = [sys.executable, *unit.command]
            if unit.reads == "pytest":
                command += [
                    f"--junitxml={report}",
                    "-o",
                    "junit_family=xunit1",
                    f"--basetemp={here / 'pytest'}",
                ]
            with out.open("wb") as stdout, err.open("wb") as stderr:
                with self._lock:
                    if self._over:
                        return None
                    process = subprocess.Popen(
                        command,
                        cwd=ROOT,
                        stdout=stdout,
                        stderr=stderr,
                        env=environment,
                        start_new_session=True,
                    )
                    self._running[process.pid] = process
                try:
                    code = process.wait(UNIT_SECONDS)
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    kill_group(process)  # remaining child processes
                    with self._lock:
                        del self._running[process.pid]
            if show:
                sys.stdout.write(out.read_text(errors="replace") + err.read_text(errors="replace"))
            seconds = round(time.monotonic() - started, 1)
            return read_result(unit, code, out, err, report, seconds)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process group, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def sweep() -> None:
    """Remove the remains of killed runs."""
    for place in (MEMORY, Path(tempfile.gettempdir())):
        for path in place.glob(f"{PREFIX}*-*"):
            if not Path(f"/proc/{path.name.split('-')[1]}").exists():
                shutil.rmtree(path, ignore_errors=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the record; a truncated last line is ignored."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def again(unit: Unit, folder: Path) -> str:
    """Return the command that runs a unit again."""
    return shlex.join(
        ["python", "-m", "tests.support.torture", "--folder", str(folder), "--again", unit.name]
    )


def in_order(suites: Iterable[Suite]) -> list[Unit]:
    """Mix the units of all suites, so that an interrupted run has some of each."""
    placed = [
        ((number + 0.5) / len(suite.units), suite.name, unit)
        for suite in suites
        for number, unit in enumerate(suite.units)
    ]
    return [unit for _, _, unit in sorted(placed, key=lambda found: found[:2])]


def settle(given: argparse.Namespace, available: Sequence[str]) -> Header:
    """Return the run to execute: an unfinished one with the same sources, or a new one."""
    sources, asked = fingerprint(), given.suites or list(available)
    lines = read_lines(given.folder / "run.jsonl")
    if lines and not given.new:
        old = Header(**lines[0])
        same = old.sources == sources and given.seed in (None, old.seed)
        same &= given.scale in (None, old.scale) and (not given.suites or given.suites == old.suites)
        if same and not any("ended" in line for line in lines):
            return old
        if given.again:
            if old.sources != sources:
                print("the library or its tests have changed since", flush=True)
            return old
    seed = random.SystemRandom().randrange(1, 1 << 31) if given.seed is None else given.seed
    begun = time.strftime("%Y-%m-%d %H:%M:%S")
    return Header(seed, given.scale or 1.0, sources, asked, begun)


def run_again(run: Run, name: str) -> int:
    """Run one unit again, and show its output."""
    (unit,) = [unit for unit in run.units if unit.name == name]
    print(f"SEED={unit.seed}", shlex.join(["python", *unit.command]), flush=True)
    result = run.run(unit, show=True)
    assert result is not None  # it is not interrupted
    for kind, text in result.failures:
        print(f"{kind}: {text}")
    print(f"{unit.name}: {result.cases} cases, {len(result.failures)} failures, {result.seconds} s")
    return bool(result.failures)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    seed = os.environ.get("SEED")
    parser.add_argument(
        "--seed", type=int, default=int(seed) if seed else None, help="of all units; or SEED="
    )
    scale = os.environ.get("SCALE")
    parser.add_argument(
        "--scale", type=float, default=float(scale) if scale else None, help="more or less of it; or SCALE="
    )
    parser.add_argument("--suites", nargs="+", help="some of them only")
    parser.add_argument("--folder", type=Path, default=ROOT / ".torture", help="where it is noted")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many units at once")
    parser.add_argument("--new", action="store_true", help="start a new run")
    parser.add_argument("--again", metavar="UNIT", help="run one unit of the last run once more")
    parser.add_argument("--list", action="store_true", help="list units and end")
    return parser.parse_args()


def main(given: argparse.Namespace | None = None, suites: Sequence[Suite] | None = None) -> int:
    """Run what the command line says; return the exit code."""
    given = given or arguments()
    names = [suite.name for suite in suites] if suites else list(KINDS)
    header = settle(given, names)
    made = suites or all_suites(header.seed, header.scale, header.suites)
    run = Run(given.folder, header, in_order(made))
    if given.list:
        print("\n".join(f"{unit.name}: {shlex.join(unit.command)}" for unit in run.units))
        return 0
    if given.again:
        return run_again(run, given.again)
    sweep()
    run.begin()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"seed {header.seed}, scale {header.scale:g}, sources {header.sources}; noted in {run.log}")
    if run.results:
        print(f"going on: {len(run.results)} of {len(run.units)} units are done", flush=True)
    interrupted = False
    try:
        run.work(given.jobs)
    except KeyboardInterrupt:
        interrupted = True
    summary = Summary.of(run.units, run.results, made, asdict(header))
    text = render(summary)
    (run.folder / "summary.md").write_text(text)
    (run.folder / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
    print("\n" + text)
    if interrupted:
        print("interrupted; the same command continues with the rest")
        return INTERRUPTED
    run.note({"ended": True})
    return bool(summary.failures)


if __name__ == "__main__":
    sys.exit(main())
