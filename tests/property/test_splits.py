"""No sampler draws rows of another split than its own: samplers, units, consumers, members and readers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    RecencySampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StreamingSliceSampler,
)
from expstore.api import Settings
from expstore.buffers import Sequence
from expstore.errors import ArgumentError, NotReadyError, SchemaError, StateError
from expstore.exchange import export_parquet, import_parquet
from expstore.gym import Record
from tests.support.forks import in_child
from tests.support.servers import Serving

pytestmark = pytest.mark.usefixtures("no_syncs")

NUMPY = {"as_numpy": True}
SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "uniform": RandomSampler,
    "weighted": lambda **options: RandomSampler(weight="x + 1", **options),
    "where": lambda **options: RandomSampler(where="episode.length > 0", **options),
    "recency": lambda **options: RecencySampler(half_life=50, **options),
    "newest": lambda **options: RecencySampler(newest=30, **options),
    "prioritized": PrioritizedSampler,
    "without_replacement": SamplerWithoutReplacement,
    "consuming": lambda **options: ConsumingSampler(1000, **options),
    "staleness": lambda **options: StalenessAwareSampler(version_key="version", **options),
    "slices": lambda **options: SliceSampler(slice_len=2, **options),
    "starts": lambda **options: SliceSampler(slice_len=2, by="start", **options),
    "keyed_slices": lambda **options: SliceSampler(slice_len=2, traj_key="run", end_key="never", **options),
    "prioritized_slices": lambda **options: PrioritizedSliceSampler(slice_len=2, **options),
    "slices_without_replacement": lambda **options: SliceSamplerWithoutReplacement(slice_len=2, **options),
    "streaming_slices": lambda **options: StreamingSliceSampler(slice_len=2, **options),
    "prompt_groups": lambda **options: PromptGroupSampler(num_groups=1, group_key="run", **options),
}
every_sampler = pytest.mark.parametrize("kind", SAMPLERS)


def rows(count: int, is_eval: bool) -> dict[str, Any]:
    """Return rows of one episode; `is_eval` is a field of them, which no library code looks at."""
    ends = np.arange(count) == count - 1
    return {
        "x": np.arange(count, dtype=np.float32),
        "is_eval": np.full(count, is_eval),
        "run": np.zeros(count, np.int64),
        "version": np.zeros(count, np.int64),
        "never": np.zeros(count, np.bool_),
        "next": {
            "reward": np.ones((count, 1), np.float32),
            "terminated": ends[:, None],
            "done": ends[:, None],
        },
    }


def write(rb: Any, generator: np.random.Generator, episodes: int = 6) -> None:
    """Append episodes of either split in random order, in the ways that a buffer has."""
    for number in range(episodes):
        is_eval = bool(generator.random() < 0.4) if number > 1 else bool(number)
        data = rows(int(generator.integers(2, 6)), is_eval)
        split = "eval" if is_eval else None
        if generator.random() < 0.5:
            rb.extend(data, split=split)
            continue
        for step in range(data["x"].size):
            rb.add(
                {name: value[step] for name, value in data.items() if name != "next"}
                | {"next": {name: value[step] for name, value in data["next"].items()}},
                split=split,
            )


def opened(path: Path, sampler: Sampler, **options: Any) -> Any:
    return expstore.open(path, sampler=sampler, seed=3, **{"batches": NUMPY} | options)


def flags(batch: Any) -> Any:
    return np.asarray(batch["is_eval"]).reshape(-1)


@pytest.mark.guarantee(
    "draw/splits",
    'A sampler draws rows of one split only, by default of "train": in every kind of sampler, over all '
    "units, consumers, readers and members, and while the first rows of another split are written. The split "
    "of an episode survives kills, restarts, snapshots and restores.",
)
@every_sampler
def test_split_is_never_left(tmp_path: Path, kind: str) -> None:
    """Draws between writes, after a restart, in a reader, from a ring and from a store that grows."""
    generator = np.random.default_rng(len(kind))
    for split in ("train", "eval"):
        for capacity in (None, 40):
            path = tmp_path / f"{split}-{capacity}"
            with opened(path, SAMPLERS[kind](split=split), capacity=capacity) as rb:
                rb.extend(rows(4, False))
                if split == "eval":
                    with pytest.raises(NotReadyError):
                        rb.sample(4)
                rb.extend(rows(4, True), split="eval")
                for _ in range(6):
                    assert (flags(rb.sample(4)) == (split == "eval")).all()
                    write(rb, generator)
                assert len(rb.storage) == min(rb.storage.write_count, capacity or rb.storage.write_count)
            with opened(path, SAMPLERS[kind](split=split), capacity=capacity) as rb:
                for _ in range(3):
                    assert (flags(rb.sample(4)) == (split == "eval")).all()
                    write(rb, generator, 2)
                if kind == "consuming":  # a reader does not count
                    continue
                with expstore.open(
                    path, mode="r", sampler=SAMPLERS[kind](split=split), batches=NUMPY
                ) as reader:
                    for _ in range(4):
                        assert (flags(reader.sample(4)) == (split == "eval")).all()
                        write(rb, generator, 2)


def draws(rb: Any, count: int = 3) -> Any:
    return np.concatenate([flags(rb.sample(4)) for _ in range(count)])


def mixed(path: Path, sampler: Sampler | None = None, **options: Any) -> Any:
    """Return a buffer over a store with episodes of both splits."""
    rb = opened(path, sampler or RandomSampler(), **options)
    for _ in range(3):
        rb.extend(rows(4, False))
        rb.extend(rows(4, True), split="eval")
    return rb


@pytest.mark.guarantee("draw/splits")
@pytest.mark.parametrize("kind", sorted({*SAMPLERS} - {"prompt_groups"}))
def test_consumers_keep_to_their_split(tmp_path: Path, kind: str) -> None:
    with mixed(tmp_path / "run.exp") as rb:
        consumers = {
            split: rb.consumer(split, sampler=SAMPLERS[kind](split=split), batch_size=4)
            for split in ("train", "eval")
        }
        rb.extend(rows(4, False))
        rb.extend(rows(4, True), split="eval")
        for split, consumer in consumers.items():
            first = [flags(consumer.sample()) for _ in range(2)]
            assert all((part == (split == "eval")).all() for part in first)
            consumer.seek("committed")
            assert all((flags(consumer.sample()) == part).all() for part in first)


@pytest.mark.parametrize("unit", ["sequence", "n_steps"])
def test_units_stay_in_the_split(tmp_path: Path, unit: str) -> None:
    """Steps around a row are of its episode; their values are those of one split."""
    options: dict[str, Any] = {}
    if unit == "sequence":
        options["batches"] = NUMPY | {"sample_unit": Sequence(length=3)}
    with mixed(tmp_path / "run.exp", SamplerWithoutReplacement(), **options) as rb:
        if unit == "n_steps":
            rb.append_transform(expstore.transforms.MultiStepTransform(n_steps=2, gamma=0.9))
        assert not draws(rb, 6).any()


def test_all_splits_are_drawn_on_request(tmp_path: Path) -> None:
    with mixed(tmp_path / "run.exp", RandomSampler(split=None)) as rb:
        assert set(draws(rb, 20).tolist()) == {False, True}


@pytest.mark.guarantee("draw/splits")
def test_splits_survive(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"

    def write_and_die() -> None:
        rb = mixed(path)
        rb.flush()
        rb.extend(rows(3, True), split="other")  # in the journal only

    in_child(write_and_die)
    with opened(path, RandomSampler()) as rb:
        assert not draws(rb, 10).any()
        names = rb.sql("SELECT split, count(*) FROM episodes GROUP BY 1 ORDER BY 1").fetchall()
        assert names == [("eval", 3), ("other", 1), ("train", 3)]
        version = rb.snapshots.create(tmp_path / "versions")
        rb.extend(rows(4, False))
        rb.snapshots.restore(tmp_path / "versions")
        assert not draws(rb, 10).any()
        rb.dumps(tmp_path / "dumped")
    assert version is not None
    with opened(tmp_path / "copy.exp", RandomSampler()) as rb:
        rb.extend(rows(4, False))
        rb.loads(tmp_path / "dumped")
        assert not draws(rb, 10).any()
    with opened(path, RandomSampler()) as rb:  # its base record names the splits, its log has them
        assert not draws(rb, 10).any()
        rb.set_sampler(RandomSampler(split="other"))
        assert draws(rb).all()


@pytest.mark.guarantee(
    "rows/splits", "Rows that continue an episode of another split are refused, and nothing is written."
)
def test_an_episode_has_one_split(tmp_path: Path) -> None:
    open_rows = rows(4, False)
    open_rows["next"]["terminated"][:] = open_rows["next"]["done"][:] = False
    with opened(tmp_path / "run.exp", RandomSampler()) as rb:
        rb.extend(open_rows, source="arm")
        with pytest.raises(SchemaError, match="'eval' continue episode 1, which is in split 'train'"):
            rb.extend(rows(2, True), source="arm", split="eval")
        assert len(rb) == 4
        rb.extend(rows(2, True), split="eval")  # a stream of its own
        rb.extend(rows(2, False), source="arm")
        assert rb.sql("SELECT split, length FROM episodes ORDER BY 1").fetchall() == [
            ("eval", 2),
            ("train", 6),
        ]
        for name in ("", "a/b", " x", 3):
            with pytest.raises(ArgumentError, match="is not a name"):
                rb.extend(rows(2, True), split=name)
        with pytest.raises(SchemaError, match="the store's own"):
            rb.extend(rows(2, True), episode_info={"_split": "eval"})


def test_other_splits_do_not_count_for_samplers(tmp_path: Path) -> None:
    with mixed(tmp_path / "run.exp", PrioritizedSampler(alpha=1.0, eps=0.0)) as rb:
        sampler, storage = rb.sampler, rb.storage
        assert (len(rb), len(storage), sampler.sampleable(storage, 4)) == (24, 24, 12)
        assert sampler.mass(storage, 4).total == pytest.approx(12.0)
        assert RandomSampler().mass(storage, 4).total == 12
        stats = rb.columns.stats(fields=["is_eval"])["is_eval"]
        assert (stats.count, float(stats.mean)) == (12, 0.0)
        assert rb.columns.stats(split="eval")["is_eval"].count == 12
        assert rb.columns.stats(split=None)["is_eval"].count == 24
        with pytest.raises(NotReadyError, match="of this split"):
            rb.columns.stats(split="nothing")
        rb.set_sampler(SliceSampler(slice_len=2))
        assert rb.sampler.sampleable(storage, 4) == 9
    with opened(tmp_path / "eval.exp", RandomSampler()) as rb:
        rb.extend(rows(4, True), split="eval")
        assert not rb.can_sample(2)
        with pytest.raises(NotReadyError):
            rb.sample(2)


def test_own_samplers_are_refused_unless_they_take_all(tmp_path: Path) -> None:
    class Newest(Sampler):
        def sample(self, storage: Any, batch_size: int) -> Any:  # type: ignore[override]
            return torch.arange(len(storage))[-batch_size:], {}

    with opened(tmp_path / "run.exp", Newest()) as rb:
        rb.extend(rows(4, False))
        assert not flags(rb.sample(4)).any()
        rb.extend(rows(4, True), split="eval")
        with pytest.raises(StateError, match="cannot leave out"):
            rb.sample(4)
        rb.set_sampler(Newest(split=None))
        assert flags(rb.sample(4)).all()


def test_several_stores_keep_to_the_split(tmp_path: Path) -> None:
    members = [mixed(tmp_path / f"{number}.exp") for number in range(2)]
    members.append(opened(tmp_path / "eval.exp", RandomSampler()))
    members[-1].extend(rows(4, True), split="eval")
    ensemble = expstore.ReplayBufferEnsemble(*members, p="sampleable", num_buffer_sampled=2)
    for _ in range(6):
        assert not np.asarray(ensemble.sample(8, as_numpy=True)["is_eval"]).any()
    for rb in members:
        rb.close()


@pytest.mark.guarantee("draw/splits")
def test_an_open_reader_keeps_to_its_split_when_the_first_other_rows_come(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    with opened(path, RandomSampler()) as rb, opened(path, RandomSampler(), mode="r") as reader:
        rb.extend(rows(100, False))
        assert not flags(reader.sample(64)).any()
        rb.extend(rows(400, True), split="eval")
        assert not flags(reader.sample(64)).any()
        assert len(reader) == 500


@pytest.mark.guarantee("draw/splits")
def test_draws_while_the_first_other_rows_are_written(tmp_path: Path) -> None:
    for kind in ("uniform", "prioritized", "slices", "slices_without_replacement", "consuming"):
        with opened(tmp_path / kind, SAMPLERS[kind]()) as rb:
            rb.extend(rows(400, False))
            ended, failed = threading.Event(), []

            def draw(rb: Any = rb, ended: threading.Event = ended, failed: list[Any] = failed) -> None:
                try:
                    while not ended.is_set():
                        assert not flags(rb.sample(16)).any()
                except BaseException as exc:
                    failed.append(exc)

            threads = [threading.Thread(target=draw) for _ in range(3)]
            for thread in threads:
                thread.start()
            for _ in range(10):
                rb.extend(rows(200, True), split="eval")
            ended.set()
            for thread in threads:
                thread.join()
            assert not failed


def test_groups_are_of_one_split(tmp_path: Path) -> None:
    keys = {"group": "run", "group_size": 2}
    sampler = expstore.GroupSampler(1)
    with opened(tmp_path / "run.exp", sampler, episodes=keys) as rb:
        for is_eval in (False, True, True, False):
            rb.extend(rows(2, is_eval), split="eval" if is_eval else None)
        found = rb.groups(order_by="split").arrow().select(["split", "members"]).to_pylist()
        assert found == [{"split": "eval", "members": [2, 3]}, {"split": "train", "members": [1, 4]}]
        assert not flags(rb.sample()).any()
        with pytest.raises(NotReadyError):
            rb.sample()
        rb.set_sampler(expstore.GroupSampler(1, split="eval"))
        assert flags(rb.sample()).all()


@pytest.mark.guarantee("draw/splits")
def test_served_stores_keep_to_the_split(tmp_path: Path) -> None:
    urls = []
    for number in range(2):
        mixed(tmp_path / f"{number}.exp").close()
    with Serving(Settings(path=tmp_path)) as server:
        urls = [f"{server.url}/{number}" for number in range(2)]
        for place in (urls[0], urls):
            with expstore.connect(place, batch_size=8, sampler={"kind": "prioritized"}) as rb:
                rb.extend(TensorDict(rows(3, True), [3]), split="eval")
                for _ in range(4):
                    assert not rb.sample()["is_eval"].any()
            with expstore.connect(place, batch_size=8, sampler={"kind": "uniform", "split": "eval"}) as rb:
                for _ in range(4):
                    assert rb.sample()["is_eval"].all()


def test_collectors_and_wrappers_take_a_split(tmp_path: Path) -> None:
    per_split = "SELECT split, sum(length)::INT FROM episodes GROUP BY 1"
    with expstore.open(tmp_path / "collected.exp") as rb:
        for number, split in enumerate((None, "eval")):
            with expstore.Collector("CartPole-v1", None, rb, seed=number, lanes=2, split=split) as collector:
                collector.collect(40)
            counts = dict(rb.sql(per_split).fetchall())
            assert counts[split or "train"] == len(rb) - counts.get("train", 0) * number
        assert int(max(rb.sample(256)["id"])) <= counts["train"]
    with expstore.open(tmp_path / "wrapped.exp") as rb:
        env = Record(gymnasium.make("CartPole-v1"), rb, source="eval-env", split="eval")
        env.reset(seed=1)
        for _ in range(60):
            *_, terminated, truncated, _ = env.step(0)
            if terminated or truncated:
                env.reset()
        env.close()
        assert dict(rb.sql(per_split).fetchall()) == {"eval": 60}
        assert not rb.can_sample(1)


def test_recorders_take_a_split(tmp_path: Path) -> None:
    """Each new episode is in it, with facts of its own and without."""
    seen, ends = np.zeros((2, 4), np.float32), np.array([False, True])
    with (
        expstore.open(tmp_path / "run.exp") as rb,
        rb.record(split="eval", lanes=2) as recorder,
    ):
        recorder.reset(info=[{"seed": 1}, None])
        for _ in range(3):
            recorder.step(seen, np.zeros(2, np.int64), np.zeros(2), seen, ends, np.zeros(2, bool))
        found = rb.sql("SELECT split, length, info.seed::INT FROM episodes ORDER BY 3, 2").fetchall()
        assert found == [("eval", 3, 1), ("eval", 1, None), ("eval", 1, None), ("eval", 1, None)]


@pytest.mark.guarantee("draw/splits")
def test_copies_have_the_splits(tmp_path: Path) -> None:
    """Merged stores, and stores imported from an export."""
    paths = [tmp_path / "a.exp", tmp_path / "b.exp"]
    for path in paths:
        with mixed(path) as rb:
            export_parquet(rb, tmp_path / f"{path.stem}.parquet")
    expstore.merge(paths, out=tmp_path / "merged.exp")
    import_parquet(tmp_path / "a.parquet", tmp_path / "imported.exp")
    for name, count in (("merged", 6), ("imported", 3)):
        with expstore.open(tmp_path / f"{name}.exp", batches=NUMPY) as rb:
            assert not draws(rb, 10).any()
            found = rb.sql("SELECT split, count(*) FROM episodes GROUP BY 1 ORDER BY 1").fetchall()
            assert found == [("eval", count), ("train", count)]
