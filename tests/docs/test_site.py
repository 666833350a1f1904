"""The documentation site: its navigation is complete, its generated pages too.

`make docs` builds it; no test does, since that takes half a minute of CPU.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import yaml

from expstore import errors
from tests.support.pages import DOCS
from tests.support.paths import ROOT

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def _load_generator() -> ModuleType:
    """Import docs/site_pages.py, which is a hook of MkDocs and in no package."""
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_pages = _load_generator()


# -- the navigation ----------------------------------------------------------------------------------


def _pages_of(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _pages_of(inner)


def _generated() -> set[str]:
    """Return the names of generated pages, without rendering them."""
    return {
        *site_pages.DOCUMENTS.values(),
        *(f"api/{page}.md" for page in site_pages.NAMESPACES),
        *(f"examples/{path.relative_to(ROOT / 'examples')}.md" for path in site_pages.examples()),
        *("commands.md", "routes.md", "settings.md"),
    }


def test_the_navigation_has_every_page_once() -> None:
    listed = sorted(_pages_of(CONFIG["nav"]))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert listed == sorted(written | _generated())


def test_links_between_pages_lead_to_pages() -> None:
    listed = set(_pages_of(CONFIG["nav"]))
    sources = {name: DOCS / name for name in listed - _generated()}
    sources |= {page: ROOT / name for name, page in site_pages.DOCUMENTS.items()}
    for page, source in sources.items():
        text = re.sub(r"^ *```.*?^ *```$|`[^`\n]+`", "", source.read_text(), flags=re.DOTALL | re.MULTILINE)
        for head, address, tail in site_pages.LINK.findall(site_pages.convert_links(text, source, page)):
            if re.match(r"[a-z]+:", address):
                continue
            target = os.path.normpath(os.path.join(os.path.dirname(page), address))
            is_file = (DOCS / target).is_file() and not target.endswith(".md")
            assert target in listed or is_file, f"{page}: {head}{address}{tail}"


def test_the_site_asks_nothing_of_a_network() -> None:
    assert CONFIG["theme"]["font"] is False
    assert "offline" in CONFIG["plugins"]
    assert CONFIG["extra"]["polyfills"] == ["assets/iframe-worker.js"]  # or it comes from a foreign server
    assert not {"repo_url", "extra_css", "extra_javascript"} & CONFIG.keys()
    text = "".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert "```mermaid" not in text  # its script comes from a foreign server
    assert re.findall(r"!\[[^\]]*\]\(http|<(?:img|script|link|iframe)\b", text) == []


# -- generated pages ---------------------------------------------------------------------------------


def test_every_public_name_is_described_once() -> None:
    described = [
        (name, home)
        for page in site_pages.NAMESPACES
        for name, home in site_pages.names_of_page(page).items()
    ]
    described += list(site_pages.SETTINGS.items())
    names = {
        pair for module in site_pages.NAMESPACES.values() for pair in site_pages.public_names(module).items()
    }
    assert set(described) == names | set(site_pages.SETTINGS.items())
    assert len(names) > 150


def test_a_name_is_at_the_top_and_in_one_module_at_most() -> None:
    homes: dict[tuple[str, str], list[str]] = {}
    for module in site_pages.NAMESPACES.values():
        for pair in site_pages.public_names(module).items():
            homes.setdefault(pair, []).append(module)
    assert {pair: found for pair, found in homes.items() if len(set(found) - {"expstore"}) > 1} == {}


def test_the_top_level_has_few_names() -> None:
    stub = ast.parse((ROOT / "expstore" / "__init__.pyi").read_text())
    names = [item.name for node in stub.body if isinstance(node, ast.ImportFrom) for item in node.names]
    assert len(names) <= 110


@pytest.mark.slow
def test_every_public_name_has_a_docstring() -> None:
    bare = []
    for module in site_pages.NAMESPACES.values():
        for name, home in site_pages.public_names(module).items():
            found = site_pages.find_definition(home, name)
            assert found is not None, f"{home} defines no {name}"
            if isinstance(found, ast.ClassDef | ast.FunctionDef) and not ast.get_docstring(found):
                bare.append(f"{home}.{name}")
    assert bare == []


def test_the_parts_of_a_buffer_exist() -> None:
    for path in site_pages.PARTS.values():
        home, _, name = path.rpartition(".")
        assert isinstance(site_pages.find_definition(home, name), ast.ClassDef), path


def test_every_command_is_described() -> None:
    page = site_pages.render_commands()
    for name, command in site_pages.commands():
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert f"Usage: expstore {name}" in section
        assert (command.help or "").split("\n")[0].split(".")[0] in " ".join(section.split())


def test_every_route_is_described() -> None:
    document = site_pages.openapi()
    page = site_pages.render_routes(document)
    routes = [
        f"## {method.upper()} {path}" for path, methods in document["paths"].items() for method in methods
    ]
    assert len(routes) > 20
    assert [route for route in routes if f"\n{route}\n" not in page] == []


def test_every_error_has_a_cause_and_a_remedy() -> None:
    page = (DOCS / "errors.md").read_text().partition("\n## Python\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\| ([^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(errors.__all__)
    for name, bases, *_ in rows:
        kind = getattr(errors, name)
        builtin = {base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"} - {"Exception"}
        assert set(re.findall(r"`(\w+)`", bases)) == builtin - {"IOError"}, name


def test_links_are_those_of_the_site() -> None:
    text = (
        "[a](../ARCHITECTURE.md#locks) [b](../README.md) [c](../examples/dqn.py) [d](sql.md) `[e](../x.md)`"
    )
    assert site_pages.convert_links(text, DOCS / "page.md", "page.md") == (
        "[a](architecture.md#locks) [b](index.md) [c](examples/dqn.py.md) [d](sql.md) `[e](../x.md)`"
    )
    assert (
        site_pages.convert_links("[a](docs/sql.md)", ROOT / "GUARANTEES.md", "guarantees.md") == "[a](sql.md)"
    )
    assert site_pages.convert_links("[a](../sql.md)", DOCS / "howto/x.md", "howto/x.md") == "[a](../sql.md)"


def test_a_link_to_what_is_not_in_the_site_is_found() -> None:
    with pytest.raises(ValueError, match="which no page of the site shows"):
        site_pages.convert_links("[a](../Makefile)", DOCS / "page.md", "page.md")


# -- examples of deployments -------------------------------------------------------------------------


def test_the_commands_of_deployments_are_those_of_the_program() -> None:
    """Every option of `expstore serve` that the unit and the Containerfile pass exists."""
    (serve,) = [command for name, command in site_pages.commands() if name == "serve"]
    known = {option for parameter in serve.params for option in parameter.opts}
    for name in ("expstore.service", "Containerfile"):
        text = (ROOT / "examples" / "deploy" / name).read_text()
        line = re.search(r"(ExecStart|ENTRYPOINT).*(?:\n.*CMD.*|\n.*--.*)?", text)
        assert line is not None
        used = set(re.findall(r"(?<![\w-])--[a-z-]+", line[0]))
        assert used >= {"--host", "--port", "--token-file"}
        assert used <= known
