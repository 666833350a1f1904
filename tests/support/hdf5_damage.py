"""Damage HDF5 files."""

from __future__ import annotations

from pathlib import Path

import h5py


def damage_header(path: Path, name: str) -> None:
    """Damage the header of a group or dataset, so that h5py cannot open the object."""
    with h5py.File(path) as file:
        address = h5py.h5o.get_info(file[name].id).addr
    raw = bytearray(path.read_bytes())
    raw[address] ^= 0xFF
    path.write_bytes(raw)
