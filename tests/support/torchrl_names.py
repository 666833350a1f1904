"""The names of torchrl that expstore is compared with: its replay buffers, and names of other modules.

Used by tests of names, signatures and examples. This module checks nothing itself.

    python -m tests.support.torchrl_names     write docs/torchrl_names.md
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from importlib import import_module
from typing import Any

import torchrl.data.replay_buffers as theirs

import expstore
from tests.support.paths import ROOT

#: Names outside of TorchRL's replay buffers, by module.
ELSEWHERE = {
    "DensifyReward": "torchrl.data",
    "MultiStep": "torchrl.data",
    "ReplayBufferTrainer": "torchrl.trainers",
    **dict.fromkeys(
        (
            *("CatFrames", "MultiStepTransform", "NextStateReconstructor", "RandomCropTensorDict"),
            *("Reward2GoTransform",),
        ),
        "torchrl.envs.transforms",
    ),
    **dict.fromkeys(
        (
            *("Composite", "Stacked", "StackedComposite"),
            *("Binary", "BinaryBox", "Bounded", "BoundedContinuous", "BoundedDiscrete", "Box", "BoxList"),
            *("Categorical", "CategoricalBox", "Choice", "ContinuousBox", "MultiCategorical", "MultiOneHot"),
            *("NonTensor", "OneHot", "TensorSpec", "Unbounded", "UnboundedContinuous", "UnboundedDiscrete"),
        ),
        "torchrl.data.tensor_specs",
    ),
    "split_trajectories": "torchrl.collectors.utils",
}

#: Modules of TorchRL of which everything that expstore offers is compared.
MODULES = ("torchrl.data", "torchrl.data.tensor_specs", "torchrl.envs.transforms", "torchrl.trainers")

#: All names of TorchRL that are compared.
NAMES = (*theirs.__all__, *ELSEWHERE)


def their(name: str) -> Any:
    """Return an object of torchrl by name."""
    return getattr(module(ELSEWHERE.get(name, theirs.__name__)), name)


def module(name: str) -> Any:
    """Return a module of torchrl."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules use deprecated names of others
        return import_module(name)


#: The page with the members of TorchRL's classes that ours lack.
PAGE = ROOT / "docs" / "torchrl_names.md"

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

#: Reasons for missing members: classes, members, the reason.
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
    (("Storage",), ("checkpointer",), "`dumps` has one format"),
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
    (
        ("RoundRobinWriter", "TensorDictRoundRobinWriter"),
        ("write_at",),
        "rows are appended, or replaced by `rb[index] = rows`: no slot is written out of order",
    ),
    (("TensorDictMaxValueWriter",), ("get_insert_index",), "places are decided for whole batches"),
)


def members_of(cls: type) -> set[str]:
    """Return the public members of a class, and the attributes that its constructors set."""
    found = {name for name in dir(cls) if not name.startswith("_")}
    for kind in cls.__mro__:
        init = vars(kind).get("__init__")
        if not inspect.isfunction(init):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
        except OSError:  # generated methods of a dataclass have no source
            continue
        found |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
            and not node.attr.startswith("_")
        }
    return found


def find_missing() -> dict[str, set[str]]:
    """Return the members of each TorchRL class that our class of the same name lacks.

    A `ConditionalUpdateResult` is not a tensorclass here: only its fields are compared.
    """
    missing = {}
    for name in theirs.__all__:
        if not inspect.isclass(their(name)) or not hasattr(expstore, name):
            continue
        asked = members_of(their(name))
        if name == "ConditionalUpdateResult":
            asked = {one for one in asked if one in vars(their(name)) and one.startswith("up")}
        missing[name] = asked - members_of(getattr(expstore, name))
    return {name: lacked for name, lacked in missing.items() if lacked}


def render_page() -> str:
    """Return docs/torchrl_names.md.

    Raises:
        AssertionError: A member is missing without a reason, or a reason names members that exist.
    """
    missing = find_missing()
    reasoned: dict[str, set[str]] = {}
    rows = []
    for classes, names, reason in REASONS:
        for one in classes:
            reasoned.setdefault(one, set()).update(names)
        cells = (" ".join(f"`{one}`" for one in group) for group in (classes, names))
        rows.append(f"| {' | '.join(cells)} | {reason} |")
    found = {name: lacked & missing.get(name, set()) for name, lacked in reasoned.items()}
    assert found == missing, f"without a reason: {_less(missing, found)}"
    assert reasoned == missing, f"there after all: {_less(reasoned, missing)}"
    return _HEAD + "\n".join(rows) + "\n"


def _less(one: dict[str, set[str]], other: dict[str, set[str]]) -> dict[str, set[str]]:
    return {
        name: names - other.get(name, set()) for name, names in one.items() if names - other.get(name, set())
    }


_HEAD = """# Members of TorchRL's classes that ours lack

Written by `python -m tests.support.torchrl_names` out of the installed torchrl (0.14.1);
`tests/conformance/test_torchrl_names.py` compares it. Each class of `torchrl.data.replay_buffers` that is
here was asked for its public members and the public attributes that its constructor sets. Classes that are
not here are in [torchrl.md](torchrl.md). A `ConditionalUpdateResult` is a plain dataclass: it lacks the
members of a tensorclass.

| classes | members | why not |
|---|---|---|
"""

if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
