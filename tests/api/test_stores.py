"""Stores of a server: what opens one delays no other, and each name means one folder."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tensordict import TensorDict

import expstore
from expstore.api import Settings, create_app
from expstore.api.errors import Refusal
from expstore.api.per_key import PerKey
from expstore.api.samplers import Consuming, Prioritized, SamplerCache, Uniform, WithoutReplacement
from expstore.api.stores import Stores
from expstore.errors import NotFoundError, StateError
from expstore.samplers.base import Sampler
from tests.support.asgi import ask

SECONDS = 60


class Gate:
    """Hold openings of a store in one mode until the test lets them go."""

    def __init__(self, name: str, mode: str) -> None:
        self._name, self._mode, self._open = name, mode, expstore.open
        self.begun, self.free = threading.Event(), threading.Event()
        self.openings: Counter[str] = Counter()

    def open(self, path: Path, **options: Any) -> Any:
        if options["mode"] == self._mode:
            self.openings[path.stem] += 1
            if path.stem == self._name:
                self.begun.set()
                assert self.free.wait(SECONDS)
        return self._open(path, **options)


def make_store(path: Path, rows: int = 10) -> None:
    with expstore.open(path, schema={"x": "int64"}) as rb:
        rb.extend(TensorDict({"x": [*range(rows)]}, [rows]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("slow", "fast"):
        make_store(tmp_path / f"{name}.exp")
    return tmp_path


def test_one_opening_delays_no_other_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests wait for the slow store than there are threads; each store is opened once."""
    gate = Gate("slow", "a")
    monkeypatch.setattr(expstore, "open", gate.open)
    app = create_app(Settings(path=folder, connections=1000))

    async def check(asking: httpx.AsyncClient) -> None:
        first = asyncio.ensure_future(asking.get("/v1/stores/slow"))
        assert await asyncio.to_thread(gate.begun.wait, SECONDS)
        acts = [("GET", "/v1/stores/slow"), ("PUT", "/v1/stores/slow"),
                ("DELETE", "/v1/stores/slow?confirm=slow")]  # fmt: skip
        waiting = [asyncio.ensure_future(asking.request(*act, json={})) for act in acts * 30]
        async with asyncio.timeout(SECONDS):
            assert (await asking.get("/v1/stores/fast")).json()["rows"] == 10
            assert (await asking.put("/v1/stores/new", json={})).status_code == 201
            assert (await asking.delete("/v1/stores/new?confirm=new")).status_code == 200
            assert (await asking.get("/v1/stores/none")).status_code == 404
            assert (await asking.get("/v1/stores")).json()["stores"] == ["fast", "slow"]
        assert not first.done()
        gate.free.set()
        async with asyncio.timeout(SECONDS):
            assert (await first).json()["rows"] == 10
            answers = await asyncio.gather(*waiting)
        # Deletion found the store not yet open, and others have opened it meanwhile: it is in use.
        assert {answer.status_code for answer in answers} <= {200, 404, 409, 503}

    try:
        ask(app, check)
    finally:
        gate.free.set()
        app.state.stores.close()
    assert gate.openings["slow"] == gate.openings["fast"] == 1


def test_closing_waits_for_an_opening(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("slow", "a")
    monkeypatch.setattr(expstore, "open", gate.open)
    stores, found, ending = Stores(Settings(path=folder)), [], threading.Event()
    end = stores.end

    def note_end() -> None:
        end()
        ending.set()

    monkeypatch.setattr(stores, "end", note_end)
    opening = threading.Thread(target=lambda: found.append(stores.get("slow")))
    opening.start()
    assert gate.begun.wait(SECONDS)
    closing = threading.Thread(target=stores.close)
    closing.start()
    assert ending.wait(SECONDS)
    with pytest.raises(Refusal, match="shut down"):
        stores.get("fast")
    gate.free.set()
    for thread in (opening, closing):
        thread.join(SECONDS)
    assert found[0].rb.storage.closed
    assert found[0].ending


def test_keys_share_nothing_and_leave_nothing() -> None:
    locks = PerKey(threading.Lock)
    with locks.use("a") as first, locks.use("a") as same, locks.use("b") as other:
        assert first is same is not other
        assert locks.keys() == ["a", "b"]
    assert locks.keys() == []
    with pytest.raises(ZeroDivisionError), locks.use("a"):
        _ = 1 / 0
    assert locks.keys() == []


# -- names ---------------------------------------------------------------------------------------------


def test_two_folders_of_one_name_are_refused_at_the_start(tmp_path: Path) -> None:
    for name in ("demo", "demo.exp", "other"):
        make_store(tmp_path / name)
    with pytest.raises(
        StateError, match=r"two stores have the name 'demo': the folders 'demo.exp' and 'demo'"
    ):
        create_app(Settings(path=tmp_path))
    for name in ("demo", "demo.exp"):  # either of them can be served alone
        stores = Stores(Settings(path=tmp_path / name))
        assert stores.get("demo").path == tmp_path / name
        stores.close()


def test_a_second_folder_of_a_name_that_comes_later_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "demo.exp")
    app = create_app(Settings(path=tmp_path))
    make_store(tmp_path / "demo")

    async def check(asking: httpx.AsyncClient) -> None:
        assert (await asking.get("/v1/stores")).json()["stores"] == ["demo"]
        for answer in (await asking.get("/v1/stores/demo"), await asking.put("/v1/stores/demo", json={})):
            assert (answer.status_code, answer.json()["error"]["kind"]) == (409, "exists")

    ask(app, check)


