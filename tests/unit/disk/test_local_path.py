"""Paths as users give them: folders of this machine, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from expstore.disk.local_path import local_path
from expstore.errors import StateError


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("http://host:8420/name", "expstore.connect"),
        ("https://host/name", "expstore.connect"),
        ("HTTPS://host/name", "expstore.connect"),
        ("s3://bucket/key", "copy the store to a local folder"),
        ("gs://bucket/key", "copy the store to a local folder"),
        ("anything+at-all.1://x", "copy the store to a local folder"),
        ("file:///tmp/x", "leave out file://"),
        (Path("s3://bucket/key"), "copy the store to a local folder"),
        (Path("http://host"), "expstore.connect"),
    ],
)
def test_a_url_is_refused_with_what_to_use(given: str | Path, instead: str) -> None:
    with pytest.raises(StateError, match=instead) as caught:
        local_path(given)
    assert caught.value.kind == "path"


@pytest.mark.parametrize(
    "given", ["a", "/a/b", ":memory:", "a?b", "a\\b", "c:/x", "a:b", "1://x", "md:x", "a/b://c"]
)
def test_a_path_stays_as_it_is(given: str) -> None:
    assert local_path(given) == Path(given)
    assert local_path(Path(given)) == Path(given)


def test_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert local_path("~/a") == Path("/home/somebody/a")
    assert local_path(Path("~/a")) == Path("/home/somebody/a")
    with pytest.raises(StateError, match="write the path without ~"):
        local_path("~no_such_user/a")


def test_what_no_file_can_be_called() -> None:
    with pytest.raises(StateError, match="NUL"):
        local_path("a\0b")
