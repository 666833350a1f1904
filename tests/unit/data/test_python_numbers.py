"""Test Python numbers that do not fit into the dtype of their field."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore.errors import SchemaError


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64"])
def test_negative_numbers_are_refused_by_unsigned_fields(tmp_path: Path, dtype: str) -> None:
    with expstore.open(tmp_path / "a.exp", schema={"x": dtype}) as rb:
        with pytest.raises(SchemaError, match=f"field 'x' is {dtype}, and .* does not fit into it"):
            rb.extend({"x": [1, -1]})
        with pytest.raises(SchemaError, match="does not fit into it"):
            rb.add({"x": -1})
        rb.extend({"x": [0, 1]})
        assert rb.sql("SELECT x FROM transitions").fetchall() == [(0,), (1,)]


@pytest.mark.guarantee("rows/refused")
@pytest.mark.parametrize(
    "value",
    [
        [2**24 + 1, 0.5],
        [[0.5, 1.0], [1.0, -(2**24) - 1]],
        [np.int64(2**53 + 1), np.float64(0.5)],
        [np.uint64(2**63 + 1), np.int64(-1)],
        [2**63, -1],
    ],
)
def test_integers_that_numpy_rounds_are_refused(tmp_path: Path, value: Any) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        with pytest.raises(SchemaError, match="field 'x'"):
            rb.extend({"x": value})
        rb.extend({"x": [2**24, 0.5, 2**60]})
        assert rb[:]["x"].tolist() == [2**24, 0.5, 2**60]


@pytest.mark.parametrize(
    "value",
    [
        np.ma.masked_array([1.0, 2.0], [False, True]),
        [np.ma.masked_array([1, 2], [False, True]), np.array([3, 4])],
        [1.0, np.ma.masked],
    ],
)
@pytest.mark.parametrize("layout", [None, "arrow"])
def test_masked_elements_are_refused(tmp_path: Path, value: Any, layout: Any) -> None:
    with expstore.open(tmp_path / "a.exp", layout=layout) as rb:
        for data in ({"x": value}, [{"x": one} for one in value]):
            with pytest.raises(SchemaError, match="'x' has a NumPy array with masked elements"):
                rb.extend(data)
        rb.extend({"x": np.ma.masked_array([1.0, 2.0], False)})
        assert rb[:]["x"].tolist() == [1.0, 2.0]
        with pytest.raises(SchemaError, match="masked elements"):
            rb.set_("x", np.ma.masked_array([1.0, 2.0], [True, False]))
        assert rb[:]["x"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.array(["2020-01-01T00:00:00.000001", "NaT"], "M8[ns]"), "timestamp[ns]"),
        (np.array([1000, 2000], "m8[ns]"), "duration[ns]"),
        (np.array(["2020-01-01T00:00:00.000001", "NaT"], "M8[us]"), "timestamp[us]"),
        (np.array(["2020-01-01", "NaT"], "M8[D]"), "date32"),
        (np.array([5], "m8[h]"), "duration[us]"),
    ],
)
def test_times_stay_times(tmp_path: Path, values: Any, kind: str) -> None:
    expected = values.astype("M8[us]" if kind == "timestamp[ns]" else "m8[us]") if "ns" in kind else values
    with expstore.open(tmp_path / "a.exp", layout="arrow") as rb:
        rb.extend({"x": values})
        rb.add({"x": values[0]})
        assert str(rb.schema["x",]) == kind
        assert list(rb[:]["x"]) == [*expected.tolist(), expected[0].item()]


@pytest.mark.parametrize("values", [np.array(["30000-01-01"], "M8[s]"), np.array([1], "m8[ps]")])
def test_times_that_python_does_not_have_are_refused(tmp_path: Path, values: Any) -> None:
    with expstore.open(tmp_path / "a.exp", layout="arrow") as rb:
        with pytest.raises(SchemaError, match=r"'x' has values of dtype .* that Python has no times for"):
            rb.extend({"x": values})
