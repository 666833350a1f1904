"""Convert specs to trees (class and arguments of each spec), and back.

Used to convert specs to text or to TorchRL's specs. A tree consists of plain values, tensors and trees, and
depends on neither.
"""

from __future__ import annotations

from typing import Any

#: `kind` is a class's name; the other items are its arguments by name.
Tree = dict[str, Any]

#: Class -> the attributes that describe it, besides shape, device and dtype. The first matching class in this
#: order is used.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "Bounded": ("low", "high", "domain"),
    "Unbounded": ("domain",),
    "Binary": ("mask",),
    "MultiCategorical": ("nvec", "mask", "remove_singleton"),
    "MultiOneHot": ("nvec", "mask"),
    "OneHot": ("n", "mask"),
    "Categorical": ("n", "mask"),
    "NonTensor": ("example_data", "feature_dims"),
}
_KINDS = {*_ARGUMENTS, "Choice", "Composite", "Stacked", "StackedComposite"}


def take_apart(spec: Any) -> Tree:
    """Return a spec of expstore or TorchRL as a tree.

    Raises:
        TypeError: The argument is not a spec, or of an unknown kind.
        ValueError: The spec maps values by a register.
    """
    names = [kind.__name__ for kind in type(spec).__mro__]
    if "StackedComposite" in names or "Stacked" in names:
        kind = "StackedComposite" if "StackedComposite" in names else "Stacked"
        parts = spec.parts if hasattr(spec, "parts") else spec._specs
        return {"kind": kind, "dim": spec.dim, "parts": [take_apart(part) for part in parts]}
    if "Composite" in names:
        return _take_composite(spec)
    if "Choice" in names:
        tree: Tree = {"kind": "Choice", "shape": spec.shape, "device": spec.device, "dtype": spec.dtype}
        return tree | {"choices": [_take_choice(choice) for choice in _choices(spec)]}
    kind = next((name for name in names if name in _ARGUMENTS), "")
    if not kind:
        raise TypeError(f"{type(spec).__name__} is not a supported spec")
    if getattr(spec, "use_register", False):
        raise ValueError(
            f"this {kind} has use_register=True: the number of a value depends on the values before it; "
            "use a spec of the numbers themselves"
        )
    tree = {"kind": kind, "shape": spec.shape, "device": spec.device, "dtype": spec.dtype}
    return tree | {name: _argument(spec, name) for name in _ARGUMENTS[kind]}


def _take_composite(spec: Any) -> Tree:
    names = list(spec.names)
    return {
        "kind": "Composite",
        "shape": spec.shape,
        "device": spec.device,
        "names": names if any(names) else None,
        "data_cls": spec.data_cls,
        "step_mdp_static": spec.step_mdp_static,
        "specs": {key: None if part is None else take_apart(part) for key, part in spec.items()},
    }


def _choices(spec: Any) -> list[Any]:
    return list(spec.choices if hasattr(spec, "choices") else spec._choices)


def _take_choice(choice: Any) -> Any:
    """Return a choice: a spec as a tree, data that is not a tensor unchanged."""
    return take_apart(choice) if hasattr(choice, "is_in") else choice


def _argument(spec: Any, name: str) -> Any:
    if name in ("low", "high"):
        return getattr(spec.space, name)
    if name == "n":
        return int(spec.space.n)  # if n is unknown, `spec.n` is provisional or raises
    return getattr(spec, name)


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
    kind = getattr(home, name, None) if name in _KINDS else None
    if kind is None:
        raise TypeError(f"{home.__name__} has no specs of class {name}")
    if "parts" in arguments:
        return kind(*(build(part, home) for part in arguments["parts"]), dim=arguments["dim"])
    if name == "Composite":
        parts = arguments.pop("specs").items()
        return kind({key: None if part is None else build(part, home) for key, part in parts}, **arguments)
    if name == "Choice":
        return kind([build(c, home) if isinstance(c, dict) else c for c in arguments["choices"]])
    if name == "Binary":  # Binary takes no mask argument
        mask = arguments.pop("mask", None)
        made = kind(**arguments)
        if mask is not None:
            made.update_mask(mask)
        return made
    return kind(**arguments)
