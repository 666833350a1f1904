"""What errors and warnings say after frequent mistakes: what was asked, what was found, what to do."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pandas import DataFrame
from tensordict import TensorDict

import expstore
from expstore import datasets
from expstore.cli.app import run
from expstore.errors import (
    ArgumentError,
    ExpStoreError,
    NotReadyError,
    QueryError,
    RemoteError,
    SchemaError,
    StackError,
    StateError,
)
from expstore.remote import transport
from tests.support.asgi import api_client


def consume_all(path: Path) -> None:
    rb = expstore.TensorDictReplayBuffer(
        storage=expstore.LazyTensorStorage(20), batch_size=10, sampler=expstore.ConsumingSampler()
    )
    rb.extend(TensorDict({"x": torch.arange(20)}, [20]))
    for _ in range(3):
        rb.sample()


def sample_objects(*rows: object) -> Callable[[Path], object]:
    """Return a function that samples all of these rows from a ListStorage."""

    def act(path: Path) -> object:
        sampler = expstore.SamplerWithoutReplacement(shuffle=False)
        rb = expstore.ReplayBuffer(storage=expstore.ListStorage(10), batch_size=len(rows), sampler=sampler)
        rb.extend(list(rows))
        return rb.sample()

    return act


WRONG: list[tuple[Callable[[Path], object], type[ExpStoreError], str]] = [
    (
        consume_all,
        NotReadyError,
        "ConsumingSampler returns each row once, and none is left; extend() the buffer, or set a sampler",
    ),
    (sample_objects(torch.zeros(2), torch.zeros(3)), StackError, "shapes (2,), (3,); pass collate_fn"),
    (sample_objects(torch.zeros(2), "x"), StackError, "some rows are Tensor, others str"),
    (sample_objects({"a": 1}, {"b": 1}), StackError, "not all rows have ['a', 'b']"),
    (
        lambda path: expstore.ReplayBuffer(100, "observations", "actions"),  # type: ignore[misc]
        ArgumentError,
        "no positional arguments, got int, str, str; use ReplayBuffer(storage=...); for replay_buffer_class=",
    ),
    (
        lambda path: expstore.TensorDictReplayBuffer(100),  # type: ignore[misc]
        ArgumentError,
        "TensorDictReplayBuffer takes no positional arguments, got int",
    ),
    (lambda path: expstore.load_dataset("minarii:x"), ArgumentError, "did you mean minari? The supported"),
    (lambda path: datasets.D4RLExperienceReplay("hoper-medium-v2"), ArgumentError, "'hopper-medium-v2'?"),
    (
        lambda path: datasets.VD4RLExperienceReplay("main/walker_walk/randm/64px"),
        ArgumentError,
        "did you mean 'main/walker_walk/random/64px'? All names: VD4RLExperienceReplay.available_datasets",
    ),
    (
        lambda path: datasets.RobosetExperienceReplay("DAPG(expert)/door_v2-v1"),
        ArgumentError,
        "did you mean 'DAPG(expert)/door_v2d-v1'?",
    ),
    (
        lambda path: datasets.D4RLExperienceReplay(name="hopper-medium-v2"),  # type: ignore[call-arg]
        ArgumentError,
        "D4RLExperienceReplay got an unexpected keyword argument 'name'; use dataset_id='hopper-medium-v2'; "
        "other versions of TorchRL's classes call it name",
    ),
    (
        lambda path: datasets.LeRobotExperienceReplay(dataset_id="lerobot/pusht"),  # type: ignore[call-arg]
        ArgumentError,
        "use repo_id='lerobot/pusht'; other versions of TorchRL's classes call it dataset_id",
    ),
    (
        lambda path: datasets.MinariExperienceReplay(),  # type: ignore[call-arg]
        ArgumentError,
        "MinariExperienceReplay needs dataset_id; pass it as the first argument",
    ),
    (
        lambda path: datasets.VD4RLExperienceReplay("x", batchsize=3),  # type: ignore[call-arg]
        ArgumentError,
        "VD4RLExperienceReplay got an unexpected keyword argument 'batchsize'; use batch_size=3",
    ),
    (
        lambda path: datasets.AtariDQNExperienceReplay("Pong/5", root=path, batchsize=3),
        ArgumentError,
        "AtariDQNExperienceReplay got an unexpected keyword argument 'batchsize'; use batch_size=3",
    ),
    (
        lambda path: datasets.D4RLExperienceReplay("hopper-medium-v2", batchsize=3),
        StateError,
        "did you mean batch_size? The arguments are batch_size, dataset_id",
    ),
    (
        lambda path: expstore.cold.push(path, "s3://b/x"),
        StateError,
        "of an object storage: it names the bucket 'b'; names of buckets have 3 to 63 letters",
    ),
    (
        lambda path: expstore.open(path / "a.exp", sampler=expstore.RandomSampler(where="1=1; DROP TABLE x")),
        QueryError,
        "'1=1; DROP TABLE x' cannot select rows: it is not one SQL expression; use one expression over a row",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("act", "error", "message"), WRONG)
def test_a_mistake_is_answered_by(
    act: Callable[[Path], object], error: type[ExpStoreError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        act(tmp_path)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_broken_chain_without_trajectory_ids_names_the_field(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rb = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(20))
    none = np.zeros(2, np.bool_)
    with caplog.at_level(logging.WARNING):
        for start in (0.0, 10.0):
            before = start + np.arange(2.0)[:, None]
            after = {"observation": before + 1, "reward": np.ones(2), "terminated": none, "truncated": none}
            rb.extend({"observation": before, "action": np.zeros(2), "next": after})
    assert caplog.text.count("began another episode") == 1
    assert "observation of its newest row does not equal the next observation" in caplog.text
    assert "trajectory" not in caplog.text


def test_sources_of_a_plot_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with expstore.open(tmp_path / "a.exp") as rb:
        zeros, ends = np.zeros((11, 2), np.float32), np.ones(11, np.bool_)
        with rb.record("a", lanes=11) as record:
            record.step(zeros, np.ones(11), np.ones(11), zeros, ends, ~ends)
        labels = [text.get_text() for text in expstore.plot.returns(rb).get_legend().get_texts()]
    assert labels == ["a", *(f"a//{lane}" for lane in range(1, 7)), "4 other sources"]


# -- wrong types and values ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rb() -> expstore.TensorDictReplayBuffer:
    buffer = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(20), batch_size=2)
    buffer.extend(TensorDict({"observation": torch.zeros(5, 2), "action": torch.zeros(5)}, [5]))
    return buffer


def step_first(**values: Any) -> Callable[[Any], object]:
    """Return a function that records the first step of a new buffer, with other values."""
    usual = {"observation": np.zeros(2), "action": 0, "reward": 1.0, "next_observation": np.zeros(2)}
    flags = {"terminated": False, "truncated": False}

    def act(_: Any) -> object:
        buffer = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(20))
        return buffer.record("a").step(**{**usual, **flags, **values})

    return act


MISUSES: list[tuple[Callable[[Any], object], type[ExpStoreError], str]] = [
    (lambda rb: rb.by_id(None), ArgumentError, "ids must be integers, got None; samples have them as id"),
    (lambda rb: rb.by_id("x"), ArgumentError, "ids must be integers, got 'x'"),
    (lambda rb: rb.by_id([1.5]), ArgumentError, "ids must be integers, got [1.5]"),
    (lambda rb: rb.sample(True), ArgumentError, "batch_size must be an integer, got True"),
    (lambda rb: rb.sample(10**12), ArgumentError, "at most 2^31 - 1, got 1000000000000; draw several"),
    (lambda rb: rb.record(5), SchemaError, "source 5 is not a valid name"),
    (lambda rb: rb.record("a", lanes=3).reset(np.zeros((3, 4))), ArgumentError, "from 0 to 2, got array"),
    (lambda rb: rb.record("a", lanes=3).reset([9]), ArgumentError, "from 0 to 2, got [9]; leave it out"),
    (lambda rb: rb.record("a", lanes=3).reset(info=[{}]), ArgumentError, "for each of 3 lanes, got 1"),
    (step_first(reward=np.zeros(2)), SchemaError, "'reward' in each lane, got float64 of shape"),
    (step_first(terminated=[False, True]), SchemaError, "'terminated' in each lane, got [False"),
    (lambda rb: expstore.plot.returns(5), ArgumentError, "rb must be a buffer, got 5; expstore.open(path"),
    (lambda rb: expstore.plot.returns(rb, window="x"), ArgumentError, "window must be an integer, got 'x'"),
    (lambda rb: expstore.plot.returns(rb, ax=5), ArgumentError, "ax must be Axes of matplotlib, got 5"),
    (lambda rb: expstore.gym.Record(5, rb), ArgumentError, "env must be a gymnasium.Env, got a int"),
    (lambda rb: expstore.gym.Record("A-v0", rb), ArgumentError, "got a str; make it: gymnasium.make('A-v0')"),
    (lambda rb: expstore.gym.RecordVector("A-v0", rb), ArgumentError, "make it: gymnasium.make_vec('A-v0')"),
    (lambda rb: expstore.load_dataset(5), ArgumentError, "dataset_id must be text such as 'd4rl:hopper"),
    (lambda rb: expstore.open(""), StateError, "the path is empty; pass one such as 'run.exp'"),
    (lambda rb: expstore.connect("run.exp"), ArgumentError, "expstore.open takes a path of this machine"),
    (
        lambda rb: expstore.connect("http://host:1/a", tokn="secret"),  # type: ignore[call-overload]
        ArgumentError,
        "connect() got an unexpected keyword argument 'tokn'; use token=...",
    ),
    (
        lambda rb: expstore.connect("http://host:1/a", batchsize=3),  # type: ignore[call-overload]
        ArgumentError,
        "connect() got an unexpected keyword argument 'batchsize'; use batch_size=3",
    ),
    (lambda rb: expstore.connect("http://host:99999/a"), ArgumentError, "Port out of range 0-65535"),
    (
        lambda rb: rb.extend({"observation": torch.zeros(3, 2).to_sparse(), "action": torch.zeros(3)}),
        SchemaError,
        "field 'observation' is a sparse tensor (torch.sparse_coo), which cannot be stored; convert it with",
    ),
    (lambda rb: rb.extend(DataFrame({"action": [1.0]})), SchemaError, "pass {name: frame[name].to_numpy()"),
    (lambda rb: rb.extend(None), SchemaError, "got NoneType; pass a TensorDict or a dict of arrays"),
    (lambda rb: rb.sql(" "), QueryError, "found 0 statements; write one, such as SELECT count(*) FROM"),
    (step_first(observation=None), SchemaError, "the first step has None for 'observation'; pass an array"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "error", "message"), MISUSES)
def test_a_misuse_is_answered_by(
    rb: expstore.TensorDictReplayBuffer,
    act: Callable[[Any], object],
    error: type[ExpStoreError],
    message: str,
) -> None:
    with pytest.raises(error) as caught:
        act(rb)
    assert message in str(caught.value)


def test_a_step_can_follow_a_refused_first_step() -> None:
    rb = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(20))
    with rb.record("a") as record:
        with pytest.raises(SchemaError):
            record.step(None, 0, 1.0, np.zeros(2), False, False)
        record.step(np.zeros(2), 0, 1.0, np.zeros(2), True, False)
    assert len(rb) == 1


@pytest.mark.parametrize("version", [[1], 1.5, True])
def test_a_version_is_a_number_or_a_tag(version: Any, tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend({"action": np.zeros(3)})
        rb.snapshots.tag("first")
        with pytest.raises(ArgumentError, match="version must be an integer, got .*; use the number of a"):
            rb.snapshots.restore(version=version)


def test_arguments_of_a_buffer_of_stable_baselines3_are_checked(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    spaces = pytest.importorskip("gymnasium").spaces
    box, choices = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    with pytest.raises(ArgumentError, match="buffer_size must be an integer, got 'many'"):
        expstore.sb3.ReplayBuffer("many", box, choices, path=tmp_path / "a.exp")  # type: ignore[arg-type]
    assert not (tmp_path / "a.exp").exists()
    rb = expstore.sb3.ReplayBuffer(10, box, choices, path=tmp_path / "b.exp")
    wide, one = np.zeros((1, 3)), np.zeros(1)
    with pytest.raises(SchemaError, match=r"observations have shape \[1, 3\], expected \[1, 2\]; the first"):
        rb.add(wide, wide, np.zeros((1, 1)), one, one, [{}])
    rb.close()


def test_a_class_of_a_sampler_is_made() -> None:
    rb = expstore.TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(20), batch_size=2)
    rb.set_sampler(expstore.SamplerWithoutReplacement)
    assert isinstance(rb.sampler, expstore.SamplerWithoutReplacement)


# -- object storage --------------------------------------------------------------------------------


@pytest.fixture
def metadata_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the requests to a stand-in of the cloud's metadata address; remove all credentials."""
    pytest.importorskip("obstore")
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            requests.append(self.path)
            self.send_error(403)

        do_GET = do_PUT

        def log_message(self, *_: object) -> None:
            pass

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED", "AWS_ROLE_ARN"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", address)
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    try:
        yield requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set; set both variables"),
        ({"AWS_ACCESS_KEY_ID": "key"}, "credentials for s3://bucket/run: AWS_SECRET_ACCESS_KEY is not set"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, "AWS_SECRET_ACCESS_KEY are not set"),
        ({"AWS_EC2_METADATA_DISABLED": "true"}, "AWS_SECRET_ACCESS_KEY are not set"),
    ],
)
def test_missing_credentials_are_named_and_not_asked_of_the_cloud(
    metadata_requests: list[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RemoteError) as caught:
        expstore.cold.versions("s3://bucket/run")
    assert message in str(caught.value)
    assert metadata_requests == []


def test_the_role_of_a_machine_is_used_if_the_user_asks_for_it(
    metadata_requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    with pytest.raises(RemoteError):
        expstore.cold.versions(expstore.cold.ObjectStorage("s3://bucket/run", retries=0))
    assert "/latest/api/token" in metadata_requests


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def run_exp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with expstore.open("run.exp", capacity=100) as rb:
        rb.extend({"observation": np.zeros((5, 2), np.float32), "action": np.zeros(5)})
    return tmp_path / "run.exp"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["verify", "/etc"], 2, "/etc is not a store: it has no expstore.json"),
        (["sql", "/etc", "SELECT 1"], 2, "/etc is not a store: it has no expstore.json"),
        (["import", "run.exp"], 2, "run.exp is a store already, so that there is nothing to import; open it"),
        (["episode", "run.exp", "one"], 2, "Invalid value for 'ID'"),
        (["serve", "run.exp", "--port", "99999"], 2, "'99999' should be less than or equal to 65535"),
        (["serve", "run.exp", "--port=many"], 2, "'--port': 'many' should be a valid integer; see expstore"),
        (["sql", "run.exp", "SELECT 1", "extra"], 2, "'extra' comes after the query; leave it out, or if it"),
        (["sql", "SELECT 1", "run.exp"], 2, 'write expstore sql run.exp "SELECT 1"'),
        (["versions", "push", "run.exp", "folder"], 2, "a local folder there are expstore versions create"),
        (["versions", "push", "run.exp", "s3://b/x"], 2, "names of buckets have 3 to 63 letters"),
        (["rnu.exp"], 2, "rnu.exp is not a store: there is no such folder"),
        (["serve", "run.exp", "--error-buffer", "3"], 2, "error_buffer requires samples_per_insert"),
        (["sql", "run.exp", " "], 2, "found 0 statements; write one, such as SELECT count(*)"),
        (["cluster", "show", "cluster.json"], 2, "no cluster file cluster.json; make one: expstore cluster"),
        (["cluster", "show", "run.exp"], 2, "run.exp is a folder, not a cluster file; open a store with"),
    ],
)  # fmt: skip
def test_the_command_line_answers(
    run_exp: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run(arguments) == code
    assert message in " ".join(capsys.readouterr().err.split())


# -- HTTP ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Return a client of an application with the store `run`."""
    folder = tmp_path_factory.mktemp("served")
    with expstore.open(folder / "run.exp", capacity=100) as rb:
        rb.extend({"observation": np.zeros((5, 2), np.float32), "action": np.zeros(5)})
    with api_client(folder) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message", "hint"),
    [
        ("GET", "/episodes?limt=3", None, 422, "no query parameter 'limt'", "did you mean limit? The"),
        ("GET", "?x=1", None, 422, "no query parameter 'x'", "this route takes none"),
        ("POST", "/sample?batch_size=3", {}, 422, "no query parameter 'batch_size'", "takes none"),
        ("POST", "/sample", {"batch_size": True}, 422, "batch_size is true", "use an integer"),
        ("POST", "/sample", {"sampler": {"kind": "prioritized", "alpha": True}}, 422, "alpha is true", "use"),
        ("POST", "/priorities", {"ids": [1], "priorities": [True]}, 422, "priorities.0 is true", "a number"),
        ("DELETE", "", None, 422, "parameter confirm is missing", "?confirm=VALUE: the store's name again"),
        ("GET", "/sql", None, 422, "the query parameter q is missing", "add ?q=VALUE: one SELECT statement"),
        ("POST", "/sample", {"where": "1=1; DROP TABLE x"}, 422, "it is not one SQL expression", "use one"),
        ("GET", "/sample", None, 405, "/v1/stores/run/sample does not take GET", "use POST"),
    ],
)  # fmt: skip
def test_a_server_answers(
    served: httpx.Client, method: str, path: str, body: object, status: int, message: str, hint: str
) -> None:
    answer = served.request(method, f"/v1/stores/run{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert message in error["message"]
    assert hint in error["hint"]
    assert answer.headers.get("Allow") == (hint[4:].replace(" or ", ", ") if status == 405 else None)


def test_a_token_for_reading_names_the_token_for_writing(tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {'r' * 32}"}
    with api_client(tmp_path, token=b"w" * 32, read_token=b"r" * 32, headers=headers) as client:
        answer = client.put("/v1/stores/run", json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["message"]) == (403, "this token only permits reading")
    assert error["hint"] == "send the token for writing, which the server reads from --token-file"
    assert not (tmp_path / "run.exp").exists()


# -- waiting ---------------------------------------------------------------------------------------


def test_a_server_that_does_not_answer_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_NOTICE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    retries = transport.Retries(seconds=0.5, first=0.01, longest=0.02)
    with caplog.at_level(logging.WARNING, "expstore"), pytest.raises(RemoteError):
        expstore.connect(f"http://127.0.0.1:{port}/run", retries=retries)
    (record,) = caplog.records
    assert record.name == "expstore"
    assert f"http://127.0.0.1:{port} does not answer: " in record.message
    assert "requests are repeated for 0.5 s (retries=), so start `expstore serve` there" in record.message
