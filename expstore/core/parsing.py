"""Convert what parsing damaged or forged content raises to one error of expstore.

Checksums find bytes that changed by accident. Forged content may have a matching checksum
and values that no version of expstore writes; the parsers raise many kinds of errors for those.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from expstore.errors import CorruptionError, ExpStoreError, StorageError

#: The largest id and the largest count in a file: more than a disk has bytes.
MOST_IDS = 1 << 60

#: What parsers of JSON, structs and arrays raise for invalid content, also for deeply nested JSON.
INVALID = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError,
    MemoryError, EOFError, SyntaxError, struct.error, zlib.error,
)  # fmt: skip


def check_number(name: str, value: object, most: int = MOST_IDS) -> int:
    """Return a value of a file if it is a whole number from 0 to `most`.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name!r} is {str(value)[:80]!r}, and not a number from 0 to {most}")
    return value


@contextmanager
def parsing(name: object, error: type[StorageError] = CorruptionError) -> Iterator[None]:
    """Convert errors of the block, which parses the content of a file, to an error of expstore.

    Args:
        name: The file or the part of it, for the message.
        error: The error: StorageError for files that are not those of a store.

    Raises:
        StorageError: The content is invalid. Errors of expstore are raised unchanged.
    """
    try:
        yield
    except ExpStoreError:
        raise
    except INVALID as exc:
        raise error(f"{name} is damaged: {type(exc).__name__}: {str(exc)[:200]}") from exc


@contextmanager
def reading(what: object, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of the block, in which a library reads a file of another program.

    The block must not call functions of the user: their errors would be taken for the file's.

    Args:
        what: The file, for the message.
        kinds: Further errors that the library raises for damaged files.

    Raises:
        StorageError: The file cannot be read. Errors of expstore are raised unchanged.
    """
    known: tuple[type[Exception], ...] = (*INVALID, *kinds)
    try:
        yield
    except ExpStoreError:  # some of these are RuntimeErrors
        raise
    except known as exc:
        raise StorageError(f"cannot read {what}: {str(exc).partition(chr(10))[0]}") from exc
