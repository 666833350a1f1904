"""The page without a browser: its files and their headers, `--no-ui`, and the command that opens it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from expstore.api import Settings
from expstore.cluster.members import ClusterFile
from tests.support import warm_processes
from tests.support.commands import Cli
from tests.support.paths import ROOT
from tests.support.servers import Serving, serving

STATIC = ROOT / "api" / "static"
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def policy_of(answer: httpx.Response) -> dict[str, str]:
    parts = (part.strip().partition(" ") for part in answer.headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in parts}


@pytest.mark.guarantee("access/page")
def test_files_need_no_token_and_data_does(tmp_path: Path) -> None:
    with Serving(Settings(path=tmp_path, token=b"secret")) as server:
        with httpx.Client(base_url=server.url) as client:
            for name in FILES:
                answer = client.get(f"/ui/{name}")
                assert answer.status_code == 200, name
                assert answer.content == (STATIC / name).read_bytes()
                if kind := KINDS.get(Path(name).suffix):
                    assert answer.headers["content-type"].startswith(kind), name
                policy = policy_of(answer)
                assert policy["default-src"] == "'none'"
                assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
                assert policy["frame-ancestors"] == "'none'"
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["cache-control"] == "no-cache"
                assert "set-cookie" not in answer.headers
                again = client.get(f"/ui/{name}", headers={"If-None-Match": answer.headers["etag"]})
                assert (again.status_code, again.content) == (304, b"")
            assert client.get("/ui/").content == (STATIC / "index.html").read_bytes()
            for path in ("/", "/ui"):
                answer = client.get(path)
                assert (answer.status_code, answer.headers["location"]) == (307, "ui/")
            assert client.get("/v1/stores").status_code == 401


@pytest.mark.parametrize(
    "path", ["../page.py", "%2e%2e/page.py", "..%2fpage.py", "pages/../../page.py", "/etc/passwd", "pages"]
)
def test_nothing_outside_the_folder_is_served(path: str, tmp_path: Path) -> None:
    with Serving(Settings(path=tmp_path)) as server:
        request = httpx.Request("GET", f"{server.url}/ui/")
        request.url = httpx.URL(f"{server.url}/ui/").copy_with(raw_path=f"/ui/{path}".encode())
        with httpx.Client() as client:
            answer = client.send(request)
    assert answer.status_code == 404
    assert b"StaticFiles" not in answer.content


def test_writing_methods_are_refused(tmp_path: Path) -> None:
    with Serving(Settings(path=tmp_path)) as server:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert httpx.request(method, f"{server.url}/ui/app.js").status_code in (404, 405)


def test_no_ui_serves_no_page(tmp_path: Path) -> None:
    with serving(tmp_path, "--no-ui") as (_, facts), httpx.Client(base_url=facts["listening"]) as client:
        for path in ("/", "/ui", "/ui/", "/ui/app.js"):
            assert client.get(path).status_code == 404
        assert client.get("/v1/stores").status_code == 200


def test_the_page_names_only_its_own_files() -> None:
    for name in FILES:
        if name.startswith("vendor") or not name.endswith((".html", ".js", ".css")):
            continue
        text = (STATIC / name).read_text()
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"'`]+", text) == [], name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
        for imported in re.findall(r"(?:from|import\()\s*\"(\.[^\"]+)\"", text):
            assert ((STATIC / name).parent / imported).is_file(), (name, imported)


def test_the_command_prints_the_address_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "expstore", "ui", str(tmp_path), "--port", "0", "--no-browser"]
    with warm_processes.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            found = re.search(r"(http://127\.0\.0\.1:\d+)/ui/ \(Ctrl-C", child.stdout.readline())
            assert found
            with httpx.Client(base_url=found[1]) as client:
                assert client.get("/ui/").status_code == 200
                assert client.get("/v1/stores").json()["access"] == "read"
                assert client.put("/v1/stores/new", json={}).status_code == 405
            child.send_signal(signal.SIGINT)
            child.communicate(timeout=60)
            assert child.returncode == 0
        finally:
            child.kill()
    assert list(tmp_path.iterdir()) == []


def test_the_command_shows_the_shards_of_a_cluster_file(tmp_path: Path) -> None:
    ClusterFile.create(tmp_path / "cluster.json", [("http://127.0.0.1:9/a", "1" * 32)])
    arguments = ["ui", str(tmp_path / "cluster.json"), "--port", "0", "--no-browser"]
    command = [sys.executable, "-m", "expstore", *arguments]
    with warm_processes.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            found = re.search(r"(http://127\.0\.0\.1:\d+)/ui/ \(Ctrl-C", child.stdout.readline())
            assert found
            with httpx.Client(base_url=found[1]) as client:
                assert client.get("/ui/").status_code == 200
                assert client.get("/v1/stores").json()["stores"] == ["shard-0"]
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("notes.txt", [], "is not a cluster file"),
        (".", ["--token-file", "notes.txt"], "no token is sent to shards"),
        ("missing", [], "neither a store nor a folder of stores"),
    ],
)
def test_other_paths_are_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("a text")
    done = cli("ui", name, *options, "--no-browser")
    assert done.code == 2
    assert message in done.err
