"""Downloads continue after interruptions, and their content is checked."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from expstore.datasets.download import RemoteFile, fetch_files, list_hugging_face
from expstore.errors import NotFoundError, RemoteError, StorageError
from tests.support.data_server import DataServer, serving_files

DATA = np.random.default_rng(1).bytes(300_000)


def remote(server: DataServer, **facts: object) -> RemoteFile:
    return RemoteFile(url=f"{server.url}/a.bin", name="sub/a.bin", **facts)  # type: ignore[arg-type]


@pytest.fixture
def public(tmp_path: Path) -> Path:
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "a.bin").write_bytes(DATA)
    return tmp_path / "public"


def test_a_broken_connection_continues_where_it_broke(public: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with serving_files(public, break_after=[100_000, 50_000]) as server:
        file = remote(server, size=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
        fetch_files([file], tmp_path / "got", progress=lambda *now: told.append(now), pause=lambda _: None)
        assert [asked for _, asked in server.requests] == [None, "bytes=100000-", "bytes=150000-"]
        fetch_files([file], tmp_path / "got")
        assert len(server.requests) == 3  # it is complete
    assert (tmp_path / "got" / "sub" / "a.bin").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "got" / "sub").iterdir()] == ["a.bin"]
    assert told[-1] == (300_000, 300_000)


def test_a_later_call_continues_unless_the_file_changed(public: Path, tmp_path: Path) -> None:
    def give_up(seconds: float) -> None:
        raise KeyboardInterrupt

    for changed in (False, True):
        folder = tmp_path / str(changed)
        with serving_files(public, break_after=[120_000]) as server:
            with pytest.raises(KeyboardInterrupt):
                fetch_files([remote(server)], folder, pause=give_up)
            assert not (folder / "sub" / "a.bin").exists()
            if changed:
                (public / "a.bin").write_bytes(DATA[::-1])
            fetch_files([remote(server)], folder)
            assert server.requests[-1][1] == "bytes=120000-"
        assert (folder / "sub" / "a.bin").read_bytes() == (DATA[::-1] if changed else DATA)


def test_a_server_without_ranges(public: Path, tmp_path: Path) -> None:
    with serving_files(public, break_after=[120_000], ranges=False) as server:
        fetch_files([remote(server)], tmp_path / "got", pause=lambda _: None)
    assert (tmp_path / "got" / "sub" / "a.bin").read_bytes() == DATA


def test_a_part_that_is_complete_is_not_fetched_again(public: Path, tmp_path: Path) -> None:
    part = tmp_path / "got" / "sub" / "a.bin.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA)
    with serving_files(public) as server:
        fetch_files([remote(server)], tmp_path / "got")
    assert (tmp_path / "got" / "sub" / "a.bin").read_bytes() == DATA
    assert not part.exists()


def test_wrong_downloads_are_refused(public: Path, tmp_path: Path) -> None:
    with serving_files(public) as server:
        with pytest.raises(StorageError, match="has 300000 bytes; 5 are expected"):
            fetch_files([remote(server, size=5)], tmp_path / "got")
        with pytest.raises(StorageError, match="SHA-256 .* abc is expected"):
            fetch_files([remote(server, sha256="abc")], tmp_path / "got")
        with pytest.raises(NotFoundError, match=r"there is no file at .*/b.bin \(HTTP 404\)"):
            fetch_files([RemoteFile(url=f"{server.url}/b.bin", name="b.bin")], tmp_path / "got")
        assert not [
            path for path in (tmp_path / "got").rglob("*") if path.is_file() and path.name != "a.bin.etag"
        ]
    waited: list[float] = []
    with pytest.raises(RemoteError, match="cannot fetch http://127.0.0.1:1/a: .*; check the address"):
        fetch_files([RemoteFile(url="http://127.0.0.1:1/a", name="a")], tmp_path / "got", pause=waited.append)
    assert waited == [1.0, 2.0, 4.0, 8.0]


def test_the_listing_of_a_hub(public: Path, tmp_path: Path) -> None:
    folder = public / "who" / "what" / "part (1)"
    folder.mkdir(parents=True)
    (folder / "a$.bin").write_bytes(DATA)
    (public / "who" / "what" / "readme").write_bytes(b"x")
    with serving_files(public) as server:
        found = list_hugging_face("who/what", "part (1)", endpoint=server.url)
        assert [(file.name, file.size) for file in found] == [("part (1)/a$.bin", 300_000)]
        fetch_files(found, tmp_path / "got")
        assert len(list_hugging_face("who/what", endpoint=server.url)) == 2
        with pytest.raises(NotFoundError):
            list_hugging_face("who/else", endpoint=server.url)
    assert (tmp_path / "got" / "part (1)" / "a$.bin").read_bytes() == DATA
    with pytest.raises(RemoteError, match="cannot fetch http://127.0.0.1:1/api/datasets/who/what"):
        list_hugging_face("who/what", endpoint="http://127.0.0.1:1")
