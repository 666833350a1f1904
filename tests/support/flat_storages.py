"""Storages in RAM whose rows are all dims of a batch, as in stores on disk."""

from __future__ import annotations

from dataclasses import replace

from expstore.storages.read_view import ReadView

__all__ = ["flatten_dims"]


def flatten_dims(storage: ReadView) -> None:
    """Make all dims of a batch rows of streams of their own; no rows have come yet."""
    storage._describe(replace(storage.description, flatten=True))
