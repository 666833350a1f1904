"""Every way of copying a store keeps the split of each episode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import exchange
from expstore.datasets import MinariReader, import_dataset
from expstore.errors import NotReadyError

QUERY = 'SELECT length, "return", split FROM episodes ORDER BY episode_id'
GROUPS = "SELECT key, split, length FROM groups ORDER BY 1, 2, 3"
SPLITS = ("train", "eval", "günther's test")


def episode(number: int, length: int) -> TensorDict:
    """Return an episode whose rows have its number as their reward."""
    at = torch.arange(length, dtype=torch.float32)[:, None] + 100 * number
    done = (torch.arange(length) == length - 1)[:, None]
    step = {"observation": at + 1, "reward": torch.full((length, 1), float(number))}
    step |= {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
    prompt = torch.full((length,), number // 3)
    return TensorDict({"observation": at, "action": at, "prompt": prompt, "next": step}, [length])


def make(path: Path, *, grouped: bool) -> None:
    chance = np.random.default_rng(5)
    keys = expstore.EpisodeKeys(group="prompt") if grouped else None
    with expstore.open(path, episodes=keys) as rb:
        for number in range(12):
            split = SPLITS[chance.integers(len(SPLITS))]
            rb.extend(episode(number, int(chance.integers(1, 6))), split=None if split == "train" else split)
        if grouped:
            rb.groups.discard(rb.sql("SELECT min(group_id) FROM groups").fetchall()[0][0], reason="odd")


def through(form: str) -> Callable[[Path, Path], None]:
    def copy(path: Path, out: Path) -> None:
        file = path.with_name(f"rows.{form}")
        getattr(exchange, f"export_{form}")(path, file)
        getattr(exchange, f"import_{form}")(file, out)

    return copy


def through_minari(path: Path, out: Path) -> None:
    folder = path.with_name("random-v0")
    exchange.export_minari(path, folder)
    import_dataset(MinariReader(folder), out)


def through_a_version(path: Path, out: Path) -> None:
    with expstore.open(path) as rb:
        rb.dumps(path.with_name("versions"))
    with expstore.open(out) as rb:
        rb.loads(path.with_name("versions"))


def through_a_merge(path: Path, out: Path) -> None:
    expstore.merge([path], out=out)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    **{form: through(form) for form in ("parquet", "arrow", "hdf5", "npz")},
    "minari": through_minari,
    "versions": through_a_version,
    "merge": through_a_merge,
}


@pytest.mark.parametrize("grouped", [False, True])
def test_a_copy_has_the_same_splits(grouped: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    make(path, grouped=grouped)
    with expstore.open(path, mode="r") as rb:
        wanted = rb.sql(QUERY).fetchall()
        groups = rb.sql(GROUPS).fetchall()
    assert {split for _, _, split in wanted} == set(SPLITS)
    for way, copy in WAYS.items() if grouped else [("parquet", WAYS["parquet"]), ("npz", WAYS["npz"])]:
        out = tmp_path / f"{way}.exp"
        copy(path, out)
        with expstore.open(out, batch_size=16) as rb:
            assert rb.sql(QUERY).fetchall() == wanted, way
            if way not in ("hdf5", "npz", "minari"):  # these say that they have no groups
                assert rb.sql(GROUPS).fetchall() == groups, way
            ended = rb.sql("SELECT count(*) FROM groups WHERE status = 'discarded'").fetchall()
            is_kept = grouped and way in ("versions", "merge")  # after an import groups begin anew
            assert ended == [(int(is_kept),)], way
            split_of = {int(total / length): split for length, total, split in wanted}
            drawn = set(rb.sample(64)["next", "reward"].reshape(-1).int().tolist())
            assert {split_of[number] for number in drawn} == {"train"}, way
    with expstore.open(out, mode="r", batch_size=4, sampler=expstore.RandomSampler(split="none")) as rb:
        with pytest.raises(NotReadyError):
            rb.sample()


@pytest.mark.parametrize("form", ["parquet", "hdf5"])
def test_an_import_says_what_becomes_of_groups(form: str, tmp_path: Path) -> None:
    path, file, notes = tmp_path / "run.exp", tmp_path / f"rows.{form}", []
    make(path, grouped=True)
    getattr(exchange, f"export_{form}")(path, file)
    getattr(exchange, f"import_{form}")(file, tmp_path / "copy.exp", tell=notes.extend)
    assert [note for note in notes if "group" in note]
