"""Image fields: which fields are images, how rows become pictures, and pictures PNG files."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from expstore.core.bfloat16 import narrow_to_bfloat16
from expstore.data.images import ImageLayout, encode_png, find_image, shrink_rows, to_pixels
from expstore.schema.schema import Field


def layout_of(dtype: str, *shape: int) -> ImageLayout | None:
    return find_image(Field(("x",), dtype, shape))


def require_layout(dtype: str, *shape: int) -> ImageLayout:
    layout = layout_of(dtype, *shape)
    assert layout is not None
    return layout


def test_layouts() -> None:
    for dtype, shape, name, size, channels in [
        ("uint8", (84, 80), "HW", (84, 80), 1),
        ("uint8", (84, 80, 3), "HWC", (84, 80), 3),
        ("uint8", (84, 80, 1), "HWC", (84, 80), 1),
        ("uint8", (3, 84, 80), "CHW", (84, 80), 3),
        ("uint8", (4, 84, 80), "stacked", (84, 80), 1),
        ("uint8", (84, 80, 4), "stacked", (84, 80), 1),
        ("uint8", (9, 84, 80), "stacked", (84, 80), 3),
        ("float32", (84, 80, 3), "HWC", (84, 80), 3),
        ("bfloat16", (1, 8, 8), "CHW", (8, 8), 1),
    ]:
        layout = require_layout(dtype, *shape)
        assert (layout.name, layout.size(None), layout.channels) == (name, size, channels)


def test_other_fields_are_no_images() -> None:
    for dtype, shape in [
        ("uint8", ()), ("uint8", (84,)), ("uint8", (84, 7)), ("uint8", (2, 3, 84, 84)),
        ("int64", (84, 84)), ("float32", (84, 84)), ("float32", (4, 84, 84)), ("bool", (84, 84)),
        ("float64", (50, 14)),
    ]:  # fmt: skip
        assert layout_of(dtype, *shape) is None


@pytest.mark.some(4)
@pytest.mark.parametrize("max_side", [None, 1000, 84, 83, 42, 30, 21, 5, 1])
@pytest.mark.parametrize("shape", [(84, 60), (84, 60, 3), (3, 84, 60), (4, 84, 60)])
def test_pictures_are_as_small_as_asked(shape: tuple[int, ...], max_side: int | None) -> None:
    layout = require_layout("uint8", *shape)
    rows = np.random.default_rng(0).integers(0, 256, (5, *shape), np.uint8)
    found = to_pixels(shrink_rows(rows, layout, max_side))
    assert found.shape == (5, *layout.size(max_side), layout.channels)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    assert max_side is None or max(found.shape[1:3]) <= max_side


def test_cells_are_averaged() -> None:
    layout = require_layout("uint8", 12, 20)
    rows = np.arange(240, dtype=np.uint8).reshape(1, 12, 20)
    found = to_pixels(shrink_rows(rows, layout, 5))[0, :, :, 0]
    expected = rows[0].astype(float).reshape(3, 4, 5, 4).mean((1, 3))
    np.testing.assert_array_equal(found, np.floor(expected + 0.5))
    white = np.full((1, 400, 400), 255, np.uint8)  # sums fit into their type
    assert (to_pixels(shrink_rows(white, require_layout("uint8", 400, 400), 7)) == 255).all()
    long = np.full((1, 8, 2000), 7, np.uint8)
    assert to_pixels(shrink_rows(long, require_layout("uint8", 8, 2000), 10)).shape == (1, 1, 10, 1)


@pytest.mark.some(8)
@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.0, 1.0, (0, 255)), (-1.0, 1.0, (0, 255)), (0.0, 255.0, (0, 255)), (-3.0, 300.0, (0, 255)),
    (0.0, 0.5, (0, 128)), (-0.5, 0.5, (64, 191)), (5.0, 5.0, (5, 5)), (300.0, 300.0, (0, 0)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_ranges_of_floats(dtype: str, low: float, high: float, expected: tuple[int, int]) -> None:
    values = np.full((2, 8, 8, 1), low, np.float32)
    values[1, 3, 3] = high
    rows = narrow_to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
    found = to_pixels(shrink_rows(rows, require_layout(dtype, 8, 8, 1)))
    assert (found.min(), found.max()) == expected


def test_values_that_are_not_finite_are_black() -> None:
    values = np.full((1, 8, 8, 3), 0.5, np.float32)
    values[0, 0, 0] = (np.nan, np.inf, -np.inf)
    found = to_pixels(shrink_rows(values, require_layout("float32", 8, 8, 3)))
    assert found[0, 0, 0].tolist() == [0, 0, 0]
    assert (found[0, 1:] == 128).all()
    values[:] = np.nan
    assert not to_pixels(shrink_rows(values, require_layout("float32", 8, 8, 3))).any()


def test_png_files() -> None:
    for shape in [(1, 1, 1), (7, 5, 3), (64, 33, 1)]:
        picture = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        image = Image.open(io.BytesIO(encode_png(picture)))
        image.verify()
        image = Image.open(io.BytesIO(encode_png(picture)))
        np.testing.assert_array_equal(np.asarray(image).reshape(shape), picture)
