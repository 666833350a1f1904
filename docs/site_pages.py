"""Pages of the documentation site that are generated when it is built, and links to files outside docs/.

`mkdocs.yml` names this module as a hook. The functions that return Markdown need no MkDocs: tests call them.
Nothing is written into docs/: generated pages exist in the built site only.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

#: Documents of the repository that are pages of the site: their path, and the page.
DOCUMENTS = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "GUARANTEES.md": "guarantees.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks_details.md",
    "migrations/README.md": "migrations.md",
}
#: Documents whose links lead to the front page.
FRONT = ("README.md",)
#: Modules with public names, by the page that lists them. A package with a stub lists the names in it.
NAMESPACES = {
    "open": "expstore",
    "buffers": "expstore.buffers",
    "samplers": "expstore.samplers",
    "schedulers": "expstore.schedulers",
    "rate_limiters": "expstore.rate_limiters",
    "storages": "expstore.storages",
    "writers": "expstore.writers",
    "transforms": "expstore.transforms",
    "trajectories": "expstore.trajectories",
    "schema": "expstore.schema",
    "specs": "expstore.specs",
    "collectors": "expstore.collectors",
    "datasets": "expstore.datasets",
    "exchange": "expstore.exchange",
    "cold": "expstore.cold",
    "remote": "expstore.remote",
    "cluster": "expstore.cluster",
    "ray": "expstore.on_ray.cluster",
    "gym": "expstore.gym",
    "sb3": "expstore.sb3",
    "torchrl": "expstore.torchrl",
    "trainers": "expstore.trainers",
    "trackers": "expstore.trackers",
    "plot": "expstore.plot",
    "maintenance": "expstore.maintenance",
    "testing": "expstore.testing",
    "errors": "expstore.errors",
}
#: Groups of settings: they have a page of their own.
SETTINGS = {
    "Layout": "expstore._settings",
    "Durability": "expstore._settings",
    "EpisodeKeys": "expstore._settings",
    "Batches": "expstore._settings",
    "Retain": "expstore.core.retention_policy",
    "Ship": "expstore.cold.ship_settings",
}
#: Objects that only a buffer creates.
PARTS = {
    "rb.episodes": "expstore.buffers.episodes.Episodes",
    "rb.groups": "expstore.buffers.groups.Groups",
    "rb.selections": "expstore.buffers.selections.Selections",
    "rb.selections[...]": "expstore.buffers.selections.Selection",
    "rb.columns": "expstore.buffers.columns.Columns",
    "rb.consumers": "expstore.buffers.consumer.Consumers",
    "rb.snapshots": "expstore.buffers.snapshots.Snapshots",
    "rb.retention": "expstore.buffers.retention.Retention",
    "rb.record(...)": "expstore.buffers.recorder.Recorder",
    "rb.sql(...)": "expstore.sql.result.Result",
}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?(?:\s+\"[^\"]*\")?\))")


# -- the programming interface ---------------------------------------------------------------------------


def public_names(module: str) -> dict[str, str]:
    """Return the public names of a module, each with the module that defines it.

    Reads the source and imports nothing. A package's names are those of its stub; a module's, those of
    `__all__`.
    """
    file = source_of(module)
    stub = file.with_suffix(".pyi")
    tree = parse(stub if stub.exists() else file)
    imported = {
        item.asname or item.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for item in node.names
        if source_of(f"{node.module}.{item.name}", missing=True) is None
    }
    if stub.exists():
        return imported
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {name: imported.get(name, module) for name in ast.literal_eval(node.value)}
    raise ValueError(f"{module} has neither a stub nor __all__")


def source_of(module: str, *, missing: bool = False) -> Path | None:
    """Return the file of a module of expstore."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.exists():
            return file
    if missing:
        return None
    raise ValueError(f"there is no module {module}")


@cache
def parse(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text())


