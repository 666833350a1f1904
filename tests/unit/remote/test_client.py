"""The client against a real server: the buffer's operations over a connection that may break."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from datetime import time as clock
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import expstore
from expstore import errors
from expstore.api import Settings, create_app
from expstore.errors import (
    ArgumentError,
    NoRowError,
    NotFoundError,
    NotReadyError,
    QueryError,
    RemoteError,
    SchemaError,
    SnapshotError,
    StateError,
    StorageError,
)
from expstore.remote import RemoteReplayBuffer, Retries
from expstore.remote.local_only import INSTEAD
from expstore.remote.transport import Address, Connection, _error_of
from tests.support.arrow_bodies import batch_of
from tests.support.asgi import api_client
from tests.support.batches import same
from tests.support.forks import forked
from tests.support.servers import KillableServer, Serving
from tests.support.tcp_proxy import BreakableProxy, Proxy
from tests.support.waits import wait_until

pytestmark = pytest.mark.index

SOON = Retries(seconds=20, first=0.01, longest=0.05, seed=3)
ONCE = Retries(seconds=0)
PATIENCE = 60.0
OWN = ("index", "id", "priority_weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with Serving(Settings(path=folder, sql_seconds=60.0)) as server:
        yield server


@pytest.fixture
def name(folder: Path, request: pytest.FixtureRequest) -> str:
    """Return the name of a new store."""
    name = "".join(letter for letter in request.node.name if letter.isalnum())[:60]
    expstore.open(folder / f"{name}.exp", mode="x", seed=3).close()
    return name


def connect(server: Any, name: str, **options: Any) -> RemoteReplayBuffer:
    options.setdefault("retries", SOON)
    found = expstore.connect(f"http://127.0.0.1:{server.port}/{name}", **options)
    _connected.append(found)
    return found


_connected: list[RemoteReplayBuffer] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _connected:
        _connected.pop().close()


def test_a_store_may_have_the_name_of_a_file(server: Serving, folder: Path, tmp_path: Path) -> None:
    """An address that ends in .json is no cluster file."""
    expstore.open(folder / "run.json.exp", mode="x", schema={"x": "int64"}).close()
    with expstore.connect(f"{server.url}/run.json") as rb:
        assert isinstance(rb, RemoteReplayBuffer)
        assert len(rb) == 0
    with pytest.raises(NotFoundError):
        expstore.connect(str(tmp_path / "run.json"))  # a path is


def test_arrays_are_stored_and_returned(server: Serving, name: str) -> None:
    """Dicts of arrays, lists of such rows and Arrow tables are stored; batches come as dicts of arrays."""
    rb = connect(server, name, batch_size=8, seed=1)
    rows = {"a": np.arange(3), "next": {"reward": np.arange(3) / 2, "done": np.arange(3) == 2}}
    assert rb.extend(rows).tolist() == [1, 2, 3]
    assert rb.add({"a": 3, "next": {"reward": 1.5, "done": False}}) == 4
    one = {"a": np.int64(4), "next": {"reward": np.float64(2), "done": np.bool_(True)}}
    assert rb.extend([one, one | {"a": 5}]).tolist() == [5, 6]
    table = pa.table({"a": [6], "next.reward": [3.0], "next.done": [False]})
    assert rb.extend(table).tolist() == [7]
    batch, info = rb.sample(64, return_info=True, as_numpy=True)
    assert set(batch["a"].tolist()) == {*range(7)}
    assert [type(batch["next"]["reward"]), type(info["id"])] == [np.ndarray, np.ndarray]
    np.testing.assert_array_equal(batch["a"], info["id"] - 1)
    assert rb.extend(batch).tolist() == [*range(8, 72)]  # without its ids
    for wrong in (table.drop_columns(["next.done"]), {"next": rows["next"], "a": np.arange(2)}):
        with pytest.raises(SchemaError):
            rb.extend(wrong)
    with pytest.raises(SchemaError):
        rb.add({"a": [1, 2], "next": {"reward": 1.5, "done": False}})


@pytest.mark.guarantee(
    "server/same",
    "Rows are written and read as in the server's process, and draws of a seed are those of a reader there.",
)
def test_rows_go_in_and_come_out_as_in_process(server: Serving, folder: Path, name: str) -> None:
    data = batch_of(30)
    with connect(server, name) as rb:
        assert rb.schema is None
        assert len(rb) == 0
        assert rb.extend(data).tolist() == list(range(1, 31))
        assert rb.add(batch_of(1, 30)[0]) == 31
        assert len(rb) == 31
        read = rb.by_id(torch.tensor([3, 1, 31]))
        assert read["id"].tolist() == [3, 1, 31]
        assert same(read[:2].exclude(*OWN), data[[2, 0]])
        assert same(rb.trajectory(2).exclude(*OWN), data[10:20])
        assert rb.stats()["write_count"] == 31
        assert rb.meta == {}
        rb.flush()
        with expstore.open(folder / f"{name}.exp", mode="r") as local:
            assert rb.schema == local.schema
            assert same(local.by_id([31]), rb.by_id([31]))


def test_arrays_may_be_the_default(server: Serving, name: str) -> None:
    options: dict[str, Any] = {"batch_size": 8, "seed": 11}
    with connect(server, name, **options) as rb, connect(server, name, as_numpy=True, **options) as own:
        rb.extend(batch_of(50))
        wanted = [rb.sample() for _ in range(5)]
        found = [own.sample(), *own.stream(1), next(iter(own)), own.next()]
        batch, info = own.sample(return_info=True)
        assert type(info["id"]) is np.ndarray
        for one, other in zip([*found, batch], wanted, strict=True):
            assert type(one["next"]["reward"]) is np.ndarray
            np.testing.assert_array_equal(one["id"], other["id"])
        for one in (own.sample(as_numpy=False), *own.stream(1, as_numpy=False), own.by_id([1])):
            assert isinstance(one, TensorDict)
        assert type(next(rb.stream(1, as_numpy=True))["id"]) is np.ndarray
        copied = pickle.loads(pickle.dumps(own))
        assert type(copied.sample()["id"]) is np.ndarray
        copied.close()


@pytest.mark.guarantee("server/same")
@pytest.mark.parametrize("sampler", [None, {"kind": "prioritized", "alpha": 0.7, "beta": 0.5}])
def test_draws_of_a_seed_are_those_of_a_reader(
    server: Serving, folder: Path, name: str, sampler: dict[str, Any] | None
) -> None:
    with connect(server, name, batch_size=8, seed=11, sampler=sampler) as rb:
        rb.extend(batch_of(50))
        rb.update_priority(id=torch.arange(1, 51), priority=torch.arange(50.0))
        rb.flush()
        own = expstore.PrioritizedSampler(alpha=0.7, beta=0.5) if sampler else None
        with expstore.open(folder / f"{name}.exp", mode="r", seed=11, sampler=own, batch_size=8) as local:
            wanted = [local.sample() for _ in range(9)]
        # one by one, as a stream, one by one again, and what a stream has made ahead meanwhile is passed over
        found = [rb.sample(), rb.sample(), *rb.stream(2)]
        stream = rb.stream()
        found += [next(stream), rb.sample(), next(stream)]
        batch, info = rb.sample(return_info=True)
        assert set(info) == {key for key in OWN if key in batch}
        found += [batch, rb.sample()]
        for one, other in zip(found, wanted, strict=True):
            assert same(one, other)
        assert rb.draw == 9
        assert ("priority_weight" in found[0]) == (sampler is not None)
        later = connect(server, name, batch_size=8, seed=11, draw=4, sampler=sampler)
        assert same(later.sample(), wanted[4])
        later.close()


def test_batches_are_the_callers_own(server: Serving, name: str) -> None:
    with connect(server, name, batch_size=4, seed=1) as rb:
        rb.extend(batch_of(20))
        for one in (rb.sample(), next(rb.stream()), rb.by_id([1, 2]), rb.trajectory(1)):
            kept = one.clone()
            one["observation"].fill_(-1)
            one["next", "reward"] += 1
            rb.sample()
            assert (one["observation"] == -1).all()
            assert (one["next", "reward"] == kept["next", "reward"] + 1).all()
        assert rb.extend(rb.sample()).tolist() == [21, 22, 23, 24]  # without what says which rows they were
        bare = rb.sample(include_info=False)
        assert not {"id", "index"} & set(bare.keys())


def test_iteration_continues_and_ends(server: Serving, name: str) -> None:
    with connect(server, name, batch_size=4) as rb:
        with pytest.raises(NotReadyError):
            next(iter(rb))
        rb.extend(batch_of(20))
        assert [batch.batch_size for batch in rb.stream(3)] == [torch.Size([4])] * 3
        assert [len(batch) for batch in rb.stream(2, batch_size=7)] == [7, 7]
        for count, batch in enumerate(rb):
            assert batch["id"].shape == (4,)
            if count == 20:
                break
        assert rb.next()["id"].shape == rb.next()["id"].shape == (4,)
    assert rb._iterator is None  # the iteration of next() has ended with the buffer
    with pytest.raises(StateError, match="closed"):
        rb.sample()


def test_values_of_all_types(server: Serving, name: str) -> None:
    numbers = torch.arange(-6, 6)
    data = TensorDict(
        {
            **{
                str(kind).removeprefix("torch."): numbers.to(kind)
                for kind in (
                    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
                )
            },
            "deep": {"er": {"matrix": torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(1))}},
            "one": numbers[:, None].float(),
            "bits": torch.eye(12) > 0,
        },
        [12],
    )  # fmt: skip
    with connect(server, name, batch_size=5, seed=2) as rb:
        rb.extend(data)
        read = rb.by_id(range(1, 13)).exclude(*OWN)
        assert same(read, data)
        for batch in (rb.sample(), next(rb.stream())):
            assert same(batch.exclude(*OWN), data[batch["id"] - 1])
            assert {key: batch[key].dtype for key in data.keys(True, True)} == {
                key: data[key].dtype for key in data.keys(True, True)
            }


@pytest.mark.slow
def test_rows_of_no_fixed_size(server: Serving, folder: Path, name: str) -> None:
    texts = ["one", "", "drei", "vier"]
    rows = [
        TensorDict(
            {
                "tokens": torch.arange(size),
                "prompt": NonTensorData(text),
                "facts": NonTensorData({"n": size, "tags": texts[:size]}),
                "reward": torch.tensor([float(size)]),
            }
        )
        for size, text in enumerate(texts)
    ]
    with expstore.open(folder / f"{name}2.exp", mode="x", layout="arrow", seed=3):
        pass
    with connect(server, f"{name}2", batch_size=3, seed=2) as rb:
        assert rb.extend(rows).tolist() == [1, 2, 3, 4]
        # Rows that happen to be of one size, and lists that happen to be empty, are of the store's types.
        assert rb.extend([rows[0], rows[0]]).tolist() == [5, 6]
        assert rb.extend(torch.stack([rows[2], rows[2]])).tolist() == [7, 8]
        rows += [rows[0], rows[0], rows[2], rows[2]]
        rb.flush()
        with expstore.open(folder / f"{name}2.exp", mode="r", seed=2, batch_size=3) as local:
            wanted = [local.sample(), local.sample()]
        for one, other in zip([rb.sample(), next(rb.stream())], wanted, strict=True):
            assert one["id"].tolist() == other["id"].tolist()
            assert one["prompt"] == other["prompt"] == [rows[number - 1]["prompt"] for number in one["id"]]
            assert one["facts"] == other["facts"]
            assert [row.tolist() for row in one["tokens"].unbind()] == [
                row.tolist() for row in other["tokens"].unbind()
            ]


def test_stores_that_keep_the_best_rows_are_written_to(server: Serving, folder: Path, name: str) -> None:
    def scored(*scores: float) -> TensorDict:
        return TensorDict({"score": torch.tensor(scores)}, [len(scores)])

    writer = expstore.TensorDictMaxValueWriter(rank_key="score")
    with expstore.open(folder / f"{name}-best.exp", capacity=3, writer=writer) as rb:
        rb.extend(scored(1.0, 2.0, 3.0))
    with connect(server, f"{name}-best") as remote:
        remote.extend(scored(0.5, 7.0, 8.0))
        remote.extend(scored(9.0))
        assert sorted(remote.sample(64)["score"].unique().tolist()) == [7.0, 8.0, 9.0]


def test_lanes_keep_their_episodes(server: Serving, name: str) -> None:
    data = torch.stack([batch_of(20), batch_of(20, 100)])
    data.names = [None, "time"]
    with connect(server, name) as rb:
        ids = rb.extend(data)
        assert ids.shape == (40,)
        assert same(rb.by_id(ids).exclude(*OWN), data.reshape(-1))
        first, second = rb.trajectory(1)["action"], rb.trajectory(3)["action"]
        assert {len({int(x) // 100 for x in part}) for part in (first, second)} == {1}


def test_rows_that_are_not_taken_in(server: Serving, name: str) -> None:
    data = batch_of(6)
    data["collector", "mask"] = torch.tensor([True, False, True, True, False, True])
    with connect(server, name) as rb:
        assert rb.extend(data).tolist() == [1, -1, 2, 3, -1, 4]
        data["collector", "mask"][:] = False
        assert rb.extend(data).tolist() == [-1] * 6
        assert rb.extend(data[:0]).tolist() == []
        assert len(rb) == 4


def test_episodes_are_annotated(server: Serving, name: str) -> None:
    with connect(server, name) as rb:
        rb.extend(batch_of(15))
        facts = {"good": True, "self": "x", "episode_id": [1, None], "note": '<b>"\u202e'}
        assert rb.episodes.annotate(1, **facts) == facts
        del facts["good"]
        assert rb.episodes.annotate(1, good=None, score=0.5) == facts | {"score": 0.5}
        for bad, error in ((99, NotFoundError), (-1, NotFoundError), ("1", TypeError)):
            with pytest.raises(error):
                rb.episodes.annotate(bad, good=True)
        with pytest.raises(SchemaError):
            rb.episodes.annotate(1, score=float("nan"))


def test_sources_and_annotations_are_sent_with_rows(server: Serving, folder: Path, name: str) -> None:
    with connect(server, name) as rb:
        rb.extend(batch_of(15), source="robot", episode_info={"task": "peg", "n": 3})
        with pytest.raises(SchemaError):
            rb.extend(batch_of(1), episode_info={"x": object()})
        with pytest.raises(ValueError, match="validate"):
            rb.extend(batch_of(1), validate="all")  # type: ignore[arg-type]
        rb.flush()
        assert len(rb) == 15
    with expstore.open(folder / f"{name}.exp", mode="r") as local:
        found = local.sql("SELECT source, info FROM episodes ORDER BY episode_id").fetchall()
    assert [source for source, _ in found] == ["robot", "robot"]
    assert all('"peg"' in str(info) for _, info in found)


def test_priorities_are_set_by_id(server: Serving, name: str) -> None:
    with connect(server, name, batch_size=32, sampler={"kind": "prioritized"}, seed=1) as rb:
        rb.extend(batch_of(10))
        batch = rb.sample()
        batch["td_error"] = (batch["id"] == 4).float()[:, None]
        assert rb.update_priority(batch) == 32
        rest = torch.tensor([number for number in range(1, 11) if number != 4])
        assert rb.update_priority(id=rest, priority=0.0) == 9
        assert rb.update_priority(id=[4], priority=[2.0]) == 1
        assert set(rb.sample()["id"].tolist()) == {4}
        with pytest.raises(RemoteError):
            rb.update_priority(torch.arange(3), torch.ones(3))  # by index
        with pytest.raises(SchemaError):
            rb.update_priority(rb.sample())  # without td_error
        with pytest.raises(SchemaError):
            rb.update_priority(id=[1, 2], priority=[1.0, 2.0, 3.0])


def test_errors_are_those_of_a_local_buffer(server: Serving, name: str) -> None:
    with connect(server, name, batch_size=4) as rb:
        with pytest.raises(NotReadyError) as caught:
            rb.sample()
        assert caught.value.status == 409
        with pytest.raises(SchemaError):
            rb.extend(torch.zeros(3))  # type: ignore[arg-type]
        rb.extend(batch_of(5))
        with pytest.raises(NotFoundError):
            next(connect(server, name, batch_size=4, sampler="nobody").stream())
        with pytest.raises(StateError, match="batch_size"):
            next(iter(connect(server, name)))


def test_every_refused_name_has_its_hint_in_the_table() -> None:
    """Types, docstrings and errors are made from one table."""
    connection = expstore.remote.transport.Connection(Address("http://nowhere", "x"), None, timeout=1)
    rb = RemoteReplayBuffer(connection)
    brackets = {"rb[...]": "__getitem__", "rb[...] = rows": "__setitem__"}
    for name, hint in INSTEAD.items():
        *parts, last = brackets.get(name, name).split(".")
        owner = functools.reduce(getattr, parts, rb)
        found = getattr(type(owner), last)
        method = found.fget if isinstance(found, property) else found
        assert method.__name__ == last
        assert method.__doc__ is not None
        assert method.__doc__.startswith(f"Raise RemoteError: `{name}` is not available over a connection.")
        assert hint in method.__doc__
        with pytest.raises(RemoteError) as caught:
            method(owner)
        assert (caught.value.kind, caught.value.hint) == ("local_only", hint)
        assert caught.value.message == f"{name} is not available over a connection"


def test_a_connection_is_shared_as_it_is(server: Serving, name: str) -> None:
    """Collectors of several processes ask; tests/conformance/test_torchrl_collectors.py runs them."""
    with connect(server, name) as rb:
        assert rb.shared
        assert rb.share() is rb
        with pytest.raises(RemoteError) as caught:
            rb.share(False)
        assert caught.value.kind == "local_only"


def test_every_name_of_the_buffer_is_there() -> None:
    buffer, remote = (
        {name for name in dir(cls) if not name.startswith("_")}
        for cls in (expstore.TensorDictReplayBuffer, RemoteReplayBuffer)
    )
    assert buffer <= remote


def test_samplers_with_names_are_shared(server: Serving, name: str) -> None:
    passes = {"kind": "without_replacement", "shuffle": False}
    with connect(server, name) as rb, connect(server, name, sampler="once", batch_size=3) as other:
        first = rb.extend(batch_of(6))
        rb.name_sampler("once", passes, where="_step < 6", seed=4)
        with connect(server, name, sampler="once", batch_size=3) as third:
            drawn = [buffer.sample()["id"].tolist() for buffer in (other, third, other, third)]
        assert drawn == [first[:3].tolist(), first[3:].tolist()] * 2
        rb.dumps()
        rb.extend(batch_of(5))
        rb.loads()
        assert rb.by_id(other.sample()["id"])["action"].tolist() == batch_of(6)["action"][:3].tolist()
        rb.forget_sampler("once")
        with pytest.raises(NotFoundError):
            other.sample()


@pytest.mark.parametrize(
    ("url", "options", "error"),
    [
        *((url, {}, ArgumentError) for url in ("", "run", "ftp://host/run", "http://host", "http://host/")),
        *(
            (url, {}, ArgumentError)
            for url in ("http://u:p@host/run", "http://h/r?x=1", "s3://bucket/run.json")
        ),
        ([5], {}, ArgumentError),
        ("http://127.0.0.1:1/demo", {"sampler": expstore.PrioritizedSampler()}, RemoteError),
        ("http://127.0.0.1:1/demo", {"draw": 3}, ArgumentError),
        ("http://127.0.0.1:1/demo", {"prefetch": 0}, ArgumentError),
        ("http://127.0.0.1:1/demo", {"token": 5}, ArgumentError),
        ("http://127.0.0.1:1/demo", {"token": "two\nlines"}, ArgumentError),
        ("http://127.0.0.1:1/demo", {"timeout": "x"}, ArgumentError),
        ("http://127.0.0.1:1/demo", {"retries": 3}, ArgumentError),
        (["http://127.0.0.1:1/demo"], {"retries": 3}, ArgumentError),
        ("http://127.0.0.1:1/demo", {"device": "cuba"}, StateError),
    ],
)
def test_wrong_arguments_are_refused_before_a_request(
    url: Any, options: dict[str, Any], error: type[errors.ExpStoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect_anyway(*_: Any, **__: Any) -> Any:
        raise AssertionError("a connection is opened")

    monkeypatch.setattr(socket, "create_connection", connect_anyway)
    with pytest.raises(error):
        expstore.connect(url, **options)


def test_addresses_are_parsed() -> None:
    found = Address.of("https://host:1/behind/a%20name/")
    assert (found.root, found.name) == ("https://host:1/behind", "a name")
    assert found.path("sample") == "/behind/v1/stores/a%20name/sample"
    assert found.url("") == "https://host:1/behind/v1/stores/a%20name"


def test_a_connection_moves_with_its_session(server: Serving, name: str) -> None:
    with BreakableProxy(server.port) as proxy:
        connection = Connection(
            Address(f"http://127.0.0.1:{proxy.port}", name), None, timeout=30, retries=SOON
        )
        rb = RemoteReplayBuffer(connection)
        rb.extend(batch_of(5), source="actor")
        proxy.stop()
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(rb.extend, batch_of(5, 5), source="actor")
            connection.move(Address(server.url, name), None)
            assert written.result(30).tolist() == list(range(6, 11))
        assert rb.sql("SELECT count(*) FROM episodes").fetchone() == (1,)
        with pytest.raises(ValueError, match="same scheme"):
            connection.move(Address("https://127.0.0.1", name), None)
        rb.close()


@pytest.mark.slow
def test_open_episodes_of_a_source_are_found(server: Serving, folder: Path, name: str) -> None:
    with connect(server, name) as rb, connect(server, name) as other:
        assert rb.episodes.find_open("actor").tolist() == []
        rb.extend(batch_of(5), source="actor")
        rb.extend(batch_of(3))
        other.extend(batch_of(5), source="actor")
        other.extend(batch_of(10), source="ended")
        found = rb.sql("SELECT episode_id, source FROM episodes ORDER BY ALL").fetchall()
        assert [number for number, source in found if source == "actor"] == [1, 3]
        assert rb.episodes.find_open("actor").tolist() == [1, 3]  # of all sessions
        assert rb.episodes.find_open(None).tolist() == [2]
        assert other.episodes.find_open(None).tolist() == []
        assert other.episodes.find_open("ended").tolist() == []
        rb.episodes.end("actor")
        assert rb.episodes.find_open("actor").tolist() == [3]
    with expstore.open(folder / f"{name}own.exp") as rb:
        rb.extend(batch_of(5), source="actor")
        rb.extend(batch_of(5))
        assert (rb.episodes.find_open("actor").tolist(), rb.episodes.find_open(None).tolist()) == ([1], [2])


def test_a_wrong_name_and_a_server_that_is_gone(server: Serving) -> None:
    with pytest.raises(NotFoundError, match="nothing"):
        connect(server, "nothing")
    with Proxy(server.port, lambda _: "refuse") as proxy:
        with pytest.raises(RemoteError) as caught:
            connect(proxy, "nothing", retries=Retries(seconds=0.2, first=0.01, longest=0.02, seed=1))
        assert caught.value.kind == "unreachable"
        assert caught.value.hint == "check the address, and that `expstore serve` runs there"
        assert isinstance(caught.value, ConnectionError)
        assert proxy.connections > 3
        before = proxy.connections
        with pytest.raises(RemoteError):
            connect(proxy, "nothing", retries=ONCE)
        assert proxy.connections == before + 1


def test_a_key_is_of_one_write(server: Serving, name: str) -> None:
    with connect(server, name) as rb:
        mine = rb._connection._get_in_process()
        rb.extend(batch_of(3))
        mine.numbers = iter([1])  # type: ignore[assignment]
        with pytest.raises(StateError) as caught:
            rb.extend(batch_of(4))
        assert (caught.value.kind, caught.value.status) == ("key_reused", 409)
        mine.numbers = iter([1])  # type: ignore[assignment]
        assert rb.extend(batch_of(3)).tolist() == [1, 2, 3]
        assert len(rb) == 3


@pytest.mark.guarantee(
    "server/streams",
    "A stream of batches or a connection for draws that breaks loses no draw.",
)
def test_a_broken_stream_continues(server: Serving, name: str) -> None:
    with connect(server, name, batch_size=5000, seed=5) as rb:
        rb.extend(batch_of(50))
        wanted = list(rb.stream(12))
    with Proxy(server.port, lambda number: "half" if number in (1, 3) else "") as proxy:
        with connect(proxy, name, batch_size=5000, seed=5, prefetch=1) as rb:
            found = []
            for batch in rb.stream(12):
                found.append(batch)
                if len(found) in (3, 6):
                    proxy.cut()
        assert proxy.connections > 3
    same_rows = [torch.equal(one["id"], other["id"]) for one, other in zip(found, wanted, strict=True)]
    assert same_rows == [True] * 12


def test_threads_share_a_buffer(server: Serving, name: str) -> None:
    with connect(server, name, batch_size=4) as rb:

        def work(number: int) -> list[int]:
            ids = rb.extend(batch_of(4, 10 * number)).tolist()
            assert rb.sample()["id"].shape == (4,)
            return ids

        with ThreadPoolExecutor(6) as pool:
            written = [row for ids in pool.map(work, range(30)) for row in ids]
        assert sorted(written) == list(range(1, 121))
        assert len(rb) == 120


@pytest.mark.some(1)
@pytest.mark.parametrize("method", ["fork", "pickle"])
def test_other_processes_have_connections_of_their_own(server: Serving, name: str, method: str) -> None:
    def work() -> tuple[list[int], int]:
        with pytest.raises(StateError, match="another process"):
            next(held)
        ids = rb.extend(batch_of(3)).tolist()
        next(rb.stream(1))
        return ids, rb.draw

    with connect(server, name, batch_size=4, seed=1) as rb:
        rb.extend(batch_of(10))
        wanted = connect(server, name, batch_size=4, seed=1).sample()["id"].tolist()
        if method == "pickle":
            with pickle.loads(pickle.dumps(rb)) as copy:
                assert copy._connection._mine == {}
                assert copy.sample()["id"].tolist() == wanted
            return
        held = rb.stream()
        next(held)
        draw = rb.draw
        with forked(work) as answer:
            assert answer() == ([11, 12, 13], draw + 1)
        assert rb.draw == draw
        assert rb.extend(batch_of(3)).tolist() == [14, 15, 16]
        assert next(held)["id"].shape == (4,)
        held.close()  # type: ignore[attr-defined]


def test_an_interruption_ends_a_wait(server: Serving, name: str) -> None:
    with connect(server, name, batch_size=4, wait=60.0, timeout=60.0) as rb:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(iter(rb))  # there are no rows
        timer.join()
        rb.extend(batch_of(5))
        assert rb.sample()["id"].shape == (4,)


def test_a_draw_that_fails_does_not_count(server: Serving, name: str) -> None:
    with connect(server, name, batch_size=4, seed=1) as rb:
        with pytest.raises(NotReadyError):
            rb.sample()
        assert rb.draw == 0
        rb.extend(batch_of(50))
        wanted = connect(server, name, batch_size=4, seed=1).sample()["id"].tolist()
        assert rb.sample()["id"].tolist() == wanted
        assert rb.draw == 1


@pytest.mark.slow
def test_writers_notice_new_fields(tmp_path: Path) -> None:
    def table_of(*names: str) -> pa.Table:
        return pa.table({name: np.arange(3.0) for name in names})

    with expstore.open(tmp_path / "run.exp", mode="x") as local:
        local.extend({"x": np.arange(5.0)})
    with Serving(Settings(path=tmp_path)) as server:
        rb = connect(server, "run")
        assert rb.extend(table_of("x")).tolist() == [6, 7, 8]
    with expstore.open(tmp_path / "run.exp") as local:
        local.columns.add("y", fill=0.0, dtype="float64")
    with Serving(Settings(path=tmp_path)) as server:
        rb._connection.move(Address.of(f"{server.url}/run"), None)
        reader = table_of("x", "y").to_reader()
        assert rb.extend(reader).tolist() == [9, 10, 11]
        with pytest.raises(SchemaError, match="column 'z' is not a field"):
            rb.extend(table_of("x", "z"))
        assert rb.add({"x": 1.0, "y": 2.0}) == 12
        assert rb.by_id([11, 12])["y"].tolist() == [2.0, 2.0]


def test_threads_share_one_iteration(server: Serving, name: str) -> None:
    with connect(server, name, batch_size=4, seed=1) as rb:
        rb.extend(batch_of(50))
        wanted = [batch["id"].tolist() for batch in connect(server, name, batch_size=4, seed=1).stream(200)]
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda _: [rb.next()["id"].tolist() for _ in range(50)], range(4))
        assert sorted(itertools.chain(*found)) == sorted(wanted)


def test_closing_wakes_a_thread_that_waits_for_a_batch(server: Serving, name: str) -> None:
    rb = connect(server, name, batch_size=4, wait=60.0, timeout=60.0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rb.next)  # there are no rows
        wait_until(lambda: rb._iterator is not None and rb._iterator.gi_running)
        rb.close()
        with pytest.raises(StateError, match="closed"):
            future.result(20)
    with pytest.raises(StateError, match="closed"):
        rb.sample()


def test_closing_wakes_threads_that_wait_for_a_server(server: Serving, name: str) -> None:
    with Proxy(server.port, lambda number: "" if number == 0 else "refuse") as proxy:
        rb = connect(proxy, name, batch_size=4, retries=Retries(seconds=100, first=50, longest=50))
        proxy.cut()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(rb.extend, batch_of(3))
            wait_until(lambda: proxy.connections >= 2)
            rb.close()
            with pytest.raises(StateError):
                waiting.result(60)


def test_values_of_numpy_and_dates_are_sent(server: Serving, name: str) -> None:
    sampler = {"kind": "prioritized", "beta": np.float32(0.5)}
    rb = connect(server, name, batch_size=np.int64(4), seed=np.int64(3), sampler=sampler)
    rb.extend(batch_of(25))
    same = connect(server, name, batch_size=4, seed=3, sampler={"kind": "prioritized", "beta": 0.5})
    assert rb.sample()["id"].tolist() == same.sample()["id"].tolist()
    assert next(rb.stream(1))["id"].tolist() == same.sample()["id"].tolist()
    query = "SELECT action FROM transitions WHERE action > ? AND list_contains(?, action) AND ?"
    found = rb.sql(query, [np.int64(3), np.arange(9), np.bool_(True)], limit=np.int64(2))
    assert found.fetchall() == [(4,), (5,)]
    for when in (datetime(2026, 11, 28, 12), date(2026, 11, 28), np.datetime64("2026-11-28T12:00:00.5")):
        assert rb.sql("SELECT ? > TIMESTAMP '2026-11-27 13:00:00'", [when]).fetchall() == [(True,)]
    assert rb.sql("SELECT ? < TIME '13:00:00'", [clock(12, 30)]).fetchall() == [(True,)]
    ((x, y),) = rb.sql("SELECT isnan(?::DOUBLE), ?::DOUBLE", [np.nan, -np.inf])
    assert (x, y) == (True, -np.inf)
    with pytest.raises(ArgumentError):
        rb.sql("SELECT ?", [{1, 2}])


def test_an_address_with_more_than_a_name_is_told_its_form(server: Serving, name: str) -> None:
    with pytest.raises(NotFoundError, match="expstore.connect takes http"):
        expstore.connect(f"{server.url}/{name}/more")


def test_wrong_values_are_refused_before_they_are_sent(server: Serving, name: str) -> None:
    rb = connect(server, name)
    rb.extend(batch_of(5))
    wrong: list[Callable[[], Any]] = [
        lambda: rb.update_priority(id=["x"], priority=1.0),
        lambda: rb.update_priority(id=[1], priority="x"),
        lambda: rb.update_tensordict_priority(5),  # type: ignore[arg-type]
        lambda: rb.sql("SELECT ?", 5),  # type: ignore[arg-type]
        lambda: rb.trajectory("x"),  # type: ignore[arg-type]
    ]
    for act in wrong:
        with pytest.raises(ArgumentError):
            act()


def test_errors_have_the_class_that_the_server_raised(tmp_path: Path) -> None:
    app = create_app(Settings(path=tmp_path))

    @app.get("/fail/{name}/{kind}")
    def fail(name: str, kind: str) -> None:
        raise getattr(errors, name)("why", kind=kind)

    kinds = ("other", "memory", "too_large", "busy", "rate_limited", "sandbox", "query")
    with api_client(app) as client:
        for name, kind in itertools.product(errors.__all__, kinds):
            answer = client.get(f"/fail/{name}/{kind}")
            error = _error_of(answer.status_code, answer.content)
            assert (type(error).__name__, error.kind, error.status) == (name, kind, answer.status_code)


def test_errors_of_servers_that_name_no_class_have_that_of_their_kind_or_status() -> None:
    for status, kind, name, cls in [
        (404, "no_row", None, NoRowError),
        (409, "changed", None, StateError),
        (500, "storage", "Unknown", StorageError),
        (500, "half_loaded", "Unknown", RemoteError),
    ]:
        told = {"kind": kind, "message": "why", "hint": "", "class": name}
        assert type(_error_of(status, json.dumps({"error": told}).encode())) is cls
    assert type(_error_of(422, b"<html>")) is SchemaError


def test_results_are_limited(server: Serving, name: str) -> None:
    with connect(server, name) as rb:
        rb.extend(batch_of(25))
        assert rb.sql("SELECT action FROM transitions WHERE _id = $id", {"id": 4}).fetchone() == (3,)
        assert rb.sql("SELECT _id FROM transitions ORDER BY _id", limit=2).fetchall() == [(1,), (2,)]
        episodes = rb.episodes("length >= $n", "length DESC", params={"n": 10})
        assert [row[0] for row in episodes.fetchall()] == [1, 2]
        assert len(rb.episodes(limit=2)) == 2
        with pytest.raises(QueryError) as caught:
            rb.sql("SELECT * FROM range(20000)")
        assert caught.value.kind == "truncated"
        assert len(rb.sql("SELECT * FROM range(20000)", limit=9000)) == 9000


def test_versions_lie_with_the_store(server: Serving, name: str) -> None:
    with connect(server, name) as rb:
        rb.extend(batch_of(5))
        made = rb.snapshots.tag("five")
        assert (made.number, made.tag, made.rows) == (1, "five", 5)
        rb.extend(batch_of(3))
        assert rb.dumps().rows == 8
        assert [version.tag for version in rb.snapshots.list()] == ["five", None]
        with pytest.raises(SnapshotError):
            rb.snapshots.tag("five")
        rb.snapshots.restore(version="five")
        assert len(rb) == 5
        assert rb.snapshots.create().rows == 5
        with pytest.raises(RemoteError, match="path"):
            rb.dumps("elsewhere")  # type: ignore[arg-type]
        rb.extend(batch_of(4))
        assert rb.save().rows == rb.write_count == 9
        rb.load(version="five")


@pytest.mark.guarantee("server/retries")
def test_requests_without_a_key_are_not_repeated(server: Serving, name: str) -> None:
    with Proxy(server.port, lambda number: "answer" if number == 1 else "") as proxy:
        with connect(proxy, name) as rb:
            rb.extend(batch_of(5))
            proxy.cut()
            with pytest.raises(RemoteError):
                rb.dumps()
            assert len(rb.snapshots.list()) == 1


def test_a_socket_that_is_being_connected_is_closed_with_the_others(
    server: Serving, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat, or another thread, may begin a request while the connection is closed."""
    asked, closed, sockets = threading.Event(), threading.Event(), list[socket.socket]()
    create = socket.create_connection

    def create_later(*arguments: Any, **options: Any) -> socket.socket:
        asked.set()
        assert closed.wait(PATIENCE)
        sockets.append(create(*arguments, **options))
        return sockets[-1]

    link = Connection(Address.of(f"{server.url}/{name}"), None, timeout=PATIENCE)
    beat = threading.Thread(target=link.beat)
    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_connection", create_later)
        beat.start()
        assert asked.wait(PATIENCE)
        link.close()
        closed.set()
        beat.join(PATIENCE)
    assert [each.fileno() for each in sockets] == [-1]


