"""What a storage in a folder knows, whether it writes there or only reads.

Base of the storages on disk: where the store lies, what expstore.json says, where the columns are. It
opens nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expstore.core.values import key_name
from expstore.disk.files import Disk
from expstore.errors import SchemaError
from expstore.schema.schema import Schema
from expstore.storages.base import Keys, Storage
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import REDO
from expstore.storages.format.records import Redo, fetch_body

__all__ = ["FolderStorage", "refuse_objects"]


def refuse_objects(schema: Schema) -> None:
    """Raise SchemaError for fields that no file can hold."""
    if schema.objects:
        raise SchemaError(
            f"field {key_name(schema.objects[0])!r} holds objects, which a store on disk cannot keep",
            hint='expstore.open(..., storage="arrow") keeps texts, numbers, lists and dicts; '
            "LazyTensorStorage, LazyStackStorage and ListStorage keep objects, in RAM",
        )


class FolderStorage(Storage):
    """Hold what the storages on disk have in common.

    Args:
        path: The store's folder.
        manifest: What its expstore.json says.
        disk: Where files are touched.
    """

    def __init__(self, path: Path, manifest: Manifest, disk: Disk) -> None:
        super().__init__(manifest.capacity, ndim=manifest.ndim)
        self.path = path
        self.disk = disk
        self.take_manifest(manifest)

    def take_manifest(self, manifest: Manifest) -> None:
        """Take over what expstore.json says."""
        self.manifest = manifest
        self.uuid, self.seed = manifest.uuid, manifest.seed
        self.geometry, self.flatten = manifest.geometry, manifest.flatten
        self.ranking, self.specs = manifest.ranking, manifest.specs

    def load_redo(self, body: bytes, schema: Schema) -> Redo:
        """Read a redo record, from its own file if it was too long for the journal."""
        return Redo.unpack(fetch_body(self.disk, self.path / REDO, body), schema)

    def resolve_keys(self, schema: Schema) -> Keys:
        """Find the fields that say what a row is to its episode."""
        return self.manifest.find_keys(schema)

    def meta(self) -> dict[str, Any]:
        """Return the user's own facts."""
        return dict(self.manifest.meta)

    def facts(self) -> dict[str, Any]:
        """Return what the relation `meta` shows."""
        manifest = self.manifest
        return super().facts() | {"uuid": manifest.uuid, "created": manifest.created, **manifest.meta}
