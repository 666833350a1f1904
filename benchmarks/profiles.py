"""Profile sample, extend and add with py-spy, by function.

Run as `python -m benchmarks.profiles` (`make profile`). A process fills a ring and repeats one call for some
seconds; py-spy samples its stack a thousand times a second. Shares are of the samples in that call: of a
function itself, and of it with all that it calls. `--native` includes C functions. It needs the extra
`bench`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import expstore
from benchmarks.report import OUT, scratch
from benchmarks.runs import ROOT
from benchmarks.workloads import LOCOMOTION, Stream

ACTS = ("sample", "extend", "add", "prioritized")
BATCH = 256


def repeat_calls(act: Callable[[], object], seconds: float) -> int:
    """Repeat a call for some seconds; the stack below this function is what is profiled."""
    count, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        act()
        count += 1
    return count


def work(act: str, folder: Path, rows: int, seconds: float) -> None:
    """Fill a ring and repeat a call."""
    sampler = expstore.PrioritizedSampler() if act == "prioritized" else None
    settings: dict[str, Any] = {"capacity": rows, "batch_size": BATCH, "sampler": sampler, "seed": 1}
    with expstore.open(folder / "store.exp", **settings) as rb:
        batches = Stream(LOCOMOTION, 1000, pool=40)
        while len(rb) < rows:
            rb.extend(next(batches))
        rb.sample()
        rb.flush()
        singles = Stream(LOCOMOTION, 0, pool=1000)
        acts: dict[str, Callable[[], object]] = {
            "sample": rb.sample,
            "extend": lambda: rb.extend(next(batches)),
            "add": lambda: rb.add(next(singles)),
            "prioritized": lambda: learn(rb),
        }
        print(repeat_calls(acts[act], seconds), "calls")


def learn(rb: Any) -> object:
    """Sample by priority and set new priorities."""
    batch = rb.sample()
    batch["td_error"] = batch["next", "reward"].abs().squeeze(-1) + 0.01
    return rb.update_tensordict_priority(batch)


def stacks(raw: str) -> Iterator[tuple[list[str], int]]:
    """Yield the frames below the loop, outermost first, and their numbers of samples."""
    for line in raw.splitlines():
        text, _, count = line.rpartition(" ")
        frames = text.split(";")
        starts = [place for place, frame in enumerate(frames) if frame.startswith("repeat_calls ")]
        if starts and frames[starts[-1] + 1 :]:
            yield [_named(frame) for frame in frames[starts[-1] + 1 :]], int(count)


def _named(frame: str) -> str:
    """Return `file: function`, without folder and line."""
    function, _, place = frame.partition(" (")
    file = place.rstrip(")").rpartition(":")[0] or place.rstrip(")")
    parts = Path(file).parts
    start = max((parts.index(top) for top in ("expstore", "tensordict", "torch") if top in parts), default=-1)
    return f"{'/'.join(parts[start:]) if start >= 0 else file}: {function}"


def shares(raw: str) -> tuple[Counter[str], Counter[str], int]:
    """Return the samples of each function itself, the samples including its calls, and the total."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    total = 0
    for frames, count in stacks(raw):
        own[frames[-1]] += count
        whole.update(dict.fromkeys(frames, count))
        total += count
    return own, whole, total


def profile(act: str, wanted: argparse.Namespace, folder: Path) -> str:
    """Profile one call; return its table."""
    raw = folder / f"{act}.raw"
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}") or shutil.which("py-spy")
    if spy is None:
        raise SystemExit("py-spy is not installed: pip install --group bench")
    command = [spy, "record", "--format", "raw", "--function", "--rate", "1000", "--output", str(raw)]
    command += ["--native"] * wanted.native
    command += ["--", sys.executable, "-m", "benchmarks.profiles", "--work", act, "--folder", str(folder)]
    command += ["--rows", str(wanted.rows), "--seconds", str(wanted.seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not raw.exists():
        raise SystemExit(
            f"py-spy ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-400:]}"
        )
    shutil.rmtree(folder / "store.exp")
    return table(act, raw.read_text(), wanted.top)


def table(act: str, raw: str, top: int) -> str:
    """Return the functions with the most samples of a call, in descending order."""
    own, whole, total = shares(raw)
    lines = [
        f"### {act}: {total:,} samples",
        "",
        "| itself | with what it calls | function |",
        "|---|---|---|",
    ]
    for name, count in own.most_common(top):
        lines.append(f"| {count / total:.1%} | {whole[name] / total:.1%} | `{name}` |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, out: Callable[[str], object] = print) -> int:
    """Profile the selected calls and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=ACTS, help="profile this call; all by default")
    parser.add_argument("--rows", type=int, default=LOCOMOTION.rows, help="capacity of the full ring")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds for which a call is repeated")
    parser.add_argument("--top", type=int, default=15, help="number of functions in a table")
    parser.add_argument("--native", action="store_true", help="C functions, too")
    parser.add_argument("--folder", type=Path, default=OUT, help="folder for stores")
    parser.add_argument("--work", choices=ACTS, help=argparse.SUPPRESS)
    wanted = parser.parse_args(argv)
    if wanted.work:
        work(wanted.work, wanted.folder, wanted.rows, wanted.seconds)
        return 0
    with scratch(wanted.folder, 4 * wanted.rows * LOCOMOTION.row_bytes) as folder:
        for act in ACTS:
            if wanted.only in (None, act):
                out(profile(act, wanted, Path(tempfile.mkdtemp(dir=folder))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
