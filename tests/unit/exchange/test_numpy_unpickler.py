"""Pickles of arrays are read unchanged, and no code that a pickle names is run."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expstore.errors import SchemaError, StorageError
from expstore.exchange.numpy_unpickler import load_arrays, load_object_npy

VALUES: dict[str, Any] = {
    "u1": np.random.default_rng(0).integers(0, 255, (3, 4, 5), np.uint8),
    "big": np.arange(4, dtype=">f4"),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "flags": np.array([True, False]),
    "texts": np.array(["a", "bc"]),
    "empty": np.zeros((0, 3)),
    "one": np.float32(3.5),
    "nested": {"list": [1, 2.5, None, "x", b"y", (True, 3 + 1j)], "arrays": [np.arange(2)]},
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_arrays_and_plain_values_come_back() -> None:
    for protocol in range(6):
        assert same(load_arrays(io.BytesIO(pickle.dumps(VALUES, protocol))), VALUES)


def test_the_modules_of_numpy_1(tmp_path: Path) -> None:
    data = pickle.dumps(VALUES, 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert b"numpy.core.multiarray" in data
    assert same(load_arrays(io.BytesIO(data)), VALUES)
    np.save(tmp_path / "a.npy", np.array(VALUES, object), allow_pickle=True)
    assert same(load_object_npy(io.BytesIO((tmp_path / "a.npy").read_bytes())), VALUES)


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.pair = function, arguments

    def __reduce__(self) -> Any:
        return self.pair


@pytest.mark.guarantee(
    "exchange/safe",
    "An import runs no function that a file names, and reads no file outside of the data set's folder.",
)
def test_everything_else_is_refused() -> None:
    for value, protocol in itertools.product(
        (
            Calls(os.system, "touch /tmp/never"),
            Calls(subprocess.Popen, ["true"]),
            Calls(eval, "1"),
            Calls(getattr, {}, "keys"),
            Calls(np.load, "x"),
            Calls(np.ndarray, (2,), "O"),
            {"a": [Calls(os.getcwd)]},
            np.array([Calls(os.getcwd)], object),
            np.zeros(3, [("a", "i4"), ("b", "f8")]),
            np.zeros(3, "M8[s]"),
            {1, 2},
            Path("x"),
        ),
        (0, 2, 5),
    ):
        with pytest.raises(SchemaError, match="names|contains|made of|neither|fields|dtype|outside|calls"):
            load_arrays(io.BytesIO(pickle.dumps(value, protocol)))


def test_cyclic_and_exploding_pickles_are_refused() -> None:
    cycle: list[Any] = []
    cycle.append({"a": (cycle,)})
    with pytest.raises(SchemaError, match="contains itself"):
        load_arrays(io.BytesIO(pickle.dumps(cycle)))
    laughs: list[Any] = [np.arange(3)]
    for _ in range(60):
        laughs = [laughs, laughs]
    found = load_arrays(io.BytesIO(pickle.dumps(laughs)))  # 2**60 arrays, each of them one
    for _ in range(60):
        assert found[0] is found[1]
        found = found[0]
    assert found[0].tolist() == [0, 1, 2]
    deep = b"]" * 20_000 + b"a" * 19_999 + b"."
    with pytest.raises(SchemaError, match="more than 100 deep"):
        load_arrays(io.BytesIO(deep))


def test_invalid_pickles_are_refused(tmp_path: Path) -> None:
    good = pickle.dumps(VALUES)
    for data in (b"", b"hello", good[:-20], good[: len(good) // 2], b"\x80\x05" + b"\xff" * 40):
        with pytest.raises((StorageError, SchemaError)):
            load_arrays(io.BytesIO(data))
    random = np.random.default_rng(4)
    for _ in range(300):  # whatever is damaged: an error of ours, or a value
        damaged = bytearray(good)
        for place in random.integers(0, len(damaged), 3):
            damaged[place] = random.integers(256)
        with contextlib.suppress(StorageError, SchemaError):
            load_arrays(io.BytesIO(bytes(damaged)))
    np.save(tmp_path / "plain.npy", np.zeros(3))
    with pytest.raises(SchemaError, match="one Python object is expected"):
        load_object_npy(io.BytesIO((tmp_path / "plain.npy").read_bytes()))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.", "more than 100 deep"),
        (b"\x80\x02Nr\x00\x00\x00\x10.", "memo index 268435456"),
        (b"\x80\x02cnumpy.core.numeric\n_frombuffer\n(J\x00\x00\x00\x20NNNtR.", "are int"),
        (b"\x80\x02cnumpy\nndarray\n}U\x01aK\x01sb.", "changes a function"),
    ],
    ids=["nested", "memo", "bytes", "build"],
)
def test_pickles_that_crash_or_fill_memory_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        load_arrays(io.BytesIO(data))


@pytest.mark.slow
def test_long_lists_are_not_deep() -> None:
    values = {"steps": [{"a": [1.0, (2, 3)]} for _ in range(5000)]}
    for protocol in range(6):
        assert load_arrays(io.BytesIO(pickle.dumps(values, protocol))) == values
