"""Reopening after a close, a flush or a kill, with and without the index, continues the store."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.core.draw_state import DrawState
from expstore.core.draws import Draws
from expstore.errors import StorageError
from expstore.maintenance import verify
from expstore.storages import ZarrStorage
from expstore.storages.columns.packed.writer import PackedColumn
from expstore.storages.engine.opening import Opening
from tests.support.batches import counted_frames, numbered_rows
from tests.support.forks import collect_from_child

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs")]

SEED = 11


def batch(count: int, first: int, *, ends: dict[int, str] | None = None, lanes: int = 1) -> TensorDict:
    """Rows whose values follow from a running number; `ends` says which of them end, and how."""
    number = torch.arange(first, first + count * lanes)
    kinds = [(ends or {}).get(i, "") for i in number.tolist()]
    after = {
        "reward": number[:, None].float() / 8,
        "terminated": torch.tensor([kind == "t" for kind in kinds])[:, None],
        "truncated": torch.tensor([kind == "T" for kind in kinds])[:, None],
    }
    data = numbered_rows(count * lanes, first, wide=counted_frames(7 * number, 600), next=after)
    return data.reshape(lanes, count) if lanes > 1 else data


EPISODES = "SELECT * FROM episodes ORDER BY episode_id"


def tables(rb: TensorDictReplayBuffer) -> dict[str, list[Any]]:
    """What the index answers, all of it."""
    return {
        "episodes": rb.sql(EPISODES).fetchall(),
        "fragments": rb.sql("SELECT * FROM fragments ORDER BY first_id").fetchall(),
        "sources": rb.sql("SELECT * FROM sources ORDER BY 1, 2").fetchall(),
        "priorities": rb.sql("SELECT * FROM priorities ORDER BY id").fetchall(),
        "transitions": rb.sql("SELECT * EXCLUDE (wide) FROM transitions ORDER BY _id").fetchall(),
    }


def drop_index(path: Path) -> None:
    for name in path.glob("index.*"):
        name.unlink()


def ended_or_not(sources: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return sources with whether they have ended, not when: an opening is that of one copy."""
    return [(*row[:-1], row[-1] is not None) for row in sources]


def drawn(rb: TensorDictReplayBuffer, draw: int, size: int = 8) -> list[int]:
    """The ids of a draw, from the rule in the documentation."""
    window = rb.storage.window
    return Draws(SEED).generator(draw).integers(window.low + 1, window.last + 1, size).tolist()


# ---------------------------------------------------------------------------------------------------
# The index is disposable.


def first_life(path: Path, stop: str, asked: str, tell: Callable[[Any], None]) -> None:
    """A ring that has turned, with named and unnamed sources, some of whose episodes have left."""
    rb = expstore.open(path, capacity=60, seed=SEED, batch_size=8)
    rb.extend(batch(12, 0, ends={3: "t", 9: "T"}), source="arm")
    rb.extend(batch(3, 12, lanes=4, ends={14: "t", 20: "T"}))
    rb.update_priority(id=[5, 20], priority=[3.0, 0.5])
    if asked == "early":
        rb.sql("SELECT 1")
    rb.extend(batch(30, 24, ends={30: "t", 45: "t"}), source="leg")
    for number in range(54, 60):
        rb.add(batch(1, number)[0], source="arm")
    tell([rb.sample()["id"].tolist() for _ in range(5)])
    rb.extend(batch(3, 60, lanes=4, ends={71: "t"}))
    rb[[2, -1]] = batch(2, 900)
    rb.extend(batch(5, 72, ends={73: "t"}), source="leg")
    if asked == "late":
        rb.sql("SELECT 1")
    rb.update_priority(id=[70, 30, 75], priority=[9.0, 4.0, 0.0])
    rb.storage.write_values()  # a kill may cost those of the last tenth of a second
    tell((rb.storage.window.low, rb.storage.last, rb.storage.draws.number))
    if stop == "kill":
        tell(tables(rb) if asked == "late" else None)
        return
    if stop == "flush":
        rb.flush()
    else:
        rb.close()
    tell(None)


