"""Rules about the source that import-linter and ruff cannot express.

The tests read the source with `ast` and import nothing of expstore. import-linter (`[tool.importlinter]` in
pyproject.toml) checks which package imports which, and ruff's `banned-api` finds imports of modules that
files. The tables below are the rules: edit them in the commit that needs the change.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from tests.support.paths import ROOT

# ---------------------------------------------------------------------------------------------------
# Libraries. Modules are named without `expstore.`; a package stands for everything in it.

#: library -> the only packages that may import it.
HOME_OF_LIBRARY: dict[str, set[str]] = {
    "anyio": {"api"},
    "cloudpickle": {"collectors", "datasets"},
    "duckdb": {"sql"},
    "fastapi": {"api"},
    "gymnasium": {"cli", "collectors", "gym", "sb3", "specs"},
    "h11": {"api"},
    "h5py": {"exchange"},
    "httpcore": {"api"},
    "httpx": {"api", "datasets", "remote"},  # api: the page over shards asks their servers
    "llvmlite": {"kernels"},
    "matplotlib": {"plot"},
    "numba": {"kernels"},
    "numcodecs": {"kernels", "storages.format"},
    "obstore": {"cold"},
    "pandas": {"sql"},
    "polars": {"sql"},
    "prometheus_client": {"api"},
    "pyarrow": {
        "data",
        "datasets",
        "exchange",
        "maintenance",
        "schema",
        "sql",
        "storages.columns",
        "storages.snapshots",
        "testing",
        "wire",
    },
    "pydantic": {"api"},
    "ray": {"on_ray"},
    "rich": {"cli", "exchange.base"},
    "starlette": {"api"},
    "torchrl": {"specs", "torchrl", "transforms.torchrl_twin"},
    "typer": {"cli"},
    "uvicorn": {"api"},
    "zarr": set(),  # the library writes the format itself; tests read it with zarr-python
}

#: Extras of pyproject.toml that the library itself does not import.
DEVELOPERS = {"bench", "dev", "docs"}

#: Importing one of these takes seconds.
SLOW_LIBRARIES = {"gymnasium", "tensordict", "torch", "torchrl"}

#: Packages that import no slow library while they are imported, so that the command line and SQL start fast.
FAST_PACKAGES = {
    "cli",
    "cold",
    "core",
    "disk",
    "episodes",
    "errors",
    "exchange",
    "kernels",
    "maintenance",
    "plot",
    "rate_limiters",
    "schema",
    "sql",
    "storages",
}

# ---------------------------------------------------------------------------------------------------
# Files.

#: The only module that touches files.
FILES_MODULE = "disk.files"

FILE_LIBRARIES = {"fcntl", "fileinput", "glob", "mmap", "pickle", "shelve", "shutil", "tempfile"}

#: The names of `os` that touch no file.
OS_ALLOWED = {
    "PathLike", "cpu_count", "environ", "fsdecode", "fsencode", "fspath", "get_terminal_size", "getpid",
    "getppid", "kill", "linesep", "name", "nice", "path", "register_at_fork", "sched_getaffinity", "sep",
    "strerror", "uname", "urandom",
}  # fmt: skip
OS_PATH_ALLOWED = {
    "basename",
    "commonpath",
    "dirname",
    "isabs",
    "join",
    "normpath",
    "relpath",
    "split",
    "splitext",
}

#: Methods of pathlib.Path that touch files. `replace` is missing because str has it too.
PATH_METHODS = {
    "chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "mkdir",
    "open", "read_bytes", "read_text", "rename", "rglob", "rmdir", "samefile", "stat", "symlink_to", "touch",
    "unlink", "walk", "write_bytes", "write_text",
}  # fmt: skip

#: Such a method is allowed on these names (a Disk, a file that a Disk opened, `expstore.open`), and on a
#: class other than Path, as in `Index.open`.
DISK_NAMES = {"_disk", "_file", "disk", "expstore", "file"}

ARRAY_FILE_FUNCTIONS = {"fromfile", "load", "loadtxt", "memmap", "save", "savetxt", "savez"}

#: module -> what it may do nevertheless, worded as in the messages.
FILE_EXCEPTIONS: dict[str, set[str]] = {
    "datasets.kinds.gen_dgrl": {".open()"},  # tarfile.open, of a file that the Disk has opened
    "datasets.kinds.minari": {".open()"},  # Image.open, of bytes
    "exchange.numpy_unpickler": {"pickle"},  # its Unpickler, of such a file, without any name of a pickle's
    "datasets.kinds.openx": {".open()", "pickle"},  # tarfile.open; pickle only where a user trusts the files
    "data.memory_maps": {"np.memmap"},  # of a file whose size was compared with its shape
    "disk.message_socket": {"os.close", "os.geteuid"},  # of a descriptor that came by a socket
    "disk.shared_memory": {
        "fcntl",
        "mmap",
        "os.MFD_ALLOW_SEALING",
        "os.MFD_CLOEXEC",
        "os.close",
        "os.fstat",
        "os.ftruncate",
        "os.memfd_create",
    },  # memory without a file
    "sql.sandbox.confine": {".open()"},  # libc.open with O_PATH names a folder for Landlock and reads nothing
}

# ---------------------------------------------------------------------------------------------------
# The source.


@dataclass(frozen=True)
class Module:
    """One file: its name without `expstore.` ("" is the package itself) and its syntax tree."""

    name: str
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[tuple[ast.AST, bool]]:
        """Every node, and whether it runs when the module is imported."""
        return list(walk(self.tree))

    def is_in(self, packages: Iterable[str]) -> bool:
        return any(self.name == package or self.name.startswith(f"{package}.") for package in packages)


@dataclass(frozen=True)
class Import:
    """One imported name, in full."""

    target: str
    line: int
    at_import: bool  # False in a function and under TYPE_CHECKING

    @property
    def library(self) -> str:
        return self.target.partition(".")[0]


def find_modules() -> dict[str, Module]:
    """Return every module of expstore and api by name. `rglob` does not follow the link expstore/api."""
    found = {}
    for folder, prefix in (("expstore", ()), ("api", ("api",))):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = (*prefix, *file.relative_to(ROOT / folder).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, ast.parse(file.read_text(encoding="utf-8"), str(file)))
    return found


def walk(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node below this one, and whether it runs when the module is imported."""
    waiting = [(tree, True)]
    while waiting:
        node, at_import = waiting.pop()
        at_import = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        skipped: Sequence[ast.AST] = ()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            skipped = node.body
        for child in ast.iter_child_nodes(node):
            waiting.append((child, at_import and child not in skipped))
            yield waiting[-1]


