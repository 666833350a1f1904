"""Run all benchmarks and write their figures, table and plots; embed or check the results of a run.

`python -m benchmarks` runs all parts, each in its own process and with a time limit. A part that fails is
reported and does not stop the others. `--resume` continues the newest interrupted run. `embed` copies the
newest complete run to `benchmarks/results` and the documents; `check` compares its ratios with those in
`benchmarks/results`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "out"
RESULTS = ROOT / "benchmarks" / "results"
#: A part begins when the load is below this, or after so many seconds.
IDLE_LOAD, IDLE_SECONDS = 2.0, 120

from benchmarks.plots import draw  # noqa: E402
from benchmarks.runs import Run, broken, load  # noqa: E402
from benchmarks.suite import PARTS, Outcome, Part, fork_part, start_part  # noqa: E402
from benchmarks.tables import DOCUMENTS, embed, whole_table  # noqa: E402


def chosen(only: str) -> list[Part]:
    """Return the parts that `--only` selects."""
    names = [name for name in only.split(",") if name]
    if unknown := set(names) - {part.name for part in PARTS}:
        raise SystemExit(
            f"no part {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PARTS)}"
        )
    return [part for part in PARTS if not names or part.name in names]


def run_parts(run: Run, parts: Sequence[Part], wanted: argparse.Namespace) -> None:
    """Run the parts that have not run yet, one after the other."""
    for number, part in enumerate(parts, 1):
        if (known := run.outcome(part)) is not None and known.state == "done":
            print(f"[{number}/{len(parts)}] {part.name}: done before", flush=True)
            continue
        print(f"[{number}/{len(parts)}] {part.name} ...", end=" ", flush=True)
        outcome = run_part(run, part, wanted)
        run.note(part, outcome)
        print(f"{_told(outcome)}", flush=True)


def _told(outcome: Outcome) -> str:
    return f"{outcome.state} in {outcome.seconds:.0f} s, CPU {outcome.cpu:.1f} s {outcome.message}".rstrip()


def run_part(run: Run, part: Part, wanted: argparse.Namespace) -> Outcome:
    """Run one part; its stores are in a folder that is removed afterwards in any case."""
    run.figures(part).unlink(missing_ok=True)
    stores = Path(tempfile.mkdtemp(prefix="stores-", dir=run.folder))
    given = [*part.arguments, "--json", str(run.figures(part)), "--folder", str(stores)]
    given += [f"--{wanted.effort}"] * (wanted.effort != "full")
    given += (part.smoke or ()) if wanted.effort == "smoke" else ()
    if part.script in ("images", "peers", "datasets") and wanted.effort != "smoke":
        given += ["--frames", str(wanted.frames)]
    if part.script == "images" and wanted.effort == "smoke":
        given += ["--frames", str(made_up_games(stores)), "--memory", str(stores / "memory")]
    if part.script == "samplers":
        given += ["--trees", str(OUT)]
    if part.script == "remote" and wanted.reverb and wanted.effort != "smoke":
        given += ["--reverb", wanted.reverb]
    start = fork_part if wanted.effort == "smoke" else start_part
    part = replace(part, limit=int(part.limit * wanted.patience))
    if wanted.effort != "smoke":
        _wait_until_idle()
    before = _cpu()
    try:
        outcome = start(part, given, run.log(part), run.figures(part))
        return replace(outcome, cpu=_cpu() - before)
    finally:
        shutil.rmtree(stores, ignore_errors=True)


def _wait_until_idle() -> None:
    """Wait until the previous part's writes have reached the disk, at most two minutes."""
    deadline = time.monotonic() + IDLE_SECONDS
    while os.getloadavg()[0] > IDLE_LOAD and time.monotonic() < deadline:
        time.sleep(1)


