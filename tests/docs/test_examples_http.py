"""The HTTP examples run against a real server: curl, polars, JavaScript."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from expstore.api import Settings
from tests.support import warm_processes
from tests.support.paths import ROOT
from tests.support.servers import Serving

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Serving(Settings(path=tmp_path_factory.mktemp("runs"))) as server:
        yield server.url


def run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    begin = warm_processes.run if command[0] == sys.executable else subprocess.run
    done = begin(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_curl_and_polars(url: str) -> None:
    lines = run("sh", str(EXAMPLES / "http_curl.sh"), url).splitlines()
    assert lines[0] == '{"name":"curl"}'
    assert lines[1] == '{"first_id":1,"count":3,"generation":1,"largest_priority":1.0}'
    assert '"observation":[[' in lines[2]
    assert lines[3] == '{"columns":["action","reward"],"rows":[[0,0.5],[1,0.5]]}'
    told = run(sys.executable, str(EXAMPLES / "http_polars.py"), f"{url}/v1/stores/curl")
    assert "next.reward" in told
    assert "episode_id" in told


@pytest.mark.slow
def test_javascript(url: str) -> None:
    assert run("node", str(EXAMPLES / "http_fetch.mjs"), url).splitlines()[::2] == [
        "rows 1 to 3",
        "clicks in all: 3",
    ]


@pytest.mark.slow
def test_actors_and_a_learner(url: str) -> None:
    command = [
        sys.executable,
        str(EXAMPLES / "http_actors.py"),
        "--url",
        url,
        "--rows",
        "256",
        "--updates",
        "30",
    ]
    told = run(*command).splitlines()
    assert told[0].endswith("after 30 updates, 512 rows")
    assert [line.split(":")[0] for line in told[1:]] == ["actor-1", "actor-2"]
