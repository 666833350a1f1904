"""Members of TorchRL's classes that ours lack, with the reasons.

Reading one raises an error that gives the reason; `torchrl_keywords` does so for keywords of constructors.
"""

from __future__ import annotations

from typing import NoReturn

from expstore.errors import MissingMemberError

_STORAGES = (
    *("Storage", "ListStorage", "LazyStackStorage", "TensorStorage", "LazyTensorStorage"),
    *("LazyMemmapStorage", "StorageEnsemble"),
)
_BUFFERS = (
    *("ReplayBuffer", "PrioritizedReplayBuffer", "TensorDictReplayBuffer", "HERReplayBuffer"),
    *("TensorDictPrioritizedReplayBuffer", "ReplayBufferEnsemble"),
)
_SLICES = (
    *("SliceSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler"),
    "StreamingSliceSampler",
)
_IGNORED = "the value of a keyword that has no effect here"
_MEMBERS = "its members have them: call the member's, or the buffer's"

#: Members that classes lack: classes, members, the reason.
REASONS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (_BUFFERS, ("as_remote",), "other processes open the store, or get the buffer pickled"),
    (
        ("PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer"),
        ("prioritized_sampler",),
        "`sampler` is the only one: writers in other processes need none of their own",
    ),
    (
        ("ReplayBufferEnsemble",),
        (
            *("dim_extend", "initialized", "mark_update", "query", "read_all_in_order", "register_load_hook"),
            *("register_save_hook", "set_", "set_at_", "set_sampler", "set_storage", "set_writer", "update_"),
            *("write_all", "write_count"),
        ),
        "a member's, by `ensemble[number]`: the ensemble has no storage, sampler or writer of its own",
    ),
    (
        ("ReplayBufferEnsemble",),
        ("routing_dim", "routing_key"),
        "settings of `extend`, fixed when it is made",
    ),
    (_SLICES, ("cache_values", "compile", "fragmented", "step_key", "use_gpu"), _IGNORED),
    (
        _SLICES,
        ("end_key", "end_keys"),
        "the store knows where episodes end; other fields are named by the constructor",
    ),
    (
        ("SamplerWithoutReplacement", "SliceSamplerWithoutReplacement"),
        ("len_storage",),
        "the length of the storage, which the storage tells",
    ),
    (
        ("SamplerEnsemble",),
        (
            *("add", "can_sample", "default_priority", "dumps", "extend", "load_state_dict", "loads"),
            *("mark_update", "ran_out", "sample", "state_dict", "update_priority"),
        ),
        _MEMBERS,
    ),
    (
        ("WriterEnsemble",),
        (
            *("add", "dumps", "extend", "generations_of", "load_state_dict", "loads", "register_storage"),
            *("state_dict", "tracks_generations"),
        ),
        _MEMBERS,
    ),
    (
        ("StorageEnsemble",),
        (
            *(
                "add",
                "contains",
                "dump",
                "dumps",
                "extend",
                "get",
                "load",
                "load_state_dict",
                "loads",
                "ndim",
            ),
            *("register_load_hook", "register_save_hook", "save", "set", "shape", "state_dict"),
        ),
        _MEMBERS,
    ),
    (_STORAGES, ("attach",), "a buffer attaches its parts itself"),
    (_STORAGES, ("flatten",), "rows of several dims are found by `geometry`; reading them copies anyway"),
    (
        _STORAGES,
        ("supports_conditional_update",),
        "`update_if_present` of the buffer works with all storages of tensors",
    ),
    (
        ("TensorStorage", "LazyTensorStorage", "LazyMemmapStorage"),
        ("initialized",),
        "a storage without rows has `schema` None",
    ),
    (
        ("LazyTensorStorage", "LazyMemmapStorage"),
        ("cleanup_memmap", "consolidated", "shared_init"),
        _IGNORED,
    ),
    (("LazyMemmapStorage",), ("existsok",), "a setting of the constructor, of no use later"),
    (("LazyStackStorage",), ("stack_dim",), "`row_traits.stack_dim`"),
    (
        ("Storage",),
        ("dump", "dumps", "load", "loads", "save"),
        "storages that can carry their content have them; a storage of your own need not",
    ),
    (("TensorDictMaxValueWriter",), ("get_insert_index",), "places are decided for whole batches"),
)


#: The same for specs, which docs/torchrl.md describes.
SPECS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (
        ("TensorSpec",),
        ("memoize_encode", "erase_memoize_cache"),
        "`encode` keeps no values: call it once per value and keep the result",
    ),
    (
        ("OneHot", "MultiOneHot"),
        ("use_register",),
        "TorchRL's register is shared by all specs of a program: number your values yourself, and encode the "
        "numbers",
    ),
)

_BY_CLASS = {
    (kind, name): reason for kinds, names, reason in (*REASONS, *SPECS) for kind in kinds for name in names
}


def find_member(instance: object, name: str) -> NoReturn:
    """Raise the error for an attribute that an object lacks; classes use it as their `__getattr__`.

    Raises:
        MissingMemberError: TorchRL's class has the attribute; the message says why ours has not.
        AttributeError: No class has it, or it is a property that raised this error.
    """
    for kind in type(instance).__mro__:
        reason = _BY_CLASS.get((kind.__name__, name))
        if reason is not None:
            raise MissingMemberError(f"a {type(instance).__name__} has no {name}: {reason}")
    raise _standard_error(instance, name)


def _standard_error(instance: object, name: str) -> AttributeError:
    """Return the error that Python raises for the attribute: also one raised within a property."""
    try:
        object.__getattribute__(instance, name)
    except AttributeError as exc:
        return exc
    return AttributeError(name)  # another thread has set it meanwhile
