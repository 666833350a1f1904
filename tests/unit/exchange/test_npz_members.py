"""NPZ files whose arrays claim more than they have."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expstore.datasets import import_dataset
from expstore.datasets.formats import make_reader, recognize
from expstore.errors import ExpStoreError, StorageError
from expstore.exchange import import_npz
from expstore.exchange.npz import read_npz


def _array(shape: tuple[int, ...], values: bytes) -> bytes:
    """Return a .npy file that claims a shape of float64."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return head.getvalue() + values


def _write(path: Path, content: bytes, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("observations.npy", content)
        for name in ("actions", "rewards", "image"):
            file.writestr(f"{name}.npy", _array((4,), bytes(32)))
    return path


FORGED: dict[str, tuple[bytes, int]] = {
    "rows": (_array((1 << 40,), bytes(64)), zipfile.ZIP_DEFLATED),
    "negative": (_array((-1,), bytes(64)), zipfile.ZIP_DEFLATED),
    "bomb": (_array((1 << 22,), bytes(8 << 22)), zipfile.ZIP_LZMA),
    "text": (b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f8'\n", zipfile.ZIP_DEFLATED),
}


@pytest.mark.guarantee("exchange/bounded")
@pytest.mark.parametrize("name", list(FORGED))
def test_claims_are_refused(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / "a.npz", *FORGED[name])
    acts: list[Callable[[], Any]] = [
        lambda: import_npz(path, tmp_path / "out.exp"),
        lambda: recognize(path),
        lambda: read_npz(path),
        lambda: import_dataset(make_reader("vd4rl", path), tmp_path / "out.exp"),
    ]
    for act in acts:
        with pytest.raises(ExpStoreError, match=r"observations.npy"):
            act()
    assert not (tmp_path / "out.exp").exists()


def test_the_directory_is_compared_with_the_file(tmp_path: Path) -> None:
    """A directory that claims a terabyte for 64 bytes is refused before the member is read."""
    path = _write(tmp_path / "a.npz", _array((8,), bytes(64)), zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = (0xFFFFFFF0).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"'observations.npy' in .* claims 4,294,967,280 bytes"):
        read_npz(path)


def test_orders_and_dtypes(tmp_path: Path) -> None:
    values = {
        "c": np.arange(6).reshape(2, 3),
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "s": np.array(7),
    }
    np.savez_compressed(tmp_path / "a.npz", **values)
    found = read_npz(tmp_path / "a.npz")
    assert {name: one.tolist() for name, one in found.items()} == {
        name: one.tolist() for name, one in values.items()
    }
