"""Episodes belong to sessions: two sessions never share one, however sessions end or are resumed.

Each case writes rows whose observations count up, so that every step shows whether it follows the previous
one.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.api import Settings
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.episodes.segmentation import OPEN, TERMINATED, TRUNCATED
from expstore.episodes.sessions import End, Resume, SessionKey
from expstore.episodes.table import EpisodeTable
from expstore.errors import NotReadyError, SchemaError, StateError
from expstore.maintenance.merge import merge
from expstore.maintenance.resize import resize
from expstore.maintenance.verify import verify
from expstore.remote.transport import ARROW
from tests.support.arrow_bodies import body_of
from tests.support.forks import collect_from_child, in_child
from tests.support.servers import Serving, process, serving

Facts = list[tuple[int, str]]


def rows(start: int, count: int, *, end: int = OPEN, traj: int | None = 0, n_step: int = 1) -> TensorDict:
    """Return rows that observe `start`, `start + 1`, ...; `end` says what comes of the last of them."""
    seen = torch.arange(start, start + count)[:, None]
    last = (torch.arange(count) == count - 1)[:, None]
    found = TensorDict(
        {
            "observation": seen.float(),
            "next": {
                "observation": (seen + n_step).float(),
                "reward": torch.ones(count, 1),
                "terminated": last & (end == TERMINATED),
                "truncated": last & (end == TRUNCATED),
            },
        },
        [count],
    )
    if traj is not None:
        found["collector", "traj_ids"] = torch.full((count,), traj)
    return found


def opened(path: Path, **options: Any) -> TensorDictReplayBuffer:
    return expstore.open(path / "run.exp", **options)


def broken(rb: Any, *, n_step: int = 1) -> list[int]:
    """Return the ids of rows that do not follow the row before them in their episode."""
    storage = rb.storage
    ids = storage.window.ids()
    if storage.schema is None or not ids.size:
        return []
    places = [
        storage.require_schema().place_of(("observation",)),
        len(storage.schema.fields) + 1,
        len(storage.schema.fields) + 2,
    ]
    seen, episodes, steps = (np.asarray(column) for column in storage.read(ids, places))
    seen = seen.reshape(ids.size, -1)
    order = np.lexsort((steps, episodes))
    same = np.diff(episodes[order]) == 0
    follows = (np.diff(seen[order], axis=0) == 1).all(1) & (np.diff(steps[order]) == 1)
    return ids[order][1:][same & ~follows].tolist()


def episodes(rb: Any) -> Facts:
    """Return length and status of each episode, by age."""
    table = rb.episodes().arrow()
    return list(zip(table["length"].to_pylist(), table["status"].to_pylist(), strict=True))


def check(rb: Any, *expected: tuple[int, str]) -> None:
    assert episodes(rb) == list(expected)
    assert broken(rb) == []


def read(path: Path, *expected: tuple[int, str]) -> None:
    """Check what a reader finds, and that nothing is wrong with the store."""
    with opened(path, mode="r") as rb:
        check(rb, *expected)
    assert verify(path / "run.exp") == []


# -- openings --------------------------------------------------------------------------------------


def restart(path: Path) -> None:
    for source in ("robot", None):
        folder = path / str(source)
        with opened(folder) as rb:
            rb.extend(rows(0, 4), source=source)
        with opened(folder) as rb:
            check(rb, (4, "cut"))
            rb.extend(rows(100, 3), source=source)
            rb.extend(rows(103, 2), source=source)
            check(rb, (4, "cut"), (5, "open"))
        read(folder, (4, "cut"), (5, "cut"))


def kill(path: Path) -> None:
    def life() -> None:
        rb = opened(path)
        rb.extend(rows(0, 4), source="robot")
        rb.extend(rows(50, 2))
        os.kill(os.getpid(), 9)

    in_child(life)
    with opened(path) as rb:
        check(rb, (4, "cut"), (2, "cut"))
        rb.extend(rows(100, 3), source="robot")
        rb.extend(rows(150, 3))
        check(rb, (4, "cut"), (2, "cut"), (3, "open"), (3, "open"))


def truncated(path: Path) -> None:
    with opened(path) as rb:
        rb.extend(rows(0, 4, end=TRUNCATED), source="robot")
        rb.extend(rows(4, 2, end=TRUNCATED), source="robot")  # in a session it may go on
        check(rb, (6, "truncated"))
    with opened(path) as rb:
        rb.extend(rows(6, 3), source="robot")
        check(rb, (6, "truncated"), (3, "open"))


# -- one process -------------------------------------------------------------------------------------


def two_torchrl_collectors(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of its modules use what other ones call deprecated
        from torchrl.collectors import Collector

    from tests.support.counting_env import Counting

    class Endless(Counting):
        def __init__(self, worker: int) -> None:
            super().__init__(worker)
            self.length = 10**6

    with opened(path) as rb:
        for worker in (0, 1):
            collector = Collector(
                Endless(worker), None, frames_per_batch=10, total_frames=30, replay_buffer=rb
            )
            for _ in collector:
                pass
            collector.shutdown()
        assert episodes(rb) == [(30, "cut"), (30, "open")]
        seen = rb[:]
        follows = seen["observation"][1:] == seen["next", "observation"][:-1]
        assert (~follows.all(-1)).nonzero().tolist() == [[29]]


def restarted_inside(path: Path) -> None:
    """A collector begins anew under the same trajectory id, without a word."""
    with opened(path) as rb:
        for base in (0, 100, 200):
            for start in (base, base + 5):
                rb.extend(rows(start, 5))
        check(rb, (10, "cut"), (10, "cut"), (10, "open"))


def lanes(path: Path) -> None:
    def steps(start: int, lanes: int, count: int) -> TensorDict:
        return torch.stack([rows(start + 1000 * lane, count, traj=None) for lane in range(lanes)])

    with opened(path) as rb:
        rb.extend(steps(0, 4, 3), source="robot")
        rb.extend(steps(3, 2, 2), source="robot")
        check(rb, (5, "open"), (5, "open"), (3, "open"), (3, "open"))
    with opened(path) as rb:
        rb.extend(steps(5, 2, 2), source="robot")
        check(rb, (5, "cut"), (5, "cut"), (3, "cut"), (3, "cut"), (2, "open"), (2, "open"))


def multi_step(path: Path) -> None:
    """Next observations are three steps ahead: the rows do not chain, and nothing is cut."""
    with opened(path) as rb:
        for start in range(0, 12, 4):
            rb.extend(rows(start, 4, n_step=3))
        check(rb, (12, "open"))


# -- what replaces rows ------------------------------------------------------------------------------


def empty(path: Path) -> None:
    with opened(path) as rb:
        rb.extend(rows(0, 4, end=TRUNCATED), source="robot")
        rb.extend(rows(50, 3))
        rb.empty()
        rb.extend(rows(4, 3), source="robot")
        rb.extend(rows(53, 2))
        check(rb, (4, "truncated"), (3, "cut"), (3, "open"), (2, "open"))


def loads(path: Path) -> None:
    with opened(path) as rb:
        rb.extend(rows(0, 6), source="robot")
        rb.dumps(path / "versions")
        rb.extend(rows(6, 6), source="robot")
        rb.loads(path / "versions")
        check(rb, (6, "cut"))
        rb.extend(rows(12, 6), source="robot")
        rb.extend(rows(18, 1), source="robot")
        check(rb, (6, "cut"), (7, "open"))


def load_state_dict(path: Path) -> None:
    with opened(path) as rb:
        rb.extend(rows(0, 4), source="robot")
        state = rb.state_dict()
        rb.extend(rows(4, 2), source="robot")
        rb.load_state_dict(state)
        rb.extend(rows(6, 3), source="robot")
        check(rb, (6, "cut"), (3, "open"))


def load_state_dict_in_ram(path: Path) -> None:
    first, second = expstore.TensorDictReplayBuffer(), expstore.TensorDictReplayBuffer()
    first.extend(rows(0, 6), source="robot")
    second.extend(rows(100, 2), source="robot")
    second.load_state_dict(first.state_dict())
    second.extend(rows(6, 3), source="robot")
    check(second, (6, "cut"), (3, "open"))


def copied_in_ram(path: Path) -> None:
    first = expstore.TensorDictReplayBuffer()
    first.extend(rows(0, 6))
    second = pickle.loads(pickle.dumps(first))
    assert second.storage.episodes.session != first.storage.episodes.session
    first.extend(rows(6, 2))
    second.extend(rows(6, 3))
    check(first, (8, "open"))
    check(second, (6, "cut"), (3, "open"))


def merged(path: Path) -> None:
    for name in ("one", "two"):
        with opened(path / name) as rb:
            rb.extend(rows(0, 4, end=TRUNCATED), source="robot")
            rb.extend(rows(50, 3), session="client")
    merge([path / "one/run.exp", path / "two/run.exp"], out=path / "run.exp")
    with opened(path) as rb:
        rb.extend(rows(4, 2), source="one/robot")
        rb.extend(rows(53, 2), session="client")
        check(rb, *[(4, "truncated"), (3, "cut")] * 2, (2, "open"), (2, "open"))


def resized(path: Path) -> None:
    with opened(path, capacity=20) as rb:
        rb.extend(rows(0, 4), source="robot")
        rb.extend(rows(50, 3), session="client")
    resize(path / "run.exp", capacity=30)
    with opened(path) as rb:
        rb.extend(rows(4, 2), source="robot")
        rb.extend(rows(53, 2), session="client")
        check(rb, (4, "cut"), (5, "open"), (2, "open"))


# -- clients -----------------------------------------------------------------------------------------


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def served(path: Path, clock: Callable[[], float] | None = None) -> Iterator[Serving]:
    more: dict[str, Any] = {} if clock is None else {"clock": clock}
    with Serving(Settings(path=path, **more)) as server:
        yield server


def make(path: Path) -> None:
    opened(path, mode="x", seed=3).close()


def client(server: Serving) -> expstore.remote.RemoteReplayBuffer:
    return expstore.connect(f"{server.url}/run")


def store_of(server: Serving) -> Any:
    return server.app.state.stores.get("run")


def two_clients(path: Path) -> None:
    for source in ("robot", None):
        folder = path / str(source)
        folder.mkdir()
        make(folder)
        with served(folder) as server:
            with client(server) as one, client(server) as two:
                for at in range(0, 6, 3):
                    one.extend(rows(at, 3), source=source)
                    two.extend(rows(100 + at, 3), source=source)
                check(store_of(server).rb, (6, "open"), (6, "open"))
                one.close()
                check(store_of(server).rb, (6, "cut"), (6, "open"))
                two.extend(rows(106, 1), source=source)
            check(store_of(server).rb, (6, "cut"), (7, "cut"))


def restarted_server(path: Path) -> None:
    """Remote sessions outlive the server; what the server wrote itself does not."""
    make(path)
    url = {"X-Session": "robot-arm"}
    with served(path) as server:
        post(server, rows(0, 4), url)
        post(server, rows(50, 2), {})
    read(path, (4, "open"), (2, "cut"))
    with served(path) as server:
        check(store_of(server).rb, (4, "open"), (2, "cut"))
        post(server, rows(4, 2), url)
        post(server, rows(52, 2), {})
        check(store_of(server).rb, (6, "open"), (2, "cut"), (2, "open"))


def killed_writer_of_clients(path: Path) -> None:
    """As `restarted_server`, where the process that had the store was killed."""

    def life() -> None:
        rb = opened(path)
        rb.extend(rows(0, 4), source="robot", session="client")
        rb.extend(rows(50, 2), source="robot")
        os.kill(os.getpid(), 9)

    in_child(life)
    with opened(path) as rb:
        check(rb, (4, "open"), (2, "cut"))
        rb.extend(rows(4, 2), source="robot", session="client")
        rb.extend(rows(52, 2), source="robot")
        check(rb, (6, "open"), (2, "cut"), (2, "open"))


def killed_server(path: Path) -> None:
    make(path)
    with serving(path) as (child, told):
        url = f"{told['listening']}/run"
        with (
            expstore.connect(url) as other,
            expstore.connect(url, retries=expstore.remote.Retries(seconds=30, first=0.01, seed=1)) as rb,
        ):
            rb.extend(rows(0, 4), source="robot")
            child.kill()
            child.wait()
            with serving_at(path, url.rpartition(":")[2].partition("/")[0]):
                rb.extend(rows(4, 2), source="robot")
                assert episodes(rb) == [(6, "open")]
                rb.close()
                assert episodes(other) == [(6, "cut")]
    with opened(path) as rb:
        check(rb, (6, "cut"))


@contextmanager
def serving_at(path: Path, port: str) -> Iterator[None]:
    with process(path, "--port", port, "--json") as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        yield


def post(server: Serving, data: TensorDict, headers: dict[str, str], source: str = "robot") -> httpx.Response:
    url = f"{server.url}/v1/stores/run/extend"
    headers = headers | {"Content-Type": ARROW}
    answer = httpx.post(url, content=body_of(data), headers=headers, params={"source": source})
    assert answer.status_code == 200, answer.text
    return answer


def late_retry(path: Path) -> None:
    """A write that is known is answered, and its session stays ended."""
    make(path)
    clock = Clock()
    with served(path, clock) as server:
        headers = {"X-Session": "client", "Idempotency-Key": "client-1"}
        first = post(server, rows(0, 4), headers)
        clock.now = 7200
        store_of(server).end_silent()
        check(store_of(server).rb, (4, "cut"))
        again = post(server, rows(0, 4), headers)
        assert again.json() == first.json()
        check(store_of(server).rb, (4, "cut"))
        assert store_of(server).rb.episodes.remote_sessions() == []


def silence(path: Path) -> None:
    """Two hours without a word end a session; its rows open it again, with what was cut."""
    make(path)
    clock = Clock()
    with served(path, clock) as server:
        store = store_of(server)
        post(server, rows(0, 4), {"X-Session": "silent"})
        post(server, rows(50, 2), {"X-Session": "beating"})
        for minute in (20, 40, 59, 60, 80, 120):
            clock.now = 60.0 * minute
            url = f"{server.url}/v1/stores/run/session"
            assert httpx.post(url, headers={"X-Session": "beating"}).status_code == 200
            store.end_silent()
            expected = "open" if minute < 60 else "cut"
            assert episodes(store.rb) == [(4, expected), (2, "open")]
        post(server, rows(4, 3), {"X-Session": "silent"})
        check(store.rb, (7, "open"), (2, "open"))
        clock.now += 3599
        store.end_silent()
        check(store.rb, (7, "open"), (2, "open"))


def silence_counts_from_the_start(path: Path) -> None:
    make(path)
    with opened(path) as rb:
        rb.extend(rows(0, 4), session="client")
    clock = Clock()
    clock.now = 1e6
    with served(path, clock) as server:
        store = store_of(server)
        clock.now += 3599
        store.end_silent()
        check(store.rb, (4, "open"))
        clock.now += 1
        store.end_silent()
        check(store.rb, (4, "cut"))


def forked(path: Path) -> None:
    """A forked child and an unpickled copy of a connection are clients of their own."""
    make(path)
    with served(path) as server, client(server) as rb:
        rb.extend(rows(0, 3))

        def work(tell: Callable[[Any], None]) -> None:
            rb.extend(rows(100, 3))
            rb.extend(rows(103, 1))
            tell("written")

        assert collect_from_child(work) == ["written"]
        with pickle.loads(pickle.dumps(rb)) as copy:
            copy.extend(rows(200, 3))
            rb.extend(rows(3, 2))
            check(store_of(server).rb, (5, "open"), (4, "open"), (3, "open"))


# -- resume ------------------------------------------------------------------------------------------


def resume(path: Path) -> None:
    with opened(path) as rb:
        rb.extend(rows(0, 4), source="robot")
        rb.extend(rows(50, 4, traj=1), source="robot")
        rb.extend(rows(80, 2), source="other")
    with opened(path) as rb:
        assert rb.episodes.resume("nobody").tolist() == []
        assert rb.episodes.resume("robot").tolist() == [1, 2]
        assert rb.episodes.resume("robot").tolist() == [1, 2]  # the same question, the same answer
        check(rb, (4, "open"), (4, "open"), (2, "cut"))
        rb.extend(rows(4, 2), source="robot")
        rb.extend(rows(54, 1, traj=1), source="robot")
        check(rb, (6, "open"), (5, "open"), (2, "cut"))
        with pytest.raises(StateError, match="already written rows of source 'robot'"):
            rb.episodes.resume("robot")
    read(path, (6, "cut"), (5, "cut"), (2, "cut"))


def resume_wrong(path: Path) -> None:
    with opened(path) as rb:
        rb.extend(rows(0, 4), source="robot")
    with opened(path) as rb:
        rb.episodes.resume("robot")
        for wrong in (rows(100, 3), rows(100, 1), rows(4, 3, traj=9)):
            with pytest.raises(SchemaError, match="does not continue episode 1"):
                rb.extend(wrong, source="robot")
        check(rb, (4, "open"))
        assert len(rb) == 4
        rb.extend(rows(4, 3), source="robot")  # nothing was changed
        check(rb, (7, "open"))


def resume_unchecked(path: Path) -> None:
    with opened(path) as rb:
        rb.extend(rows(0, 4, n_step=3), source="robot")
    with opened(path) as rb:
        assert rb.episodes.resume("robot", check=False).tolist() == [1]
        rb.extend(rows(4, 3, n_step=3), source="robot")
        check(rb, (7, "open"))


def resume_of_clients(path: Path) -> None:
    make(path)
    with served(path) as server:
        with client(server) as rb:
            rb.extend(rows(0, 4), source="robot")
        with client(server) as rb:
            assert rb.episodes.resume("robot").tolist() == [1]
            with pytest.raises(SchemaError, match="does not continue episode 1"):
                rb.extend(rows(100, 2), source="robot")
            rb.extend(rows(4, 2), source="robot")
            check(store_of(server).rb, (6, "open"))
            rb.episodes.end("robot")
            check(store_of(server).rb, (6, "cut"))


def ended_by_hand(path: Path) -> None:
    with opened(path) as rb:
        rb.extend(rows(0, 4, end=TRUNCATED), source="robot")
        rb.extend(rows(50, 2), source="other")
        rb.extend(rows(80, 2), source="robot", session="client")
        rb.episodes.end("robot")
        check(rb, (4, "truncated"), (2, "open"), (2, "cut"))
        rb.extend(rows(4, 2), source="robot")
        rb.extend(rows(52, 1), source="other")
        check(rb, (4, "truncated"), (3, "open"), (2, "cut"), (2, "open"))
        rb.episodes.end()
        check(rb, (4, "truncated"), (3, "cut"), (2, "cut"), (2, "cut"))


# -- records -----------------------------------------------------------------------------------------


def _killed_after(
    path: Path, act: Callable[[TensorDictReplayBuffer], object], *expected: tuple[int, str]
) -> None:
    """Act, be killed, and find the same by a reader, by verify and by the next writer."""

    def life() -> None:
        rb = opened(path)
        rb.extend(rows(0, 4), source="robot", session="client")
        rb.extend(rows(50, 2), source="arm", session="other")
        act(rb)
        os.kill(os.getpid(), 9)

    in_child(life)
    read(path, *expected)
    with opened(path) as rb:
        check(rb, *expected)
    read(path, *expected)


def end_and_kill(path: Path) -> None:
    _killed_after(path, lambda rb: rb.episodes.end("robot"), (4, "cut"), (2, "open"))


def end_session_and_kill(path: Path) -> None:
    _killed_after(path, lambda rb: rb.episodes.end_session(["client"]), (4, "cut"), (2, "open"))


def empty_and_kill(path: Path) -> None:
    _killed_after(path, lambda rb: rb.empty(), (4, "cut"), (2, "cut"))


def resume_and_kill(path: Path) -> None:
    def act(rb: TensorDictReplayBuffer) -> None:
        rb.episodes.end_session(["client"])
        rb.episodes.resume("robot", session="heir")
        rb.episodes.annotate(1, adopted=True)

    _killed_after(path, act, (4, "open"), (2, "open"))
    with opened(path) as rb:
        assert rb.episodes("info->>'adopted' = 'true'").shape[0] == 1
        rb.extend(rows(4, 2), source="robot", session="heir")
        rb.extend(rows(4, 3), source="robot", session="client")  # its episode is no longer its own
        check(rb, (6, "open"), (2, "open"), (3, "open"))


# -- what sees records ---------------------------------------------------------------------------------


def drawn_where(path: Path) -> None:
    """Conditions over episodes see their ends and adoptions, also of rows that were evaluated before."""

    def made() -> dict[str, expstore.RandomSampler]:
        words = ("open", "cut")
        return {word: expstore.RandomSampler(where=f"episode.status = '{word}'") for word in words}

    samplers = made()

    def drawn(rb: TensorDictReplayBuffer, **expected: range) -> None:
        for status, sampler in samplers.items():
            rb.set_sampler(sampler)
            rb.refresh()
            wanted = [float(number) for number in expected.get(status, ())]
            if wanted:
                assert sorted(set(rb.sample(500)["observation"].flatten().tolist())) == wanted
            else:
                with pytest.raises(NotReadyError, match=f"episode.status = '{status}'"):
                    rb.sample(500)

    with opened(path, batch_size=4, seed=1) as rb:
        rb.extend(rows(0, 4), source="robot", session="client")
        rb.extend(rows(4, 4), source="arm", session="other")
        drawn(rb, open=range(8))
        rb.episodes.end("robot")
        drawn(rb, open=range(4, 8), cut=range(4))
        rb.episodes.end_session(["other"])
        drawn(rb, cut=range(8))
        assert rb.episodes.resume("arm").tolist() == [2]
        drawn(rb, open=range(4, 8), cut=range(4))
        rb.extend(rows(8, 2), source="arm")
        drawn(rb, open=range(4, 10), cut=range(4))
    samplers = made()
    with opened(path, batch_size=4, seed=1) as rb:
        drawn(rb, cut=range(10))


CASES: list[Callable[[Path], None]] = [
    *(restart, kill, truncated, two_torchrl_collectors, restarted_inside, lanes, multi_step),
    *(empty, loads, load_state_dict, load_state_dict_in_ram, copied_in_ram, merged, resized),
    *(two_clients, restarted_server, killed_writer_of_clients, killed_server),
    *(late_retry, silence, silence_counts_from_the_start, forked),
    *(resume, resume_wrong, resume_unchecked, resume_of_clients, ended_by_hand),
    *(end_and_kill, end_session_and_kill, empty_and_kill, resume_and_kill, drawn_where),
]


@pytest.mark.guarantee(
    "kill/sessions",
    "Rows of two sessions never share an episode, and episodes remain ended or resumed once the call "
    "returned.",
)
@pytest.mark.slow
@pytest.mark.index
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl", "ignore::FutureWarning:torchrl")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_sessions(case: Callable[[Path], None], tmp_path: Path) -> None:
    """Episodes are those of one session, and each row follows the one before it."""
    case(tmp_path)


def _cut_all(table: EpisodeTable, time: int, sequence: int) -> Any:
    live = [key for key in table.live_sessions() if key != table.session]
    return table.apply(End(time, (), tuple(live)), sequence)


def _cut_none(table: EpisodeTable, time: int, sequence: int) -> Any:
    return []


@pytest.mark.slow
@pytest.mark.index
@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (_cut_all, restarted_server),
        (_cut_all, killed_writer_of_clients),
        (_cut_none, kill),
        (_cut_none, killed_writer_of_clients),
    ],
)
def test_a_wrong_opening_is_seen(
    mutant: Any, case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An opening that cuts episodes of live clients too, or none at all, fails the test of sessions."""
    monkeypatch.setattr(EpisodeTable, "end_local", mutant)
    with pytest.raises(AssertionError):
        case(tmp_path)


