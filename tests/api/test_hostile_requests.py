"""Requests of attackers: invalid Arrow bodies, names that escape the folder, requests of every kind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack

import expstore
from expstore.api import Settings
from expstore.wire.codec import Encoder
from expstore.wire.stream import write_stream
from tests.support.arrow_bodies import ARROW
from tests.support.asgi import api_client, refusal_of
from tests.support.batches import numbered_rows
from tests.support.servers import Serving, serving
from tests.support.stores import build_store

pytestmark = pytest.mark.index

# -- bodies --------------------------------------------------------------------------------------------


def body_of(count: int) -> bytes:
    """Return rows of all kinds of columns: numbers, tensors, flags, and strings, whose offsets can lie."""
    texts = NonTensorStack(*[f"row {number}" for number in range(count)])
    rows = numbered_rows(count, key="x", obs=torch.ones(count, 3), done=lambda n: n % 4 == 3, text=texts)
    body: bytes = write_stream(Encoder().encode(rows)).to_pybytes()
    return body


def damaged(body: bytes, rng: np.random.Generator) -> bytes:
    """Return a body that is another at one to four places."""
    found = bytearray(body)
    for _ in range(int(rng.integers(1, 5))):
        if not found:
            break
        kind, at = int(rng.integers(7)), int(rng.integers(len(found)))
        if kind == 0:
            found[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            del found[at : at + int(rng.integers(1, 64))]
        elif kind == 3:
            found[at:at] = rng.bytes(int(rng.integers(1, 64)))
        elif kind == 4:
            word = int(rng.choice(np.array([-1, 0, 1, 1 << 31, (1 << 31) - 1, 1 << 62, -(1 << 63)])))
            found[at // 8 * 8 : at // 8 * 8 + 8] = struct.pack("<q", word)
        elif kind == 5:
            word = int(rng.integers(-(1 << 31), 1 << 31))
            found[at // 4 * 4 : at // 4 * 4 + 4] = struct.pack("<i", word)
        else:
            other, size = int(rng.integers(len(found))), int(rng.integers(1, 64))
            found[at : at + size] = found[other : other + size]
    return bytes(found)


def send_damaged(tmp_path: Path, times: int, seed: int) -> Counter[int]:
    """Send damaged bodies to a server of its own; return how often it answered with which status."""
    rng, whole, statuses = np.random.default_rng(seed), body_of(8), Counter[int]()
    with serving(tmp_path) as (child, facts), httpx.Client(base_url=facts["listening"], timeout=60) as client:
        assert client.put("/v1/stores/run", json={"storage": "arrow"}).status_code == 201
        rows = client.post("/v1/stores/run/extend", content=whole, headers=ARROW).json()["count"]
        assert rows == 8
        for number in range(times):
            body = damaged(whole, rng)
            answer = client.post("/v1/stores/run/extend", content=body, headers=ARROW)
            assert answer.status_code < 500, (seed, number, answer.text)
            statuses[answer.status_code] += 1
            if answer.status_code == 200:
                rows += answer.json()["count"]
            else:
                assert {"kind", "message", "hint"} <= set(answer.json()["error"])
        assert client.get("/v1/stores/run").json()["rows"] == rows
        last = client.post("/v1/stores/run/extend", content=whole, headers=ARROW).json()
        assert (last["first_id"], last["count"]) == (rows + 1, 8)
        child.terminate()
        assert child.wait(60) == 0
    with expstore.open(tmp_path / "run.exp", mode="r") as rb:
        assert len(rb) == rows + 8
        assert rb[-8:]["x"].tolist() == list(range(8))
    return statuses


@pytest.mark.guarantee(
    "access/bodies",
    "A damaged, truncated or too long body is refused, and nothing of it is stored.",
)
@pytest.mark.slow
def test_damaged_bodies_store_nothing(tmp_path: Path) -> None:
    statuses = send_damaged(tmp_path, 500, seed=1)
    assert statuses[422] > 300
    assert sum(statuses.values()) == 500


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 21))
def test_damaged_bodies_store_nothing_ever(
    tmp_path: Path, seed: int, long_seed: int, count_cases: Callable[..., None]
) -> None:
    count_cases(500)
    assert sum(send_damaged(tmp_path, 500, seed + long_seed).values()) == 500


# -- names ---------------------------------------------------------------------------------------------

NAMES = [
    b"..", b".", b"...", b"%2e%2e", b"%2E%2E", b".%2e", b"%2e.", b"..%2f..", b"..%2Foutside", b"%2f", b"/",
    b"%2fetc%2fpasswd", b"/etc/passwd", b"//etc", b"..%5coutside", b"..\\outside", b"%5c", b"C:", b"C:%5cx",
    b"c:\\x", b"%5c%5chost%5cshare", b"\\\\host\\share", b"%00", b"a%00", b"a%00.exp", b"..%00/outside",
    b"%0a", b"a%0d%0aX: y", b"%20", b"a%20b", b"a ", b"%09", b"~", b"~root", b"$HOME", b"%24%7bHOME%7d",
    b"a%3bls", b"a|b", b"a%26b", b"*", b"%3f", b"a%3fb", b"a%23b", b"%c0%ae%c0%ae", b"%c0%af", b"%e0%80%ae",
    b"%ff", b"%ef%bc%8f", b"%e2%80%ae", b"%f0%9f%98%80", b"a" * 101, b"a" * 5000, b"-a", b"_a", b".hidden",
    b"a..b", b"run.exp/..", b"../outside", b"../../outside", b"x/../../outside", b"linked", b"linked.exp",
    b"%6cinked", b"a:stream", b"con", b"NUL", b"aux.x", b"COM1", b"lpt9", b"a.", b"%252e%252e", b"%u002e",
    b"run.exp.exp%2f..",
]  # fmt: skip


def hash_of(folder: Path) -> str:
    """Return a hash of every name and every byte below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content = b"dir" if path.is_dir() else path.read_bytes()
        found.update(repr((str(path), path.is_symlink(), len(content))).encode())
        found.update(content)
    return found.hexdigest()


