"""Serve the public addresses of data sets from a local folder.

Used by tests that call the data set classes without `mirror=`, as users do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import expstore.datasets
from tests.support.data_server import DataServer, serving_files


@contextmanager
def serving_public_addresses(folder: Path, stores: Path) -> Iterator[DataServer]:
    """Serve a folder as every public address, and keep the classes' stores in another folder.

    Args:
        folder: The files, at their paths below the public addresses.
        stores: Folder that replaces `~/.cache/expstore`.
    """
    names = [name for name in expstore.datasets.__all__ if name.endswith("ExperienceReplay")]
    with serving_files(folder) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPSTORE_DATA", str(stores))
        for name in names:
            made = getattr(expstore.datasets, name).__init__
            if "mirror" in inspect.signature(made).parameters:
                patch.setitem(inspect.unwrap(made).__kwdefaults__, "mirror", server.url)
        yield server
