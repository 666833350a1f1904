"""Record what the library writes and draws, in `tests/golden/`.

    python -m tests.support.golden            print differences to the recorded files
    python -m tests.support.golden --record   record again; print which files changed

`acts/NAME.txt` has the file operations of a scripted history of a store (`act_traces.py`); `draws/NAME.txt`
has the rows that a sampler draws (`draw_sequences.py`). `tests/crash/test_act_traces.py` and
`tests/unit/samplers/test_draw_sequences.py` compare. A change that is meant to alter them records them again
and explains it in its commit; other changes must not alter them.
"""

from __future__ import annotations

import argparse
import difflib
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.paths import ROOT

GOLDEN = ROOT / "tests" / "golden"
#: Maximum number of difference lines that are shown.
_MAX_LINES = 60

_HINT = "If it is meant: python -m tests.support.golden --record, and say why in the commit."


def recorded(kind: str, name: str) -> list[str]:
    """Return the recorded lines of a name; an empty list if nothing is recorded."""
    path = GOLDEN / kind / f"{name}.txt"
    return path.read_text().splitlines() if path.exists() else []


def compare(kind: str, name: str, lines: list[str]) -> str:
    """Return the differences between lines and the recorded lines; "" if they are equal."""
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
    """Return what can be recorded: kind -> name -> function of an empty folder that returns lines."""
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
    parser.add_argument("--record", action="store_true", help="record again")
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