@pytest.mark.guarantee(
    "damage/index",
    "The index is derived: whatever is wrong with it, it is rebuilt and gives the same answers.",
)
@pytest.mark.some(1)
@pytest.mark.parametrize("asked", ["never", "early", "late"])
@pytest.mark.parametrize("stop", ["close", "flush", "kill"])
def test_nothing_changes_when_the_index_is_deleted(tmp_path: Path, stop: str, asked: str) -> None:
    path = tmp_path / "run.exp"
    batches, (low, last, draw), before = collect_from_child(lambda tell: first_life(path, stop, asked, tell))
    assert (low, last, draw) == (17, 77, 5)
    assert len(batches) == 5
    shutil.copytree(path, tmp_path / "bare.exp")
    drop_index(tmp_path / "bare.exp")
    found = []
    for name in ("run.exp", "bare.exp"):
        with expstore.open(tmp_path / name, batch_size=8) as rb:
            assert (rb.recovered is None) == (stop == "close")
            assert rb["number"][0] == 900 or 900 in rb["number"]
            told: dict[str, Any] = tables(rb)
            told["sources"] = ended_or_not(told["sources"])
            told["batches"] = [rb.sample()["id"].tolist() for _ in range(3)]
            assert told["batches"] == [drawn(rb, number) for number in (5, 6, 7)]
            told["ids"] = rb.extend(batch(4, 80), source="arm", return_ids=True).tolist()
            told["more"] = rb.extend(batch(4, 84), return_ids=True).tolist()
            told["after"] = [row[:6] + row[7:] for row in rb.sql("FROM episodes ORDER BY 1").fetchall()][:-2]
            told["steps"] = rb.sql(
                "SELECT _id, _episode, _step FROM transitions WHERE _id > 77 ORDER BY 1"
            ).fetchall()
            found.append(told)
    assert found[0] == found[1]
    told = found[0]
    assert told["ids"] == [78, 79, 80, 81]
    assert told["more"] == [82, 83, 84, 85]
    # What the writer saw, but that its session is over and its open episodes are cut.
    statuses = {row[0]: (row[1], row[2], row[4], row[10]) for row in told["episodes"]}
    assert "open" not in [status for _, _, status, _ in statuses.values()]
    assert all(ended for *_, ended in told["sources"])
    assert statuses[1] == ("arm", 4, "terminated", 0)
    assert statuses[2] == ("arm", 6, "truncated", 0)
    assert sum(length for _, length, _, _ in statuses.values()) == 77
    assert sum(live for _, _, _, live in statuses.values()) == 60
    if before is not None:

        def as_cut(row: tuple[Any, ...]) -> tuple[Any, ...]:
            return row if row[4] != "open" else (*row[:4], "cut", row[5], None, *row[7:])

        def blind(row: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*row[:6], None, *row[7:]) if row[4] == "cut" else row

        assert [blind(as_cut(row)) for row in before["episodes"]] == [blind(row) for row in told["episodes"]]
        for name in ("transitions", "priorities"):
            assert before[name] == told[name]
        assert [row[:-1] for row in before["sources"]] == [row[:-1] for row in told["sources"]]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("closed", "more"), [(True, ()), (True, (5,)), (True, (30,)), (True, (5, 30)), (False, (5, 30))]
)
def test_an_index_that_is_lives_behind_gives_the_same_answers(
    store_path: Path, closed: bool, more: tuple[int, ...]
) -> None:
    """Episodes that it knows have left since, whole or in part, in lives in which nobody asked it."""

    def first(tell: Callable[[Any], None]) -> None:
        rb = expstore.open(store_path, capacity=40)
        rb.extend(batch(40, 0, ends={9: "t", 19: "T", 29: "t"}), source="arm")
        rb.sql("SELECT 1")
        if closed:
            rb.close()

    def later(tell: Callable[[Any], None], rows: int) -> None:
        rb = expstore.open(store_path)
        rb.extend(batch(rows, 100, ends={102: "t"}), source="arm")

    collect_from_child(first)
    for rows in more:
        collect_from_child(lambda tell, rows=rows: later(tell, rows))
    shutil.copytree(store_path, store_path.with_name("bare.exp"))
    drop_index(store_path.with_name("bare.exp"))
    with expstore.open(store_path) as rb, expstore.open(store_path.with_name("bare.exp")) as bare:
        found, others = tables(rb), tables(bare)
        for told in (found, others):
            told["sources"] = ended_or_not(told["sources"])
        assert found == others
    live = {
        (): [10, 10, 10, 10],
        (5,): [5, 10, 10, 10, 3, 2],
        (30,): [0, 0, 0, 10, 3, 27],
        (5, 30): [0, 0, 0, 5, 3, 2, 3, 27],
    }[more]
    assert [row[10] for row in found["episodes"]] == live
    assert sum(row[2] for row in found["fragments"]) == 40


