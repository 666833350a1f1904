"""Rows that are changed in place after a draw: the draw is not given again as if nothing had happened."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core.values import IntArray
from expstore.errors import CorruptionError, RowsChangedError
from expstore.storages import ZarrStorage
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.engine.store import Store
from expstore.storages.format import row_changes
from expstore.writers import TensorDictMaxValueWriter
from tests.support.forks import in_child

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")


def rows(count: int, start: int = 0) -> TensorDict:
    """Rows whose observations are their ids less one."""
    seen = torch.arange(start, start + count)[:, None].float()
    return TensorDict({"observation": seen, "mark": torch.zeros(count)}, [count])


def open_store(path: Path, **options: Any) -> Any:
    return expstore.open(path, batch_size=4, seed=1, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.exp"


@pytest.fixture
def rb(path: Path) -> Iterator[Any]:
    with open_store(path) as rb:
        rb.extend(rows(100))
        yield rb


def change(rb: Any, ids: Any, mark: float) -> None:
    """Change rows in place, as `rb[i] = ...` does."""
    found = rb.update_if_present(id=torch.tensor(ids), patch={"mark": torch.full((len(ids),), float(mark))})
    assert found.updated.all()


def draw(c: Any, count: int) -> list[list[int]]:
    """Return the ids of new batches."""
    return [ids_of(c.sample()) for _ in range(count)]


def ids_of(batch: Any) -> list[int]:
    found: list[int] = (batch["observation"].reshape(-1).long() + 1).tolist()
    return found


def assert_changed(c: Any, number: int, ids: list[int]) -> None:
    """Check that a draw is refused because of these rows, as often as it is asked for."""
    for _ in range(2):
        with pytest.raises(RowsChangedError) as caught:
            list(c.replay(number, number))
        assert str(caught.value).startswith(
            f"draw {number} had rows that were changed, deleted or overwritten since: {len(ids)} "
            f"(id {', '.join(map(str, ids))})"
        )


# -- what is noticed -------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "consumers/changed",
    "A row that was changed in place since a consumer drew it is an error or left out when the draw comes "
    "again.",
)
@pytest.mark.parametrize("reader", [False, True])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_changed_row_is_an_error_or_left_out(rb: Any, path: Path, reader: bool, reopened: bool) -> None:
    def look() -> Any:
        return open_store(path, mode="r") if reader else rb

    seen = look()
    c = seen.consumer("learner", sampler="without_replacement")
    position, drawn = c.position, draw(c, 3)
    change(rb, drawn[1][2:], 7)
    drawn += draw(c, 1)
    if reopened:
        c.close()
        seen = look()
        c = seen.consumer("learner", sampler="without_replacement", at=position)
    c.seek(position)
    assert draw(c, 1) == drawn[:1]
    with pytest.raises(RowsChangedError):
        c.sample()
    assert_changed(c, 1, drawn[1][2:])
    assert [ids_of(batch) for batch in c.replay(2)] == drawn[2:]
    c.close()
    c = seen.consumer("learner", sampler="without_replacement", at=position, missing="skip")
    assert draw(c, 4) == [drawn[0], drawn[1][:2], *drawn[2:]]
    change(rb, drawn[0], 8)
    c.seek(position)
    assert_changed(c, 0, drawn[0])  # no row is left
    c.close()


@pytest.mark.guarantee("consumers/changed")
@pytest.mark.parametrize("reader", [False, True])
def test_a_changed_step_that_a_transform_reads_is_an_error(path: Path, reader: bool) -> None:
    data = rows(40)
    data["next"] = {"reward": torch.ones(40, 1), "done": (torch.arange(40) % 20 == 19)[:, None]}
    with expstore.open(path, batch_size=1, seed=1) as rb:
        rb.extend(data)
        rb.flush()
        seen = open_store(path, mode="r") if reader else rb
        seen.append_transform(expstore.transforms.MultiStepTransform(n_steps=3, gamma=0.9))
        c = seen.consumer("learner", batch_size=1, sampler="without_replacement", keep="all")
        drawn = [ids for (ids,) in draw(c, 20)]
        change(rb, [10], 7)
        touched = [number for number, id in enumerate(drawn) if id in (8, 9)]
        assert touched
        for number, id in enumerate(drawn):
            if id in (8, 9, 10):
                assert_changed(c, number, [10])
            elif id < 7 or id > 10:
                assert len(list(c.replay(number, number))) == 1
        c.close()
        c = seen.consumer("learner", batch_size=1, sampler="without_replacement", missing="skip", keep="all")
        assert [ids_of(*c.replay(number, number)) for number in touched] == [[drawn[n]] for n in touched]
        c.close()


@pytest.mark.parametrize("reader", [False, True])
def test_a_draw_after_the_change_comes_again(rb: Any, path: Path, reader: bool) -> None:
    rb.consumer("other").close()
    change(rb, range(1, 101), 7)
    seen = open_store(path, mode="r") if reader else rb
    c = seen.consumer("learner")
    before = [c.sample() for _ in range(3)]
    assert all((batch["mark"] == 7).all() for batch in before)
    for again, batch in zip(c.replay(0), before, strict=True):
        assert (again == batch).all()
    change(rb, [1], 7)
    holds = [1 in ids_of(batch) for batch in before]
    assert not all(holds)
    for number, has in enumerate(holds):
        if not has:
            list(c.replay(number, number))
    c.close()


def test_each_way_to_change_a_row_counts_and_priorities_do_not(rb: Any) -> None:
    c = rb.consumer("learner", sampler="without_replacement")
    drawn = draw(c, 6)
    rb[drawn[0][0] - 1] = rows(1, drawn[0][0] - 1)[0]
    rb.set_at_("mark", torch.ones(1), [drawn[1][0] - 1])
    rb.storage.set([drawn[2][0] - 1], rows(1, drawn[2][0] - 1))
    rb.update_priority(id=torch.tensor(drawn[4]), priority=torch.tensor([4.0] * 4))
    for number in range(3):
        assert_changed(c, number, drawn[number][:1])
    assert [ids_of(batch) for batch in c.replay(3)] == drawn[3:]
    rb.columns.add("new", fill=1.0)
    assert [ids_of(batch) for batch in c.replay(3)] == drawn[3:]
    rb.update_({"mark": torch.ones(100)})
    assert_changed(c, 3, drawn[3])


@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_replace_others_count(path: Path, shared: bool) -> None:
    rb = expstore.TensorDictReplayBuffer(
        storage=ZarrStorage(path, 8), writer=TensorDictMaxValueWriter("score"), batch_size=8, with_ids=True
    )
    score = TensorDict({"score": torch.arange(8.0)}, [8])
    with rb:
        rb.extend(score)
        c = rb.consumer("learner", sampler="without_replacement")
        reader = open_store(path, mode="r")
        elsewhere = reader.consumer("elsewhere", sampler="without_replacement", batch_size=8)
        old = c.sample(), elsewhere.sample()
        if shared:
            writer = pickle.loads(pickle.dumps(rb.share()))
            writer.extend(score[:2] + 20)
            writer.close()
        else:
            rb.extend(score[:2] + 20)
        new = c.sample(), elsewhere.sample()  # the other process does not see the rows before a checkpoint
        assert sorted(new[0]["score"].tolist()) == [2, 3, 4, 5, 6, 7, 20, 21]
        assert (new[1]["score"].sort()[0] == old[1]["score"].sort()[0]).all()
        ids = old[0]["id"][old[0]["score"] < 2].tolist()
        assert_changed(c, 0, ids)
        assert (next(c.replay(1))["score"] == new[0]["score"]).all()
        for number in (0, 1):
            with pytest.raises(RowsChangedError, match=": 2 "):
                list(elsewhere.replay(number, number))
        rb.flush()
        last = elsewhere.sample()
        assert sorted(last["score"].tolist()) == [2, 3, 4, 5, 6, 7, 20, 21]
        assert (next(elsewhere.replay(2))["score"] == last["score"]).all()
        elsewhere.close()
        reader.close()


@pytest.mark.parametrize("reader", [False, True])
def test_a_draw_in_the_middle_of_a_change_counts_as_before_it(
    rb: Any, path: Path, reader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = open_store(path, mode="r") if reader else rb
    c = seen.consumer("learner", sampler="without_replacement")
    drawn: list[list[int]] = []
    record = row_changes.RowChanges.record

    @contextmanager
    def draw_too(changes: Any, number: int, ids: IntArray) -> Iterator[None]:
        drawn.extend(draw(c, 1))
        with record(changes, number, ids):
            drawn.extend(draw(c, 1))  # journal and file have the change, and no read returns it
            yield

    monkeypatch.setattr(row_changes.RowChanges, "record", draw_too)
    change(rb, range(1, 101), 7)
    for number in range(2):
        assert_changed(c, number, drawn[number])
    c.close()


def test_a_change_while_a_recorded_draw_is_read_is_noticed(rb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c = rb.consumer("learner", missing="skip")
    (ids,) = draw(c, 1)
    read = Store.read

    def change_then_read(storage: Store, ids: IntArray, places: Any = None) -> Any:
        monkeypatch.setattr(Store, "read", read)
        change(rb, ids[:1].tolist(), 7)
        return read(storage, ids, places)

    monkeypatch.setattr(Store, "read", change_then_read)
    with pytest.raises(RowsChangedError, match="draw 0 "):
        list(c.replay(0))
    assert [ids_of(batch) for batch in c.replay(0)] == [ids[1:]]


def test_the_first_consumer_may_begin_during_a_change(rb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[int]] = []
    overwrite = OpenStore.overwrite

    def begin(state: OpenStore, *args: Any) -> Any:
        with rb.consumer("learner") as c:
            drawn.extend(draw(c, 1))
        return overwrite(state, *args)

    monkeypatch.setattr(OpenStore, "overwrite", begin)
    change(rb, range(1, 101), 7)
    assert_changed(rb.consumer("learner"), 0, drawn[0])


# -- lives of the processes ------------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [False, True])
def test_changes_of_former_lives_count(path: Path, closes: bool) -> None:
    with open_store(path) as rb:
        rb.extend(rows(100))
        rb.flush()
        with rb.consumer("learner", sampler="without_replacement", keep="all") as c:
            drawn = draw(c, 5)

    def work(number: int) -> None:
        rb = open_store(path)
        change(rb, drawn[number][:1], number)
        if closes:
            rb.close()

    for number in range(3):
        in_child(lambda: work(number))  # noqa: B023
        for mode in ("r", "a"):
            with open_store(path, mode=mode) as rb, rb.consumer("learner") as c:
                for one in range(5):
                    if one <= number:
                        assert_changed(c, one, drawn[one][:1])
                    else:
                        assert [ids_of(batch) for batch in c.replay(one, one)] == [drawn[one]]


def test_a_writer_that_was_killed_before_it_wrote_down_a_change(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record in the journal is enough, for readers and for the next writer."""
    with open_store(path) as rb:
        rb.extend(rows(100))
        with rb.consumer("learner", sampler="without_replacement", keep="all") as c:
            drawn = draw(c, 3)

    def work() -> None:
        rb = open_store(path)
        rb.storage.background.stop()
        monkeypatch.setattr(row_changes.RowChanges, "_append", lambda *args: True)
        change(rb, drawn[0][:1], 7)
        with rb.consumer("learner", at="end") as c:
            drawn.extend(draw(c, 1))

    in_child(work)
    assert not (path / "changes").exists()
    for mode in ("r", "a", "r"):
        with open_store(path, mode=mode) as rb, rb.consumer("learner") as c:
            assert_changed(c, 0, drawn[0][:1])
            assert [ids_of(batch) for batch in c.replay(1, 2)] == drawn[1:]
            list(c.replay(3))
    assert (path / "changes").exists()


