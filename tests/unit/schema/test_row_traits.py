"""The traits of a storage's rows determine the accepted fields."""

from __future__ import annotations

import pytest

from expstore.errors import SchemaError
from expstore.schema.row_traits import RowTraits
from expstore.schema.schema import ARROW, Field, Schema

FIXED = Schema([Field(("a",), "int64", ())])
VARIABLE = Schema([Field(("a",), "int64", ()), Field(("next", "text"), ARROW, (), '"string"')])


@pytest.mark.parametrize(("traits", "schema"), [(RowTraits(), FIXED), (RowTraits(variable=True), VARIABLE)])
def test_fields_that_fit_are_taken(traits: RowTraits, schema: Schema) -> None:
    traits.check(schema, "zarr")


def test_rows_of_no_fixed_size_are_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"field 'next\.text' .* a zarr storage cannot keep") as refused:
        RowTraits(objects=True).check(VARIABLE, "zarr")
    assert 'layout="arrow"' in str(refused.value)
