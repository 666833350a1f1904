"""Sampling without replacement: each row once per pass, through any operations."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore import SamplerWithoutReplacement, TensorDictReplayBuffer
from expstore.core.draws import Draws
from expstore.errors import NotReadyError
from expstore.samplers.without_replacement import permute
from tests.support.batches import memory_buffer, numbered_rows


def numbers(rb: TensorDictReplayBuffer) -> list[list[int]]:
    return [batch["number"].tolist() for batch in rb]


@pytest.mark.parametrize(
    ("size", "drop_last", "lengths"),
    [(4, False, [4, 4, 2]), (4, True, [4, 4]), (5, True, [5, 5]), (16, False, [10])],
)
def test_a_pass_draws_each_row_at_most_once(size: int, drop_last: bool, lengths: list[int]) -> None:
    rb = memory_buffer(10, sampler=SamplerWithoutReplacement(drop_last=drop_last), batch_size=size)
    rb.extend(numbered_rows(10))
    passes = [numbers(rb) for _ in range(20)]
    for batches in passes:
        assert [len(batch) for batch in batches] == lengths
        drawn = list(itertools.chain(*batches))
        assert len(set(drawn)) == len(drawn)
    assert len({tuple(itertools.chain(*batches)) for batches in passes}) > 15


def test_in_order() -> None:
    rb = memory_buffer(10, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4)
    rb.extend(numbered_rows(10))
    assert numbers(rb) == numbers(rb) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_every_order_is_as_likely() -> None:
    rb = memory_buffer(4, sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(numbered_rows(4))
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(4800):
        order = tuple(rb.sample()["number"].tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi_square < 53, "23 degrees of freedom: the 99.97 % quantile"


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 1000, 20_000])
def test_large_passes_are_permutations_too(size: int) -> None:
    whole = permute(np.arange(size), size, key=(1, 2))
    np.testing.assert_array_equal(np.sort(whole), np.arange(size))
    part = np.random.default_rng(0).integers(0, size, 50)
    np.testing.assert_array_equal(permute(part, size, key=(1, 2)), whole[part])


def test_large_passes_are_shuffled_well() -> None:
    size, classes = 40_000, 20
    orders = [permute(np.arange(size), size, key=(3, number)) for number in range(6)]
    for order in orders:
        table = np.zeros((classes, classes))
        np.add.at(table, (np.arange(size) * classes // size, order * classes // size), 1)
        expected = size / classes**2
        assert 260 < ((table - expected) ** 2 / expected).sum() < 480, "361 degrees of freedom"
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    for one, other in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


def test_a_pass_restarts_when_the_number_of_rows_changes() -> None:
    rb = memory_buffer(10, sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(numbered_rows(6))
    rb.sample()
    rb.extend(numbered_rows(2, 6))
    assert sorted(itertools.chain(*numbers(rb))) == list(range(8))


def test_in_a_full_ring_an_index_stands_for_its_newest_row() -> None:
    rb = memory_buffer(10, sampler=SamplerWithoutReplacement(), batch_size=5)
    rb.extend(numbered_rows(10))
    first = rb.sample()["index"].tolist()
    rb.extend(numbered_rows(5, 10))
    second = rb.sample()
    assert sorted(first + second["index"].tolist()) == list(range(10))
    assert (second["number"] == torch.where(second["index"] < 5, second["index"] + 10, second["index"])).all()


def test_rows_given_up_before_others_take_their_places() -> None:
    """A long extend does so: who has drawn such rows draws others, of those that are left."""
    rb = memory_buffer(10, sampler=SamplerWithoutReplacement(), batch_size=4)
    rb.extend(numbered_rows(10))
    generator = Draws(1).generator(0)
    selection = rb.sampler.sample(rb.storage, 4, generator)
    rb.storage._retire(6)
    again = rb.sampler.sample_again(rb.storage, selection, generator)
    assert sorted(again.ids.tolist()) == [7, 8, 9, 10]


def test_invalid_arguments_are_refused() -> None:
    rb = memory_buffer(10, sampler=SamplerWithoutReplacement(drop_last=True), batch_size=11)
    with pytest.raises(NotReadyError, match="empty storage"):
        rb.sample()
    rb.extend(numbered_rows(10))
    with pytest.raises(ValueError, match="batch size .* is greater than the storage capacity"):
        rb.sample()


def test_threads_share_a_pass() -> None:
    rb = memory_buffer(3000, sampler=SamplerWithoutReplacement(), batch_size=10)
    rb.extend(numbered_rows(3000))
    drawn: list[int] = []

    def work() -> None:
        for _ in range(75):
            drawn.extend(rb.sample()["number"].tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(range(3000))


def opened(path: Path, **keywords: Any) -> TensorDictReplayBuffer:
    sampler = SamplerWithoutReplacement()
    return expstore.open(path, sampler=sampler, batch_size=7, seed=5, **keywords)


@pytest.mark.guarantee("draw/next")
@pytest.mark.some(2)
@pytest.mark.parametrize("capacity", [50, 200, None])
@pytest.mark.parametrize("end", ["close", "kill after flush", "kill"])
def test_a_pass_continues_in_the_middle_after_a_restart(
    capacity: int | None, end: str, tmp_path: Path
) -> None:
    def live(path: Path) -> TensorDictReplayBuffer:
        rb = opened(path, capacity=capacity)
        rb.extend(numbered_rows(120))
        for _ in range(10):
            rb.sample()
        return rb

    with live(tmp_path / "whole.exp") as whole:
        expected = [whole.sample()["number"].tolist() for _ in range(40)]
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        rb = live(tmp_path / "parts.exp")
        if end == "close":
            rb.close()
        elif end == "kill after flush":
            rb.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with opened(tmp_path / "parts.exp") as again:
        assert [again.sample()["number"].tolist() for _ in range(40)] == expected


def test_a_flush_keeps_the_place_across_a_power_cut(tmp_path: Path) -> None:
    with opened(tmp_path / "whole.exp", capacity=60) as whole:
        whole.extend(numbered_rows(60))
        expected = [whole.sample()["number"].tolist() for _ in range(30)]
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        rb = opened(tmp_path / "parts.exp", capacity=60)
        rb.extend(numbered_rows(60))
        for _ in range(12):
            rb.sample()
        rb.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (tmp_path / "parts.exp" / "STATE").write_bytes(bytes(4096))  # what a restart of the machine leaves of it
    with opened(tmp_path / "parts.exp") as again:
        assert [again.sample()["number"].tolist() for _ in range(18)] == expected[12:]


def test_a_snapshot_keeps_the_place(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", capacity=60) as rb:
        rb.extend(numbered_rows(60))
        for _ in range(3):
            rb.sample()
        rb.dumps(tmp_path / "versions")
        expected = [rb.sample()["number"].tolist() for _ in range(20)]
        with opened(tmp_path / "b.exp", capacity=60) as copy:
            copy.loads(tmp_path / "versions")
            assert [copy.sample()["number"].tolist() for _ in range(20)] == expected


def test_state_dict_goes_to_another_sampler() -> None:
    one, other = (
        memory_buffer(20, sampler=SamplerWithoutReplacement(), batch_size=6),
        memory_buffer(20, sampler=SamplerWithoutReplacement(), batch_size=6),
    )
    for rb in (one, other):
        rb.extend(numbered_rows(20))
        rb.sample()
    one.sample()
    samplers: list[Any] = [one.sampler, other.sampler]
    samplers[1].load_state_dict(samplers[0].state_dict())
    assert one.sample()["number"].tolist() == other.sample()["number"].tolist()
