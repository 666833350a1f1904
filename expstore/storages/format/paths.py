"""Names of the files and folders of a store.

ARCHITECTURE.md says what each of them holds.
"""

from __future__ import annotations

__all__ = [
    "CHECKSUMS",
    "COLUMNS",
    "JOURNAL",
    "LOCK",
    "LOG",
    "ORIGIN",
    "REDO",
    "REPAIR",
    "SEGMENTS",
    "STATE",
    "VERSION",
]

CHECKSUMS = "checksums"
COLUMNS = "columns"
JOURNAL = "journal"
LOCK = "LOCK"
LOG = "episodes.log"
REDO = "redo"
SEGMENTS = "segments"
STATE = "STATE"
#: In a folder that is a snapshot, which has no writer.
VERSION = "version.json"
#: In a snapshot: the store's own checksums when it was made; equal ones mean equal rows.
ORIGIN = "origin"
#: Present while a repair cuts the journal: nothing else may open the store.
REPAIR = "REPAIR"
