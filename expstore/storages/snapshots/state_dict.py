"""Convert a storage's whole content to tensors and plain values, and read such a state.

Used by storages for `state_dict` and `load_state_dict`. The state shares no memory with the storage. This
module uses no files.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.parsing import INVALID
from expstore.core.values import Array, IntArray, key_name
from expstore.episodes.log import LogEntry, unpack_entries
from expstore.errors import ArgumentError, CorruptionError, SchemaError, StateError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import OBJECT, Field
from expstore.storages.base import Hook, Storage
from expstore.storages.columns.annotated import Annotations, MemoryAnnotations
from expstore.storages.columns.sample_counts import SAMPLED
from expstore.storages.format.manifest import Manifest
from expstore.storages.snapshots.capture import Frozen, freeze
from expstore.storages.snapshots.restore import ContentLike

if TYPE_CHECKING:
    import torch

#: TorchRL's hooks for its own files, and the classes derived from them.
_FILE_HOOKS = {"TED2Flat", "Flat2TED", "H5Split", "H5Combine"}

#: Keys that `base` must have.
_NUMBERS = {
    *("draw", "episodes", "last", "limits", "max_priority", "progress", "randomness", "retired"),
    "write_count",
}
_PARTS = {"manifest": str, "base": str, "log": object, "rows": object}


def check_hook(hook: Hook) -> None:
    """Refuse hooks of TorchRL that convert a TensorDict to TorchRL's own files, or back.

    Raises:
        ArgumentError: The hook is one of these.
    """
    if not callable(hook):
        raise ArgumentError(f"a hook is a function of the rows, got {hook!r}")
    bases = type(hook).__mro__
    if any(base.__name__ in _FILE_HOOKS and base.__module__.startswith("torchrl.") for base in bases):
        raise ArgumentError(
            f"{type(hook).__name__} converts TensorDicts to or from torchrl's own files, but dumps() and "
            "loads() have one format",
            hint="leave the hook out: they need none",
        )


def content_of(storage: Storage, hooks: Sequence[Hook] = ()) -> dict[str, Any]:
    """Return a storage's content at one moment, which `read_state` reads.

    Other threads can read and add rows meanwhile. A thread that would overwrite or change a row waits.

    Args:
        storage: The storage, open for writing.
        hooks: Each is called with the rows and returns the rows to store instead.

    Returns:
        `rows`, unless hooks return something else: name -> a tensor of all rows, oldest first (objects: a
        list; variable-length rows: the bytes of an Arrow IPC stream), row fields under `_row.`; `log`: uint8,
        the content of episodes.log; `annotations`, if a field is annotated: uint8, their records;
        `manifest` and `base`: JSON.

    Raises:
        StateError: The storage is closed, or open for reading only.
        StorageError: Rows could not be synced to the disk.
    """
    with freeze(storage) as state:
        rows: Any = _rows(state)
        found = _describe(state)
        if (annotations := storage.state.annotations) is not None:
            import torch

            kept = MemoryAnnotations(None)
            kept.write_copy(annotations, state.manifest.schema or (), lambda ids: ids)
            found["annotations"] = torch.from_numpy(np.frombuffer(kept.data, np.uint8).copy())
    for hook in hooks:
        _tell(hook, state)
        rows = hook(rows)
    return found | {"rows": rows}


def call_hooks(storage: Storage, hooks: Sequence[Hook]) -> bool:
    """Call hooks with a storage's rows; return whether one of them returns other rows."""
    with freeze(storage) as state:
        rows = _rows(state)
    for hook in hooks:
        _tell(hook, state)
        kept = hook(dict(rows))
        if kept.keys() != rows.keys() or any(kept[name] is not rows[name] for name in rows):
            return True
    return False


def _rows(state: Frozen) -> dict[str, Any]:
    return {key_name(entry.key): _join(entry, state.parts(place)) for place, entry in enumerate(state.fields)}


