"""A consumer's batches through a DataLoader: the same draws in the same order, with any number of workers."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import expstore
from expstore.buffers.draw_server import DrawServer, Question
from expstore.errors import ArgumentError, NotReadyError, RowsChangedError, StateError
from tests.support.batches import observed_episode as rows

pytestmark = [
    pytest.mark.usefixtures("no_syncs", "no_index_on_close"),
    pytest.mark.filterwarnings("ignore:.*set_vital"),
]


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch["observation"].reshape(-1).long().tolist()
    return found


@pytest.fixture
def rb(tmp_path: Path) -> Iterator[Any]:
    with expstore.open(tmp_path / "run.exp", batch_size=8, seed=1) as rb:
        rb.extend(rows(100))
        yield rb


def in_passes(rb: Any, name: str, **options: Any) -> Any:
    return rb.consumer(name, sampler=expstore.SamplerWithoutReplacement(), **options)


def load(dataset: Any, workers: int, kind: Any = DataLoader, **options: Any) -> Any:
    if workers:
        options = {"multiprocessing_context": "fork", **options}
    return kind(dataset, batch_size=None, num_workers=workers, collate_fn=dataset.collate, **options)


def taken(loader: Any, count: int) -> list[list[int]]:
    batches = iter(loader)
    return [numbers(next(batches)) for _ in range(count)]


# -- the same draws --------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "consumers/loader", "A `DataLoader` returns a consumer's draws in their order, with any workers."
)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_returns_the_draws_in_order(rb: Any, workers: int) -> None:
    with in_passes(rb, "alone") as alone, in_passes(rb, "learner") as learner:
        first, second = ([numbers(batch) for batch in alone] for _ in range(2))
        loader = load(learner.to_torch_dataset(), workers)
        assert [numbers(batch) for batch in loader] == first
        assert learner.position["draw"] == 13
        assert [numbers(batch) for batch in loader] == second


def test_workers_that_stay_begin_the_next_pass(rb: Any) -> None:
    with in_passes(rb, "alone") as alone, in_passes(rb, "learner") as learner:
        loader = load(learner.to_torch_dataset(), 2, persistent_workers=True)
        for _ in range(3):
            assert [numbers(batch) for batch in loader] == [numbers(batch) for batch in alone]


@pytest.mark.slow
def test_a_worker_that_is_spawned_gets_the_same(rb: Any) -> None:
    with in_passes(rb, "alone") as alone, in_passes(rb, "learner") as learner:
        loader = load(learner.to_torch_dataset(), 1, multiprocessing_context="spawn")
        assert [numbers(batch) for batch in loader] == [numbers(batch) for batch in alone]


def test_workers_see_rows_that_are_appended_meanwhile(rb: Any) -> None:
    with rb.consumer("learner", sampler=expstore.RecencySampler(newest=8)) as learner:
        batches = iter(load(learner.to_torch_dataset(), 2, prefetch_factor=1))
        seen: list[int] = []
        for start in range(100, 200, 20):
            rb.extend(rows(20, start))
            seen += numbers(next(batches))
        assert max(seen) > 150
        recorded = [numbers(batch) for batch in learner.replay(0, 4)]
        assert [number for batch in recorded for number in batch] == seen


def test_workers_of_a_rank_return_its_parts(rb: Any) -> None:
    with (
        in_passes(rb, "alone") as alone,
        in_passes(rb, "learner", rank=0, world=2) as learner,
        expstore.open(rb.storage.path, mode="r", batch_size=8) as reader,
        in_passes(reader, "learner", rank=1, world=2) as other,
    ):
        own = [numbers(batch) for batch in load(learner.to_torch_dataset(), 2)]
        theirs = [numbers(batch) for batch in load(other.to_torch_dataset(), 2)]
        assert [one + two for one, two in zip(own, theirs, strict=True)] == [numbers(one) for one in alone]


# -- going on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stateful_loader_continues_after_the_last_returned_batch(rb: Any, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    with in_passes(rb, "alone") as alone, in_passes(rb, "learner") as learner:
        whole = [numbers(batch) for batch in alone]
        dataset = learner.to_torch_dataset()
        dataset.set_epoch(3)
        loader = load(dataset, workers, stateful)
        batches = iter(loader)
        assert [numbers(next(batches)) for _ in range(5)] == whole[:5]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        next(batches)  # lost
        del batches
        learner.commit(dataset.position(state))
        assert learner.committed == 5
        again = load(dataset, workers, stateful)
        again.load_state_dict(state)
        assert [numbers(batch) for batch in again] == whole[5:]
        assert [numbers(batch) for batch in again] == [numbers(batch) for batch in alone]


def test_the_position_in_a_state_is_that_of_the_first_batch_not_returned(rb: Any) -> None:
    with rb.consumer("learner") as learner:
        dataset = learner.to_torch_dataset()
        place = learner.position
        state = {
            "workers": {"a": place | {"draw": 7, "begin": 1}, "b": place | {"draw": 6, "begin": 1}},
            "n": 3,
        }
        assert dataset.position(state) == place | {"draw": 6}
        with pytest.raises(ArgumentError, match="there is no position of a consumer in"):
            dataset.position({"n": 3})


def test_the_epoch_is_in_the_state(rb: Any) -> None:
    with rb.consumer("learner") as learner:
        dataset = learner.to_torch_dataset()
        learner.sample()
        state = dataset.state_dict()
        dataset.set_epoch(4)
        learner.sample()
        assert dataset.state_dict() == learner.position | {"epoch": 4}
        dataset.load_state_dict(state)
        assert (dataset.epoch, learner.position["draw"]) == (0, 1)
        with pytest.raises(ArgumentError, match="epoch"):
            dataset.set_epoch("one")


# -- errors ----------------------------------------------------------------------------------------------


def test_an_error_of_the_sampler_reaches_the_loader(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", batch_size=8) as rb, rb.consumer("learner") as learner:
        with pytest.raises(NotReadyError, match="Cannot sample"):
            taken(load(learner.to_torch_dataset(), 1), 1)


def test_rows_that_are_gone_are_an_error_in_a_worker(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=16, batch_size=8, seed=1) as rb:
        rb.extend(rows(16))
        with rb.consumer("learner") as learner:
            learner.sample()
            rb.extend(rows(40, 16))
            learner.seek("committed")
            with pytest.raises(RowsChangedError, match="draw 0 had rows"):
                taken(load(learner.to_torch_dataset(), 1), 1)


def test_a_loader_of_a_closed_consumer_is_refused(rb: Any) -> None:
    with rb.consumer("learner") as learner:
        dataset = learner.to_torch_dataset()
    with pytest.raises(StateError, match="has closed it, or has ended"):
        taken(load(dataset, 1), 1)
    with pytest.raises(StateError, match="is closed"):
        taken(load(dataset, 0), 1)
    with pytest.raises(StateError, match="is closed"):
        learner.to_torch_dataset()


def test_a_draw_far_ahead_is_refused(rb: Any) -> None:
    with rb.consumer("learner") as learner:
        with pytest.raises(ArgumentError, match="draw 20000 of consumer 'learner' is too far after"):
            learner.draw(20_000)
        assert learner.position["draw"] == 0
        third = numbers(learner.draw(2))
        assert learner.position["draw"] == 0
        assert [numbers(learner.sample()) for _ in range(3)][2] == third


# -- the socket ------------------------------------------------------------------------------------------


class Answers:
    def __init__(self) -> None:
        self.asked: list[Question] = []

    def answer(self, question: Question) -> None:
        self.asked.append(question)
        if question[0] == "wrong":
            raise ValueError("no")


def test_workers_ask_by_a_copy_of_the_client() -> None:
    answers = Answers()
    server = DrawServer(answers.answer)
    client = pickle.loads(pickle.dumps(server.client))
    client.ask("draw", 3)
    with pytest.raises(ValueError, match="no"):
        client.ask("wrong", 4)
    client.ask("end", 5)
    assert answers.asked == [("draw", 3), ("wrong", 4), ("end", 5)]
    server.close()
    server.close()
    with pytest.raises(StateError):
        server.client.ask("draw", 6)


def test_a_process_without_the_key_does_not_stop_the_server() -> None:
    answers = Answers()
    server = DrawServer(answers.answer)
    with pytest.raises((OSError, EOFError, Exception), match="digest|rejected|"):
        Client(server._address, "AF_UNIX", b"another key")
    server.client.ask("draw", 1)
    assert answers.asked == [("draw", 1)]
    server.close()


def test_a_consumer_that_is_dropped_ends_its_thread(rb: Any) -> None:
    before = {thread.name for thread in threading.enumerate()}
    learner = rb.consumer("learner")
    dataset = learner.to_torch_dataset()
    held = weakref.ref(learner)
    accepting = next(thread for thread in threading.enumerate() if thread.name == "expstore-draws")
    rb._consumers.clear()
    del learner, dataset
    gc.collect()
    assert held() is None
    accepting.join(10)
    assert not accepting.is_alive()
    assert "expstore-draws" not in before
