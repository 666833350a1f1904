"""Memory of large batches is reused only when nothing refers to any part of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core.buffer_pool import Recycled

FLOAT = np.dtype(np.float32)
SHAPE = (256, 1024)


def address(array: Any) -> int:
    return int(array.ctypes.data)


def test_unreferenced_buffers_are_reused() -> None:
    recycled = Recycled()
    first = recycled.empty(SHAPE, FLOAT)
    assert (first.shape, first.dtype) == (SHAPE, FLOAT)
    assert first.flags.writeable
    place = address(first)
    second = recycled.empty(SHAPE, FLOAT)
    assert address(second) != place
    del first
    assert address(recycled.empty((1024, 128), np.dtype(np.int64))) == place


@pytest.mark.guarantee("draw/whole")
@pytest.mark.some(2)
@pytest.mark.parametrize(
    "refer",
    [
        lambda array: array[3],
        lambda array: array.reshape(-1).view(np.uint8)[5:],
        lambda array: array.T[::2],
        lambda array: memoryview(array)[1:],
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[7].view(torch.int32),
        lambda array: torch.from_numpy(array).view(-1).untyped_storage(),
        lambda array: torch.from_numpy(array).numpy()[1:],
        lambda array: TensorDict({"a": torch.from_numpy(array)}, [256])[:2],
        lambda array: np.lib.stride_tricks.sliding_window_view(array, 3, 0),
        lambda array: np.from_dlpack(torch.from_numpy(array))[0],
    ],
)
def test_referenced_buffers_are_not_reused(refer: Callable[[Any], Any]) -> None:
    recycled = Recycled()
    array = recycled.empty(SHAPE, FLOAT)
    place, held = address(array), refer(array)
    del array
    gc.collect()
    others = [recycled.empty(SHAPE, FLOAT) for _ in range(3)]
    assert place not in map(address, others)
    del held
    gc.collect()
    assert address(recycled.empty(SHAPE, FLOAT)) == place


def test_small_and_huge_arrays_are_the_allocators() -> None:
    recycled = Recycled()
    for shape in ((4,), (1 << 27,)):
        array = recycled.empty(shape, np.dtype(np.uint8))
        assert array.base is None
        del array
    assert not recycled._kept
    for size in (1 << 20, 1 << 21, 1 << 20):  # the one that is kept is of another size
        assert recycled.empty((size,), np.dtype(np.uint8)).shape == (size,)


@pytest.mark.guarantee("draw/whole")
def test_threads_never_share_it() -> None:
    recycled, wrong = Recycled(), []

    def work(number: int) -> None:
        for cycle in range(100):
            array = recycled.empty((1 << 18,), FLOAT)
            array[:] = number * 1000 + cycle
            held = torch.from_numpy(array)[::64]
            del array
            if not bool((held == number * 1000 + cycle).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture(params=["packed", "memory"])
def images(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, torch.Tensor]]:
    """A buffer of 400 images, and these."""
    if request.param == "memory":
        rb = expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(400))
    else:
        rb = expstore.open(tmp_path / "a.exp", capacity=400, layout=request.param, seed=1)
    with rb:
        chance = torch.Generator().manual_seed(1)
        data = torch.randint(0, 256, (400, 84, 84), dtype=torch.uint8, generator=chance)
        rb.extend(TensorDict({"image": data, "n": torch.arange(400)}, [400]))
        yield rb, data


def test_batches_that_are_kept_stay_as_they_are(images: tuple[Any, torch.Tensor]) -> None:
    """Of a loop that keeps every third of its batches, or a part of one."""
    (rb, data), kept = images, []
    for number in range(12):
        batch = rb.sample(256)
        if number % 3 == 0:
            kept.append((batch["n"], batch["image"] if number % 2 else batch["image"][10:]))
    for numbers, found in kept:
        assert torch.equal(found, data[numbers[-len(found) :]])


def test_the_next_batch_takes_the_memory_of_the_last(
    images: tuple[Any, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    (rb, _), places, again = images, set(), []
    own = Recycled.empty

    def empty(recycled: Recycled, shape: tuple[int, ...], dtype: Any) -> Any:
        if shape[1:] == (84, 84):
            again.append(bool(recycled._kept))
        return own(recycled, shape, dtype)

    monkeypatch.setattr(Recycled, "empty", empty)
    for _ in range(6):
        batch = rb.sample(256)  # the last one lives until this one is made
        places.add(batch["image"].data_ptr())
    assert again == [False] * 2 + [True] * 4
    assert len(places) == 2


def test_an_empty_batch_of_wide_rows(images: tuple[Any, torch.Tensor]) -> None:
    rb, _ = images
    assert rb[torch.zeros(400, dtype=torch.bool)]["image"].shape == (0, 84, 84)


def test_many_objects_are_copied_as_objects() -> None:
    with expstore.ReplayBuffer(storage=expstore.ListStorage(140_000)) as rb:
        rb.extend([(number, str(number)) for number in range(140_000)])
        numbers, texts = rb[:]
        assert [int(text) for text in texts] == numbers.tolist()
