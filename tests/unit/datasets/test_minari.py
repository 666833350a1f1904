"""The Minari reader returns TorchRL's rows for every format of Minari."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from tensordict import TensorDict

import expstore
from expstore.datasets import MinariReader, import_dataset
from expstore.datasets.kinds import minari as reader_module
from expstore.errors import NotFoundError, SchemaError, StorageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing torchrl's collectors
    from torchrl.data.datasets.minari_data import MinariExperienceReplay

NAME = "test/hop-v0"
LENGTHS = (4, 1, 11)
ACTIONS = spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 10, (1,), np.float64)))


def create(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    form: str = "hdf5",
    jpeg: bool = False,
    plain: bool = False,
    name: str = "t/h-v0",
) -> Path:
    """Have Minari make a data set of three episodes, the last one truncated; return its folder."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    root.mkdir(exist_ok=True)
    buffers = []
    for number, count in enumerate(LENGTHS):
        at = np.arange(count + 1)
        frame = (at[:, None, None, None] * 10 + np.zeros((1, 40, 40, 3))).astype(np.uint8)
        ends = (at[1:] == count).tolist()
        buffers.append(
            EpisodeBuffer(
                id=number,
                seed=number + 5,
                observations={
                    "pos": 100 * number + at[:, None].astype("f4") * np.ones((1, 2), "f4"),
                    "frame": frame,
                },
                actions=at[:-1] % 3 if plain else (at[:-1] % 3, at[:-1, None] / 8),
                rewards=(at[:-1] / 3).tolist(),
                terminations=ends if number < 2 else [False] * count,
                truncations=[False] * count if number < 2 else ends,
                # Minari cannot read infos that are single numbers from Arrow.
                infos={"x": at[:, None] * 1.0, "deep": {"y": at[:, None]}},
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it was not told
        minari.create_dataset_from_buffers(
            NAME,
            buffer=buffers,
            observation_space=spaces.Dict(
                pos=spaces.Box(-1000, 1000, (2,), np.float32), frame=spaces.Box(0, 255, (40, 40, 3), np.uint8)
            ),
            action_space=spaces.Discrete(3) if plain else ACTIONS,
            algorithm_name="random",
            author="x",
            author_email="x@y",
            code_permalink="c",
            description="d",
            data_format=form,
            jpeg_encoding=jpeg,
        )
    return root / NAME


def imported(tmp_path: Path, folder: Path) -> tuple[TensorDict, list[Any], dict[str, Any]]:
    target = tmp_path / f"{len(list(tmp_path.iterdir()))}.exp"
    import_dataset(MinariReader(folder), target)
    with expstore.open(target, mode="r") as rb:
        facts = "SELECT length, status, info->>'seed' FROM episodes ORDER BY episode_id"
        return rb[:], rb.sql(facts).fetchall(), rb.meta


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("form", "jpeg"), [("hdf5", False), ("hdf5", True), ("arrow", False), ("parquet", False)]
)
def test_every_form_gives_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, jpeg: bool
) -> None:
    folder = create(tmp_path / "root", monkeypatch, form=form, jpeg=jpeg)
    rows, episodes, meta = imported(tmp_path, folder)
    assert episodes == [(4, "terminated", "5"), (1, "terminated", "6"), (11, "truncated", "7")]
    assert meta["minari"]["algorithm_name"] == "random"
    start = 0
    for number, one in enumerate(minari.MinariDataset(folder / "data").iterate_episodes()):
        part = rows[start : start + LENGTHS[number]]
        for name in ("pos", "frame"):
            np.testing.assert_array_equal(part["observation", name].numpy(), one.observations[name][:-1])
            np.testing.assert_array_equal(
                part["next", "observation", name].numpy(), one.observations[name][1:]
            )
        np.testing.assert_array_equal(part["action", "0"].numpy(), one.actions[0])
        np.testing.assert_array_equal(part["action", "1"].numpy(), one.actions[1])
        np.testing.assert_array_equal(part["next", "reward"].numpy()[:, 0], one.rewards)
        np.testing.assert_array_equal(part["info", "x"].numpy(), one.infos["x"][:-1])
        if form == "hdf5":  # from Arrow, Minari gives nested infos as objects
            deep = part["next", "info", "deep", "y"].numpy()
            np.testing.assert_array_equal(deep, one.infos["deep"]["y"][1:])
        assert part["episode"].unique().tolist() == [number]
        start += LENGTHS[number]
    assert rows["next", "done"].sum() == 3