def _cpu() -> float:
    """Return the CPU seconds of finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def made_up_games(folder: Path) -> Path:
    """Write synthetic frames to the folder in which `images.py` looks for games."""
    from benchmarks.atari import GAMES, keep, made_up
    from benchmarks.images import SMOKE

    for name in GAMES:
        keep(made_up(SMOKE.steps), name, SMOKE.steps, folder / "games")
    return folder / "games"


def finish(run: Run, parts: Sequence[Part], effort: str) -> int:
    """Write figures, table and plots; return 1 if a bar was missed, 2 if a part is incomplete."""
    told = run.gather(parts, effort=effort)
    (run.folder / "table.md").write_text(whole_table(told))
    try:
        draw(told, run.folder)
    except ImportError as exc:
        print(f"plots are left out: {exc}; pip install --group bench")
    run.write(told)
    for name, why in told["skipped"].items():
        print(f"left out: {name}: {why}")
    for row in told["results"]:
        if not row["ok"]:
            print(f"missed: {row['part']}: {row['name']}: {row['value']} (bar {row['bar']})")
    unfinished = [part for part in told["parts"] if part["state"] != "done"]
    for part in unfinished:
        print(f"incomplete: {part['name']}: {part['state']} {part['message']}; see {run.folder}/parts")
    print(f"{len(told['results'])} results in {told['seconds'] / 60:.1f} minutes: {run.file}")
    return 2 if unfinished else 1 if told["missed"] else 0


def measure(wanted: argparse.Namespace) -> int:
    """Run parts: start a run, or continue an interrupted one."""
    parts = [part for part in chosen(wanted.only) if wanted.effort != "smoke" or part.smoke is not None]
    run = Run.last(wanted.out, whole=False) if wanted.resume else None
    if wanted.resume and run is None:
        raise SystemExit(f"{wanted.out} has no interrupted run")
    run = run or Run.new(wanted.out)
    if wanted.effort == "smoke":
        _import_once()
    run_parts(run, parts, wanted)
    return finish(run, parts, wanted.effort)


def _import_once() -> None:
    """Import the modules that parts need, so that forks do not. Lance is excluded: it starts threads."""
    import torchrl.data  # noqa: F401

    import expstore

    _ = expstore.open
    for name in ("kernels.file_loops", "kernels.gather_runs", "sql.index", "kernels.sum_tree", "storages"):
        importlib.import_module(f"expstore.{name}")
    for name in ("minari", "stable_baselines3.common.buffers", "cpprb"):
        with suppress(ImportError):
            importlib.import_module(name)


def newest(wanted: argparse.Namespace) -> Run:
    """Return the given run, or the newest complete one."""
    run = Run(wanted.run) if wanted.run else Run.last(wanted.out, whole=True)
    if run is None or not run.file.exists():
        raise SystemExit(f"{wanted.run or wanted.out} has no complete run: run make bench")
    return run


def put(wanted: argparse.Namespace) -> int:
    """Copy a run to `benchmarks/results` and the documents."""
    run = newest(wanted)
    told = load(run.file)
    if told["effort"] == "smoke":
        raise SystemExit("figures of a smoke run are meaningless and cannot be embedded")
    files = ("run.json", "table.md", "ratios.png", "growth.png")
    if missing := [name for name in files if not (run.folder / name).exists()]:
        raise SystemExit(f"{run.folder} has no {', '.join(missing)}: matplotlib was not installed")
    texts = {name: embed(name, (ROOT / name).read_text(), told) for name in DOCUMENTS}
    RESULTS.mkdir(exist_ok=True)
    for name in files:
        shutil.copyfile(run.folder / name, RESULTS / name)
    for name, text in texts.items():
        (ROOT / name).write_text(text)
    print(f"{', '.join(texts)} and benchmarks/results now have the figures of {run.folder}")
    return 0


def check(wanted: argparse.Namespace) -> int:
    """Compare the ratios of a run with those in `benchmarks/results`."""
    told: dict[str, Any] = load(newest(wanted).file)
    worse = list(broken(told, load(RESULTS / "run.json"), wanted.slack))
    for line in worse:
        print(line)
    print(f"{len(worse)} of {len(told['results'])} results are missing, or worse by over {wanted.slack:.0%}")
    return 1 if worse else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("do", nargs="?", choices=("run", "embed", "check"), default="run")
    parser.add_argument("--only", default="", metavar="PART,...", help=", ".join(part.name for part in PARTS))
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", dest="effort", action="store_const", const="quick", help="rough numbers")
    effort.add_argument("--smoke", dest="effort", action="store_const", const="smoke", help="all once, tiny")
    parser.set_defaults(effort="full")
    parser.add_argument("--resume", action="store_true", help="continue the newest interrupted run")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for runs")
    parser.add_argument("--patience", type=float, default=1.0, help="factor for the time limits of parts")
    parser.add_argument("--frames", type=Path, default=OUT / "frames", help="folder for frames of games")
    parser.add_argument(
        "--reverb",
        metavar="PYTHON",
        default=os.environ.get("REVERB_PYTHON"),
        help="an interpreter with dm-reverb",
    )
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="embed, check: this run, not the newest")
    parser.add_argument("--slack", type=float, default=0.3, help="check: accepted decrease of a ratio")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen command; return the exit code."""
    wanted = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are stopped
    return {"run": measure, "embed": put, "check": check}[wanted.do](wanted)


if __name__ == "__main__":
    sys.exit(main())