def imports_of(module: Module) -> Iterator[Import]:
    """Yield what import statements and `import_module("...")` name."""
    for node, at_import in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, at_import)
        elif isinstance(node, ast.Call) and (target := module_in_string(node)):
            yield Import(target, node.lineno, at_import)


def module_in_string(call: ast.Call) -> str:
    """Return what `import_module("...")` imports, "" for any other call."""
    if last_name(call.func) in {"__import__", "import_module"} and call.args:
        target = getattr(call.args[0], "value", None)
        return target if isinstance(target, str) else ""
    return ""


def last_name(node: ast.expr) -> str:
    """Return `c` of `a.b.c` and `a` of `a`, "" for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# ---------------------------------------------------------------------------------------------------
# The checks: each yields one message per violation.


def check_libraries(module: Module) -> Iterator[str]:
    """Find imports of a library outside its packages, and slow imports in fast packages."""
    fast = module.name == "" or module.is_in(FAST_PACKAGES)
    for item in imports_of(module):
        where, homes = f"{module.name}:{item.line}", HOME_OF_LIBRARY.get(item.library)
        if homes is not None and not module.is_in(homes):
            yield f"{where}: imports {item.library}; only {', '.join(sorted(homes))} may"
        if fast and item.at_import and item.library in SLOW_LIBRARIES:
            yield f"{where}: imports {item.library} at import time; import it in the function that needs it"


def check_strings(module: Module) -> Iterator[str]:
    """Find modules of ours that are imported by a string, which import-linter does not see."""
    for node, _ in module.nodes:
        if isinstance(node, ast.Call) and module_in_string(node).partition(".")[0] == "expstore":
            yield f"{module.name}:{node.lineno}: imports {module_in_string(node)} by a string; use `import`"


def check_files(module: Module) -> Iterator[str]:
    """Find operations on files outside the one module that does them."""
    if module.name != FILES_MODULE:
        for line, operation in file_operations(module):
            if operation not in FILE_EXCEPTIONS.get(module.name, ()):
                yield f"{module.name}:{line}: {operation} touches files; use the Disk of {FILES_MODULE}"


def file_operations(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that looks like an operation on files."""
    for item in imports_of(module):
        library, _, name = item.target.partition(".")
        if library in FILE_LIBRARIES:
            yield item.line, library
        elif library == "os" and name and name not in OS_ALLOWED:
            yield item.line, item.target
    for node, _ in module.nodes:
        if isinstance(node, ast.Attribute):
            owner, name = last_name(node.value), node.attr
            if (
                (owner == "os" and name not in OS_ALLOWED)
                or (owner == "io" and name in {"FileIO", "open"})
                or (owner in {"np", "numpy", "torch"} and name in ARRAY_FILE_FUNCTIONS)
                or (ast.unparse(node.value) == "os.path" and name not in OS_PATH_ALLOWED)
            ):
                yield node.lineno, f"{ast.unparse(node.value)}.{name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno, "open()"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, name = last_name(node.func.value), node.func.attr
            is_class = owner[:1].isupper() and owner != "Path"
            is_module = ast.unparse(node.func.value) in {"io", "os", "os.path"}  # reported above
            if name in PATH_METHODS and owner not in DISK_NAMES and not is_class and not is_module:
                yield node.lineno, f".{name}()"