def test_a_store_has_one_name(tmp_path: Path) -> None:
    """`demo.exp` would be a second name of `demo`, and the server would be locked out by itself."""
    make_store(tmp_path / "demo.exp")
    make_store(tmp_path / "twice.exp.exp")
    stores = Stores(Settings(path=tmp_path))
    assert stores.names() == ["demo", "twice.exp"]
    with pytest.raises(NotFoundError, match="does not include .exp"):
        stores.get("demo.exp")
    assert len(stores.get("twice.exp").rb) == 10
    stores.close()


# -- samplers ------------------------------------------------------------------------------------------


@pytest.fixture
def drawers(folder: Path) -> Iterator[SamplerCache]:
    path = folder / "fast.exp"
    with expstore.open(path) as rb:
        kept = SamplerCache(path, rb, None, seconds=3)
        yield kept
        kept.close()


def test_a_reader_that_opens_delays_no_draw(drawers: SamplerCache, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("fast", "r")
    monkeypatch.setattr(expstore, "open", gate.open)
    spec = WithoutReplacement(kind="without_replacement")
    naming = [threading.Thread(target=drawers.name, args=("pass", spec, None, 1)) for _ in range(3)]
    for thread in naming:
        thread.start()
    try:
        assert gate.begun.wait(SECONDS)
        drawn: list[int] = []

        def draw() -> None:
            drawn.append(drawers.draw(Prioritized(kind="prioritized"), None, 3, None, 4).batch.numel())
            drawers.name("once", Consuming(kind="consuming"), None, None)
            drawn.append(drawers.draw("once", None, None, None, 4).batch.numel())

        drawing = threading.Thread(target=draw, daemon=True)
        drawing.start()
        drawing.join(SECONDS)
        assert drawn == [4, 4]
    finally:
        gate.free.set()
        for thread in naming:
            thread.join(SECONDS)
    assert gate.openings["fast"] == 1
    assert sorted(drawers.describe()) == ["once", "pass"]
    assert drawers.draw("pass", None, None, None, 10).batch.numel() == 10


def test_a_sampler_in_use_is_not_detached(drawers: SamplerCache, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Sampler] = []
    monkeypatch.setattr(Sampler, "detach", lambda self: ended.append(self))
    with drawers.choose(Uniform(), "x > 2", 0, 2, 1) as (_, first):
        with drawers.choose(Uniform(), "x > 2", 0, 2, 1) as (_, same):
            for seed in range(1, 40):
                drawers.draw(Uniform(), None, seed, None, 2)
            assert same is first
        assert len(ended) == 7  # of 40, the 32 newest are kept, and the first is in use
        assert first not in ended
    assert ended[-1] is first
    drawers.close()
    assert len(ended) == len(set(ended)) == 40


@pytest.mark.parametrize("kind", ["consuming", "without_replacement"])
def test_a_named_sampler_in_use_is_not_ended(
    drawers: SamplerCache, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    spec = Consuming(kind=kind) if kind == "consuming" else WithoutReplacement(kind=kind)
    drawers.name("mine", spec, None, None)
    ended: list[str] = []
    with drawers._use_named("mine") as named:
        end = named.end
        monkeypatch.setattr(named, "end", lambda: ended.append(kind) or end())  # type: ignore[func-returns-value]
        drawers.forget("mine")
        assert named.buffer.sample(2).numel() == 2
        assert ended == []
    assert ended == [kind]
    with pytest.raises(NotFoundError):
        drawers.draw("mine", None, None, None, 2)