# ---------------------------------------------------------------------------------------------------
# Draws, priorities, shards.


@pytest.mark.guarantee("draw/next")
@pytest.mark.slow
def test_batches_continue_after_any_stop(store_path: Path) -> None:
    expected = 0
    for stop in ("close", "kill", "flush", "kill", "close"):

        def life(tell: Callable[[Any], None], stop: str = stop) -> None:
            rb = expstore.open(store_path, capacity=50, seed=SEED, batch_size=8)
            rb.extend(batch(10, 0))
            for _ in range(3):
                tell(
                    (
                        rb.sample()["id"].tolist(),
                        drawn(rb, rb.storage.draws.number - 1),
                        rb.storage.draws.number,
                    )
                )
            if stop != "kill":
                getattr(rb, stop)()

        for ids, wanted, draw in collect_from_child(life):
            expected += 1
            assert draw == expected
            assert ids == wanted


def test_one_line_says_what_was_recovered(store_path: Path) -> None:
    def life(tell: Callable[[Any], None]) -> None:
        rb = expstore.open(store_path)
        rb.extend(batch(5, 0))
        rb.flush()
        rb.extend(batch(7, 5))

    collect_from_child(life)
    with expstore.open(store_path) as rb:
        assert rb.recovered == (
            "the last writer did not close the store: 7 rows since the last sync kept, "
            "1 open episodes ended as cut"
        )
        assert rb.stats()["recovered"] == rb.recovered
    with expstore.open(store_path) as rb:
        assert rb.recovered is None


def test_the_index_is_let_go_of_though_the_last_sync_cuts_the_journal(store_path: Path) -> None:
    """Others can open it, this process among them, while somebody still has the closed buffer."""
    ends = (torch.arange(1000) % 10 == 9)[:, None]
    rows = TensorDict({"x": torch.arange(1000), "next": {"done": ends, "terminated": ends}}, [1000])
    rb = expstore.open(store_path)
    for _ in range(30):
        rb.extend(rows)
    rb.close()
    assert verify(store_path) == []


STEPS = ["_recover_rows", "_load_priorities", "_make_durable", "_claim"]


def fail_reopening(
    rb: TensorDictReplayBuffer, monkeypatch: pytest.MonkeyPatch, step: str, act: Callable[[], None]
) -> None:
    """Let the journal be read again twice, which fails at a step, before which another thread acts."""

    def fail(*given: Any, **keywords: Any) -> Any:
        acting = threading.Thread(target=act)
        acting.start()
        acting.join(60)
        raise StorageError("not now")

    rb.storage.health.note_interruption()
    with monkeypatch.context() as patched:
        patched.setattr(Opening, step, fail)
        for _ in range(2):
            with pytest.raises(StorageError, match="not now"):
                rb.flush()


@pytest.mark.guarantee("draw/count")
@pytest.mark.parametrize("step", STEPS)
def test_a_reopening_that_fails_takes_back_no_draw(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    sampled, settings = [0], 77

    def act() -> None:
        sampled[0] += 4
        rb.storage.draws.next()
        rb.storage.draws.note_progress((1, sampled[0], 0, 40))
        rb.storage.draws.note_limits(sampled[0], settings)

    def kept() -> tuple[int, tuple[int, ...], tuple[int, int]]:
        return rb.storage.draws.number, tuple(rb.storage.draws.progress), rb.storage.draws.limits

    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(40))
        rb.flush()
        act()
        fail_reopening(rb, monkeypatch, step, act)
        assert kept() == (3, (1, 12, 0, 40), (12, settings))
        act()
        rb.flush()
        assert kept() == (4, (1, 16, 0, 40), (16, settings))
    with expstore.open(store_path) as rb:
        assert kept() == (4, (1, 16, 0, 40), (16, settings))