def test_tokens(tmp_path: Path) -> None:
    expstore.open(tmp_path / "run.exp").close()
    with Serving(Settings(path=tmp_path, token=b"let me in please")) as server:
        with connect(server, "run", token="let me in please") as rb:
            assert rb.extend(batch_of(3)).tolist() == [1, 2, 3]
            assert next(rb.stream(1, batch_size=2))["id"].shape == (2,)
        for token in (None, "let me in"):
            with pytest.raises(RemoteError) as caught:
                connect(server, "run", token=token)
            assert caught.value.status == 401


def _write(server: KillableServer, number: int, until: float, written: dict[int, int]) -> None:
    with connect(server, "run", timeout=60, retries=Retries(seconds=100, seed=number)) as rb:
        for cycle in itertools.count():
            data = batch_of(20, (number << 32) + cycle * 20)
            ids = rb.extend(data).tolist()
            assert not written.keys() & set(ids), "an id came twice"
            written.update(zip(ids, data["action"].tolist(), strict=True))
            if time.monotonic() > until:
                return


def _sample(server: KillableServer, number: int, until: float) -> None:
    options: dict[str, Any] = {"timeout": 60, "wait": 30.0, "retries": Retries(seconds=100, seed=number)}
    with connect(server, "run", batch_size=32, **options) as rb:
        while time.monotonic() < until:
            batch = rb.sample()
            assert (batch["observation"][:, 0] == batch["action"].float()).all()


