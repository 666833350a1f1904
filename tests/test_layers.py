"""The shape of the code: which module may import which, who touches files, how large things get.

Run with the other tests; the tables below are the rules and are meant to be edited in the open. It
reads source with `ast` and imports nothing of expstore.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import pytest

from tests.support.paths import ROOT

# ---------------------------------------------------------------------------------------------------
# The rules. Modules are named without `expstore.`; a package stands for everything in it.

#: From the ground up. A module imports only from lines before its own.
LINES: tuple[tuple[str, str], ...] = (
    (
        "0",
        "errors gaps types members compiled files addresses bulk kernels gathering native compressing "
        "unpacking arrowbuffers turns aside confine pipes",
    ),
    (
        "1",
        "schema arrowtypes arrowvalues raggedcolumns widening fitting picking fieldtypes spectext manifest "
        "lock probe retain state journal journaltail pieces episodes episodelog "
        "episodeinfo sources fragments sumtree ranking ranktree runtable limiter touched keys "
        "writekeys keyfile",
    ),
    ("2", "index delta expressions relations history halves shownvalues named result migrate"),
    ("2b", "ragged raggedrows leaves looserows batches forms specs frames"),
    ("3", "storages snapshots dumping making"),
    ("3b", "sqlworker sqlchild"),
    (
        "4",
        "domains writers draws prefetch samplers sample_units transforms query routing framing codec "
        "trajectories postprocs connection",
    ),
    (
        "5",
        "retention handles drawing shaping patches latefields keyed keywords finding streams service parts "
        "torchdatasets feed localonly",
    ),
    ("5a", "buffers client"),
    (
        "5b",
        "tensordictbuffers prioritized seeded hindsight offline schedulers memberpatches ensembles checks",
    ),
    ("6", "door"),
    ("7", "collectors datasets exchange interop merging resizing trainers"),
    ("8", "api testing"),
    (
        "9",
        "cli cli_checks cli_codes cli_columns cli_export cli_info cli_migrate cli_print cli_query "
        "cli_reshape cli_retain cli_serve cli_snapshots cli_stop __main__",
    ),
)

#: (importer, imported) on one line, as patterns. Whatever is not here is a sideways import.
ALLOWED_SIDEWAYS: tuple[tuple[str, str], ...] = (
    ("types", "errors"),
    ("types", "gaps"),
    ("files", "compiled"),
    ("files", "errors"),
    ("files", "kernels"),
    ("addresses", "errors"),
    ("addresses", "files"),
    ("bulk", "errors"),
    ("bulk", "files"),
    ("manifest", "schema"),
    ("ranking", "schema"),
    ("spectext", "schema"),
    ("schema", "arrowtypes"),
    ("schema", "fitting"),
    ("spectext", "arrowtypes"),
    ("raggedcolumns", "arrowtypes"),
    ("fitting", "arrowtypes"),
    ("fitting", "arrowvalues"),
    ("fitting", "raggedcolumns"),
    ("fitting", "widening"),
    ("picking", "arrowtypes"),
    ("picking", "schema"),
    ("fieldtypes", "arrowtypes"),
    ("fieldtypes", "schema"),
    ("episodes", "episodelog"),
    ("episodes", "episodeinfo"),
    ("episodes", "fragments"),
    ("episodes", "pieces"),
    ("pieces", "fragments"),
    ("episodes", "sources"),
    ("episodes", "touched"),
    ("journaltail", "journal"),
    # the index's parts
    ("index", "delta"),
    ("index", "migrate"),
    ("index", "relations"),
    ("relations", "halves"),
    ("relations", "history"),
    ("history", "relations"),
    ("relations", "named"),
    ("relations", "shownvalues"),
    ("index", "result"),
    ("expressions", "index"),
    ("expressions", "relations"),
    ("keys", "schema"),
    ("keyfile", "writekeys"),
    ("leaves", "ragged"),
    ("raggedrows", "ragged"),
    ("looserows", "leaves"),
    ("looserows", "ragged"),
    ("batches", "leaves"),
    ("batches", "looserows"),
    ("batches", "ragged"),
    ("forms", "batches"),
    ("forms", "leaves"),
    ("forms", "looserows"),
    ("forms", "ragged"),
    ("prefetch", "draws"),
    ("postprocs", "trajectories"),
    ("drawing", "handles"),
    ("handles", "retention"),
    ("shaping", "drawing"),
    ("latefields", "patches"),
    ("latefields", "shaping"),
    ("prioritized", "tensordictbuffers"),
    ("seeded", "tensordictbuffers"),
    ("hindsight", "tensordictbuffers"),
    ("ensembles", "memberpatches"),
    # the parts of a check
    ("checks.*", "checks.findings"),
    ("checks.*", "checks.packed"),
    ("checks.blocks", "checks.shared"),
    ("checks.rows", "checks.blocks"),
    ("checks.logs", "checks.rows"),
    ("checks.verify", "checks.*"),
    ("checks.repair", "checks.*"),
    # a package's __init__ gathers its names
    ("checks", "checks.*"),
    ("storages", "storages.*"),
    ("samplers", "samplers.*"),
    ("transforms", "transforms.*"),
    ("exchange", "exchange.*"),
    ("specs", "specs.*"),
    ("datasets", "datasets.*"),
    # inside these, the others may import base
    ("storages.*", "storages.base"),
    ("storages.base", "storages.described"),
    ("storages.*", "storages.position"),
    ("samplers.*", "samplers.base"),
    ("samplers.*", "samplers.filter"),
    ("samplers.recency", "samplers.windowtree"),
    ("samplers.staleness", "samplers.rowmasses"),
    ("samplers.consuming", "samplers.random"),
    ("samplers.candidates", "samplers.filter"),
    ("samplers.candidates", "samplers.slicing"),
    ("samplers.candidates", "samplers.windowtree"),
    ("samplers.slices", "samplers.candidates"),
    ("samplers.prioritized_slices", "samplers.keyedruns"),
    ("samplers.prioritized_slices", "samplers.prioritized"),
    ("samplers.prioritized_slices", "samplers.slicing"),
    ("sample_units", "samplers.adapted"),
    ("sample_units", "samplers.keyedruns"),
    ("sample_units", "samplers.base"),
    ("samplers.runweights", "samplers.windowtree"),
    ("samplers.slices", "samplers.keyedruns"),
    ("samplers.slices", "samplers.runweights"),
    ("samplers.slices", "samplers.slicing"),
    ("samplers.slices", "samplers.windowtree"),
    ("samplers.slices_without_replacement", "samplers.candidates"),
    ("samplers.slices_without_replacement", "samplers.keyedruns"),
    ("samplers.slices_without_replacement", "samplers.runweights"),
    ("samplers.slices_without_replacement", "samplers.slicing"),
    ("samplers.slices_without_replacement", "samplers.without_replacement"),
    ("samplers.consuming", "samplers.windowtree"),
    ("samplers.prioritized", "samplers.windowtree"),
    ("samplers.random", "samplers.windowtree"),
    ("samplers.random", "samplers.without_replacement"),
    ("samplers.slices", "samplers.slices_without_replacement"),
    ("samplers.streaming", "samplers.slices"),
    ("samplers.streaming", "samplers.slicing"),
    ("specs.*", "specs.base"),
    ("specs.*", "specs.boxes"),
    ("specs.*", "specs.shapes"),
    ("specs.*", "specs.masks"),
    ("specs.*", "specs.numbers"),
    ("specs.binary", "specs.categorical"),
    ("specs.multi", "specs.categorical"),
    ("specs.unbounded", "specs.bounded"),
    ("specs.composite", "specs.batchdims"),
    ("specs.views", "specs.batchdims"),
    ("specs.composite", "specs.locking"),
    ("specs.composite", "specs.views"),
    ("specs.stacked", "specs.batchdims"),
    ("specs.stacked", "specs.composite"),
    ("specs.stacked", "specs.views"),
    ("specs.text", "specs"),
    ("specs.text", "specs.anatomy"),
    ("specs.foreign", "specs"),
    ("specs.foreign", "specs.anatomy"),
    ("specs.spaces", "specs"),
    ("transforms.*", "transforms.steps"),
    ("exchange.*", "exchange"),
    ("exchange.*", "exchange.*"),
    ("datasets.*", "datasets.base"),
    # the parts of the storage on disk
    ("native", "kernels"),
    ("compressing", "kernels"),
    ("compressing", "native"),
    ("unpacking", "kernels"),
    ("unpacking", "native"),
    ("arrowbuffers", "kernels"),
    ("arrowbuffers", "native"),
    ("storages.columns", "storages.zarrmeta"),
    ("storages.columns", "storages.recycled"),
    ("storages.memory", "storages.recycled"),
    ("storages.packedrows", "storages.recycled"),
    ("storages.columngroup", "storages.*"),
    ("storages.*", "storages.columngroup"),
    ("storages.packed", "storages.*"),
    ("storages.packed*", "storages.chunkfile"),
    ("storages.packed*", "storages.packedparts"),
    ("storages.packed*", "storages.packing"),
    ("storages.packed*", "storages.partial"),
    ("storages.packed*", "storages.columns"),
    ("storages.packedreader", "storages.packedrows"),
    ("storages.packedversion", "storages.packedrows"),
    ("storages.packedversion", "storages.frozen"),
    ("storages.packedversion", "storages.zarrmeta"),
    ("storages.frozen", "storages.packedrows"),
    ("storages.loading", "storages.layout"),
    ("storages.loading", "storages.packing"),
    ("storages.columnwriter", "storages.packed*"),
    ("storages.columnwriter", "storages.sharedcolumn"),
    ("storages.checksums", "storages.sharedcolumn"),
    ("storages.sharedcolumn", "storages.columns"),
    ("storages.sharedcolumn", "storages.zarrmeta"),
    ("storages.sharedversion", "storages.sharedcolumn"),
    ("storages.frozen", "storages.sharedversion"),
    ("storages.frozen", "storages.implied"),
    ("storages.layout", "storages.implied"),
    ("storages.zarr", "storages.implied"),
    ("storages.zarrmeta", "storages.implied"),
    ("storages.frozen", "storages.zarrmeta"),
    ("storages.late", "storages.zarrmeta"),
    ("storages.lending", "storages.*"),
    ("storages.reshapable", "storages.lending"),
    ("storages.columnwriter", "storages.packing"),
    ("storages.columnwriter", "storages.sharing"),
    ("storages.columnwriter", "storages.zarrmeta"),
    ("storages.zarrmeta", "storages.packing"),
    ("storages.layout", "storages.codecs"),
    ("storages.packing", "storages.codecs"),
    ("storages.layout", "storages.packing"),
    ("storages.retaining", "storages.checksums"),
    ("storages.retaining", "storages.columngroup"),
    ("storages.retaining", "storages.columns"),
    ("storages.retaining", "storages.folder"),
    ("storages.retaining", "storages.packed"),
    ("storages.retaining", "storages.packing"),
    ("storages.retaining", "storages.reshapable"),
    ("storages.retaining", "storages.sampledcolumn"),
    ("storages.thinning", "storages.chunkfile"),
    ("storages.thinning", "storages.packedrows"),
    ("storages.packed", "storages.thinning"),
    ("storages.archiving", "storages.archive"),
    ("storages.archiving", "storages.coming"),
    ("storages.archiving", "storages.loading"),
    ("storages.archiving", "storages.retaining"),
    ("storages.archive", "storages"),
    ("storages.archive", "storages.*"),
    ("storages.follower", "storages.archive"),
    ("storages.shownrows", "storages.archive"),
    ("storages.shownrows", "storages.sampled"),
    ("storages.catalog", "storages.archive"),
    ("storages.catalog", "storages.shownrows"),
    ("storages.zarr", "storages.archiving"),
    ("storages.settings", "storages.layout"),
    ("storages.packable", "storages.*"),
    ("storages.former", "storages.*"),
    ("storages.resizing", "storages.*"),
    ("storages.zarr", "storages.resizing"),
    # fields that come and go
    ("storages.described", "storages.coming"),
    ("storages.catalog", "storages.coming"),
    ("storages.memory", "storages.coming"),
    ("storages.late", "storages.checksums"),
    ("storages.late", "storages.folder"),
    ("storages.reshapable", "storages.*"),
    ("storages.zarr", "storages.reshapable"),
    ("storages.journaled", "storages.late"),
    ("storages.journaled", "storages.keykeeping"),
    ("storages.keykeeping", "storages.recovery"),
    ("storages.keykeeping", "storages.synced"),
    ("storages.settings", "storages.late"),
    ("storages.columnwriter", "storages.columns"),
    ("storages.tail", "storages.columnwriter"),
    ("storages.recovery", "storages.columnwriter"),
    ("storages.journaled", "storages.columnwriter"),
    ("storages.zarr", "storages.columnwriter"),
    ("storages.zarr", "storages.displacing"),
    ("storages.displacing", "storages.checksums"),
    ("storages.displacing", "storages.columns"),
    ("storages.displacing", "storages.columnwriter"),
    ("storages.displacing", "storages.journaled"),
    ("storages.displacing", "storages.overlay"),
    ("storages.displacing", "storages.records"),
    ("storages.zarr", "storages.overlay"),
    ("storages.folder", "storages.columns"),
    ("storages.chronicle", "storages.folder"),
    ("storages.chronicle", "storages.records"),
    ("storages.chronicle", "storages.recovery"),
    ("storages.folder", "storages.records"),
    ("storages.follower", "storages.chronicle"),
    ("storages.follower", "storages.columns"),
    ("storages.follower", "storages.folder"),
    ("storages.follower", "storages.loading"),
    ("storages.follower", "storages.overlay"),
    ("storages.follower", "storages.recovery"),
    ("storages.follower", "storages.replay"),
    ("storages.follower", "storages.settings"),
    ("storages.follower", "storages.watch"),
    ("storages.overlay", "storages.columns"),
    ("storages.watch", "storages.folder"),
    ("storages.segmentreader", "storages.watch"),
    ("storages.replay", "storages.columns"),
    ("storages.replay", "storages.folder"),
    ("storages.replay", "storages.overlay"),
    ("storages.replay", "storages.records"),
    ("storages.replay", "storages.recovery"),
    ("storages.recovery", "storages.checksums"),
    ("storages.recovery", "storages.columns"),
    ("storages.recovery", "storages.records"),
    ("storages.tail", "storages.columns"),
    ("storages.checksums", "storages.columns"),
    ("storages.indexed", "storages.access"),
    ("storages.access", "storages.rows"),
    ("storages.base", "storages.indexed"),
    ("storages.base", "storages.rows"),
    ("storages.base", "storages.changed"),
    ("storages.base", "storages.grid"),
    ("storages.loading", "storages.grid"),
    ("storages.memory", "storages.grid"),
    ("storages.settings", "storages.grid"),
    ("storages.base", "storages.cataloglike"),
    ("storages.base", "storages.hold"),
    ("storages.base", "storages.keyed"),
    ("storages.keyed", "storages.rows"),
    ("storages.base", "storages.rows"),
    ("storages.base", "storages.runs"),
    ("storages.base", "storages.sampled"),
    ("storages.base", "storages.spare"),
    ("storages.base", "storages.stateful"),
    ("storages.contents", "storages.frozen"),
    ("storages.contents", "storages.sampled"),
    ("storages.contents", "storages.stateful"),
    ("gathering", "kernels"),
    ("gathering", "native"),
    ("storages.arrow", "storages.*"),
    ("storages.opening", "storages.*"),
    ("storages.merging", "storages.messages"),
    ("storages.merging", "storages.segments"),
    ("storages.segment*", "storages.gather"),
    ("storages.segment*", "storages.merging"),
    ("storages.segment*", "storages.messages"),
    ("storages.segment*", "storages.segments"),
    ("storages.segment*", "storages.widths"),
    ("storages.widths", "storages.gather"),
    ("storages.segmentcolumn", "storages.columns"),
    ("storages.columnwriter", "storages.payload"),
    ("storages.columnwriter", "storages.segmentwriter"),
    ("storages.recovery", "storages.payload"),
    ("storages.replay", "storages.payload"),
    ("storages.zarr", "storages.payload"),
    ("storages.tail", "storages.payload"),
    ("storages.packable", "storages.segmentversion"),
    ("storages.memory", "storages.cells"),
    ("storages.contents", "storages.cells"),
    ("storages.memory", "storages.portable"),
    ("storages.portable", "storages.contents"),
    ("storages.portable", "storages.loading"),
    ("storages.portable", "storages.stateful"),
    ("storages.scratch", "storages.loading"),
    ("storages.scratch", "storages.portable"),
    ("storages.scratch", "storages.rows"),
    ("storages.objects", "storages.memory"),
    ("storages.objects", "storages.options"),
    ("storages.scratch", "storages.options"),
    ("storages.scratch", "storages.settings"),
    ("storages.scratch", "storages.zarr"),
    ("storages.tensors", "storages.access"),
    ("storages.tensors", "storages.memory"),
    ("storages.tensors", "storages.options"),
    ("storages.base", "storages.stats"),
    ("storages.memory", "storages.sampled"),
    ("storages.frozen", "storages.sampled"),
    ("storages.catalog", "storages.rows"),
    ("storages.catalog", "storages.sampled"),
    ("storages.catalog", "storages.trajectories"),
    ("storages.loading", "storages.sampledcolumn"),
    ("storages.sampledcolumn", "storages.columns"),
    ("storages.sampledcolumn", "storages.sampled"),
    ("storages.sampledcolumn", "storages.zarrmeta"),
    ("storages.zarr", "storages.sampledcolumn"),
    ("storages.frozen", "storages.folder"),
    ("storages.base", "storages.priorities"),
    ("storages.frozen", "storages.hold"),
    ("storages.memory", "storages.loading"),
    ("storages.loading", "storages.checksums"),
    ("storages.loading", "storages.columns"),
    ("storages.loading", "storages.columnwriter"),
    ("storages.loading", "storages.folder"),
    ("storages.loading", "storages.frozen"),
    ("storages.settings", "storages.folder"),
    ("storages.settings", "storages.loading"),
    ("storages.journaled", "storages.columns"),
    ("storages.journaled", "storages.folder"),
    ("storages.journaled", "storages.frozen"),
    ("storages.journaled", "storages.loading"),
    ("storages.journaled", "storages.keeper"),
    ("storages.journaled", "storages.leaving"),
    ("storages.journaled", "storages.synced"),
    ("storages.synced", "storages.folder"),
    ("storages.synced", "storages.shown"),
    ("storages.synced", "storages.keeper"),
    ("storages.synced", "storages.records"),
    ("storages.journaled", "storages.records"),
    ("storages.journaled", "storages.recovery"),
    ("storages.journaled", "storages.layout"),
    ("storages.journaled", "storages.settings"),
    ("storages.shown", "storages.folder"),
    ("storages.zarr", "storages.checksums"),
    ("storages.zarr", "storages.columns"),
    ("storages.zarr", "storages.folder"),
    ("storages.zarr", "storages.journaled"),
    ("storages.zarr", "storages.loading"),
    ("storages.zarr", "storages.recovery"),
    ("storages.zarr", "storages.synced"),
    ("storages.zarr", "storages.tail"),
    ("storages.zarr", "storages.zarrmeta"),
    ("dumping", "snapshots"),
    ("dumping", "storages.*"),
    ("snapshots", "storages.folder"),
    ("storages.versioned", "dumping"),
    ("storages.versioned", "snapshots"),
    ("storages.memory", "storages.versioned"),
    ("storages.journaled", "storages.versioned"),
    # the HTTP layer and the shipped tests are small trees of their own
    ("api*", "api*"),
    ("testing*", "testing*"),
    ("cli", "cli_checks"),
    ("cli", "cli_columns"),
    ("cli_columns", "cli_print"),
    ("cli", "cli_export"),
    ("cli", "cli_info"),
    ("cli_export", "cli_print"),
    ("cli_info", "cli_print"),
    ("cli", "cli_migrate"),
    ("cli_migrate", "cli_print"),
    ("cli", "cli_codes"),
    ("cli", "cli_print"),
    ("cli_checks", "cli_codes"),
    ("cli_checks", "cli_print"),
    ("cli", "cli_query"),
    ("cli", "cli_snapshots"),
    ("cli", "cli_retain"),
    ("cli_retain", "cli_print"),
    ("cli", "cli_serve"),
    ("cli_snapshots", "cli_print"),
    ("cli", "cli_reshape"),
    ("cli_reshape", "cli_print"),
    ("cli_reshape", "cli_stop"),
    ("cli_export", "cli_stop"),
    ("__main__", "cli"),
)

#: The same, for what is imported under TYPE_CHECKING only: two files that are one thing in two parts.
ALLOWED_AS_TYPE: tuple[tuple[str, str], ...] = (
    ("storages.recovery", "storages.journaled"),
    ("halves", "relations"),
    ("storages.stateful", "storages.packedrows"),
    ("storages.stateful", "storages.segmentversion"),
    ("storages.frozen", "storages.segmentversion"),
    ("storages.merging", "storages.segmentwriter"),
    ("storages.payload", "storages.columngroup"),
    ("storages.stateful", "storages.sharedcolumn"),
)

#: Libraries that belong to few modules.
HOME_OF_LIBRARY: dict[str, tuple[str, ...]] = {
    "duckdb": ("index", "delta", "expressions", "relations", "history", "named", "migrate"),
    "fastapi": ("api", "api.*"),
    "httpx": ("connection",),
    "h5py": ("exchange.*",),
    "pyarrow": (
        "index",
        "delta",
        "relations",
        "expressions",
        "halves",
        "result",
        "arrowtypes",
        "arrowvalues",
        "raggedcolumns",
        "widening",
        "fitting",
        "picking",
        "shownvalues",
        "ragged",
        "looserows",
        "storages.cells",
        "storages.gather",
        "storages.loading",
        "storages.messages",
        "storages.payload",
        "storages.segment*",
        "storages.widths",
        "checks.segments",
        "codec",
        "frames",
        "framing",
        "sqlchild",
        "exchange",
        "exchange.*",
        "testing.anylength",
    ),
    "starlette": ("api", "api.*"),
    "torchrl": ("interop", "specs.foreign"),
    "uvicorn": ("api", "api.*"),
    "zarr": ("exchange.*", "storages.zarrmeta"),
}

#: Not imported by lines 0-3 while they are imported themselves: these cost seconds.
SLOW_LIBRARIES = {"torch", "tensordict", "torchrl", "gymnasium"}
FAST_LINES = {"0", "1", "2", "3", "3b"}

#: What the package's own __init__ offers to the modules below it.
ROOT_NAMES = {"__version__"}

#: The one module that touches files.
FILES_MODULE = "files"

FILE_LIBRARIES = {"fcntl", "mmap", "shutil", "tempfile", "glob", "fileinput", "pickle", "shelve"}

#: All that others may use of `os`: nothing here opens, changes or looks at a file.
OS_ALLOWED = {
    "PathLike", "cpu_count", "environ", "fsdecode", "fsencode", "fspath", "get_terminal_size", "getpid",
    "getppid", "kill", "linesep", "name", "register_at_fork", "sched_getaffinity", "sep", "strerror", "uname",
    "urandom",
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

#: Methods of pathlib.Path that touch files. (`replace` is left out: strings have it.)
PATH_METHODS = {
    "chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "mkdir",
    "open", "read_bytes", "read_text", "rename", "rglob", "rmdir", "samefile", "stat", "symlink_to", "touch",
    "unlink", "walk", "write_bytes", "write_text",
}  # fmt: skip
NUMPY_FILE_FUNCTIONS = {"fromfile", "load", "loadtxt", "memmap", "save", "savetxt", "savez"}

#: Such a method on one of these names is a call of files.Disk, or of expstore itself; one on a class
#: (Index.open) makes an object of ours, unless the class is Path.
DISK_NAMES = {"disk", "_disk", "file", "_file", "expstore", "door"}

#: module -> the acts it may do itself, as the messages below print them.
FILE_EXCEPTIONS: dict[str, set[str]] = {
    "storages.settings": {".is_dir()"},  # a look before the first lock; nothing is opened
    "confine": {".open()"},  # names folders to the kernel, and reads nothing
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50

# ---------------------------------------------------------------------------------------------------
# Reading the source.


@dataclass(frozen=True)
class Module:
    """One file: its name without `expstore.` ("" is the package itself), its tree."""

    name: str
    is_package: bool
    source: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)


#: When code runs: as its module is imported, when it is called, or never (under TYPE_CHECKING).
When = Literal["import", "call", "never"]


@dataclass(frozen=True)
class Import:
    """One imported thing, by its full dotted name."""

    target: str
    line: int
    when: When


def find_modules() -> dict[str, Module]:
    """Return every module of expstore and api by name; the links are skipped, their targets are not."""
    found = {}
    for base, prefix in ((ROOT / "expstore", ()), (ROOT / "api", ("api",))):
        for file in sorted(base.rglob("*.py")):
            parts = (*prefix, *file.relative_to(base).with_suffix("").parts)
            if base.name == "expstore" and parts[0] in {"api", "migrations"}:
                continue  # rglob does not follow links before Python 3.13
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found[name] = Module(name, is_package, file.read_text(encoding="utf-8"))
    return found


MODULES = find_modules()


def is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def walk(node: ast.AST, when: When = "import") -> Iterator[tuple[ast.AST, When]]:
    """Yield every node below, and when it runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and is_type_checking(child.test):
            for part in child.body:
                yield part, "never"
                yield from walk(part, "never")
            for part in child.orelse:
                yield part, when
                yield from walk(part, when)
            continue
        yield child, when
        is_body = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from walk(child, "call" if is_body and when == "import" else when)


