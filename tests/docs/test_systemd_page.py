"""docs/server.md: its unit for systemd is valid, its command serves, and probes need no token or headers."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers import serving

UNIT = (ROOT / "examples" / "deploy" / "expstore.service").read_text()
PAGE = (ROOT / "docs" / "server.md").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    """With a program that exists in place of the one that the page installs."""
    assert UNIT.count("/opt/expstore/bin/expstore") == 1
    unit = tmp_path / "expstore.service"
    unit.write_text(UNIT.replace("/opt/expstore/bin/expstore", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert not [line for line in (done.stdout + done.stderr).splitlines() if "expstore.service" in line]


def ask(address: str, request: str) -> str:
    """Send a request as it is; return the beginning of the answer."""
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(request.encode())
        answer = b""
        while b"\r\n" not in answer and (part := connection.recv(4096)):
            answer += part
    return answer.decode()


@pytest.mark.slow
def test_the_command_serves_and_probes_need_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens as the page makes them, and the command of the unit in folders of the test."""
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"`(umask 077; [^`]+)`", PAGE)
    for name in ("token", "read-token"):
        line = command.replace("/etc/expstore/token", f"etc/expstore/{name}").replace("/etc", "etc")
        subprocess.run(["sh", "-c", line], check=True)
        assert (tmp_path / "etc" / "expstore" / name).stat().st_mode & 0o077 == 0
    (start,) = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", UNIT, re.MULTILINE)
    folders = {"%S": str(tmp_path / "state"), "%d": str(tmp_path / "etc" / "expstore")}
    for name, folder in folders.items():
        start = start.replace(name, folder)
    (tmp_path / "state" / "expstore").mkdir(parents=True)
    program, serve, *arguments = shlex.split(start.replace("\\\n", " "))
    assert (program, serve) == ("/opt/expstore/bin/expstore", "serve")
    with serving(*arguments) as (_, facts):
        address = facts["listening"].replace("0.0.0.0", "127.0.0.1")
        for path in re.findall(r"path: (/\w+)", PAGE):
            named = f"GET {path} HTTP/1.1\r\nHost: {address.removeprefix('http://')}\r\n\r\n"
            for request in (named, f"GET {path} HTTP/1.0\r\n\r\n"):
                answer = ask(address, request)
                assert answer.split()[1] == "200", answer
        assert ask(address, "GET /v1/stores HTTP/1.0\r\n\r\n").split()[1] == "400"
