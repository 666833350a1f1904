"""Methods that a served store does not have: each raises an error that says what to do instead.

Base class of the client's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from expstore.errors import RemoteError

_TRANSFORM = "transform the batches that you receive or send"
_MANAGE = "do it on the store's machine, with expstore.open()"
_SHARE = "connect() wherever the rows are wanted"
#: What to do instead, by the name of the method or attribute. docs/server.md prints this table.
INSTEAD: Mapping[str, str] = {
    "rb[...]": "read rows by id: by_id(ids), or by episode: trajectory(episode_id)",
    "read_all_in_order": "use sql(), or read episodes: trajectory(episode_id)",
    "query": "use sql(), then read each trajectory(episode_id)",
    "columns.stats": "use sql(), or open the store on its machine with mode='r'",
    "to_torch_dataset": "iterate over the buffer: it prefetches batches",
    "refresh": "nothing: every answer is from the store as it is now",
    "synchronize": "nothing: every answer is from the store as it is now",
    "can_sample": "sample(): it raises NotReadyError; connect(wait=) waits for rows",
    "sampler": "describe it: connect(sampler=)",
    "set_sampler": "connect() again, with another sampler=",
    "set_rng": "connect() with seed=",
    "state_dict": "keep `draw`, and connect() with it",
    "load_state_dict": "connect() with draw=",
    "mark_update": "pass the new priorities: update_priority(id=, priority=)",
    "append_transform": _TRANSFORM,
    "insert_transform": _TRANSFORM,
    "transform": _TRANSFORM,
    "record": "extend() several steps at a time: each call is a request",
    "write_all": "extend()",
    "client": _SHARE,
    "start": _SHARE,
    "shutdown": _SHARE,
    "is_alive": _SHARE,
    "service_backend": _SHARE,
    "rb[...] = rows": _MANAGE,
    "set_": _MANAGE,
    "set_at_": _MANAGE,
    "update_": _MANAGE,
    "update_if_present": _MANAGE,
    "submit_update_if_present": _MANAGE,
    "empty": _MANAGE,
    "episodes.annotate_each": "annotate() each of them",
    "episodes.delete": _MANAGE,
    "episodes.measure": _MANAGE,
    "columns.add": _MANAGE,
    "columns.drop": _MANAGE,
    "retention.policy": _MANAGE,
    "retention.set": _MANAGE,
    "retention.apply": _MANAGE,
    "specs": _MANAGE,
    "set_specs": _MANAGE,
    "writer": _MANAGE,
    "set_writer": _MANAGE,
    "storage": _MANAGE,
    "set_storage": _MANAGE,
    "dim_extend": _MANAGE,
    "recovered": _MANAGE,
    "record_lineage": _MANAGE,
    "register_save_hook": _MANAGE,
    "register_load_hook": _MANAGE,
}


def _refuse(name: str, method: str = "") -> Callable[..., NoReturn]:
    """Return a method that raises RemoteError with a hint what to do instead.

    Args:
        name: A name in `INSTEAD`.
        method: Name of the method, if it is not the last part of `name`.
    """
    hint = INSTEAD[name]

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RemoteError(f"{name} is not available over a connection", kind="local_only", hint=hint)

    refuse.__name__ = refuse.__qualname__ = method or name.rpartition(".")[2]
    refuse.__doc__ = f"Raise RemoteError: `{name}` is not available over a connection. Instead: {hint}."
    return refuse


def _refuse_reading(name: str) -> property:
    """Return a property that raises RemoteError when it is read."""
    return property(_refuse(name))


class _Elsewhere:
    """A stub of the storage: TorchRL's collectors read its device, and whether it has rows."""

    initialized = True
    device = None


class _Columns:
    """`rb.columns` of a served store: not available."""

    add = _refuse("columns.add")
    drop = _refuse("columns.drop")
    stats = _refuse("columns.stats")


class _Retention:
    """`rb.retention` of a served store: not available."""

    policy = _refuse_reading("retention.policy")
    set = _refuse("retention.set")
    apply = _refuse("retention.apply")


class LocalEpisodes:
    """The methods of `rb.episodes` that a served store does not have."""

    annotate_each = _refuse("episodes.annotate_each")
    delete = _refuse("episodes.delete")
    measure = _refuse("episodes.measure")


class LocalOnly:
    """The methods that need direct access to the rows, or that manage the store.

    Each of them raises RemoteError of kind "local_only"; properties raise it when they are read.
    """

    __getitem__ = _refuse("rb[...]", "__getitem__")
    __setitem__ = _refuse("rb[...] = rows", "__setitem__")
    read_all_in_order = _refuse("read_all_in_order")
    query = _refuse("query")
    to_torch_dataset = _refuse("to_torch_dataset")
    refresh = _refuse("refresh")
    synchronize = _refuse("synchronize")
    can_sample = _refuse("can_sample")
    sampler = _refuse_reading("sampler")
    set_sampler = _refuse("set_sampler")
    set_rng = _refuse("set_rng")
    state_dict = _refuse("state_dict")
    load_state_dict = _refuse("load_state_dict")
    mark_update = _refuse("mark_update")
    append_transform = _refuse("append_transform")
    insert_transform = _refuse("insert_transform")
    transform = _refuse_reading("transform")
    record = _refuse("record")
    write_all = _refuse("write_all")
    client = _refuse("client")
    start = _refuse("start")
    shutdown = _refuse("shutdown")
    is_alive = _refuse_reading("is_alive")
    service_backend = _refuse_reading("service_backend")
    set_ = _refuse("set_")
    set_at_ = _refuse("set_at_")
    update_ = _refuse("update_")
    update_if_present = _refuse("update_if_present")
    submit_update_if_present = _refuse("submit_update_if_present")
    empty = _refuse("empty")
    columns = _Columns()
    retention = _Retention()
    specs = _refuse_reading("specs")
    set_specs = _refuse("set_specs")
    writer = _refuse_reading("writer")
    set_writer = _refuse("set_writer")
    storage = _refuse_reading("storage")
    set_storage = _refuse("set_storage")
    dim_extend = _refuse_reading("dim_extend")
    recovered = _refuse_reading("recovered")
    record_lineage = _refuse("record_lineage")
    register_save_hook = _refuse("register_save_hook")
    register_load_hook = _refuse("register_load_hook")
    _storage, _sampler = _Elsewhere(), None
