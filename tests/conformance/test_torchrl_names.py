"""Every public name of TorchRL's replay buffers is in docs/torchrl.md, with the same arguments.

The table there says for each name whether it is the same, better or not offered. Names, signatures and
members come from the installed TorchRL. Names of its other modules are in the table if they are offered.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torchrl.data.replay_buffers as theirs

import expstore
from expstore.core import torchrl_keywords
from tests.support.shape import count_own_parameters
from tests.support.torchrl_names import (
    MODULES,
    NAMES,
    OWN_MODULES,
    PAGE,
    embed,
    find_own,
    find_own_module,
    module,
    their,
)

STATUSES = ("same", "better", "not offered")

#: Members of our ReplayBuffer that TorchRL's has not.
BEYOND = {
    "close": "a store on disk has an end: what is pending is written, the lock is given back",
    "columns": "fields are added, dropped and summed up",
    "consumer": "a reader with a name, whose draws are written down",
    "consumers": "which of these there are",
    "episodes": "episodes are counted, and their rows looked up, without reading rows",
    "flush": "the moment from which on rows survive a power cut",
    "groups": "episodes that belong together, such as the answers to one prompt",
    "meta": "the user's facts about the store as a whole",
    "record_lineage": "where rows come from",
    "recovered": "what opening found after a crash",
    "refresh": "a follower in another process looks for new rows; filters take them in",
    "retention": "which rows of a store without a capacity stay",
    "schema": "which fields are stored, with shapes and dtypes",
    "selections": "lists of episodes that have a name",
    "set_specs": "what values fields may have, told later",
    "snapshots": "versions, with names that stay",
    "specs": "what values fields may have",
    "sql": "questions about everything in the store",
    "record": "steps of an environment loop",
    "to_torch_dataset": "for torch's DataLoader",
    "trajectory": "all rows of an episode in order",
    "annotate": "values that are computed after the rows, with their history",
    "by_id": "rows by id, which no other row ever has",
}

#: Members of TorchRL's ReplayBuffer that ours has not.
WITHOUT = {
    "as_remote": "other processes open the store, or get the buffer pickled",
    "prioritized_sampler": "`sampler` is the only one: writers in other processes need none of their own",
}

_REST = ("args", "kwargs")


def test_members_that_are_missing_are_in_the_page_with_a_reason() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert embed(page) == page, "run: python -m tests.support.torchrl_names"


#: The buffers, and what they cannot do without.
BUFFERS: dict[str, dict[str, Any]] = {
    "ReplayBuffer": {},
    "PrioritizedReplayBuffer": {"alpha": 0.7, "beta": 0.9},
    "TensorDictReplayBuffer": {},
    "TensorDictPrioritizedReplayBuffer": {"alpha": 0.7, "beta": 0.9},
    "HERReplayBuffer": {"reward_fn": len},
}


def table() -> dict[str, tuple[str, str, str]]:
    """Return what docs/torchrl.md says of each name: its module, the status and how, or why not."""
    found: dict[str, tuple[str, str, str]] = {}
    for line in PAGE.read_text().partition("<!-- missing members -->")[0].splitlines():
        if not line.startswith("| `"):
            continue
        names, place, status, how = (cell.strip() for cell in line.strip("| ").split(" | "))
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, f"{name} stands there twice"
            found[name] = (place.strip("`"), status, how)
    return found


TABLE = table()
OFFERED = sorted(name for name, (_, status, _) in TABLE.items() if status != "not offered")


@pytest.mark.guarantee(
    "torchrl/names",
    "Every name of `torchrl.data.replay_buffers` is offered with its arguments, or "
    "[docs/torchrl.md](docs/torchrl.md) says why it is not.",
)
def test_every_name_is_in_the_table() -> None:
    assert set(TABLE) == set(NAMES)
    assert {status for _, status, _ in TABLE.values()} == set(STATUSES)
    assert not [name for name, (_, _, how) in TABLE.items() if len(how) < 8]


def test_every_shared_name_is_in_the_table() -> None:
    offered = {name for place in OWN_MODULES for name in import_module(place).__all__}
    for place in MODULES:
        assert {name for name in dir(module(place)) if name in offered} <= set(NAMES), place


def test_exactly_the_offered_names_can_be_imported() -> None:
    places = {name: find_own_module(name) or "none" for name in TABLE}
    assert {name: place for name, (place, _, _) in TABLE.items()} == places
    assert [name for name, place in places.items() if place != "none"] == [
        name for name in TABLE if name in OFFERED
    ]


def constructors(cls: type) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a class, those too that it hands on to its bases by keyword."""
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = [*inspect.signature(vars(base)["__init__"]).parameters.values()][1:]
        yield from (one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL))
        if not any(one.kind is one.VAR_KEYWORD and one.name != "torchrl" for one in parameters):
            return


