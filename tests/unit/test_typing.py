"""What a type checker tells the users of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_types_of_batches(tmp_path: Path) -> None:
    """mypy --strict, as a user runs it; tensordict has no types, so that mypy takes a TensorDict for Any."""
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\n[mypy-tensordict.*]\nignore_missing_imports = True\n")
    cache = (
        ROOT / ".mypy_cache" / "typed_program"
    )  # of its own: other settings would invalidate the other one
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(cache)]
    program = ROOT / "tests" / "fixtures" / "typed_program.py"
    done = subprocess.run([*command, str(program)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "expstore" / "py.typed").is_file()
