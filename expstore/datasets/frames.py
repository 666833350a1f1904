"""Decode images and video frames to arrays `(channels, height, width)`, the layout of TorchRL's data sets.

Used by readers of formats with cameras. Pillow and av are imported when they are first needed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import Array
from expstore.errors import SchemaError, StorageError
from expstore.exchange.base import import_library

#: Frames further ahead than this many seconds are reached by a seek, nearer ones by decoding.
_SEEK_SECONDS = 20.0


def decode_image(data: bytes) -> Array:
    """Return the pixels of a PNG or JPEG file.

    Images with a palette are converted to RGB.

    Raises:
        StorageError: The bytes are not an image.
        MissingExtraError: Pillow is not installed.
    """
    Image = import_library("PIL.Image")
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = np.asarray(image.convert("RGB") if image.mode == "P" else image)
    except (OSError, SyntaxError, ValueError) as exc:
        raise StorageError(f"an image of {len(data)} bytes cannot be decoded: {exc}") from exc
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def decode_images(name: str, images: Sequence[bytes]) -> Array:
    """Return the pixels of images of one size. Shape `(n, channels, height, width)`.

    Raises:
        SchemaError: The images differ in size.
        StorageError: Some bytes are not an image.
    """
    first = decode_image(images[0])
    found = np.empty((len(images), *first.shape), first.dtype)
    for place, data in enumerate(images):
        pixels = decode_image(data) if place else first
        if pixels.shape != first.shape or pixels.dtype != first.dtype:
            raise SchemaError(
                f"{name!r} has images of different sizes: {list(first.shape)} and {list(pixels.shape)}"
            )
        found[place] = pixels
    return found


class VideoFrames:
    """Read the frames of a video file by time. Use it as a context manager, or call `close`.

    Args:
        path: The file.
        fps: Frames per second: a frame matches a time up to half a period before or after it.

    Raises:
        StorageError: The file is not a video.
        MissingExtraError: av is not installed.
    """

    def __init__(self, path: Path, fps: float) -> None:
        av = import_library("av")
        open_video, self._av_error = av.open, av.FFmpegError
        self._path, self._tolerance = path, 0.5 / fps
        try:
            self._container = open_video(str(path))
            self._stream = self._container.streams.video[0]
        except (self._av_error, IndexError) as exc:
            raise StorageError(f"{path} is not a video: {exc}") from exc
        self._stream.thread_type = "AUTO"
        self._decoded = self._container.decode(self._stream)
        self._frame: Any = None

    def __enter__(self) -> VideoFrames:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    def read(self, times: Sequence[float]) -> Array:
        """Return the frames at some times in seconds. Shape `(n, 3, height, width)`, uint8.

        Ascending times are read fastest.

        Raises:
            SchemaError: There is no frame at one of the times.
            StorageError: The file is damaged.
        """
        found: Array | None = None
        for place, time in enumerate(times):
            try:
                pixels = self._find(float(time)).to_ndarray(format="rgb24").transpose(2, 0, 1)
            except self._av_error as exc:
                raise StorageError(f"cannot decode {self._path} at {time:.3f} s: {exc}") from exc
            if found is None:
                found = np.empty((len(times), *pixels.shape), np.uint8)
            found[place] = pixels
        assert found is not None, "no times were passed"
        return found

    def _find(self, time: float) -> Any:
        """Return the first frame at or after a time, within the tolerance."""
        low, high = time - self._tolerance, time + self._tolerance
        if self._frame is not None and not low - _SEEK_SECONDS <= self._frame.time <= high:
            self._container.seek(
                max(0, int(low / self._stream.time_base)), stream=self._stream, backward=True
            )
            self._decoded, self._frame = self._container.decode(self._stream), None
        while self._frame is None or self._frame.time < low:
            self._frame = next(self._decoded, None)
            if self._frame is None:
                break
        if self._frame is None or self._frame.time > high:
            raise SchemaError(f"{self._path} has no frame at {time:.3f} s")
        return self._frame
