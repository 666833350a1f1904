"""Lazy imports of a package's public names, which its stub `__init__.pyi` lists.

`__init__.py` of packages with public names uses it, so that importing a package costs nothing. Type checkers
read the same stub. This module imports nothing else of expstore.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any


def attach(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that import the names of its `__init__.pyi` lazily.

    A name that the stub imports from a module becomes a name of the package and of its `__all__`. A module
    that the stub imports from a package becomes an attribute only. The error for any other name says which
    of these modules have it.

    Args:
        package: `__name__` of the package.
    """

    @cache
    def read() -> dict[str, tuple[str, str]]:
        import pkgutil

        stub = pkgutil.get_data(package, "__init__.pyi")
        assert stub is not None, f"the stub of {package} is missing"
        return _read_imports(stub.decode())

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
                value = _import_module(f"{home}.{attribute}")
            else:
                value = getattr(_import_module(home), attribute)
        else:
            homes = [] if name.startswith("_") else _find_homes(package, name, read())
            message = _describe_missing(package, name, homes, read())
            # `from package import name` replaces an AttributeError by a message of its own.
            if homes and sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise ImportError(message, name=package)
            raise AttributeError(message, obj=sys.modules[package])
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *read()})

    return load, list_names


def _import_module(name: str) -> ModuleType:
    """Import a module without garbage collections, which find nothing and take a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if was_enabled:
            gc.enable()


def _read_imports(stub: str) -> dict[str, tuple[str, str]]:
    """Return the names that a stub imports, each with its module and its name in that module."""
    import ast  # here, so that importing a package is quick until one of its names is used

    return {
        item.asname or item.name: (node.module, item.name)
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom) and node.module
        for item in node.names
    }


def _read_all(source: str) -> Iterable[str]:
    """Return the `__all__` of a module."""
    import ast

    return next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )


def _find_homes(package: str, name: str, known: dict[str, tuple[str, str]]) -> list[str]:
    """Return the modules in the stub of a package that list a name: in their stub, or in `__all__`.

    Reads their source: an import may take seconds, or need a library that is not installed.
    """
    from importlib.util import find_spec

    homes = []
    for module in (f"{home}.{short}" for short, (home, _) in known.items() if home == package):
        spec = find_spec(module)
        assert spec is not None, f"the stub of {package} lists {module}, which does not exist"
        loader: Any = spec.loader
        read: Callable[[str], Iterable[str]]
        try:
            text, read = loader.get_data(f"{spec.origin}i").decode(), _read_imports
        except FileNotFoundError:
            text, read = loader.get_data(spec.origin).decode(), _read_all
        if name in text and name in read(text):
            homes.append(module)
    return homes


def _describe_missing(package: str, name: str, homes: list[str], known: Iterable[str]) -> str:
    """Return the error message for a missing name: where it is, or the most similar known name."""
    import difflib

    message = f"module {package!r} has no attribute {name!r}"
    if homes:
        return f"{message}; it is {' or '.join(f'{home}.{name}' for home in homes)}"
    near = [] if name.startswith("_") else difflib.get_close_matches(name, known, 1)
    return f"{message}; did you mean {near[0]!r}?" if near else message


def _is_package(name: str) -> bool:
    """Return whether a name is that of a package. Imports at most the parent of the package."""
    from importlib.util import find_spec

    spec = find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None
