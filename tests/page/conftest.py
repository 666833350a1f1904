"""A browser for the tests of this folder, and stores and a server for those of a module."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from expstore.api import Settings, recent_answers
from expstore.api.page import findings
from tests.support.browsers import Visit, launch
from tests.support.page_stores import build_page_stores
from tests.support.servers import Serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with launch() as browser:
        yield browser


@pytest.fixture(scope="package")
def closed_stores(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Path:
    """A folder with the stores of `build_page_stores`, to copy. (Without a browser nothing is built.)"""
    folder = tmp_path_factory.mktemp("closed")
    build_page_stores(folder)
    return folder


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory, closed_stores: Path) -> Path:
    """The stores of a module."""
    return shutil.copytree(closed_stores, tmp_path_factory.mktemp("stores"), dirs_exist_ok=True)


@pytest.fixture(scope="module")
def server(page_folder: Path) -> Iterator[Serving]:
    """A server that writes the stores, without tokens.

    It reuses no answers: its time passes slowly for a page whose clock a test moves.
    """
    with pytest.MonkeyPatch.context() as patch, Serving(Settings(path=page_folder)) as server:
        patch.setattr(recent_answers, "_SECONDS", 0.0)
        patch.setattr(findings, "_KEEP_SECONDS", 0.0)
        yield server


@pytest.fixture(scope="module")
def shared_tab(browser: Browser, server: Serving) -> Iterator[Visit]:
    """A tab for the tests of a module: a new one costs as much as a page."""
    with Visit(browser, server.url) as tab:
        yield tab


@pytest.fixture
def visit(browser: Browser, shared_tab: Visit, server: Serving) -> Iterator[Callable[..., Visit]]:
    """Return a function that returns the shared tab; with options of `Visit`, a tab of the test's own."""
    with ExitStack() as tabs:

        def find_tab(**options: Any) -> Visit:
            if options:
                return tabs.enter_context(Visit(browser, options.pop("url", server.url), **options))
            shared_tab.reset()
            return shared_tab

        yield find_tab


#: A function that opens a tab, as the fixture `visit` returns it.
Open = Callable[..., Any]