def test_a_consumer_goes_from_the_writer_to_a_reader_beside_it(rb: Any, path: Path) -> None:
    """The columns may lack the newest rows and changes, which its draws have seen."""
    rb.storage.background.stop()
    for number in range(3):
        rb.add(rows(1, 100 + number)[0])
    with rb.consumer("learner") as c:
        drawn = draw(c, 3)
        c.commit()
        drawn += draw(c, 2)
    with open_store(path, mode="r") as reader, reader.consumer("learner") as c:
        assert (c.committed, c.position["draw"]) == (3, 3)
        assert [ids_of(batch) for batch in c.replay(3)] == drawn[3:]


# -- the file --------------------------------------------------------------------------------------------


def test_without_consumers_there_is_no_file(rb: Any, path: Path) -> None:
    change(rb, [1, 2, 3], 7)
    rb.flush()
    assert not (path / "changes").exists()
    rb.consumer("learner").close()
    change(rb, [1, 2, 3], 8)
    assert (path / "changes").exists()


def test_the_file_does_not_grow_for_ever(rb: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_changes, "COMPACT_BYTES", 1000)
    with rb.consumer("learner", sampler="without_replacement") as c:
        drawn = draw(c, 5)
        for number in range(400):
            change(rb, [drawn[number % 2][0]], number)
            if number == 300:
                assert_changed(c, 1, drawn[1][:1])
        change(rb, [drawn[2][0]], 400)
        assert (path / "changes").stat().st_size < 1100
        for number in range(3):
            assert_changed(c, number, drawn[number][:1])
        list(c.replay(3))