def find_definition(module: str, name: str) -> ast.AST | None:
    """Return the class, function or assignment that defines a name in a module; None if there is none.

    Overloads of a function are passed over.
    """
    for node in parse(source_of(module)).body:
        if (
            isinstance(node, ast.ClassDef | ast.FunctionDef)
            and node.name == name
            and "overload" not in map(ast.unparse, node.decorator_list)
        ):
            return node
        if isinstance(node, ast.Assign) and any(ast.unparse(one) == name for one in node.targets):
            return node
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return node
    return None


def names_of_page(page: str) -> dict[str, str]:
    """Return the names that a page of the interface describes, each with the module that defines it.

    A name is described once: the page of `expstore` itself has those that no other page has.
    """
    names = public_names(NAMESPACES[page])
    if page == "open":
        elsewhere = {
            (name, home)
            for other, module in NAMESPACES.items()
            if other != "open"
            for name, home in public_names(module).items()
        }
        names = {
            name: home
            for name, home in names.items()
            if (name, home) not in elsewhere and name not in SETTINGS
        }
    return names


def render_namespace(page: str) -> str:
    """Return a page of the interface: a directive of mkdocstrings for each public name."""
    module = NAMESPACES[page]
    short = "expstore.cluster.ray" if module == "expstore.on_ray.cluster" else module
    text = ast.get_docstring(parse(source_of(module))) or ""
    lines = [f"# {short}", "", text.partition("\n\n")[0], ""]
    for name, home in sorted(names_of_page(page).items(), key=lambda pair: pair[0].lower()):
        if isinstance(find_definition(home, name), ast.ClassDef | ast.FunctionDef):
            lines += [f"::: {home}.{name}", ""]
        else:
            lines += [f"## `{name}`", "", f"Defined in `{home}`.", ""]
    if page == "buffers":
        lines += ["# Parts of a buffer", ""]
        for name, path in PARTS.items():
            lines += [f"What `{name}` is:", "", f"::: {path}", ""]
    return "\n".join(lines)


# -- the command line, HTTP, examples --------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any]]:
    """Yield the name and the parser of each command, with those of groups."""
    import typer

    from expstore.cli.app import app

    for name, command in typer.main.get_command(app).commands.items():
        yield name, command
        for inner, part in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", part


def render_commands() -> str:
    """Return the page of the command line: the help of every command, as the parser prints it."""
    lines = [
        "# Command line", "",
        "Each section is what `expstore COMMAND --help` prints. Exit codes: 0 success, 1 findings or a "
        "failure, 2 wrong usage, 3 the store is locked, 4 the store is damaged, 130 interrupted.", "",
    ]  # fmt: skip
    for name, command in commands():
        command.rich_markup_mode = None
        context = command.context_class(command, info_name=f"expstore {name}", terminal_width=100)
        lines += [f"## {name}", "", "```text", command.get_help(context).strip(), "```", ""]
    return "\n".join(lines)


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    from expstore.api import Settings, create_app

    document: dict[str, Any] = create_app(Settings(path=Path("runs"))).openapi()
    return document


