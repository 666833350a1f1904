"""Lazy imports of a package's public names, which its stub `__init__.pyi` lists.

`__init__.py` of packages with public names uses it, so that importing a package costs nothing. Type checkers
read the same stub. This module imports nothing else of expstore.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache


def attach(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that import the names of its `__init__.pyi` lazily.

    A name that the stub imports from a module becomes a name of the package and of its `__all__`. A module
    that the stub imports from a package becomes an attribute only.

    Args:
        package: `__name__` of the package.
    """

    @cache
    def read() -> dict[str, tuple[str, str]]:
        import ast  # here, so that importing a package is quick until one of its names is used
        import pkgutil

        stub = pkgutil.get_data(package, "__init__.pyi")
        assert stub is not None, f"the stub of {package} is missing"
        return {
            item.asname or item.name: (node.module, item.name)
            for node in ast.parse(stub).body
            if isinstance(node, ast.ImportFrom) and node.module
            for item in node.names
        }

    def load(name: str) -> object:
        value: object
        if name == "__all__":
            # `from expstore import *` must not replace Python's own `open`.
            value = sorted(
                name
                for name, (home, _) in read().items()
                if not _is_package(home) and not hasattr(builtins, name)
            )
        elif not name.startswith("__") and name in read():
            home, attribute = read()[name]
            if _is_package(home):
                value = importlib.import_module(f"{home}.{attribute}")
            else:
                value = getattr(importlib.import_module(home), attribute)
        else:
            raise AttributeError(_describe_missing(package, name, read()), obj=sys.modules[package])
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *read()})

    return load, list_names


def _describe_missing(package: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for a missing name, with the most similar known name if there is one."""
    import difflib

    message = f"module {package!r} has no attribute {name!r}"
    near = [] if name.startswith("_") else difflib.get_close_matches(name, known, 1)
    return f"{message}; did you mean {near[0]!r}?" if near else message


def _is_package(name: str) -> bool:
    """Return whether a name is that of a package. Imports at most the parent of the package."""
    from importlib.util import find_spec

    spec = find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None
