"""Test Python numbers that do not fit into the dtype of their field."""

from pathlib import Path

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