def package_of(module: Module) -> list[str]:
    parts = ["expstore", *filter(None, module.name.split("."))]
    return parts if module.is_package else parts[:-1]


def imports_of(module: Module) -> Iterator[Import]:
    """Yield what a module imports: statements wherever they stand, and import_module("...")."""
    for node, when in walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, when)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = package_of(module)
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, when)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield Import(node.args[0].value, node.lineno, when)


def own_target(target: str, known: Collection[str]) -> str | None:
    """Return the module of ours that a dotted name lives in, or None for other people's.

    `expstore.files.Disk` is in "files"; a name of the package itself gives "" and its name is lost.
    """
    parts = target.split(".")
    if parts[0] == "api":
        return target  # under this name it exists in a checkout only; reported by its line
    if parts[0] != "expstore":
        return None
    names = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
    return next(
        (name for name in names if name in known or (line_of(name) is not None and "." not in name)), ""
    )


def line_of(name: str) -> int | None:
    for position, (_, members) in enumerate(LINES):
        if name.split(".")[0] in members.split():
            return position
    return None


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# ---------------------------------------------------------------------------------------------------
# The checks: each yields one sentence per fault.


def layer_faults(module: Module, known: Collection[str]) -> Iterator[str]:
    here = line_of(module.name)
    if here is None:
        yield f"{module.name}: has no line; add it to LINES"
        return
    for item in imports_of(module):
        where = f"{module.name}:{item.line}"
        target = own_target(item.target, known)
        if target is None or target == module.name:
            continue
        if item.target.split(".")[0] == "api":
            yield f"{where}: imports api by its folder; its name is expstore.api"
            continue
        if target == "":
            if item.target != "expstore" and item.target.removeprefix("expstore.") not in ROOT_NAMES:
                yield f"{where}: imports {item.target} from the package; name its module"
            elif item.target == "expstore" and LINES[here][0] not in {"8", "9"}:
                yield f"{where}: imports the package as a whole; name a module"
            continue
        there = line_of(target)
        if there is None:
            yield f"{where}: imports {target}, which has no line"
        elif there > here:
            yield f"{where}: imports {target} upward (line {LINES[there][0]} from line {LINES[here][0]})"
        elif there == here and not may_import_sideways(module.name, target, item.when):
            yield f"{where}: imports {target} sideways (line {LINES[here][0]})"