def first_by_name(parameters: Iterable[inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """Return parameters by name, in their order; a class's own before those of its bases."""
    found: dict[str, inspect.Parameter] = {}
    for one in parameters:
        found.setdefault(one.name, one)
    return found


_VOID = "taken at its default, otherwise refused with the reason"
_COMPILE = "nothing here is compiled with torch.compile"

#: Parameters of TorchRL's that our signatures do not have, and `**torchrl` takes.
THROUGH_TORCHRL = {
    **dict.fromkeys(BUFFERS, torchrl_keywords.BUFFER),
    "ReplayBufferEnsemble": torchrl_keywords.ENSEMBLE,
    "SliceSampler": torchrl_keywords.SLICES,
    "SliceSamplerWithoutReplacement": torchrl_keywords.SLICES_WITHOUT_REPLACEMENT,
    "PrioritizedSliceSampler": torchrl_keywords.PRIORITIZED_SLICES,
    "StreamingSliceSampler": torchrl_keywords.STREAMING_SLICES,
    "TensorStorage": torchrl_keywords.OBJECT_STORAGE,
    "LazyTensorStorage": torchrl_keywords.TENSOR_STORAGE,
    "LazyMemmapStorage": torchrl_keywords.MEMMAP_STORAGE,
    "ListStorage": torchrl_keywords.OBJECT_STORAGE,
    "LazyStackStorage": torchrl_keywords.OBJECT_STORAGE,
    "TensorDictMaxValueWriter": torchrl_keywords.WRITER,
}

#: Parameters of TorchRL's that ours do not have.
LESS: dict[str, dict[str, str]] = {
    **{name: dict.fromkeys(keywords, _VOID) for name, keywords in THROUGH_TORCHRL.items()},
    **{
        name: {"_encode_memo_dict": "encoding keeps nothing"}
        for name in ("Bounded", "TensorSpec", "Unbounded", "UnboundedContinuous", "UnboundedDiscrete")
    },
    "ContinuousBox": dict.fromkeys(("_batch_size", "_high", "_low", "device"), "it is `low` and `high`"),
    "Composite": {"_encode_memo_dict": "encoding keeps nothing"},
    "NonTensor": dict.fromkeys(("_encode_memo_dict", "domain", "space"), "nothing is said of objects"),
    "Storage": {
        "checkpointer": "`dumps` has one format",
        "compilable": _COMPILE,
        "max_size": "called capacity, in all storages that are not TorchRL's",
    },
    "Writer": {"compilable": _COMPILE},
    "ConditionalUpdateResult": dict.fromkeys(("batch_size", "device", "names"), "it is no tensorclass"),
}


def positional(parameters: Iterable[inspect.Parameter], less: Iterable[str] = ()) -> list[str]:
    """Return the names of those that can be given by position, without some."""
    return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.name not in less]


@pytest.mark.guarantee("torchrl/names")
@pytest.mark.parametrize("name", OFFERED)
def test_constructors_take_torchrls_arguments(name: str) -> None:
    own, other = find_own(name), their(name)
    if inspect.isfunction(other):
        assert inspect.signature(own).parameters.keys() == inspect.signature(other).parameters.keys()
    if not inspect.isclass(other):
        pytest.skip("not a class")
    ours, asked = (first_by_name(constructors(cls)) for cls in (own, other))
    assert set(asked) - set(ours) == set(LESS.get(name, {})) & set(asked)
    for parameter in set(asked) & set(ours):
        default = asked[parameter].default
        told = default is not inspect.Parameter.empty and not isinstance(default, property)
        same = ours[parameter].default == default or repr(ours[parameter].default) == repr(default) == "nan"
        assert not told or same, parameter
    positions = positional(asked.values(), LESS.get(name, {}))
    assert positional(ours.values())[: len(positions)] == positions


#: Values that ask for what does not exist here; keywords without one are accepted with every value.
ASKED: dict[str, object] = {
    "checkpointer": object(),
    "cleanup_memmap": False,
    "compilable": True,
    "compile": {"mode": "default"},
    "consolidated": True,
    "consume_after_n_samples": 2,
    "delayed_init": True,
    "dim_extend": 1,
    "pin_memory": True,
    "prefetch": 2,
    "sample_unit": object(),
    "sampler": object(),
    "sampler_device": "cuda",
    "service_backend": "ray",
    "service_backend_options": {"max_restarts": 1},
    "shared": True,
    "shared_init": True,
    "storage": object(),
    "sync": False,
    "transform_factory": object(),
    "transport": "distributed",
    "transport_options": {"port": 1},
    "use_gpu": torch.device("cuda"),
    "writer": object(),
}
#: Keywords that make no difference to the constructor, and values that programs give them.
EITHER: dict[str, list[object]] = {
    "cache_values": [True, False],
    "ends": [torch.ones(3, dtype=torch.bool)],
    "fragmented": [True, False],
    "trajectories": [torch.zeros(3, dtype=torch.int64)],
    "step_key": ["step_count", ("next", "step_count"), None],
}
#: What the classes need besides the buffers.
NEEDED: dict[str, dict[str, Any]] = {
    **BUFFERS,
    "SliceSampler": {"slice_len": 2},
    "SliceSamplerWithoutReplacement": {"slice_len": 2},
    "PrioritizedSliceSampler": {"max_capacity": 10, "alpha": 0.7, "beta": 0.9, "slice_len": 2},
    "StreamingSliceSampler": {"slice_len": 2},
    "TensorStorage": {"storage": torch.zeros(3)},
    "LazyTensorStorage": {"max_size": 10},
    "LazyMemmapStorage": {"max_size": 10},
    "ListStorage": {"max_size": 10},
    "LazyStackStorage": {"max_size": 10},
    "TensorDictMaxValueWriter": {},
}


def test_every_void_keyword_is_tried() -> None:
    tried = {keyword for keywords in THROUGH_TORCHRL.values() for keyword in keywords}
    assert tried == ASKED.keys() | EITHER.keys()
    assert not ASKED.keys() & EITHER.keys()
    assert torchrl_keywords.VOID.keys() - tried == set(torchrl_keywords.PRIORITIZED)


@pytest.mark.guarantee("torchrl/keywords", "No keyword is accepted and ignored.")
@pytest.mark.parametrize("name", THROUGH_TORCHRL)
def test_ignored_keywords_are_refused_except_for_defaults(name: str) -> None:
    needed = NEEDED.get(name, {})
    make: Any = partial(getattr(expstore, name), **needed)
    if name == "ReplayBufferEnsemble":
        make = partial(expstore.ReplayBufferEnsemble, expstore.ReplayBuffer())
    defaults = {one.name: one.default for one in constructors(getattr(theirs, name))}
    for keyword in THROUGH_TORCHRL[name]:
        if keyword in defaults:
            make(**{keyword: defaults[keyword]})
        for value in EITHER.get(keyword, ()):
            make(**{keyword: value})
        if keyword in ASKED:
            with pytest.raises(ValueError, match=rf"(?s){name} does not support {keyword}=.{{20,}}"):
                make(**{keyword: ASKED[keyword]})
    every = {keyword: default for keyword, default in defaults.items() if keyword in THROUGH_TORCHRL[name]}
    make(**every)
    with pytest.raises(TypeError, match=f"{name} got an unexpected keyword argument 'no_such_keyword'"):
        make(no_such_keyword=1)


@pytest.mark.parametrize("name", sorted(name for name in OFFERED if name.endswith("Sampler")))
def test_samplers_have_few_parameters_of_their_own(name: str) -> None:
    assert count_own_parameters(find_own(name)) <= 16


def members(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


@pytest.mark.parametrize("name", BUFFERS)
def test_public_members_are_those_of_the_list(name: str) -> None:
    ours, asked = members(getattr(expstore, name)), members(getattr(theirs, name))
    attributes = {one.name for one in constructors(getattr(theirs, name))}  # which objects have, not classes
    attributes.add("shared")  # which all of them have
    assert ours - asked - attributes == set(BEYOND)
    assert asked - ours == set(WITHOUT) & asked
    assert len(BEYOND) <= 23
    assert not [why for why in (*BEYOND.values(), *WITHOUT.values()) if len(why) < 8]


#: Parameters of methods that ours do not have.
METHODS_LESS: dict[tuple[str, str], str] = {}
#: Names by which nobody calls an only argument.
CALLED = {"tensordicts": "data"}


@pytest.mark.parametrize("name", BUFFERS)
def test_methods_take_torchrls_arguments(name: str) -> None:
    own, other = getattr(expstore, name), getattr(theirs, name)
    for member in sorted(members(other) & members(own)):
        ours, asked = getattr(own, member), getattr(other, member)
        if isinstance(ours, property) or isinstance(asked, property):
            assert isinstance(ours, property) == isinstance(asked, property), member
            continue
        taken = {one.name: one for one in inspect.signature(ours).parameters.values()}
        wanted = [one for one in inspect.signature(asked).parameters.values() if one.name not in _REST]
        less = {one.name for one in wanted if CALLED.get(one.name, one.name) not in taken}
        assert {(member, one) for one in less} == {
            pair for pair in METHODS_LESS if pair[0] == member and pair[1] in {one.name for one in wanted}
        }, member
        places = [CALLED.get(one, one) for one in positional(wanted, less)]
        assert positional(taken.values())[: len(places)] == places, member
