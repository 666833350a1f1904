"""Checks of integers and of unknown keywords."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

from expstore.core.arguments import check_whole, refuse_unknown
from expstore.errors import ArgumentError


def test_whole_numbers_are_integers() -> None:
    for value in [3, 3.0, np.int32(3), np.float64(3), np.float32(3)]:
        found = check_whole("n", value)
        assert found == 3
        assert type(found) is int


def test_other_values_are_refused() -> None:
    for value in [1.5, "3", None, math.nan, math.inf, [3]]:
        with pytest.raises(ArgumentError, match="n must be an integer, got"):
            check_whole("n", value)


@refuse_unknown({"prefetch": "batches"})
def make(path: str, *, capacity: int = 1, batches: Any = None) -> tuple[str, int]:
    return path, capacity


def test_known_keywords_are_passed_on() -> None:
    assert make("a", capacity=3) == ("a", 3)
    assert make(path="b") == ("b", 1)
    assert [*inspect.signature(make).parameters] == ["path", "capacity", "batches"]


def test_unknown_keywords_name_the_nearest() -> None:
    for keywords, hint in [
        ({"max_size": 5}, "use capacity=5"),
        ({"capcity": 5}, "use capacity=5"),
        ({"prefetch": 5}, "use batches={'prefetch': 5}"),
        ({"prefech": 5}, "use batches={'prefetch': 5}"),
        ({"zzz": 5}, "it has path, capacity, batches"),
        ({"capcity": "x" * 99}, "use capacity=..."),
    ]:
        with pytest.raises(ArgumentError) as caught:
            make("a", **keywords)
        (name,) = keywords
        assert caught.value.message == f"make() got an unexpected keyword argument {name!r}"
        assert caught.value.hint == hint