def may_import_sideways(importer: str, target: str, when: When) -> bool:
    allowed = ALLOWED_SIDEWAYS + (ALLOWED_AS_TYPE if when == "never" else ())
    return any(fnmatchcase(importer, a) and fnmatchcase(target, b) for a, b in allowed)


def library_faults(module: Module) -> Iterator[str]:
    here = line_of(module.name)
    fast = module.name == "" or (here is not None and LINES[here][0] in FAST_LINES)
    for item in imports_of(module):
        library = item.target.split(".")[0]
        homes = HOME_OF_LIBRARY.get(library)
        if homes is not None and not matches(module.name, homes):
            yield f"{module.name}:{item.line}: imports {library}, which belongs to {', '.join(homes)}"
        if fast and item.when == "import" and library in SLOW_LIBRARIES:
            yield f"{module.name}:{item.line}: imports {library} at import time"


def file_acts(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, act) for everything that looks like touching a file."""
    for item in imports_of(module):
        library, _, name = item.target.partition(".")
        if library in FILE_LIBRARIES:
            yield item.line, library
        elif library == "os" and name and name != "path" and name not in OS_ALLOWED:
            yield item.line, f"os.{name}"
    for node, _ in walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield node.lineno, "open()"
        elif isinstance(node, ast.Attribute):
            owner = (
                node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            )
            if owner == "os" and node.attr != "path" and node.attr not in OS_ALLOWED:
                yield node.lineno, f"os.{node.attr}"
            elif ast.unparse(node.value) == "os.path" and node.attr not in OS_PATH_ALLOWED:
                yield node.lineno, f"os.path.{node.attr}"
            elif owner in {"np", "numpy", "torch"} and node.attr in NUMPY_FILE_FUNCTIONS:
                yield node.lineno, f"{owner}.{node.attr}"
            elif owner == "io" and node.attr in {"open", "FileIO"}:
                yield node.lineno, f"io.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            value = node.func.value
            owner = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
            is_class = owner[:1].isupper() and owner != "Path"
            is_ours = is_class or owner in DISK_NAMES
            is_module = ast.unparse(value) in {"os", "os.path", "io"}
            if node.func.attr in PATH_METHODS and not (is_ours or is_module):
                yield node.lineno, f".{node.func.attr}()"


def file_faults(module: Module) -> Iterator[str]:
    if module.name == FILES_MODULE:
        return
    for line, act in file_acts(module):
        if act not in FILE_EXCEPTIONS.get(module.name, ()):
            yield f"{module.name}:{line}: {act} touches files; only files.py does"


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code: no blank, no comment, no docstring."""
    skip = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    }  # fmt: skip
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                held.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return held


