"""The shards of a cluster in a browser: their list, one of them, a comparison, and one that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from expstore.api import Settings
from expstore.api.shards_app import create_shards_app
from expstore.cluster.members import FixedMembers
from tests.page.conftest import Open
from tests.support.browsers import read_findings, wait_until
from tests.support.servers import Serving

pytestmark = pytest.mark.slow  # in a browser


@pytest.fixture(scope="module")
def cluster(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The page over two stores of the server, and one of a server that does not run."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    members = FixedMembers([f"{server.url}/run", "http://127.0.0.1:9/gone", f"{server.url}/texts"])
    settings = Settings(path=folder, read_only=True)
    with Serving(settings, create_shards_app(members, settings)) as page:
        yield page


def test_the_pages_show_shards(visit: Open, cluster: Serving) -> None:
    tab = visit(url=cluster.url)
    page = tab.open("/")
    wait_until(page, "text => document.querySelector('main').innerText.includes(text)", "does not answer")
    names = page.locator("tbody td a").all_inner_texts()
    assert {"shard-0", "shard-1", "shard-2"} <= set(names)
    assert read_findings(page) == []
    page.click("a:has-text('shard-0')")
    page.wait_for_selector("h1:has-text('shard-0')")
    wait_until(page, "() => document.querySelectorAll('main canvas').length >= 2")
    tab.open("/stores/shard-0/episodes/1")
    wait_until(page, "text => document.querySelector('main').innerText.includes(text)", "Values at step")
    tab.open("/compare?stores=shard-0,shard-2")
    wait_until(page, "text => document.querySelector('main').innerText.includes(text)", "shard-2")
    tab.open("/stores/shard-2/sql?q=SELECT%20count(*)%20AS%20n%20FROM%20episodes")
    wait_until(page, "() => document.querySelectorAll('main tbody tr').length == 1")
    tab.open("/stores/shard-0/sampling?kind=prioritized")
    wait_until(page, "text => document.querySelector('main').innerText.includes(text)", "rows drawn in")
    assert tab.foreign == []
    assert [error for error in tab.errors if "502" not in error] == []
