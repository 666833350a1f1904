"""The part of `verify` that checks the file `keys`.

It reads that file and the content of the journal, but no rows.
"""

from __future__ import annotations

from expstore.core import tuning
from expstore.maintenance.findings import Finding, Inspection
from expstore.storages.format.write_key_file import KEYS, read_keys


def check_keys(inspection: Inspection) -> None:
    """Check the idempotency keys against their checksums, and their number against the journal."""
    past, disk, path = inspection.past, inspection.disk, inspection.path / KEYS
    if past is None or not inspection.manifest.keyed:
        return
    found = read_keys(
        disk.read_whole(path) if disk.exists(path) else None,
        slots=tuning.IDEMPOTENCY_SLOTS,
        kept=tuning.IDEMPOTENCY_KEYS,
        covered=min(past.synced, past.state.last),
        known=past.base.get("write_keys", 0),
    )
    if found.damage:
        text = f"{KEYS} {found.damage}; a write that is retried under such a key is stored again"
        inspection.note(Finding(kind="keys", path=KEYS, message=text))
