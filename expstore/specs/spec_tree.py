"""Convert specs to trees (class and arguments of each spec), and back.

Used to convert specs to text or to TorchRL's specs. A tree consists of plain values, tensors and trees, and
depends on neither.
"""

from __future__ import annotations

from typing import Any

from expstore import specs
from expstore.specs.base import create, read_argument

#: `kind` is a class's name; the other items are its arguments by name.
Tree = dict[str, Any]

_LEAVES = (
    *("Bounded", "Unbounded", "Binary", "MultiCategorical", "MultiOneHot", "OneHot", "Categorical"),
    "NonTensor",
)
_GROUPS = ("StackedComposite", "Stacked", "Composite", "Choice")


def take_apart(spec: Any) -> Tree:
    """Return a spec of expstore or TorchRL as a tree.

    Raises:
        TypeError: The argument is not a spec, or of an unknown kind.
        ValueError: The spec maps values by a register.
    """
    kind = next((k.__name__ for k in type(spec).__mro__ if k.__name__ in (*_LEAVES, *_GROUPS)), None)
    if kind is None:
        raise TypeError(f"{type(spec).__name__} is not a supported spec")
    if kind in ("StackedComposite", "Stacked"):
        parts = spec.parts if hasattr(spec, "parts") else spec._specs
        return {"kind": kind, "dim": spec.dim, "parts": [take_apart(part) for part in parts]}
    tree: Tree = {"kind": kind, "shape": spec.shape, "device": spec.device}
    if kind == "Composite":
        names = list(spec.names)
        return tree | {
            "names": names if any(names) else None,
            "data_cls": spec.data_cls,
            "step_mdp_static": spec.step_mdp_static,
            "specs": {key: None if part is None else take_apart(part) for key, part in spec.items()},
        }
    tree["dtype"] = spec.dtype
    if kind == "Choice":
        choices = spec.choices if hasattr(spec, "choices") else spec._choices
        return tree | {"choices": [take_apart(one) if hasattr(one, "is_in") else one for one in choices]}
    if getattr(spec, "use_register", False):
        raise ValueError(
            f"this {kind} has use_register=True: the number of a value depends on the values before it; "
            "use a spec of the numbers themselves"
        )
    return tree | {name: read_argument(spec, name) for name in getattr(specs, kind)._arguments}


def build(tree: Tree, home: Any) -> Any:
    """Return the spec that a tree describes.

    Args:
        tree: A tree that `take_apart` returned.
        home: The module with the classes.

    Raises:
        TypeError: The module has no such class.
    """
    arguments = dict(tree)
    name = arguments.pop("kind")
    kind = getattr(home, name, None) if name in (*_LEAVES, *_GROUPS) else None
    if kind is None:
        raise TypeError(f"{home.__name__} has no specs of class {name}")
    if "parts" in arguments:
        return kind(*(build(part, home) for part in arguments["parts"]), dim=arguments["dim"])
    if name == "Composite":
        parts = arguments.pop("specs").items()
        return kind({key: None if part is None else build(part, home) for key, part in parts}, **arguments)
    if name == "Choice":
        return kind([build(c, home) if isinstance(c, dict) else c for c in arguments["choices"]])
    return create(kind, arguments)