def _tell(hook: Hook, state: Frozen) -> None:
    """Set the attributes of a hook, as torchrl does."""
    capacity = state.manifest.capacity
    if hasattr(hook, "is_full"):
        hook.is_full = capacity is not None and state.stored.rows == capacity
    if hasattr(hook, "shift"):
        hook.shift = state.stored.last if capacity is None else state.stored.last % capacity


def _describe(state: Frozen) -> dict[str, Any]:
    import torch

    return {
        "manifest": state.manifest.pack().decode(),
        "base": json.dumps(state.base),
        "log": torch.from_numpy(np.frombuffer(state.log, np.uint8).copy()),
    }


def _join(entry: Field, parts: Sequence[Array]) -> torch.Tensor | list[Any]:
    import torch

    if entry.dtype == OBJECT:
        return copy.deepcopy([_detach(value) for part in parts for value in part])
    if entry.variable:
        from expstore.storages.columns.object_cells import to_bytes

        return torch.from_numpy(np.frombuffer(to_bytes(entry, parts), np.uint8).copy())
    rows = np.concatenate(parts) if parts else np.empty((0, *entry.shape), entry.numpy_dtype)
    tensor = torch.from_numpy(rows)
    return tensor.view(torch.bfloat16) if entry.dtype == "bfloat16" else tensor


