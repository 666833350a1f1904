"""Methods that a served store does not have: each raises an error that says what to do instead.

Base class of the client's buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from expstore.errors import RemoteError


def _refuse(name: str, hint: str) -> Callable[..., NoReturn]:
    """Return a method that raises RemoteError with a hint what to do instead."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RemoteError(f"{name} is not available over a connection", kind="local_only", hint=hint)

    refuse.__name__ = name
    refuse.__doc__ = f"Raise RemoteError: `{name}` is not available over a connection. Instead: {hint}."
    return refuse


_TRANSFORM = "transform the batches that you receive or send"
_MANAGE = "do it on the store's machine, with expstore.open()"


class _Elsewhere:
    """A stub of the storage: TorchRL's collectors read its device, and whether it has rows."""

    initialized = True
    device = None


class _Columns:
    """`rb.columns` of a served store: not available."""

    add, drop = _refuse("columns.add", _MANAGE), _refuse("columns.drop", _MANAGE)
    stats = _refuse("columns.stats", "use sql(), or open the store on its machine with mode='r'")


class _Retention:
    """`rb.retention` of a served store: not available."""

    policy = property(_refuse("retention.policy", _MANAGE))
    set, apply = _refuse("retention.set", _MANAGE), _refuse("retention.apply", _MANAGE)


class LocalEpisodes:
    """The methods of `rb.episodes` that a served store does not have."""

    delete = _refuse("episodes.delete", _MANAGE)


class LocalOnly:
    """The methods that need direct access to the rows, or that manage the store.

    Each of them raises RemoteError of kind "local_only"; properties raise it when they are read.
    """

    append_transform = insert_transform = _refuse("a transform", _TRANSFORM)
    transform = property(_refuse("a transform", _TRANSFORM))
    __getitem__ = _refuse("rb[...]", "read rows by id: by_id(ids), or by episode: trajectory(episode_id)")
    read_all_in_order = _refuse("reading all rows", "use sql(), or read episodes: trajectory(episode_id)")
    __setitem__ = set_ = set_at_ = update_ = _refuse("changing rows", _MANAGE)
    update_if_present = submit_update_if_present = _refuse("changing rows", _MANAGE)
    mark_update = _refuse("mark_update", "pass the new priorities: update_priority(id=, priority=)")
    write_all = _refuse("write_all", "extend()")
    record = _refuse("record", "extend() several steps at a time: each call is a request")
    sampler = property(_refuse("the sampler", "describe it: connect(sampler=)"))
    set_sampler = _refuse("set_sampler", "connect() again, with another sampler=")
    can_sample = _refuse("can_sample", "sample(): it raises NotReadyError; connect(wait=) waits for rows")
    count_candidates = _refuse("count_candidates", "use sql()")
    set_rng = _refuse("set_rng", "connect() with seed=")
    writer, storage = property(_refuse("the writer", _MANAGE)), property(_refuse("the storage", _MANAGE))
    set_writer, set_storage = _refuse("set_writer", _MANAGE), _refuse("set_storage", _MANAGE)
    dim_extend, recovered = (
        property(_refuse("dim_extend", _MANAGE)),
        property(_refuse("recovered", _MANAGE)),
    )
    state_dict = _refuse("state_dict", "keep `draw`, and connect() with it")
    load_state_dict = _refuse("load_state_dict", "connect() with draw=")
    register_save_hook = register_load_hook = _refuse("a hook of versions", _MANAGE)
    empty = _refuse("empty", _MANAGE)
    columns = _Columns()
    retention = _Retention()
    specs, set_specs = property(_refuse("specs", _MANAGE)), _refuse("set_specs", _MANAGE)
    query = _refuse("query", "use sql(), then read each trajectory(episode_id)")
    to_torch_dataset = _refuse("to_torch_dataset", "iterate over the buffer: it prefetches batches")
    refresh = synchronize = _refuse("refresh", "nothing: every answer is from the store as it is now")
    _storage, _sampler = _Elsewhere(), None
    client = start = shutdown = _refuse("sharing", "connect() wherever the rows are wanted")
    is_alive = service_backend = property(_refuse("sharing", "connect() wherever the rows are wanted"))
