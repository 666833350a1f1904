"""Idempotency keys beside the rows of a storage.

Base of storages. Where the keys are kept is for `WriteKeys`, and who asks for them for buffers.
"""

from __future__ import annotations

from expstore.core.idempotency import WriteKeys
from expstore.storages.batch import Rows

__all__ = ["Keyed"]


class Keyed:
    """Know under which idempotency keys rows were written.

    Threads: one notes, any number ask. Crashes: in memory keys go with the process; on disk they are known
    as long as their rows are, or would be.
    """

    write_keys: WriteKeys

    def _expect_key(self, rows: Rows) -> None:
        """Make ready for the key of rows that are about to be written, if they have one."""

    def _note_key(self, rows: Rows) -> None:
        """Know the key of rows from now on, if they have one; they are published."""
        if rows.key is not None:
            self.write_keys.note(rows.key, rows.first_id, rows.count, rows.time)
