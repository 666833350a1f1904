"""Check the arrays of an NPZ file before memory is allocated for them, and read them without unpickling."""

from __future__ import annotations

import math
import tokenize
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.parsing import reading
from expstore.core.values import Array
from expstore.disk.files import ReadingDisk
from expstore.errors import SchemaError, StorageError
from expstore.exchange.base import open_to_read
from expstore.exchange.claimed_sizes import check_size

#: Other compressions have no bound on what a byte becomes; NumPy writes these.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def check_archive(file: zipfile.ZipFile, path: Path) -> None:
    """Check the sizes that the directory of a zip file claims.

    Raises:
        SchemaError: A member is compressed in a way that NumPy does not write.
        StorageError: A member claims more bytes than it can have.
    """
    left = ReadingDisk().size(path)
    for member in file.infolist():
        what = f"{member.filename!r} in {path}"
        if member.compress_type not in _METHODS:
            raise SchemaError(f"{what} has compression {member.compress_type}; only deflate is read")
        check_size(what, "uncompressed", claimed=member.file_size, stored=min(left, member.compress_size))
        left -= member.compress_size  # members that overlap would be read several times
        if left < 0:
            raise StorageError(f"{path} is damaged: its members have more bytes than the file")


def read_header(part: Any, size: int, what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array.

    Args:
        part: The open member, at its beginning.
        size: Its uncompressed length in bytes.
        what: Its name, for messages.

    Returns:
        Shape, whether it is in Fortran order, and dtype.

    Raises:
        StorageError: The header is damaged, or its shape needs more bytes than the member has. The size of
            objects, which are pickled, is not checked.
    """
    with reading(what, tokenize.TokenError, zipfile.BadZipFile):
        version = np.lib.format.read_magic(part)
        read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(part)
        is_valid = all(type(side) is int and side >= 0 for side in shape)
    needed = math.prod(shape) * (0 if dtype.hasobject else dtype.itemsize) if is_valid else -1
    if not 0 <= needed <= size - part.tell():
        raise StorageError(
            f"{what} claims the shape {list(shape)} of {dtype}, but has {size - part.tell():,} bytes"
        )
    return shape, fortran, dtype


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of a file.

    Raises:
        StorageError: The file is not an NPZ file, is damaged, or claims more bytes than it can have.
        SchemaError: An array holds objects, or a member is no array.
    """
    found: dict[str, Array] = {}
    with open_to_read(path) as raw, reading_npz(path), zipfile.ZipFile(raw) as file:
        check_archive(file, path)
        for member in file.infolist():
            with file.open(member) as part:
                what = f"{member.filename!r} in {path}"
                shape, fortran, dtype = read_header(part, member.file_size, what)
                if dtype.hasobject:
                    raise SchemaError(f"{what} holds Python objects, which are never unpickled")
                values = np.frombuffer(bytearray(part.read(math.prod(shape) * dtype.itemsize)), dtype)
                order = values.reshape(shape[::-1]).T if fortran else values.reshape(shape)
                found[member.filename.removesuffix(".npy")] = order
    return found


def reading_npz(path: Path) -> AbstractContextManager[None]:
    """Convert what zipfile raises for damaged files, unknown compressions and encryptions to StorageError."""
    return reading(f"{path} as .npz", zipfile.BadZipFile, zipfile.LargeZipFile, OSError, RuntimeError)
