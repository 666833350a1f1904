"""Storages in RAM that store all dims of a batch as rows, like stores on disk."""

from __future__ import annotations

from dataclasses import replace

from expstore.storages.read_view import ReadView


def flatten_dims(storage: ReadView) -> None:
    """Store all dims of a batch as rows of separate streams; call it before the first rows."""
    storage._describe(replace(storage.description, flatten=True))
