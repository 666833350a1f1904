"""Packages whose names load when first used: the stub beside `__init__.py` lists them, once.

Used by `__init__.py` of packages with public names, so that importing a package costs nothing. Type checkers
read the same stub. It imports nothing of expstore by itself.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable

__all__ = ["attach"]


def attach(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package: they load what its `__init__.pyi` imports.

    `from expstore.buffers.rng import Draws as Draws` in the stub makes `Draws` a name of the package;
    `from expstore.buffers import schedulers as schedulers` makes a module one.

    Args:
        package: `__name__` of the package.
    """
    homes: dict[str, tuple[str, str]] = {}

    def names() -> dict[str, tuple[str, str]]:
        if not homes:
            stub = pkgutil.get_data(package, "__init__.pyi")
            assert stub is not None, f"the stub of {package} is missing"
            for node in ast.parse(stub).body:
                if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                    module = node.module or package
                    homes.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
        return homes

    def load(name: str) -> object:
        if name == "__all__":
            return sorted(names())
        if name.startswith("__") or name not in names():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = names()[name]
        value: object
        if module != package and hasattr(importlib.import_module(module), attribute):
            value = getattr(importlib.import_module(module), attribute)
        else:
            value = importlib.import_module(f"{module}.{attribute}")
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names()})

    return load, listed