def _live_through_a_kill(folder: Path, clients: int, seconds: float) -> None:
    expstore.open(folder / "run.exp", mode="x", seed=1).close()
    server = KillableServer(folder)
    try:
        connect(server, "run").close()  # it answers
        until, written = time.monotonic() + seconds, [dict[int, int]() for _ in range(clients // 2)]
        with ThreadPoolExecutor(clients) as pool:
            writers = [
                pool.submit(_write, server, number, until, mine) for number, mine in enumerate(written)
            ]
            samplers = [pool.submit(_sample, server, number, until) for number in range(clients // 2)]
            threading.Event().wait(seconds / 2)  # in the middle
            server.kill()
            before = sum(map(len, written))
            server.begin()
            for client in (*writers, *samplers):
                client.result(seconds + 200)  # who saw an error other than the gap's has raised it
        with connect(server, "run") as rb:
            found = rb.sql("SELECT count(*), count(DISTINCT _id), count(DISTINCT action) FROM transitions")
            total = sum(map(len, written))
            assert found.fetchall() == [(total, total, total)]
            assert 0 < before < total
        assert server.most_memory < 2 << 20
    finally:
        server.kill()
    acknowledged = {number: action for mine in written for number, action in mine.items()}
    assert len(acknowledged) == total, "two clients were given one id"
    with expstore.open(folder / "run.exp", mode="r") as rb:
        assert dict(rb.sql("SELECT _id, action FROM transitions").fetchall()) == acknowledged


@pytest.mark.guarantee("server/rows")
@pytest.mark.slow
def test_acknowledged_rows_are_stored_once_after_a_kill(tmp_path: Path) -> None:
    _live_through_a_kill(tmp_path, 8, 6)


@pytest.mark.guarantee("server/rows")
@pytest.mark.torture
@pytest.mark.timeout(600)
def test_32_clients_and_a_kill(tmp_path: Path) -> None:
    _live_through_a_kill(tmp_path, 32, 60)


def test_first_rows_with_names_of_samples_warn_once(
    server: Serving, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rb = connect(server, name)
    columns = {"x": np.arange(2), "index": np.arange(2), "id": np.arange(2)}
    with caplog.at_level("WARNING", "expstore"):
        for _ in range(2):
            rb.extend(TensorDict({key: torch.from_numpy(value) for key, value in columns.items()}, [2]))
            rb.extend(columns)
            rb.extend(pa.table(columns))
    (text,) = [text for text in caplog.messages if "leaves out" in text]
    assert "the first rows have 'id', 'index'" in text
    assert len(rb) == 12