def _no_end(body: Any) -> Any:
    return End(0)


def _no_resumption(body: Any) -> Any:
    return Resume(0, SessionKey("nobody"))


def _resumed_as_it_was(body: Any) -> Any:
    return Resume(0, SessionKey(*body["session"]), episodes=tuple(body["episodes"]))


@pytest.mark.index
@pytest.mark.parametrize(
    ("place", "mutant", "case"),
    [
        ((End, "unpack"), _no_end, end_and_kill),
        ((End, "unpack"), _no_end, end_session_and_kill),
        ((Resume, "unpack"), _no_resumption, resume_and_kill),
        ((Resume, "unpack"), _resumed_as_it_was, resume_and_kill),
        ((EpisodeTable, "end_episodes"), lambda table, sequence: [], empty_and_kill),
    ],
)
def test_a_record_that_is_not_folded_is_seen(
    place: tuple[type, str], mutant: Any, case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery or a reader that passes over ends, adoptions or deletions fails the test of sessions."""
    monkeypatch.setattr(*place, mutant)
    with pytest.raises(AssertionError):
        case(tmp_path)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the warnings since the last call."""
    caplog.set_level(logging.WARNING, "expstore")

    def found() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == "expstore"]
        caplog.clear()
        return lines

    return found


def test_several_sessions_under_one_name_are_warned_of_once(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    with opened(tmp_path) as rb:
        rb.extend(rows(0, 3), source="robot", session="one")
        rb.extend(rows(0, 3), source="arm", session="two")
        rb.extend(rows(0, 3), session="one")
        rb.extend(rows(0, 3), session="two")  # the streams without a name are several
        assert warned() == []
        rb.extend(rows(100, 3), source="robot", session="two")
        (line,) = warned()
        assert line.startswith("several sessions write to source robot at the same time: ")
        assert "source=" in line
        rb.extend(rows(3, 3), source="robot", session="one")
        rb.extend(rows(200, 3), source="robot", session="three")
        assert warned() == []
        rb.extend(rows(100, 3), source="arm", session="one")
        (line,) = warned()
        assert "source arm" in line
    with opened(tmp_path) as rb:
        rb.episodes.end_session(["one", "two", "three"])
        rb.extend(rows(0, 3), source="robot")  # the others are over
        assert warned() == []


@pytest.mark.index
def test_a_restart_inside_a_session_is_warned_of_once_for_each_source(
    tmp_path: Path, warned: Callable[[], list[str]]
) -> None:
    def run(rb: TensorDictReplayBuffer, base: int, source: str | None) -> None:
        for start in (base, base + 5):
            rb.extend(rows(start, 5), source=source)

    with opened(tmp_path) as rb:
        run(rb, 0, "robot")
        assert warned() == []
        run(rb, 100, "robot")
        (line,) = warned()
        assert line.startswith("source robot began another episode under the trajectory id of its open one")
        assert "source=" in line
        run(rb, 200, "robot")
        assert warned() == []
        run(rb, 0, "arm")
        run(rb, 100, "arm")
        (line,) = warned()
        assert line.startswith("source arm began")
        assert episodes(rb) == [(10, "cut"), (10, "cut"), (10, "open"), (10, "cut"), (10, "open")]


@pytest.mark.slow
@pytest.mark.index
def test_a_connection_that_has_written_sends_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours without a request do not end its session; without heartbeats it ends, and with `close`."""
    monkeypatch.setattr(tuning, "CONNECTION_HEARTBEAT_SECONDS", 0.02)
    make(tmp_path)
    clock = Clock()
    with served(tmp_path, clock) as server, client(server) as reader:
        store, heard = store_of(server), queue.SimpleQueue[str]()
        note = store.heard.note

        def noted(session: str, **more: Any) -> None:
            note(session, **more)
            heard.put(session)

        monkeypatch.setattr(store.heard, "note", noted)
        assert len(reader) == 0
        post(server, rows(50, 2), {"X-Session": "silent"})
        with client(server) as writer:
            writer.extend(rows(0, 4), source="robot")
            for hour in range(1, 4):
                clock.now = 3600.0 * hour
                while not heard.empty():
                    heard.get()
                # The first may have been noted before the clock was set, the second is sent after the first.
                ours = {heard.get(timeout=60), heard.get(timeout=60)}
                store.end_silent()
                check(store.rb, (2, "cut"), (4, "open"))
                assert list(ours) == store.rb.episodes.remote_sessions()  # who only reads sends none
        check(store.rb, (2, "cut"), (4, "cut"))


def test_many_ids_of_sessions_take_no_memory() -> None:
    from expstore.api.sessions import SessionActivity

    heard = SessionActivity(lambda: 0.0)
    for number in range(1000):
        heard.note(str(number))
    assert not heard._last