@pytest.mark.parametrize("killed", [False, True])
def test_an_opening_removes_what_no_draw_needs(
    path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_changes, "COMPACT_BYTES", 0)
    file = path / "changes"
    with open_store(path) as rb:
        rb.extend(rows(100))
        with rb.consumer("learner", sampler="without_replacement", keep="all") as c:
            change(rb, range(50, 100, 2), 1)
            drawn = draw(c, 1)
            change(rb, drawn[0][:2], 2)

    def work() -> None:
        rb = open_store(path)
        if not killed:
            rb.close()

    size = file.stat().st_size
    in_child(work)
    assert 24 + 2 * 16 == file.stat().st_size < size
    with open_store(path) as rb:
        with rb.consumer("learner") as c:
            assert_changed(c, 0, drawn[0][:2])
            change(rb, drawn[0][2:], 3)
            assert_changed(c, 0, drawn[0])
        rb.consumers.drop("learner")
    in_child(work)
    assert file.stat().st_size == 24
    with open_store(path) as rb, rb.consumer("learner") as c:
        drawn = draw(c, 2)
        change(rb, drawn[0][:1], 4)
        assert_changed(c, 0, drawn[0][:1])


@pytest.mark.parametrize("place", [2, 10, 17, 30, 100])
def test_a_damaged_file_is_named(rb: Any, path: Path, place: int) -> None:
    c = rb.consumer("learner", sampler="without_replacement")
    drawn = draw(c, 3)
    for number in range(4):
        change(rb, [drawn[0][0], drawn[0][1], drawn[0][2]], number)
    rb.flush()
    file = path / "changes"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="changes is damaged at byte"):
        list(c.replay(1))
    c.close()
    rb.close()
    with open_store(path) as rb, rb.consumer("learner", sampler="without_replacement") as c:
        with pytest.raises(CorruptionError, match="changes is damaged at byte"):
            list(c.replay(1))
        file.unlink()
        assert [ids_of(batch) for batch in c.replay(1)] == drawn[1:]


def test_a_torn_end_is_cut_after_a_kill(path: Path) -> None:
    with open_store(path) as rb:
        rb.extend(rows(100))
        with rb.consumer("learner", sampler="without_replacement", keep="all") as c:
            drawn = draw(c, 3)
    file = path / "changes"

    def work() -> None:
        rb = open_store(path)
        rb.storage.background.stop()
        change(rb, drawn[0][:1], 1)
        change(rb, drawn[1][:1], 1)
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) + b"\0" * 50)

    in_child(work)
    for mode in ("r", "a", "r"):
        with open_store(path, mode=mode) as rb, rb.consumer("learner") as c:
            assert_changed(c, 0, drawn[0][:1])
            assert_changed(c, 1, drawn[1][:1])
            assert [ids_of(batch) for batch in c.replay(2)] == drawn[2:]
    assert file.stat().st_size == 24 + 2 * 16


def test_ids_that_follow_one_another_take_little_space(rb: Any, path: Path) -> None:
    c = rb.consumer("learner")
    drawn = draw(c, 1)
    change(rb, np.random.default_rng(1).permutation(range(1, 101)).tolist(), 7)
    assert (path / "changes").stat().st_size == 24 + 16
    assert_changed(c, 0, drawn[0])