def status_of(server: Serving, head: bytes, body: bytes = b"") -> int:
    """Return the status of an answer that says what is wrong, and nothing of the server's paths."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as one:
        one.sendall(
            head + b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        answer = b"".join(iter(lambda: one.recv(1 << 16), b""))
    assert b'{"error":' in answer, (head, answer)
    assert os.fsencode(server.root.parent) not in answer
    return int(answer.split()[1])


@pytest.mark.guarantee(
    "access/folder",
    "No name reaches outside the served folder, and no error tells where it is.",
)
@pytest.mark.slow
def test_names_lead_nowhere(tmp_path: Path) -> None:
    assert len(NAMES) > 60
    root, outside = tmp_path / "runs", tmp_path / "outside.exp"
    root.mkdir()
    build_store(outside, numbered_rows(3))
    (root / "linked.exp").symlink_to(outside)
    (root / "plain").mkdir()
    before = hash_of(tmp_path)
    with Serving(Settings(path=root)) as server:
        assert httpx.get(f"{server.url}/v1/stores", timeout=60).json()["stores"] == []
        for name in NAMES:
            path = b"/v1/stores/" + name
            for head, body in (
                (b"GET " + path, b""), (b"GET " + path + b"/stats", b""), (b"PUT " + path, b"{}"),
                (b"POST " + path + b"/extend", b'{"x": [1]}'), (b"POST " + path + b"/flush", b""),
                (b"POST " + path + b"/rows", b'{"ids": [1]}'), (b"DELETE " + path, b""),
                (b"DELETE " + path + b"?confirm=" + name.replace(b" ", b"+"), b""),
            ):  # fmt: skip
                assert 400 <= status_of(server, head, body) < 500, head
        assert hash_of(tmp_path) == before
    assert hash_of(tmp_path) == before


def test_names_of_samplers_and_versions_lead_nowhere(tmp_path: Path) -> None:
    with Serving(Settings(path=tmp_path)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        client.put("/v1/stores/run", json={"fields": {"x": "int64"}})
        client.post("/v1/stores/run/extend", json={"x": [1, 2]})
        client.post("/v1/stores/run/flush")
        shutil.copytree(tmp_path, tmp_path.with_suffix(".before"))
        names = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
        body = {"sampler": {"kind": "without_replacement"}}
        assert client.put("/v1/stores/run/samplers/good", json=body).status_code == 201
        for name in (b"..", b"%2e%2e", b"..%2fx", b"%00", b"%5c", b"a" * 200, b".x"):
            head = b"PUT /v1/stores/run/samplers/" + name
            assert 400 <= status_of(server, head, json.dumps(body).encode()) < 500
        for tag in ("..", "../x", "/etc", "a/b", "a\\b", "\0", "x" * 200, ""):
            assert 400 <= client.post("/v1/stores/run/dumps", json={"tag": tag}).status_code < 500
            assert 400 <= client.post("/v1/stores/run/loads", json={"version": tag}).status_code < 500
        assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == names


# -- requests of every kind ----------------------------------------------------------------------------


#: Has schemathesis send Arrow streams, too (the examples, which are base64, and bytes of its own), and lines.
ARROW_HOOK = """
import base64

import schemathesis


@schemathesis.serializer("application/vnd.apache.arrow.stream")
def arrow_body(ctx, value):
    return base64.b64decode(value) if isinstance(value, str) else bytes(getattr(value, "data", b""))


@schemathesis.serializer("application/x-ndjson")
def lines_body(ctx, value):
    return value.encode(errors="replace") if isinstance(value, str) else b""
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # it sends a thousand requests
def test_the_document_says_how_routes_answer(tmp_path: Path) -> None:
    """Requests made from the OpenAPI document: nothing fails inside, every status is in the document."""
    with Serving(Settings(path=tmp_path, wait_seconds=0.0)) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            client.put("/v1/stores/run", json={"fields": {"x": "int64", "y": ["float32", [2]]}})
            client.post("/v1/stores/run/extend", json={"x": [1, 2, 3], "y": [[0, 1]] * 3})
        (tmp_path / "schemathesis.toml").write_text(
            'hooks = "arrow_bodies.py"\n[parameters]\n"path.name" = "run"\n'
        )
        (tmp_path / "arrow_bodies.py").write_text(ARROW_HOOK)
        done = subprocess.run(
            [
                sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--seed", "1",
                "--max-examples", "5", "--phases", "examples,coverage,fuzzing", "--no-color",
                "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,"
                "response_schema_conformance", "--generation-database", "none", "--request-timeout", "60",
                "--exclude-path-regex", "(sample/stream|events)$",  # they may have no end
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=590, env=os.environ,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_texts_in_a_column_of_numbers_take_no_memory(tmp_path: Path) -> None:
    """In an array of texts each value takes as much memory as the longest one."""
    with api_client(tmp_path) as client:
        client.put("/v1/stores/run", json={"fields": {"x": "float32"}}).raise_for_status()
        client.post("/v1/stores/run/extend", json={"x": [1.0]}).raise_for_status()
        for wrong in (["x" * 10_000, *[""] * 5_000], [1.0, None], [1.0, {}], [1.0, [1.0]], [1 << 80, 1.0]):
            tracemalloc.start()
            try:
                answer = client.post("/v1/stores/run/extend", json={"x": wrong})
                most = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert refusal_of(answer) == (422, "schema")
            assert most < 16 << 20
        assert client.get("/v1/stores/run").json()["rows"] == 1
