"""Compile all loops of the library at once, on all cores, so that every process finds them in the cache.

`make test` runs it first. Otherwise each process of a run would compile what it needs, because the processes
start together, which takes longer than most of their other work.
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
    """Import a module, which compiles loops that are missing in the cache."""
    importlib.import_module(name)


if __name__ == "__main__":
    load("expstore.kernels.native")  # the other modules depend on it
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.map(load, modules(), chunksize=1)
