"""Find image fields, convert their rows to small pictures, and write a picture as PNG.

Used by plots and by the HTTP layer. It needs NumPy only, and reads no rows.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array
from expstore.schema.schema import Field

#: Both sides of an image have at least this many pixels.
_LEAST_SIDE = 8
#: Pixels per side of a cell that are averaged when an image is reduced by a larger factor.
_MOST_PIXELS = 4
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_PNG_COLOURS = {1: 0, 3: 2}


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """How a row of an image field becomes a picture.

    Args:
        name: "HWC" or "CHW": one or three channels, last or first. "HW": one channel. "stacked": several
            frames on top of one another, of which the last one is the picture.
        height: Number of rows of pixels.
        width: Number of pixels in a row.
        channels: Number of channels of the picture: 1 (grey) or 3 (RGB).
        axis: The axis of channels or frames of a row; None: it has only height and width.
        dtype: The dtype of the field.
    """

    name: Literal["HWC", "CHW", "HW", "stacked"]
    height: int
    width: int
    channels: int
    axis: int | None
    dtype: str

    def shrink_factor(self, max_side: int | None) -> int:
        """Return by which factor a picture is reduced so that no side is longer than `max_side`."""
        longest = max(self.height, self.width)
        return 1 if max_side is None else max(1, -(-longest // max_side))

    def size(self, max_side: int | None) -> tuple[int, int]:
        """Return height and width of the reduced picture."""
        factor = self.shrink_factor(max_side)
        return max(1, self.height // factor), max(1, self.width // factor)


def find_image(entry: Field) -> ImageLayout | None:
    """Return the layout of an image field; None: the field is not an image.

    Images are uint8 fields of shape `[height, width]`, or with channels or frames as the first or last dim;
    and float fields with such a third dim of 1 or 3 channels.

    Example:
        >>> from expstore import Field
        >>> from expstore.data.images import find_image
        >>> find_image(Field(("pixels",), "uint8", (3, 84, 84))).name
        'CHW'
    """
    shape, is_float = entry.shape, entry.dtype in _FLOATS
    if not (entry.dtype == "uint8" or is_float) or len(shape) not in (2, 3):
        return None
    if sorted(shape)[-2] < _LEAST_SIDE:
        return None
    if len(shape) == 2:
        return None if is_float else ImageLayout("HW", *shape, 1, None, entry.dtype)
    last = shape[-1] <= shape[0]
    axis, (height, width) = (2, shape[:2]) if last else (0, shape[1:])
    count = shape[axis]
    if count in (1, 3):
        return ImageLayout("HWC" if last else "CHW", height, width, count, axis, entry.dtype)
    if is_float:
        return None
    return ImageLayout("stacked", height, width, 3 if count % 3 == 0 else 1, axis, entry.dtype)


def shrink_rows(rows: Array, layout: ImageLayout, max_side: int | None = None) -> Array:
    """Return rows of an image field as pictures that are small enough.

    Pictures are reduced by a whole factor, to the mean of the pixels of each cell; of cells with more than 4
    pixels a side, 4 a side are averaged.

    Args:
        rows: Shape `(n, *row shape)`, of the field's dtype.
        layout: The field's layout.
        max_side: Most pixels of the longer side; None: as stored.

    Returns:
        Shape `(n, height, width, channels)`, uint8 or floats: pass these to `to_pixels`.
    """
    planes = rows[..., None] if layout.axis is None else rows
    if layout.axis == 0:
        planes = np.moveaxis(planes, 1, -1)
    planes = planes[..., -layout.channels :]
    if layout.dtype == "bfloat16":
        planes = widen_bfloat16(planes)
    return _shrink(planes, layout.shrink_factor(max_side))


def to_pixels(pictures: Array) -> Array:
    """Return pictures as bytes.

    Floats from 0 to 1, or else from -1 to 1, or else from 0 to 255, fill the range of pixels; other floats
    are scaled so that the smallest value is black and the largest white. NaN and infinities are black.

    Args:
        pictures: The result of `shrink_rows`. Shape `(n, height, width, channels)`.

    Returns:
        Same shape, uint8, C-contiguous.
    """
    return np.ascontiguousarray(pictures if pictures.dtype == np.uint8 else _scale(pictures), np.uint8)


def _shrink(planes: Array, factor: int) -> Array:
    """Reduce pictures by a factor. Shape `(n, height, width, channels)`."""
    if factor == 1:
        return planes
    high, wide = (min(factor, side) for side in planes.shape[1:3])
    planes = planes[:, : planes.shape[1] // high * high, : planes.shape[2] // wide * wide]
    is_float = planes.dtype.kind == "f"
    kind = np.dtype(np.float32 if is_float else np.uint16)
    # Rows first: they are contiguous, and leave fewer values for the columns.
    lines = _add([planes[:, row::high] for row in _places(high)], kind)
    total = _add([lines[:, :, column::wide] for column in _places(wide)], kind)
    count = len(_places(high)) * len(_places(wide))
    means: Array = total / np.float32(count) if is_float else ((total + count // 2) // count).astype(np.uint8)
    return means


def _add(parts: Sequence[Array], kind: np.dtype[Any]) -> Array:
    """Return the sum of arrays of one shape."""
    total: Array = parts[0].astype(kind)
    for part in parts[1:]:
        total += part
    return total


def _places(side: int) -> list[int]:
    """Return the positions along a side of a cell that are averaged."""
    count = min(side, _MOST_PIXELS)
    return [(2 * place + 1) * side // (2 * count) for place in range(count)]


def _scale(planes: Array) -> Array:
    """Return floats as pixels."""
    values = planes.astype(np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        values[~finite] = np.nan
    low, high = (0.0, 0.0) if not finite.any() else (float(np.nanmin(values)), float(np.nanmax(values)))
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low >= -1 and high <= 1:
        low, high = -1.0, 1.0
    elif low >= 0 and high <= 255:
        low, high = 0.0, 255.0
    pixels: Array = np.rint(np.nan_to_num((values - low) * (255 / max(high - low, 1e-30)), nan=0.0))
    return pixels


def encode_png(picture: Array) -> bytes:
    """Return a picture as a PNG file. Shape `(height, width, 1 or 3)`, uint8.

    https://www.w3.org/TR/png-3/: no filter, one IDAT chunk.
    """
    height, width, channels = picture.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)
    lines[:, 1:] = picture.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOURS[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
