"""Idempotency keys on disk: opened with the store, known again from its journal, made room for.

Base of the storages on disk. What the file looks like is in `expstore.storages.format.write_key_file`;
`expstore.storages.engine.checkpointer` writes it with each sync.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from expstore.disk.files import File
from expstore.storages.base import Rows, now_us
from expstore.storages.engine.checkpointer import SyncedStorage
from expstore.storages.format.write_key_file import KEYS, KeyFile

if TYPE_CHECKING:
    from expstore.storages.recovery.recover import Past

__all__ = ["KeyKeepingStorage"]


class KeyKeepingStorage(SyncedStorage):
    """Know the keys of rows for as long as these are there, and longer.

    Crashes: a key survives exactly what its rows survive: both are in one record, and the mark that lets the
    record go comes after the sync of the key's place in the file. Threads: as `Storage`.
    """

    def _open_keys(self, past: Past | None) -> None:
        """Take over the keys of rows that are there: from the file what a mark covers, or their records."""
        covered = 0 if past is None else min(past.synced, past.last)
        keys = KeyFile(
            self.disk,
            self.path / KEYS,
            expected=self.manifest.keyed,
            covered=covered,
            known=past.base.get("write_keys", 0) if past else 0,
            now=now_us(),
        )
        for publish in past.publishes if past else []:
            if publish.key is not None and publish.last_id > covered:
                keys.note(publish.key, publish.first_id, publish.count, publish.time)
        self.write_keys = keys

    def _settle_files(self, files: set[File], folders: set[Path]) -> None:
        """Bring what an opening wrote to the disk: columns, logs and keys."""
        files = {self._log.file, *self.write_keys.unsynced, *files}
        self.disk.sync_all(files, sorted({self.path, *folders}), self._pool)
        self.write_keys.settle()

    def _base_of_keys(self) -> dict[str, int]:
        """Return what a base record says of keys, by which a file that is lost is known."""
        return {"write_keys": self.write_keys.number}

    def _expect_key(self, rows: Rows) -> None:
        if rows.key is None:
            return
        if not self.manifest.keyed:
            self._note_manifest(self.manifest.replace(keyed=True))  # from now on a lost file is damage
        keys = self.write_keys
        if 2 * keys.room < keys.spare:
            self._keeper.hurry()
        if not keys.room:
            self._sync(lambda: self.write_keys.room > 0)
