"""Compile the library's loops, all at once, on all cores: the cache then has them for every process.

`make test` runs it first. Otherwise each of a run's processes would compile what it needs by itself, since
they begin together, which takes longer than all else that most of them do.
"""

from __future__ import annotations

import importlib
import multiprocessing
import re

from tests.support.paths import ROOT

PACKAGE = ROOT / "expstore"


def modules() -> list[str]:
    """Return the names of modules with compiled loops."""
    return [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"^@compiled(_for_c)?\(", path.read_text(), re.MULTILINE)
    ]


def load(name: str) -> None:
    """Import one, which compiles what the cache does not have."""
    importlib.import_module(name)


if __name__ == "__main__":
    load("expstore.kernels.native")  # what the others lean on
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.map(load, modules(), chunksize=1)