def size_faults(module: Module) -> Iterator[str]:
    held = code_lines(module.source)
    if len(held) > MAX_FILE_LINES:
        yield f"{module.name}: {len(held)} lines of code, at most {MAX_FILE_LINES}"
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            size = len(held.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            if size > MAX_FUNCTION_LINES:
                where = f"{module.name}:{node.lineno}"
                yield f"{where}: {node.name} has {size} lines of code, at most {MAX_FUNCTION_LINES}"


def find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    """Return one cycle of a graph, or None."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for target in sorted(edges.get(name, ())):
            if cycle := visit(target, [*path, name]):
                return cycle
        done.add(name)
        return None

    return next((cycle for name in sorted(edges) if (cycle := visit(name, []))), None)


# ---------------------------------------------------------------------------------------------------
# The tests.


def hold(faults: Iterable[str]) -> None:
    """Fail with every fault of any module on a line of its own."""
    found = list(faults)
    assert not found, "\n" + "\n".join(found)


def test_there_is_something_to_check() -> None:
    assert {"", "errors", "files", "api"} <= set(MODULES)


def test_no_module_stands_on_two_lines() -> None:
    names = [name for _, members in LINES for name in members.split()]
    assert len(names) == len(set(names))


def test_imports_point_down() -> None:
    # The package itself names what it loads late; tests/unit/test_imports.py holds that it does.
    hold(fault for module in MODULES.values() if module.name for fault in layer_faults(module, MODULES))


def test_libraries_stay_in_their_modules() -> None:
    hold(fault for module in MODULES.values() for fault in library_faults(module))


def test_only_files_touches_files() -> None:
    hold(fault for module in MODULES.values() for fault in file_faults(module))


def test_nothing_grows_too_large() -> None:
    hold(fault for module in MODULES.values() for fault in size_faults(module))


def test_no_import_cycle() -> None:
    edges = {
        name: {
            target
            for item in imports_of(module)
            if item.when != "never"
            and (target := own_target(item.target, MODULES)) not in {None, "", name}
            and target is not None
        }
        for name, module in MODULES.items()
        if name and not module.is_package
    }
    assert find_cycle(edges) is None


# The checks themselves must be able to fail.

#: What the sources below may name, whatever the tree holds.
KNOWN = {"errors", "schema", "storages"} | {
    f"storages.{name}" for name in ["base", "columns", "journaled", "zarr"]
}


def made(name: str, source: str) -> Module:
    return Module(name, False, source)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("journal", "from expstore.buffers import ReplayBuffer"),
        ("journal", "from .buffers import ReplayBuffer"),
        ("journal", "def f():\n    import expstore.door"),
        ("journal", "import importlib\nimportlib.import_module('expstore.index')"),
        ("journal", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from expstore import storages"),
        ("journal", "from expstore.schema import Schema"),
        ("journal", "from expstore import SchemaError"),
        ("journal", "import expstore"),
        ("storages.memory", "from expstore.storages.zarr import ZarrStorage"),
        ("storages.memory", "from .zarr import ZarrStorage"),
        ("storages.recovery", "from expstore.storages.zarr import ZarrStorage"),
        ("buffers", "from api import create_app"),
        ("novelty", ""),
    ],
)
def test_a_bad_import_is_found(name: str, source: str) -> None:
    assert len(list(layer_faults(made(name, source), KNOWN))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("storages.memory", "from .base import Storage\nfrom ..schema import Schema"),
        ("storages.zarr", "from expstore.storages import base, columns"),
        (
            "storages.recovery",
            "if TYPE_CHECKING:\n    from expstore.storages.journaled import JournaledStorage",
        ),
        ("journal", "from expstore.errors import StorageError\nfrom expstore import __version__\nimport os"),
        ("cli", "import expstore\ndef serve():\n    from expstore.api import app"),
    ],
)
def test_a_good_import_passes(name: str, source: str) -> None:
    assert list(layer_faults(made(name, source), KNOWN)) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("buffers", "import duckdb"),
        ("storages.memory", "def f():\n    import zarr.storage"),
        ("cli", "import uvicorn"),
        ("journal", "try:\n    import torch\nexcept ImportError:\n    pass"),
        ("storages.base", "class A:\n    from tensordict import TensorDict"),
    ],
)
def test_a_misplaced_library_is_found(name: str, source: str) -> None:
    assert len(list(library_faults(made(name, source)))) == 1


def test_torch_may_be_imported_late() -> None:
    source = "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch"
    assert list(library_faults(made("storages.base", source))) == []


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "import os\nos.rename('a', 'b')",
        "import os\nos.stat('a')",
        "from os import unlink",
        "import os\nos.path.exists('a')",
        "import shutil",
        "path.write_text('x')",
        "(path / 'x').mkdir()",
        "Path('x').open()",
        "Path.mkdir(path)",
        "self.path.unlink()",
        "np.memmap('x')",
    ],
)
def test_an_act_on_files_is_found(source: str) -> None:
    assert len(list(file_faults(made("journal", source)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "self._disk.rename(a, b)",
        "disk.open(path)",
        "Index.open(path)",
        "import os\nos.getpid()",
        "text.replace('a', 'b')",
    ],
)
def test_what_is_no_act_on_files_passes(source: str) -> None:
    assert list(file_faults(made("journal", source))) == []


def test_large_things_are_found() -> None:
    body = "".join(f"    x{n} = {n}\n" for n in range(MAX_FUNCTION_LINES))
    assert len(list(size_faults(made("m", f"def f():\n{body}")))) == 1
    assert (
        list(size_faults(made("m", f'def f():\n    """Say\n    more."""\n    # why\n\n{body}'[:-12]))) == []
    )
    assert len(list(size_faults(made("m", "x = 1\n" * (MAX_FILE_LINES + 1))))) == 1


def test_a_cycle_is_found() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}}) is None
