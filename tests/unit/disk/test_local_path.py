"""Paths given by users: local folders only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expstore.disk.local_path import local_path
from expstore.errors import StateError

#: Text or path, and what the error says.
REFUSED: list[tuple[Any, str]] = [
    ("http://host:8420/name", "expstore.connect"),
    ("https://host/name", "expstore.connect"),
    ("HTTPS://host/name", "expstore.connect"),
    ("s3://bucket/key", "give a local path"),
    ("gs://bucket/key", "give a local path"),
    ("anything+at-all.1://x", "give a local path"),
    ("file:///tmp/x", "leave out file://"),
    (Path("s3://bucket/key"), "give a local path"),
    (Path("http://host"), "expstore.connect"),
    (Path("foo://b/k"), "foo:// is not supported; give a local path"),
    (Path("anything+at-all.1://x"), "give a local path"),
    ("foo:/b/k", "give the absolute path"),
    *((given, f"is a {type(given).__name__}, not a path; pass a str") for given in (b"a", 3, None)),
    ("a\0b", "NUL"),
]


def test_what_is_no_local_path_is_refused_with_what_to_use() -> None:
    for given, instead in REFUSED:
        with pytest.raises(StateError, match=instead) as caught:
            local_path(given)
        assert caught.value.kind == "path"


LOCAL = ("a", "/a/b", ":memory:", "a?b", "a\\b", "c:/x", "a:b", "1://x", "md:x", "a/b://c", "foo:", "/foo:/b")


def test_a_path_stays_as_it_is() -> None:
    for given in LOCAL:
        assert local_path(given) == Path(given)
        assert local_path(Path(given)) == Path(given)


def test_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert local_path("~/a") == Path("/home/somebody/a")
    assert local_path(Path("~/a")) == Path("/home/somebody/a")
    with pytest.raises(StateError, match="Write the path without ~"):
        local_path("~no_such_user/a")


def test_links_that_lead_to_themselves_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / "a" / "store.exp"):
        with pytest.raises(StateError, match="leads to itself") as caught:
            local_path(path)
        assert caught.value.kind == "path"
