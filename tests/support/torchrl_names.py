"""The names of torchrl that expstore is compared with: its replay buffers, and names of other modules.

Used by tests of names, signatures and examples. This module checks nothing itself.

    python -m tests.support.torchrl_names     write the last table of docs/torchrl.md
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from importlib import import_module
from typing import Any

import torchrl.data.replay_buffers as theirs

from expstore.core.torchrl_members import REASONS
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

#: Modules of expstore that have names of TorchRL.
OWN_MODULES = (
    "expstore",
    *(f"expstore.{name}" for name in ("buffers", "datasets", "samplers", "specs", "storages")),
    *(f"expstore.{name}" for name in ("trajectories", "writers")),
)

#: All names of TorchRL that are compared.
NAMES = (*theirs.__all__, *ELSEWHERE)


def their(name: str) -> Any:
    """Return an object of torchrl by name."""
    return getattr(module(ELSEWHERE.get(name, theirs.__name__)), name)


def find_own_module(name: str) -> str | None:
    """Return the module of expstore that has a name of torchrl: the top level if it has it."""
    return next((place for place in OWN_MODULES if name in import_module(place).__all__), None)


def find_own(name: str) -> Any:
    """Return the object of expstore for a name of torchrl.

    Raises:
        AttributeError: expstore does not offer it.
    """
    return getattr(import_module(find_own_module(name) or "expstore"), name)


def module(name: str) -> Any:
    """Return a module of torchrl."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules use deprecated names of others
        return import_module(name)


#: The page with the members of TorchRL's classes that ours lack, between markers.
PAGE = ROOT / "docs" / "torchrl.md"
_BEGIN, _END = "<!-- missing members -->\n", "<!-- end of missing members -->"


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
        if not inspect.isclass(their(name)) or find_own_module(name) is None:
            continue
        asked = members_of(their(name))
        if name == "ConditionalUpdateResult":
            asked = {one for one in asked if one in vars(their(name)) and one.startswith("up")}
        missing[name] = asked - members_of(find_own(name))
    return {name: lacked for name, lacked in missing.items() if lacked}


def render_table() -> str:
    """Return the table of the members that ours lack.

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
    return "\n".join(["| classes | members | why not |", "|---|---|---|", *rows]) + "\n"


def _less(one: dict[str, set[str]], other: dict[str, set[str]]) -> dict[str, set[str]]:
    return {
        name: names - other.get(name, set()) for name, names in one.items() if names - other.get(name, set())
    }


def embed(page: str) -> str:
    """Return the text of docs/torchrl.md with the table between its markers."""
    head, _, rest = page.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    assert tail, f"{PAGE} lacks the markers of the table"
    return head + _BEGIN + render_table() + _END + tail


if __name__ == "__main__":
    PAGE.write_text(embed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
