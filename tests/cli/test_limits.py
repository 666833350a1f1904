"""The file of limits of `expstore serve`: every limit of the settings, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import httpx
import pytest

from expstore.api import Settings
from expstore.cli.serve import LIMITS
from tests.support.commands import Cli
from tests.support.paths import ROOT
from tests.support.servers import serving

#: Fields of the settings that are no limits, or have an option of their own.
_OTHERS = {
    "path", "read_only", "token", "read_token", "hosts", "sql", "ui", "min_size", "samples_per_insert",
    "error_buffer", "capture", "ship", "clock",
}  # fmt: skip


def test_the_page_and_the_command_name_every_limit() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert {*fields} - _OTHERS == {*LIMITS}
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", (ROOT / "docs" / "server.md").read_text(), re.M)
    defaults = {name: default for name, default in rows if name in LIMITS}
    assert defaults == {name: "none" if fields[name] is None else str(fields[name]) for name in LIMITS}


def test_a_file_with_something_else_is_refused(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    for text, message in (
        ("max_row = 3", "'max_row', which is no limit; did you mean max_rows?"),
        ("port = 3", "'port', which is no limit; there are max_body, max_rows"),
        ("max_rows = 1.5", "max_rows = 1.5, which is not a whole number above 0"),
        ("max_rows = true", "max_rows = True, which is not a whole number above 0"),
        ("rate = 0", "rate = 0, which is not a number above 0"),
        ("sql_seconds = inf", "sql_seconds = inf, which is not a number above 0"),
        ("max_rows: 3", "limits.toml cannot be read: "),
    ):
        path.write_text(text)
        done = cli("serve", tmp_path, "--limits", path)
        assert done.code == 2
        assert message in done.err
    assert "cannot be read" in cli("serve", tmp_path, "--limits", tmp_path / "none.toml").err


@pytest.mark.slow
def test_the_limits_of_the_environment_are_used(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = store.parent / "limits.toml"
    limits.write_text("max_rows = 5\nrate = 1000.0\n")
    monkeypatch.setenv("EXPSTORE_LIMITS", str(limits))
    with serving(store) as (_, facts), httpx.Client(base_url=facts["listening"], timeout=60) as client:
        asked = client.post("/v1/stores/run/sample", json={"batch_size": 6})
        assert asked.status_code == 422
        assert "at most 5" in asked.text or "equal to 5" in asked.text, asked.text
        assert client.post("/v1/stores/run/sample", json={"batch_size": 5}).status_code == 200
        read = client.post("/v1/stores/run/rows", json={"ids": [*range(1, 7)]})
        assert read.status_code == 422
        assert "at most 5 rows, and 6 ids are given" in read.text
        assert client.post("/v1/stores/run/rows", json={"ids": [*range(1, 6)]}).status_code == 200
