"""Compare the size that a file claims for an array with the bytes that it has, before memory is allocated."""

from __future__ import annotations

from expstore.errors import StorageError

#: The most bytes that one byte of a file becomes: deflate reaches 1032, with headers a little less.
LARGEST_RATIO = 1100
#: Up to this size nothing is compared: arrays of nothing but one value take no space in some formats.
_ALWAYS = 16 << 20


def check_size(what: str, detail: str, *, claimed: int, stored: int) -> None:
    """Refuse an array that claims more bytes than its stored bytes can become.

    Args:
        what: The array, for the message.
        detail: What it claims, for the message.
        claimed: Number of bytes of its values.
        stored: Number of bytes that it has in the file, compressed or not.

    Raises:
        StorageError: It claims over 16 MiB and over 1100 times its stored bytes.
    """
    if claimed > _ALWAYS and claimed > LARGEST_RATIO * stored:
        raise StorageError(
            f"{what} claims {claimed:,} bytes ({detail}), but has {stored:,} bytes in the file",
            hint="the file is damaged, or made to fill the memory; if it is right, write it again in full",
        )