def _detach(value: Any) -> Any:
    """Return an object whose tensors have no gradient history, which cannot be copied."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


@dataclass(frozen=True, slots=True)
class Carried:
    """Content that `content_of` returned, for `restore.Arrival`.

    Args:
        manifest: The manifest of the storage.
        base: Its state, as a journal's base record stores it.
        entries: The entries of episodes.log.
        columns: All rows, oldest first: fields, row fields, and counts if there are any.
        records: The records of annotations; None: they are not known.
    """

    manifest: Manifest
    base: dict[str, Any]
    entries: Sequence[LogEntry]
    columns: Sequence[Array]
    records: bytes | None = None

    name = "the state"

    @property
    def low(self) -> int:
        """The newest id that cannot be read."""
        return int(self.base["last"]) - (len(self.columns[0]) if self.columns else 0)

    @property
    def row_bytes(self) -> int:
        """The size of a row, bytes."""
        return sum(column[:1].nbytes for column in self.columns) or 1

    @property
    def _own(self) -> int:
        schema = self.manifest.schema
        return 0 if schema is None else len(schema.fields) + len(ROW_FIELDS)

    @property
    def counted(self) -> bool:
        """Whether it has sample counts."""
        return len(self.columns) > self._own

    def rows(self, first_id: int, count: int) -> list[Array]:
        """Copy a run of rows: one array per column."""
        start = first_id - self.low - 1
        parts = [column[start : start + count] for column in self.columns[: self._own]]
        return [_copy(part) for part in parts]

    def counts(self, first_id: int, count: int) -> Array:
        """Copy how often each of a run of rows was sampled. Shape `(count,)`, uint32."""
        start = first_id - self.low - 1
        return self.columns[-1][start : start + count] if self.counted else np.zeros(count, np.uint32)

    def annotations(self) -> Iterable[tuple[Annotations, Callable[[IntArray], IntArray]]]:
        """Yield the records of annotations; see `restore.ContentLike`.

        Raises:
            StateError: They are not known: a load hook returned the rows.
        """
        if self.records is None:
            raise StateError(
                "a load hook passes rows on, and not what they were annotated with",
                hint="load without hooks, or drop the annotated fields first",
            )
        return [(MemoryAnnotations(None, self.records), lambda ids: ids)]


def _copy(part: Any) -> Any:
    if not isinstance(part, np.ndarray):
        return part  # Arrow arrays are immutable
    return copy.deepcopy(part) if part.dtype.hasobject else part.copy()


def read_state(state: Mapping[str, Any], hooks: Sequence[Hook] = ()) -> Carried:
    """Read a state that `content_of` returned.

    Args:
        state: The state; it is not changed, and no reference to it is kept.
        hooks: Each is called with the stored rows and returns the rows to use instead.

    Raises:
        StateError: The state has no rows, because it is from a store on disk.
        SchemaError: The argument is not such a state, or its rows do not match its description.
        CorruptionError: The description of the storage is damaged.
    """
    if not isinstance(state, Mapping) or "uuid" in state:
        raise StateError(
            "this state has no rows: it is from a store on disk, whose rows are in its folder",
            hint="copy them with dumps() and loads()",
        )
    for name, kind in _PARTS.items():
        if state.get(name) is None or not isinstance(state[name], kind):
            raise SchemaError(f"not the state of a storage: {name!r} is missing", hint="see state_dict()")
    manifest = Manifest.unpack(state["manifest"].encode(), "the state's manifest")
    log = np.asarray(state["log"], np.uint8).tobytes()
    rows = state["rows"]
    for hook in hooks:
        rows = hook(rows)
    schema = manifest.schema
    fields = () if schema is None else (*schema.fields, *ROW_FIELDS)
    if key_name(SAMPLED.key) in rows:
        fields = (*fields, SAMPLED)
    columns, entries = _columns(fields, rows), list(unpack_entries(log, "the state's log"))
    records = np.asarray(state.get("annotations", ()), np.uint8).tobytes()
    return Carried(manifest, _base(state["base"]), entries, columns, records)


def hook_rows(content: ContentLike, hooks: Sequence[Hook]) -> Carried:
    """Return a content with the rows that hooks return for its own; all rows are in memory meanwhile.

    Raises:
        SchemaError: A hook returns other fields, or rows that do not fit them.
    """
    schema = content.manifest.schema
    fields: tuple[Field, ...] = () if schema is None else (*schema.fields, *ROW_FIELDS)
    first, count = content.low + 1, int(content.base["last"]) - content.low
    arrays = content.rows(first, count) if fields and count else []
    if content.counted:
        fields, arrays = (*fields, SAMPLED), [*arrays, content.counts(first, count)]
    parts = [[array] for array in arrays] or [[] for _ in fields]
    rows: Any = {key_name(entry.key): _join(entry, part) for entry, part in zip(fields, parts, strict=True)}
    for hook in hooks:
        rows = hook(rows)
    return Carried(content.manifest, content.base, content.entries, _columns(fields, rows))


def _columns(fields: Sequence[Field], rows: Mapping[str, Any]) -> list[Any]:
    """Return rows as columns, one for each field."""
    columns = [_part(entry, rows) for entry in fields]
    if len({len(column) for column in columns}) > 1 or len(rows) != len(fields):
        raise SchemaError("the fields of the state do not match its description, or have different lengths")
    return columns


def _base(text: str) -> dict[str, Any]:
    try:
        base = json.loads(text)
        missing = _NUMBERS - set(base)
    except INVALID as exc:
        raise CorruptionError(f"the state's base is damaged: {exc}") from exc
    if missing:
        raise CorruptionError(f"the state's base lacks {', '.join(sorted(missing))}")
    return dict(base)


def _part(entry: Field, rows: Mapping[str, Any]) -> Any:
    import torch

    name = key_name(entry.key)
    values = rows.get(name)
    if entry.dtype == OBJECT:
        if not isinstance(values, list):
            raise SchemaError(f"the state has no list of objects {name!r}")
        found = np.empty(len(values), object)
        found[:] = values
        return found
    if not isinstance(values, torch.Tensor):
        raise SchemaError(f"the state has no tensor {name!r}")
    values = values.detach().cpu()
    if entry.variable:
        from expstore.storages.columns.object_cells import from_bytes

        return from_bytes(entry, values.numpy().tobytes())
    array: Array = (values.view(torch.uint16) if values.dtype is torch.bfloat16 else values).numpy()
    bits = (values.dtype is torch.bfloat16) == (entry.dtype == "bfloat16")
    if not bits or array.dtype != entry.numpy_dtype or array.shape[1:] != entry.shape:
        raise SchemaError(
            f"the state's {name!r} is {values.dtype}{list(values.shape)}, expected rows of {entry}"
        )
    return array
