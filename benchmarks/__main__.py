"""Run all benchmarks and write their figures and table; embed or check the figures of a run.

`python -m benchmarks` runs all programs, each in its own process and with a time limit. A program that fails
is reported and does not stop the others. `embed` copies the newest run to `benchmarks/results` and the
documents; `check` compares its ratios with those in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import OUT
from benchmarks.runs import PROGRAMS, ROOT, find_worse, gather, load, run_program, write
from benchmarks.tables import embed, find_documents, whole_table

RESULTS = ROOT / "benchmarks" / "results"


def measure(options: argparse.Namespace) -> int:
    """Run the programs; return 1 if a bar was missed, 2 if a program is incomplete."""
    names = options.only.split(",") if options.only else [*PROGRAMS]
    if unknown := set(names) - PROGRAMS.keys():
        raise SystemExit(f"no program {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    folder = options.out.resolve() / f"run-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True)
    parts = []
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name} ...", end=" ", flush=True)
        part = run_program(name, folder, cache=folder.parent, smoke=options.smoke)
        print(f"{part['state']} in {part['seconds']:.0f} s {part['message']}".rstrip(), flush=True)
        parts.append(part)
    run = gather(parts, "smoke" if options.smoke else "full")
    (folder / "table.md").write_text(whole_table(run))
    write(run, folder / "run.json")
    for part in parts:
        for side, why in part["skipped"].items():
            print(f"left out: {part['name']}: {side}: {why}")
    missed = [row for row in run["results"] if not row["ok"]]
    for row in missed:
        print(f"missed: {row['part']}: {row['name']}: {row['value']} (bar {row['bar']})")
    unfinished = [part for part in parts if part["state"] != "done"]
    for part in unfinished:
        print(f"incomplete: {part['name']}: {part['state']}: {part['message']}; see {folder}")
    minutes = sum(part["seconds"] for part in parts) / 60
    print(f"{len(run['results'])} results in {minutes:.1f} minutes: {folder / 'run.json'}")
    return 2 if unfinished else 1 if missed else 0


def find_run(options: argparse.Namespace) -> Path:
    """Return the folder of the given run, or of the newest one that ended."""
    folders: list[Path] = [options.run] if options.run else sorted(options.out.glob("run-*"))
    folders = [folder for folder in folders if (folder / "run.json").exists()]
    if not folders:
        raise SystemExit(f"{options.run or options.out} has no run: run make bench")
    return folders[-1]


def put(options: argparse.Namespace) -> int:
    """Copy a run to `benchmarks/results` and the documents."""
    folder = find_run(options)
    run = load(folder / "run.json")
    if run["effort"] == "smoke":
        raise SystemExit("figures of a smoke run are meaningless and cannot be embedded")
    if absent := PROGRAMS.keys() - {part["name"] for part in run["parts"]}:
        raise SystemExit(f"{folder} has no figures of {', '.join(sorted(absent))}: run make bench")
    texts = {path: embed(path.read_text(), run) for path in find_documents()}
    RESULTS.mkdir(exist_ok=True)
    write(run, RESULTS / "run.json")
    (RESULTS / "table.md").write_text(whole_table(run))
    for path, text in texts.items():
        path.write_text(text)
    print(f"{', '.join(path.name for path in texts)} and {RESULTS} now have the figures of {folder}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Compare the ratios of a run with those in `benchmarks/results`."""
    run = load(find_run(options) / "run.json")
    worse = list(find_worse(run, load(RESULTS / "run.json"), options.slack))
    for line in worse:
        print(line)
    print(f"{len(worse)} of {len(run['results'])} results are missing, or worse by over {options.slack:.0%}")
    return 1 if worse else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("do", nargs="?", choices=("run", "embed", "check"), default="run")
    parser.add_argument("--only", default="", metavar="PROGRAM,...", help=", ".join(PROGRAMS))
    parser.add_argument("--smoke", action="store_true", help="run everything once, tiny")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for runs")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="embed, check: this run, not the newest")
    parser.add_argument("--slack", type=float, default=0.3, help="check: accepted decrease of a ratio")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are stopped
    return {"run": measure, "embed": put, "check": check}[options.do](options)


if __name__ == "__main__":
    sys.exit(main())
