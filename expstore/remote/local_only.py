"""The names of a buffer that mean nothing over a connection: each says what to do instead.

Used by the client's buffer. It does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from expstore.errors import RemoteError

__all__ = ["LocalEpisodes", "LocalOnly"]


def _refused(name: str, hint: str) -> Callable[..., NoReturn]:
    """Return a method that says what to do instead."""

    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise RemoteError(f"{name} is not done over a connection", kind="local_only", hint=hint)

    refuse.__name__ = name
    refuse.__doc__ = f"Say what to do instead of `{name}`: {hint}."
    return refuse


_TRANSFORM = "transform the batches that come, or those that you send"
_MANAGE = "do it where the store is, with expstore.open()"


class _Elsewhere:
    """Stand for the storage: TorchRL's collectors ask it for its device, and whether it has rows."""

    initialized = True
    device = None


class _Columns:
    """Refuse `rb.columns`."""

    add, drop = _refused("columns.add", _MANAGE), _refused("columns.drop", _MANAGE)
    stats = _refused("columns.stats", "ask by sql(), or open the store where it is with mode='r'")


class _Retention:
    """Refuse `rb.retention`."""

    policy = property(_refused("retention.policy", _MANAGE))
    set, apply = _refused("retention.set", _MANAGE), _refused("retention.apply", _MANAGE)


class LocalEpisodes:
    """Refuse what `rb.episodes` offers where the store is."""

    annotate = _refused("episodes.annotate", "give episode_info= to extend()")
    delete = _refused("episodes.delete", _MANAGE)


class LocalOnly:
    """Refuse what needs the rows at hand, or is for who manages the store.

    Every one of these raises RemoteError, of kind "local_only"; those that are properties of a buffer do when
    they are read.
    """

    append_transform = insert_transform = _refused("a transform", _TRANSFORM)
    transform = property(_refused("a transform", _TRANSFORM))
    __getitem__ = _refused("rb[...]", "ask by id: by_id(ids), or by episode: trajectory(episode_id)")
    read_all_in_order = _refused("reading all rows", "ask by sql(), or by episode: trajectory(episode_id)")
    __setitem__ = set_ = set_at_ = update_ = _refused("changing rows", _MANAGE)
    update_if_present = submit_update_if_present = _refused("changing rows", _MANAGE)
    mark_update = _refused("mark_update", "give the new priorities: update_priority(id=, priority=)")
    write_all = _refused("write_all", "extend()")
    record = _refused("record", "extend() some steps at a time: each call is a request")
    sampler = property(_refused("the sampler", "describe it: connect(sampler=)"))
    set_sampler = _refused("set_sampler", "connect() once more, with another sampler=")
    can_sample = _refused("can_sample", "sample(): it raises NotReadyError; connect(wait=) waits for rows")
    count_candidates = _refused("count_candidates", "ask by sql()")
    set_rng = _refused("set_rng", "connect() with seed=")
    writer, storage = property(_refused("the writer", _MANAGE)), property(_refused("the storage", _MANAGE))
    set_writer, set_storage = _refused("set_writer", _MANAGE), _refused("set_storage", _MANAGE)
    dim_extend, recovered = (
        property(_refused("dim_extend", _MANAGE)),
        property(_refused("recovered", _MANAGE)),
    )
    state_dict = _refused("state_dict", "keep `draw`, and connect() with it")
    load_state_dict = _refused("load_state_dict", "connect() with draw=")
    register_save_hook = register_load_hook = _refused("a hook of versions", _MANAGE)
    empty = _refused("empty", _MANAGE)
    columns = _Columns()
    retention = _Retention()
    specs, set_specs = property(_refused("specs", _MANAGE)), _refused("set_specs", _MANAGE)
    query = _refused("query", "ask by sql(), then take each trajectory(episode_id)")
    to_torch_dataset = _refused("to_torch_dataset", "iterate over the buffer: batches are made ahead")
    refresh = synchronize = _refused("refresh", "ask: every answer is of the store as it is now")
    _storage = _Elsewhere()
    #: Collectors of several processes ask it, and call `share` then.
    shared = False
    share = _refused(
        "sharing",
        "a collector of several processes cannot write over it yet: call extend() with the batches that it "
        "yields, or let every process connect() and run a Collector",
    )
    client = start = shutdown = _refused("sharing", "connect() wherever the rows are wanted")
    is_alive = service_backend = property(_refused("sharing", "connect() wherever the rows are wanted"))