@pytest.mark.guarantee("draw/count")
@pytest.mark.parametrize("given", [False, True], ids=["seed", "generator"])
def test_batches_of_another_thread_never_come_twice_though_a_reopening_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    generators = {name: torch.Generator().manual_seed(3) for name in ("calm.exp", "failing.exp")}

    def opened(name: str) -> TensorDictReplayBuffer:
        return expstore.open(
            tmp_path / name,
            seed=5,
            batch_size=4,
            batches=expstore.Batches(generator=generators[name] if given else None),
        )

    with opened("calm.exp") as calm, opened("failing.exp") as rb:
        for buffer in (calm, rb):
            buffer.extend(numbered_rows(40))
            buffer.flush()
        found = [rb.sample()["number"].tolist()]
        threads: list[threading.Thread] = []
        drawn = threading.Event()
        real = DrawState.next

        def next_draw(draws: DrawState) -> int:
            number = real(draws)
            drawn.set()
            return number

        def act() -> None:  # a batch waits for the rows until the reopening has failed, its number is taken
            threads.append(threading.Thread(target=lambda: found.append(rb.sample()["number"].tolist())))
            threads[-1].start()
            assert drawn.wait(60)
            drawn.clear()

        monkeypatch.setattr(DrawState, "next", next_draw)
        fail_reopening(rb, monkeypatch, "_make_durable", act)
        for thread in threads:
            thread.join(60)
        found.append(rb.sample()["number"].tolist())
        rb.flush()
        found += [rb.sample()["number"].tolist() for _ in range(2)]
        wanted = [calm.sample()["number"].tolist() for _ in range(6)]
        assert sorted(found) == sorted(wanted)
        assert found[3:] == wanted[3:]
    with opened("calm.exp") as calm, opened("failing.exp") as rb:
        assert rb.sample()["number"].tolist() == calm.sample()["number"].tolist()


def test_a_load_that_fails_late_leaves_the_next_opening_the_draws_of_the_version(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with expstore.open(store_path, seed=5, batch_size=4) as rb:
        rb.extend(numbered_rows(40))
        rb.sample()
        rb.dumps(store_path.parent / "versions")
        wanted = rb.sample()["number"].tolist()
        rb.sample()

        def fail(*given: Any, **keywords: Any) -> Any:
            raise StorageError("not now")

        with monkeypatch.context() as patched:
            patched.setattr(Opening, "_make_durable", fail)
            with pytest.raises(StorageError, match="not now"):
                rb.loads(store_path.parent / "versions")
        rb.flush()
        assert rb.storage.draws.number == 1
        assert rb.sample()["number"].tolist() == wanted


def test_rows_are_right_after_an_interruption_while_they_are_packed(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Packed columns only grow: what an interrupted attempt has written must not be written again."""
    monkeypatch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 128)
    data = rng.integers(0, 256, (224, 64), dtype=np.uint8)
    end = PackedColumn._end_shard

    def end_interrupted(column: Any, filling: Any) -> None:
        end(column, filling)
        monkeypatch.setattr(PackedColumn, "_end_shard", end)
        raise KeyboardInterrupt

    def read() -> bool:
        return np.array_equal(rb.storage.read(np.arange(1, len(rb) + 1))[0], data[: len(rb)])

    with expstore.open(store_path, layout="packed", batch_size=4) as rb:
        monkeypatch.setattr(PackedColumn, "_end_shard", end_interrupted)
        for first in range(0, 192, 32):
            rb.extend({"observation": data[first : first + 32]})
        with pytest.raises(KeyboardInterrupt):
            rb.sample()
        assert read()
        assert len(rb.sample()["observation"]) == 4
        with pytest.raises(StorageError, match="an earlier attempt was interrupted"):
            rb.storage.drain()
        assert read()
        rb.extend({"observation": data[192:]})
        rb.flush()
        assert read()
    with expstore.open(store_path) as rb:
        assert len(rb) == 224
        assert read()
    assert not verify(store_path)


@pytest.mark.parametrize("in_memory", [True, False])
def test_replaced_rows_are_counted_with_their_record(
    tmp_path: Path, in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment of the journal that begins right after the record begins with the count of its rows."""
    if not in_memory:
        monkeypatch.setattr(tuning, "REPLACED_ROWS_BYTES", 0)
    path, copy = tmp_path / "run.exp", tmp_path / "killed.exp"
    rb = expstore.TensorDictReplayBuffer(storage=ZarrStorage(path, 20), batch_size=4)
    rb.extend(batch(10, 0))
    rb.flush()
    storage = rb.storage

    def kill(*_: object) -> None:
        with storage.locks.episodes:
            storage.checkpoints.start_segment(storage)
        storage.sync()
        shutil.copytree(path, copy)

    monkeypatch.setattr(storage.priorities, "raise_largest", kill)
    with storage.lock:
        storage.replace(np.array([2, 5]), storage.take(np.array([6, 7]), None))
    assert rb.write_count == 12
    with expstore.open(copy) as found:
        assert found.write_count == 12
    rb.close()
