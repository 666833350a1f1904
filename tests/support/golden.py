"""Record what the library is expected to write and to draw, in `tests/golden/`.

    python -m tests.support.golden            say what differs from what is recorded
    python -m tests.support.golden --record   record it anew; say which files changed

`acts/NAME.txt` is what a scripted life of a store does to files, act by act (`act_traces.py`);
`draws/NAME.txt` is which rows a sampler draws (`draw_sequences.py`). The tests that compare are
`tests/crash/test_act_traces.py` and `tests/unit/samplers/test_draw_sequences.py`. A change to what is written
or drawn records them anew on purpose, and says why in its commit; one that is to change nothing leaves them
as they are.
"""

from __future__ import annotations

import argparse
import difflib
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.paths import ROOT

__all__ = ["compare", "recorded"]

GOLDEN = ROOT / "tests" / "golden"
#: Lines of a difference that are shown.
_MAX_LINES = 60

_HINT = "If it is meant: python -m tests.support.golden --record, and say why in the commit."


def recorded(kind: str, name: str) -> list[str]:
    """Return the lines that are recorded under a name; none if nothing is."""
    path = GOLDEN / kind / f"{name}.txt"
    return path.read_text().splitlines() if path.exists() else []


def compare(kind: str, name: str, lines: list[str]) -> str:
    """Return how lines differ from what is recorded; "" if they do not."""
    difference = list(difflib.unified_diff(recorded(kind, name), lines, "recorded", "now", lineterm="", n=4))
    if not difference:
        return ""
    left = len(difference) - _MAX_LINES
    excerpt = difference[:_MAX_LINES] + [f"... and {left} more lines"] * (left > 0)
    return "\n".join([f"tests/golden/{kind}/{name}.txt differs:", *excerpt, _HINT])


def _record(kind: str, made: dict[str, list[str]]) -> None:
    folder = GOLDEN / kind
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob("*.txt")):
        if path.stem not in made:
            path.unlink()
            print(f"removed  {kind}/{path.name}")
    for name, lines in made.items():
        if recorded(kind, name) != lines:
            (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
            print(f"recorded {kind}/{name}.txt: {len(lines)} lines")


def _all() -> dict[str, dict[str, Callable[[Path], list[str]]]]:
    """Return what can be recorded: kind -> name -> what makes its lines in an empty folder."""
    from tests.support.act_lives import LIVES
    from tests.support.act_traces import trace
    from tests.support.draw_sequences import SEQUENCES

    return {
        "acts": {name: lambda folder, life=life: trace(life, folder) for name, life in LIVES.items()},
        "draws": SEQUENCES,
    }


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record anew")
    record = parser.parse_args().record
    differences = []
    for kind, makers in _all().items():
        made = {}
        for name, make in makers.items():
            with tempfile.TemporaryDirectory() as folder:
                made[name] = make(Path(folder))
        if record:
            _record(kind, made)
        else:
            differences += [text for name, lines in made.items() if (text := compare(kind, name, lines))]
    print("\n\n".join(differences), end="\n" if differences else "")
    return bool(differences)


if __name__ == "__main__":
    raise SystemExit(main())
