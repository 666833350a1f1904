"""A browser, stores and a server for the tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from expstore.api import Settings
from tests.support.browsers import Visit, launch
from tests.support.page_stores import build_page_stores
from tests.support.servers import Serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch() as browser:
        yield browser


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Path:
    """A folder with the stores of `build_page_stores`. (Without a browser nothing is built.)"""
    folder = tmp_path_factory.mktemp("stores")
    build_page_stores(folder)
    return folder


@pytest.fixture(scope="module")
def server(page_folder: Path) -> Iterator[Serving]:
    """A server that writes the stores, without tokens."""
    with Serving(Settings(path=page_folder)) as server:
        yield server


@pytest.fixture
def visit(browser: Browser, server: Serving) -> Iterator[Callable[..., Visit]]:
    """Open a tab; it is closed after the test."""
    with ExitStack() as tabs:
        yield lambda **options: tabs.enter_context(Visit(browser, options.pop("url", server.url), **options))


#: A function that opens a tab, as the fixture `visit` returns it.
Open = Callable[..., Any]
