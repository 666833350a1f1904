"""Serve the public addresses of data sets from a local folder.

Used by tests that call the data set classes without `mirror=`, as users do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from expstore.datasets.registry import list_kinds
from tests.support.data_server import DataServer, serving_files


@contextmanager
def serving_public_addresses(folder: Path, stores: Path) -> Iterator[DataServer]:
    """Serve a folder as every public address, and keep the classes' stores in another folder.

    Args:
        folder: The files, at their paths below the public addresses.
        stores: Folder that replaces `~/.cache/expstore`.
    """
    with serving_files(folder) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPSTORE_DATA", str(stores))
        for kind in list_kinds():
            if kind.buffer and kind.mirror:
                patch.setattr(kind.load_class(), "kind", replace(kind, mirror=server.url))
        yield server
