"""A data set and a growing buffer sampled together: rows of each, compared with TorchRL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchrl.data as theirs
from tensordict import TensorDict

from expstore import LazyTensorStorage, RandomCropTensorDict, ReplayBuffer, ZarrStorage
from expstore.datasets import OfflineToOnlineReplayBuffer, prefill_replay_buffer
from expstore.errors import SchemaError
from expstore.transforms import StepTransform
from tests.support.refusals import check_refusals
from tests.support.torchrl_pair import OURS
from tests.unit.datasets.test_d4rl import arrays, write

pytestmark = pytest.mark.index


def rows(count: int, value: float, *, first: int = 0) -> TensorDict:
    return TensorDict({"x": torch.full((count, 2), value), "n": torch.arange(first, first + count)}, [count])


def made(library: Any = OURS, *, fraction: float = 0.5, **keywords: Any) -> Any:
    dataset = library.ReplayBuffer(storage=library.LazyTensorStorage(100))
    dataset.extend(rows(100, -1.0))
    return library.OfflineToOnlineReplayBuffer(
        offline_dataset=dataset, online_capacity=50, offline_fraction=fraction, **keywords
    )


@pytest.mark.parametrize("library", [OURS, theirs], ids=["ours", "torchrl"])
def test_a_batch_has_the_same_part_of_each(library: Any) -> None:
    for fraction, size, wanted in ((0.5, 8, 4), (0.25, 10, 2), (0.75, 10, 8), (0.01, 10, 0), (0.99, 10, 10)):
        rb = made(library, fraction=fraction, batch_size=size)
        assert (rb.sample()["x"] == -1).all()  # nothing else is there
        rb.extend(rows(10, 1.0))
        for _ in range(3):
            batch = rb.sample()
            assert batch.batch_size == (size,)
            assert batch["x"][:, 0].tolist() == [-1.0] * wanted + [1.0] * (size - wanted)
        assert rb.sample(4).batch_size == (4,)
        assert (len(rb), len(rb.offline_buffer), len(rb.online_buffer)) == (110, 100, 10)


def test_arrays_may_be_the_default() -> None:
    rb = made(batch_size=8, as_numpy=True)
    rb.extend(rows(10, 1.0))
    assert type(rb.sample()["x"]) is np.ndarray
    assert type(rb.sample(4)["n"]) is np.ndarray
    assert isinstance(rb.sample(as_numpy=False), TensorDict)
    both = OfflineToOnlineReplayBuffer(rb, online_capacity=10, batch_size=4)  # whatever the data set does
    both.extend(rows(10, 2.0))
    assert isinstance(both.sample()["x"], torch.Tensor)


def test_the_part_falls_as_torchrls_does() -> None:
    ours, other = made(fraction=0.8), made(theirs, fraction=0.8)
    assert repr(ours) == repr(other)
    for step in (0, 3, 10, 12):
        for rb in (ours, other):
            rb.anneal(step, 10)
        assert ours.offline_fraction == other.offline_fraction
    ours.extend(rows(10, 1.0))
    assert (ours.sample(20)["x"] == 1).all()
    with pytest.raises(ValueError, match="total_steps"):
        ours.anneal(0, 0)


def test_new_rows_never_go_to_the_data_set() -> None:
    rb = made()
    assert rb.extend(rows(60, 1.0)).tolist() == [*range(50), *range(10)]
    assert (rb.offline_buffer[:]["x"] == -1).all()
    assert len(rb.online_buffer) == 50


def test_batches_are_transformed_as_a_whole() -> None:
    rb = made(transform=lambda batch: batch.set("double", batch["x"] * 2))
    rb.extend(rows(10, 1.0))
    assert rb.sample(4)["double"][:, 0].tolist() == [-2.0, -2.0, 2.0, 2.0]


def test_a_data_set_of_torchrls_may_be_the_other_half() -> None:
    dataset = theirs.TensorDictReplayBuffer(storage=theirs.LazyTensorStorage(100))
    dataset.extend(rows(100, -1.0))
    rb = OfflineToOnlineReplayBuffer(dataset, online_capacity=50, transform=RandomCropTensorDict(3))
    rb.extend(rows(20, 1.0))
    batch = rb.sample(8)
    assert batch["x"].shape == (3, 2)
    assert set(batch.keys()) == {"x", "n"}


def test_draws_continue_after_a_restart(tmp_path: Path) -> None:
    def opened() -> OfflineToOnlineReplayBuffer:
        dataset = ReplayBuffer(storage=ZarrStorage(tmp_path / "old.exp", 100))
        return OfflineToOnlineReplayBuffer(
            dataset,
            online_storage=ZarrStorage(tmp_path / "new.exp", 100),
            batch_size=10,
            transform=[lambda batch: batch.reshape(2, 5), RandomCropTensorDict(2)],
        )

    def closed(rb: OfflineToOnlineReplayBuffer) -> None:
        rb.offline_buffer.close()
        rb.online_buffer.close()

    rb = opened()
    rb.offline_buffer.extend(rows(80, -1.0))
    rb.extend(rows(80, 1.0))
    states = [part.state_dict() for part in (rb.offline_buffer, rb.online_buffer)]
    wanted = [rb.sample()["n"].tolist() for _ in range(4)]
    assert len({str(batch) for batch in wanted}) == 4
    for part, state in zip((rb.offline_buffer, rb.online_buffer), states, strict=True):
        part.load_state_dict(state)
    found = [rb.sample()["n"].tolist() for _ in range(2)]
    closed(rb)
    rb = opened()
    assert found + [rb.sample()["n"].tolist() for _ in range(2)] == wanted
    closed(rb)


def raised(act: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception, match=".") as found:
        act()
    return found.value


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"online_capacity": 5, "online_storage": 3},
        {"online_capacity": 5, "offline_fraction": 1.0},
        {"online_capacity": 5, "download": True},
    ],
)
def test_arguments_that_torchrl_refuses_are_refused(keywords: dict[str, Any]) -> None:
    ours, other = (
        raised(lambda lib=lib: lib.OfflineToOnlineReplayBuffer(object(), **keywords))  # type: ignore[misc]
        for lib in (OURS, theirs)
    )
    assert isinstance(ours, type(other))
    assert str(ours).split(", got")[0].split(". ")[0] == str(other).split(", got")[0].split(". ")[0]


class Looking(StepTransform):
    def look(self, view: Any) -> None:
        """Look at nothing."""

    def apply(self, batch: Any, seen: None) -> Any:
        return batch


def test_wrong_arguments_are_refused() -> None:
    rb, wrong_type, too_small = ReplayBuffer(storage=LazyTensorStorage(100)), TypeError, ValueError
    text: Any = "x"

    def by_name(name: str, **options: Any) -> Callable[[], object]:
        return lambda: OfflineToOnlineReplayBuffer(name, online_capacity=3, **options)

    fractions: list[Any] = [text, None, True, float("nan")]
    sizes = ((0, too_small), (-2, too_small), (text, wrong_type))
    steps: list[Any] = [(text, 3), (1, None), (float("nan"), 3)]
    check_refusals(
        [
            (made().sample, ValueError, "batch_size must be provided"),
            (by_name("d4rl:x"), ValueError, "batch_size must be provided when offline_dataset is a string"),
            (by_name("nobody:x", batch_size=4), ValueError, "Unknown dataset source 'nobody'"),
            (lambda: made(transform=Looking()), ValueError, "Looking reads other steps"),
            (lambda: prefill_replay_buffer(rb, rb, n_samples=text), TypeError, "must be a number, got 'x'"),
            (lambda: prefill_replay_buffer(rb, "d4rl:x"), KeyError, "Env x not found"),
            (lambda: prefill_replay_buffer(rb, rb, chunk_size=0), ValueError, "chunk_size=0"),
            *(
                (partial(made, fraction=one), TypeError, "offline_fraction must be a num")
                for one in fractions
            ),
            *((partial(made, batch_size=size), kind, "batch_size must be") for size, kind in sizes),
            *((partial(made().sample, size), kind, "batch_size must be") for size, kind in sizes),
            *((partial(made().anneal, *pair), TypeError, "must be a number") for pair in steps),
        ]
    )


def test_data_sets_that_do_not_fit_are_refused() -> None:
    rb = made()
    rb.extend(rows(10, 1.0).rename_key_("x", "y"))
    with pytest.raises(SchemaError, match=r"only the data set has .*\['x'\].*only the online buffer \['y'\]"):
        rb.sample(4)
    lanes = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    lanes.extend(rows(10, 0.0).reshape(2, 5))
    with pytest.raises(ValueError, match="several dims"):
        prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(100)), lanes)


@pytest.mark.some(4)
@pytest.mark.parametrize("dataset", [None, 3, TensorDict({"x": torch.zeros(3)}, [3]), [], ReplayBuffer])
def test_objects_other_than_buffers_are_refused(dataset: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    check_refusals(
        [
            (
                lambda: OfflineToOnlineReplayBuffer(dataset, online_capacity=10),
                TypeError,
                r"offline_dataset must be a buffer.*with extend\(\)",
            ),
            (lambda: prefill_replay_buffer(rb, dataset), TypeError, "dataset must be a buffer"),
            (lambda: prefill_replay_buffer(dataset, rb), TypeError, "rb must be a buffer"),
        ]
    )


# -- copying ------------------------------------------------------------------------------------------


@pytest.mark.some(4)
@pytest.mark.parametrize(("wanted", "count"), [(None, 30), (7, 7), (99, 30), (0, 0)])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_rows_are_copied_each_once_in_order(wanted: int | None, count: int, chunk: int) -> None:
    dataset = ReplayBuffer(storage=LazyTensorStorage(30))
    dataset.extend(rows(25, 0.0))
    dataset.extend(rows(25, 0.0, first=25))  # the ring has wrapped
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    assert prefill_replay_buffer(rb, dataset, n_samples=wanted, chunk_size=chunk) is rb
    assert len(rb) == count
    assert not count or rb[:]["n"].tolist() == list(range(20, 20 + count))


def test_rows_of_torchrls_buffers_are_copied() -> None:
    dataset = theirs.ReplayBuffer(storage=theirs.LazyTensorStorage(30))
    dataset.extend(rows(12, 0.0))
    rb = prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(100)), dataset, chunk_size=5)
    assert rb[:]["n"].tolist() == list(range(12))


def test_a_data_set_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPSTORE_DATA", str(tmp_path / "cache"))
    source = write(tmp_path / "hopper.hdf5", arrays())
    rb = OfflineToOnlineReplayBuffer(
        "d4rl:hopper-medium-v2", online_capacity=50, batch_size=8, source=source, use_truncated_as_done=False
    )
    assert len(rb) == 12
    assert rb.sample()["observation"].shape == (8, 3)
    copy = ReplayBuffer(storage=LazyTensorStorage(50))
    assert len(prefill_replay_buffer(copy, "d4rl:hopper-medium-v2", n_samples=10)) == 10
