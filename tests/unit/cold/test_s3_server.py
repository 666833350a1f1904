"""A server with S3's interface: addresses and credentials, repeated requests, lost answers, no conditions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto", reason="moto is not installed: there is no server to ask")

from obstore.store import S3Store

import expstore
from expstore import cold
from expstore.errors import CorruptionError, RemoteError, StateError
from tests.support.batches import episode_rows
from tests.support.object_stores import check_whole
from tests.support.s3_server import ENVIRONMENT, Request, S3Server

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

Buffer = expstore.TensorDictReplayBuffer


def _store_of(url: str, server: S3Server) -> S3Store:
    return S3Store.from_url(
        url, endpoint=server.url, access_key_id="key", secret_access_key="secret", region="us-east-1",
        client_options={"allow_http": True},
    )  # fmt: skip


@pytest.mark.slow
def test_a_store_goes_there_and_back(tmp_path: Path, rb: Buffer, server: S3Server, url: str) -> None:
    first = cold.push(rb, url)
    rb.extend(episode_rows(10, start=50))
    second = cold.push(rb, url)
    assert 0 < second.new_parts < first.new_parts
    cold.pull(url, tmp_path / "new.exp", version=2)
    with expstore.open(tmp_path / "new.exp", mode="r") as reader:
        assert reader[:]["number"].tolist() == list(range(60))
    cached = cold.ObjectStorage(url, cache=tmp_path / "cache")
    with expstore.open(cached, mode="r", batch_size=4) as reader:
        assert len(reader) == 60
        assert reader.sample().shape == (4,)
    assert [version.number for version in cold.prune(url, keep=1).versions] == [1]
    assert check_whole(cold.ObjectStorage(_store_of(url, server))) == [second]


def test_open_takes_a_url(
    tmp_path: Path, rb: Buffer, server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cold.push(rb, url)
    with expstore.open(url, mode="r", version=1) as reader:
        assert len(reader) == 50
    assert (tmp_path / "home" / "expstore" / "versions").is_dir()


@pytest.mark.slow
def test_a_large_file_takes_several_requests(tmp_path: Path, server: S3Server, url: str) -> None:
    import torch
    from tensordict import TensorDict

    frames = torch.randint(
        0, 255, (700, 3, 96, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    with expstore.open(tmp_path / "run.exp", layout="flat") as rb:
        rb.extend(TensorDict({"pixels": frames}, [700]))
        cold.push(rb, url)
    assert any("partNumber" in request.path for request in server.requests)
    cold.pull(url, tmp_path / "new.exp")
    with expstore.open(tmp_path / "new.exp", mode="r") as reader:
        assert reader[:]["pixels"].equal(frames)


@pytest.mark.guarantee(
    "version/retries",
    "Requests to an object storage that are throttled or fail are repeated a few times, and a lost answer"
    " makes no second version.",
)
@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 500, 503])
def test_throttled_and_failed_requests_are_repeated(
    status: int, tmp_path: Path, rb: Buffer, server: S3Server, url: str
) -> None:
    """Every request fails once, before the server has seen it or after."""
    seen: set[tuple[str, str]] = set()

    def fail_once(request: Request) -> int | None:
        first = (request.method, request.path) not in seen
        seen.add((request.method, request.path))
        return status if first else None

    server.before = fail_once
    cold.push(rb, url)
    cold.pull(url, tmp_path / "new.exp")
    with expstore.open(tmp_path / "new.exp", mode="r") as reader:
        assert len(reader) == 50


@pytest.mark.guarantee("version/retries")
def test_repetition_is_bounded(rb: Buffer, server: S3Server, url: str) -> None:
    server.before = lambda request: 503
    with pytest.raises(RemoteError, match=r"cannot get versions\.json in s3://bucket/.*503"):
        cold.versions(cold.ObjectStorage(url, retries=2))
    assert len(server.requests) == 3


@pytest.mark.guarantee("version/retries")
@pytest.mark.slow
@pytest.mark.parametrize("target", ["versions.json", "manifests/", "parts/"])
def test_an_answer_that_is_lost_commits_one_version(
    target: str, rb: Buffer, server: S3Server, url: str
) -> None:
    """The server has done what was asked, and the client repeats it."""
    lost: list[Request] = []

    def lose(request: Request) -> int | None:
        if request.method == "PUT" and target in request.path and not lost:
            lost.append(request)
            return 500
        return None

    server.after = lose
    assert cold.push(rb, url).number == 1
    rb.extend(episode_rows(10, start=50))
    lost.clear()
    assert cold.push(rb, url).number == 2
    assert lost
    assert [version.rows for version in check_whole(cold.ObjectStorage(_store_of(url, server)))] == [50, 60]


@pytest.mark.guarantee("version/retries")
@pytest.mark.slow
@pytest.mark.parametrize("wanted", [{"drop": [1]}, {"keep": 1}])
def test_a_prune_whose_answer_is_lost_reports_what_it_removed(
    wanted: dict[str, Any], rb: Buffer, server: S3Server, url: str
) -> None:
    first = cold.push(rb, url)
    rb.extend(episode_rows(10, start=50))
    cold.push(rb, url)
    lost: list[Request] = []

    def lose(request: Request) -> int | None:
        if request.method == "PUT" and "versions.json" in request.path and not lost:
            lost.append(request)
            return 500
        return None

    server.after = lose
    assert cold.prune(url, **wanted).versions == (first,)
    assert lost
    assert [version.rows for version in check_whole(cold.ObjectStorage(_store_of(url, server)))] == [60]


@pytest.mark.guarantee("version/races")
def test_a_server_without_conditional_writes_is_refused(rb: Buffer, server: S3Server, url: str) -> None:
    server.unconditional = True
    for act in (lambda: cold.push(rb, url), lambda: cold.prune(url, keep=1)):
        with pytest.raises(StateError, match=r"ignores conditional writes \(If-None-Match\)") as caught:
            act()
        assert caught.value.kind == "no_conditional_put"
    server.unconditional = False
    assert cold.versions(url) == []
    assert not any("parts" in request.path for request in server.requests)


def test_a_server_that_does_not_know_conditional_writes_is_refused(
    rb: Buffer, server: S3Server, url: str
) -> None:
    server.before = lambda request: (
        501 if {"If-None-Match", "If-Match"} & {name.title() for name in request.headers} else None
    )
    with pytest.raises(expstore.ExpStoreError, match="501"):
        cold.push(rb, cold.ObjectStorage(url, retries=0))


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_say_what_to_set(status: int, rb: Buffer, server: S3Server, url: str) -> None:
    server.before = lambda request: status
    for act in (lambda: cold.push(rb, url), lambda: cold.versions(url)):
        with pytest.raises(RemoteError, match="set AWS_ACCESS_KEY_ID") as caught:
            act()
        assert caught.value.kind == "unauthorized"
        assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_a_missing_bucket_is_reported(tmp_path: Path, rb: Buffer, server: S3Server) -> None:
    acts: list[Callable[[], object]] = [
        lambda: cold.push(rb, "s3://none/run"),
        lambda: cold.versions("s3://none/run"),
        lambda: cold.pull("s3://none/run", tmp_path / "new.exp"),
    ]
    for act in acts:
        with pytest.raises(RemoteError, match="there is no bucket for s3://none/run"):
            act()


def test_no_server_is_reported(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RemoteError, match=r"cannot get versions\.json in s3://bucket/run"):
        cold.versions(cold.ObjectStorage("s3://bucket/run", retries=1))


@pytest.mark.guarantee("version/pulls")
def test_a_flipped_byte_is_named(tmp_path: Path, rb: Buffer, server: S3Server, url: str) -> None:
    import obstore

    cold.push(rb, url)
    store = _store_of(url, server)
    parts = obstore.list(store, "parts").collect()
    largest = max(parts, key=lambda item: item["size"])["path"]
    data = bytearray(obstore.get(store, largest).bytes())
    data[100] ^= 4
    obstore.put(store, largest, bytes(data))
    with pytest.raises(CorruptionError, match=f"of version 1 is damaged in {url}: {largest} has SHA-256"):
        cold.pull(url, tmp_path / "new.exp")