@pytest.mark.slow
def test_long_episodes_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create(tmp_path / "root", monkeypatch)
    whole, ends, _ = imported(tmp_path, folder)
    monkeypatch.setattr(reader_module, "_PIECE_BYTES", 15_000)
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        for number, count in enumerate(LENGTHS):  # an info that comes with steps alone, and states
            file[f"episode_{number}/infos/late"] = 1.0 + np.arange(count)
            file[f"episode_{number}/state/qpos"] = np.arange(2.0 * count + 2).reshape(-1, 2)
    rows, again, _ = imported(tmp_path, folder)
    assert again == ends
    torch.testing.assert_close(rows.select(*whole.keys(True, True)).exclude("id"), whole.exclude("id"))
    assert rows["info", "late"][:4].tolist() == [0, 1, 2, 3]
    assert rows["next", "info", "late"].tolist() == [1.0 + n for count in LENGTHS for n in range(count)]
    assert rows["next", "state", "qpos"][:3].tolist() == rows["state", "qpos"][1:4].tolist()


def test_rows_equal_those_of_torchrls_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create(tmp_path / "root", monkeypatch, plain=True)
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("ignore")
        # torchrl 0.14.1 makes the memory maps with `memmap_like`, which copies no values: all rows are 0.
        patch.setattr(TensorDict, "memmap_like", TensorDict.memmap)
        theirs = MinariExperienceReplay(
            NAME, 4, root=tmp_path / "torchrl", load_from_local_minari=True, download=False
        )[:]
    ours, _, _ = imported(tmp_path, folder)
    keys = {key if isinstance(key, tuple) else (key,) for key in theirs.keys(True, True)}
    for key in keys:
        torch.testing.assert_close(ours[key], theirs[key])
    more = {key if isinstance(key, tuple) else (key,) for key in ours.keys(True, True)} - keys
    # Ours have the root flags; theirs cannot read parts of a Tuple at all.
    assert {("done",), ("terminated",), ("truncated",)} <= more


def test_bad_data_sets_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create(tmp_path / "root", monkeypatch)
    file, target = folder / "data/main_data.hdf5", tmp_path / "x.exp"
    good = file.read_bytes()
    for name, what, kind, text in (
        ("actions/_index_0", np.zeros(3), SchemaError, r"episode_1 has 3 'actions/_index_0' for 1 rewards"),
        ("rewards", None, SchemaError, "episode_1 has no 'rewards'"),
        ("observations", None, SchemaError, "episode_1 has no 'observations'"),
    ):
        file.write_bytes(good)
        with h5py.File(file, "a") as opened:
            del opened[f"episode_1/{name}"]
            if what is not None:
                opened[f"episode_1/{name}"] = what
        with pytest.raises(kind, match=text):
            import_dataset(MinariReader(folder), target)
        assert not target.exists()
    file.write_bytes(good[:4000])
    with pytest.raises(StorageError, match="cannot read"):
        import_dataset(MinariReader(folder), target)
    file.unlink()
    with pytest.raises(NotFoundError, match="there is no file"):
        MinariReader(folder)
    (folder / "data/metadata.json").unlink()
    with pytest.raises(NotFoundError, match="no Minari dataset"):
        MinariReader(folder)
    with pytest.raises(NotFoundError, match="there is no folder"):
        MinariReader(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotFoundError, match="is a file, but a folder is needed"):
        MinariReader(tmp_path / "file")