def render_routes(document: dict[str, Any]) -> str:
    """Return the page of the HTTP routes, from the OpenAPI document."""
    lines = [
        "# HTTP routes", "",
        "From the OpenAPI document that a server has at `/openapi.json`; its page `/docs` has the same with "
        "examples to run. [The HTTP server](http.md) explains formats, pages of episodes, frames and events.",
        "",
    ]  # fmt: skip
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            lines += [f"## {method.upper()} {path}", "", route.get("summary", "") + ".", ""]
            lines += [route.get("description", ""), ""]
            parameters = [one for one in route.get("parameters", []) if "name" in one]
            if parameters:
                lines += ["| parameter | in | meaning |", "|---|---|---|"]
                for one in parameters:
                    lines.append(f"| `{one['name']}` | {one['in']} | {_cell(one.get('description', ''))} |")
                lines.append("")
            body = (
                route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            )
            model = (
                document.get("components", {})
                .get("schemas", {})
                .get(body.get("$ref", "").rpartition("/")[2], {})
            )
            if model.get("properties"):
                lines += ["| field of the body | meaning |", "|---|---|"]
                for name, one in model["properties"].items():
                    lines.append(f"| `{name}` | {_cell(one.get('description', ''))} |")
                lines.append("")
            answers = [
                f"| {status} | {_cell(one.get('description', ''))} |"
                for status, one in route.get("responses", {}).items()
            ]
            lines += ["| status | meaning |", "|---|---|", *answers, ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def render_settings() -> str:
    """Return the page of settings."""
    names = [*(f"{home}.{name}" for name, home in SETTINGS.items()), "expstore.api.settings.Settings"]
    lines = [
        "# Settings", "",
        "`expstore.open` takes these groups as objects, dicts or single words. The last one has the limits "
        "of a server; `expstore serve --help` lists them as options.", "",
    ]  # fmt: skip
    for name in names:
        lines += [f"::: {name}", "    options:", "      members: false", ""]
    return "\n".join(lines)


def examples() -> list[Path]:
    """Return the example programs and the files for deployments."""
    folder = ROOT / "examples"
    return sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def render_example(path: Path) -> str:
    """Return the page of an example: its source."""
    kind = {".py": "python", ".sh": "sh", ".mjs": "js", ".service": "ini"}.get(path.suffix, "text")
    return f"# {path.relative_to(ROOT)}\n\n````{kind}\n{path.read_text().rstrip()}\n````\n"


def render_pages() -> dict[str, str]:
    """Return all generated pages: paths below docs/, and Markdown whose links are those of the site."""
    pages = {page: (ROOT / name).read_text() for name, page in DOCUMENTS.items()}
    pages |= {f"api/{page}.md": render_namespace(page) for page in NAMESPACES}
    pages |= {
        f"examples/{path.relative_to(ROOT / 'examples')}.md": render_example(path) for path in examples()
    }
    pages["commands.md"] = render_commands()
    pages["routes.md"] = render_routes(openapi())
    pages["settings.md"] = render_settings()
    return pages


# -- links -----------------------------------------------------------------------------------------------


def page_of(target: Path) -> str | None:
    """Return the page or the file of the site that shows a file of the repository; None if there is none."""
    name = str(target.relative_to(ROOT))
    if name in FRONT:
        return "index.md"
    if name in DOCUMENTS:
        return DOCUMENTS[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if name.startswith("examples/") and target.is_file():
        return f"{name}.md"
    if target.suffix == ".png":
        return name
    return None


def convert_links(text: str, source: Path, page: str) -> str:
    """Return the text of a page with links that lead to pages of the site.

    Args:
        text: Markdown.
        source: The file that it is from: its links are relative to it.
        page: Its path in the site.

    Raises:
        ValueError: No page shows the file that a link leads to.
    """

    def convert(found: re.Match[str]) -> str:
        head, address, tail = found.groups()
        if re.match(r"[a-z]+:", address):
            return found[0]
        target = (source.parent / address).resolve()
        shown = page_of(target) if target.is_relative_to(ROOT) else None
        if shown is None:
            raise ValueError(f"{source.name} links to {address}, which no page of the site shows")
        return head + os.path.relpath(shown, os.path.dirname(page) or ".") + tail

    pieces = re.split(r"(^ *```+.*?^ *```+$|`[^`\n]+`(?!\]))", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(piece if number % 2 else LINK.sub(convert, piece) for number, piece in enumerate(pieces))


def slugify(text: str, separator: str) -> str:
    """Return the anchor of a heading, by GitHub's rule, so that links work there and in the site."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


# -- hooks of MkDocs -------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Set the rule of anchors, which a YAML file cannot name."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for name, text in render_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Convert the links of a page."""
    name = page.file.src_uri
    sources = {page: ROOT / document for document, page in DOCUMENTS.items()}
    if name.startswith(("api/", "examples/")):
        return markdown
    return convert_links(markdown, sources.get(name, DOCS / name), name)