# ---------------------------------------------------------------------------------------------------
# The tests.


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return find_modules()


def assert_none(violations: Iterable[str]) -> None:
    """Fail with one line per violation."""
    found = list(violations)
    assert not found, "\n" + "\n".join(found)


def test_every_named_module_exists(modules: dict[str, Module]) -> None:
    named = {FILES_MODULE, *FILE_EXCEPTIONS, *FAST_PACKAGES}.union(*HOME_OF_LIBRARY.values())
    assert named <= set(modules)


def test_every_file_exception_is_needed(modules: dict[str, Module]) -> None:
    for name, operations in FILE_EXCEPTIONS.items():
        assert operations <= {operation for _, operation in file_operations(modules[name])}


def test_libraries_are_imported_by_their_packages_only(modules: dict[str, Module]) -> None:
    assert_none(message for module in modules.values() for message in check_libraries(module))


def test_only_the_disk_touches_files(modules: dict[str, Module]) -> None:
    assert_none(message for module in modules.values() for message in check_files(module))


def test_each_tunable_has_one_value() -> None:
    """A name that is assigned twice changes the value of the first for all who use it."""
    body = ast.parse((ROOT / "expstore/core/tuning.py").read_text()).body
    targets = [
        target.id
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    assert "HEARTBEAT_SECONDS" in targets
    assert sorted(set(targets)) == sorted(targets)


def test_no_module_of_ours_is_imported_by_a_string(modules: dict[str, Module]) -> None:
    assert_none(message for module in modules.values() for message in check_strings(module))


def test_every_dependency_is_used(modules: dict[str, Module]) -> None:
    """A module imports it, or names it in a string, as those do that come with an extra."""
    named = {one.library for module in modules.values() for one in imports_of(module)}
    strings = (node.value for module in modules.values() for node, _ in module.nodes
               if isinstance(node, ast.Constant) and isinstance(node.value, str))  # fmt: skip
    named.update(string.partition(".")[0] for string in strings)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in extras.keys() - DEVELOPERS)]
    listed = {plain_name(requirement) for each in lists for requirement in each}
    homes = importlib.metadata.packages_distributions()
    used = {plain_name(home) for name in named for home in homes.get(name, ())}
    assert_none(f"{name} is listed in pyproject.toml, and never imported" for name in sorted(listed - used))


def plain_name(requirement: str) -> str:
    """Return the name of a distribution as package indexes compare it, without versions."""
    return re.sub("[-_.]+", "-", re.split("[^A-Za-z0-9._-]", requirement)[0]).lower()


# The checks must be able to fail.


def module_of(name: str, source: str) -> Module:
    return Module(name, ast.parse(source))


def test_what_the_checks_find() -> None:
    def count(check: Callable[[Module], Iterator[str]], source: str, name: str = "storages.base") -> int:
        return len(list(check(module_of(name, source))))

    for name, source in [
        ("storages.memory", "def f():\n    import zarr.storage"),
        ("buffers.sampling", "import importlib\nimportlib.import_module('torchrl.data')"),
        ("storages.base", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("storages.base", "class A:\n    from tensordict import TensorDict"),
        ("", "import torch"),
        ("apish", "import fastapi"),
    ]:
        assert count(check_libraries, source, name) == 1, source
    assert count(check_libraries, "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch") == 0
    for source in [
        "open('x')",
        "import os\nos.rename('a', 'b')",
        "from os import unlink",
        "import os\nos.path.exists('a')",
        "import shutil",
        "(path / 'x').mkdir()",
        "Path('x').open()",
        "Path.mkdir(path)",
        "self.path.unlink()",
        "np.memmap('x')",
    ]:
        assert count(check_files, source) == 1, source
    for source in [
        "self._disk.rename(a, b)",
        "disk.open(path)",
        "Index.open(path)",
        "import os\nos.getpid()",
    ]:
        assert count(check_files, source) == 0, source
    assert (
        count(check_strings, "from importlib import import_module\nimport_module('expstore.sql.index')") == 1
    )
