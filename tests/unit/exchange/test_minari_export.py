"""Minari datasets: Minari reads what the store exported, and Minari's own datasets can be imported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.cli.app import run
from expstore.core import tuning
from expstore.datasets import MinariReader, import_dataset
from expstore.errors import NotFoundError, SchemaError, StateError, StorageError
from expstore.exchange import export_minari
from tests.support.buffer_bytes import held

h5py = pytest.importorskip("h5py", reason="the extra expstore[h5] is not installed")
minari = pytest.importorskip("minari", reason="Minari is not installed: its reader cannot be asked")
spaces = pytest.importorskip("gymnasium.spaces", reason="gymnasium is not installed")


pytestmark = pytest.mark.usefixtures("no_syncs")


def rows(first: int, count: int, every: int = 9) -> TensorDict:
    """Rows whose next observations are those of the next steps."""
    number = torch.arange(first, first + count)
    data = TensorDict({"action": number % 4}, [count])
    for group, at in ((), number), (("next",), number + 1):
        frame = (at[:, None, None] + torch.arange(40 * 40).reshape(40, 40)).to(torch.uint8)
        data[(*group, "observation", "frame")] = frame
        data[(*group, "observation", "pair", "0")] = at[:, None].float() * torch.ones(3)
        data[(*group, "observation", "pair", "1")] = at
        data[(*group, "info", "x")] = at.double()
    data["next", "reward"] = torch.where(number % 5 == 0, -0.0, number.float())[:, None]
    data["next", "terminated"] = (number % every == every - 1)[:, None]
    data["next", "truncated"] = torch.zeros(count, 1, dtype=torch.bool)
    data["next", "done"] = data["next", "terminated"].clone()
    data["collector", "traj_ids"] = number // every
    data["bits"] = number.to(torch.bfloat16)
    return data


#: Formats whose rows stand episode after episode.
BY_STEPS = "_episode, _step"
EPISODES = (
    "SELECT length, \"return\", CASE WHEN status = 'open' THEN 'cut' ELSE status END, info FROM episodes "
    "WHERE live_rows > 0 ORDER BY episode_id"
)


def make(path: Path, **settings: Any) -> expstore.TensorDictReplayBuffer:
    rb = expstore.open(path, seed=0, **settings)
    for first in range(0, 60, 20):
        rb.extend(torch.stack([rows(first, 20), rows(first + 900, 20, every=14)]))
    rb.episodes.annotate(2, seed=7, note="ä")
    return rb


def test_minari_reads_what_the_store_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 4)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    (tmp_path / "root/robots").mkdir(parents=True)
    specs = expstore.Composite(action=expstore.Categorical(4))
    with make(tmp_path / "run.exp", schema=specs) as rb:
        done = export_minari(rb, tmp_path / "root/robots/walk-v0", dataset_id="robots/walk-v0")
        dataset = minari.load_dataset("robots/walk-v0")
        assert (dataset.total_episodes, dataset.total_steps) == (done.episodes, 120)
        assert dataset.spec.action_space == spaces.Discrete(4)
        pair = dataset.spec.observation_space["pair"]
        assert isinstance(pair, spaces.Tuple)
        assert dataset.spec.observation_space["frame"] == spaces.Box(0, 255, (40, 40), np.uint8)
        ids = [number for (number,) in rb.sql("SELECT episode_id FROM episodes ORDER BY 1").fetchall()]
        for number, episode in zip(ids, dataset.iterate_episodes(), strict=True):
            steps = rb.trajectory(number)
            both = torch.cat([steps["observation", "frame"], steps["next", "observation", "frame"][-1:]])
            assert (episode.observations["frame"] == both.numpy()).all()
            assert episode.observations["frame"].dtype == np.uint8
            assert isinstance(episode.observations["pair"], tuple)
            both = torch.cat(
                [steps["observation", "pair", "1"], steps["next", "observation", "pair", "1"][-1:]]
            )
            assert episode.observations["pair"][1].tolist() == both.tolist()
            assert episode.actions.tolist() == steps["action"].tolist()
            assert episode.rewards.tolist() == steps["next", "reward"][:, 0].tolist()
            assert episode.terminations.tolist() == steps["next", "terminated"][:, 0].tolist()
            assert not episode.truncations.any()
            assert len(episode.infos["x"]) == len(episode) + 1
            assert episode.infos["collector"]["traj_ids"].tolist() == steps["collector", "traj_ids"].tolist()
        (about,) = dataset.storage.get_episode_metadata([1])
        assert (about["id"], about["seed"]) == (1, 7)
    assert minari.list_local_datasets().keys() == {"robots/walk-v0"}


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("layout", ["flat", "auto"])
def test_rows_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 4)
    with make(tmp_path / "run.exp", layout=layout, capacity=500) as rb:
        done = export_minari(rb, tmp_path / "out")
        assert json.loads((tmp_path / "out/data/metadata.json").read_text())["dataset_id"] == "out-v0"
        assert import_dataset(MinariReader(tmp_path / "out"), tmp_path / "back.exp").episodes == done.episodes
        with expstore.open(tmp_path / "back.exp", mode="r") as again:
            assert held(rb, BY_STEPS) == held(again, BY_STEPS)
            assert rb.schema == again.schema
            assert again.sql(EPISODES).fetchall() == rb.sql(EPISODES).fetchall()
            assert again.storage.capacity == 500
            export_minari(again, tmp_path / "twice")
    for name in ("out", "twice"):
        dataset = minari.MinariDataset(tmp_path / name / "data")
        assert (dataset.total_steps, dataset.total_episodes) == (120, done.episodes)
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp", "twice"]
    assert run(["verify", str(tmp_path / "back.exp")]) == 0


def test_ends_are_there_though_no_field_says_them(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        data = rows(0, 30).select(("next", "reward"), "observation", ("next", "observation"), "action")
        data["collector", "traj_ids"] = torch.arange(30) // 10
        rb.extend(data)
        export_minari(rb, tmp_path / "out")
        found = list(minari.MinariDataset(tmp_path / "out/data").iterate_episodes())
        assert [e.truncations.tolist() for e in found] == [[False] * 9 + [True]] * 3
        assert not any(e.terminations.any() for e in found)
        import_dataset(MinariReader(tmp_path / "out"), tmp_path / "back.exp")
        with expstore.open(tmp_path / "back.exp", mode="r") as again:
            assert held(rb, BY_STEPS) == held(again, BY_STEPS)
            assert again.sql("SELECT status FROM episodes").fetchall() == [("cut",)] * 3


@pytest.mark.slow
def test_roles_of_fields_come_back(tmp_path: Path) -> None:
    data = rows(0, 27).exclude(("next", "terminated"), ("next", "truncated"), ("next", "done"))
    data["next", "game_over"] = (torch.arange(27) % 9 == 8)[:, None]
    with expstore.open(
        tmp_path / "run.exp", episodes=expstore.EpisodeKeys(traj="action", done=[("next", "game_over")])
    ) as rb:
        data["action"] = torch.arange(27) // 9
        rb.extend(data)
        export_minari(rb, tmp_path / "out")
        import_dataset(MinariReader(tmp_path / "out"), tmp_path / "back.exp")
        with expstore.open(tmp_path / "back.exp", mode="r") as again:
            assert held(rb, BY_STEPS) == held(again, BY_STEPS)
            assert again.sql(EPISODES).fetchall() == rb.sql(EPISODES).fetchall()
            assert again.storage.keys == rb.storage.keys
        names = [".".join(key) for key in rb.schema.keys if key != ("next", "game_over")]
        export_minari(rb, tmp_path / "less", fields=names)
        assert import_dataset(MinariReader(tmp_path / "less"), tmp_path / "less.exp").episodes == 3


def test_fields_without_a_minari_form_are_refused(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(rows(0, 18))
        for fields, words in (
            (["action", "next.reward"], "no 'observation'"),
            (["observation.frame", "next.observation.frame", "next.reward"], "no 'action'"),
            (["observation.frame", "next.observation.frame", "action"], "no 'next.reward'"),
            (["observation.frame", "action", "next.reward"], "no 'next.observation.frame'"),
        ):
            with pytest.raises(SchemaError, match=words):
                export_minari(rb, tmp_path / "out", fields=fields)
        row = rb[4:5].clone()
        row["next", "observation", "frame"] += 1
    with expstore.open(tmp_path / "odd.exp", layout="flat") as rb:
        rb.extend(rows(0, 18))
        rb[4:5] = row
        with pytest.raises(SchemaError, match=r"observation\.frame of row 6 is not the next one"):
            export_minari(rb, tmp_path / "out")
        rb[4:5] = rows(4, 1)
        export_minari(rb, tmp_path / "out")
        with pytest.raises(StateError, match="exists already"):
            export_minari(rb, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["odd.exp", "out", "run.exp"]


@pytest.mark.parametrize("other", [("info", "won"), ("info", "won", "by")])
def test_fields_that_would_share_a_name_are_refused(tmp_path: Path, other: tuple[str, ...]) -> None:
    data = rows(0, 18)
    data["won"] = data[other] = torch.ones(18)
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(data)
        with pytest.raises(SchemaError, match="two fields would both be named 'infos/won' in the file"):
            export_minari(rb, tmp_path / "out")
        fields = [".".join(key) for key in rb.schema.keys if key != ("won",)]
        assert export_minari(rb, tmp_path / "out", fields=fields).rows == 18


def test_flags_of_several_agents_are_refused(tmp_path: Path) -> None:
    data = rows(0, 18)
    for name in ("terminated", "truncated", "done"):
        data["next", name] = data["next", name].expand(18, 3).clone()
    with expstore.open(tmp_path / "run.exp", episodes={"done_reduce": "any"}) as rb:
        rb.extend(data)
        with pytest.raises(SchemaError, match=r"'next\.terminated' has several values per row"):
            export_minari(rb, tmp_path / "out")
        left_out = [("next", "terminated"), ("next", "truncated")]
        fields = [".".join(key) for key in rb.schema.keys if key not in left_out]
        export_minari(rb, tmp_path / "out", fields=fields)
    episodes = list(minari.MinariDataset(tmp_path / "out/data").iterate_episodes())
    assert [bool(one.terminations[-1]) for one in episodes] == [True, True]


def test_episodes_with_deleted_rows_become_several(tmp_path: Path) -> None:
    """What lies between is lost, and nothing may seem to follow on it."""
    with expstore.open(tmp_path / "run.exp", capacity=24) as rb:
        rb.extend(rows(0, 40, every=100))
        assert export_minari(rb, tmp_path / "out").episodes == 1
        (episode,) = minari.MinariDataset(tmp_path / "out/data").iterate_episodes()
        assert episode.observations["pair"][1].tolist() == list(range(16, 41))


# -- datasets that Minari has made ----------------------------------------------------------------------


def create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, jpeg: bool = False) -> Path:
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    (tmp_path / "root").mkdir()
    buffers = []
    for number, count in enumerate((4, 1, 11)):
        at = np.arange(count + 1)
        frame = (at[:, None, None, None] * 10 + np.zeros((1, 40, 40, 3))).astype(np.uint8)
        buffers.append(
            EpisodeBuffer(
                id=number,
                seed=number + 5,
                observations={"pos": at[:, None].astype("f4") * np.ones((1, 2), "f4"), "frame": frame},
                actions=(at[:-1] % 3, at[:-1, None] / 8),
                rewards=(at[:-1] / 3).tolist(),
                terminations=(at[1:] == count).tolist() if number < 2 else [False] * count,
                truncations=[False] * count if number < 2 else (at[1:] == count).tolist(),
                infos={"x": at * 1.0, "deep": {"y": at}, "word": ["a"] * (count + 1)},
            )
        )
    minari.create_dataset_from_buffers(
        "test/h-v0",
        buffer=buffers,
        observation_space=spaces.Dict(
            pos=spaces.Box(-100, 100, (2,), np.float32), frame=spaces.Box(0, 255, (40, 40, 3), np.uint8)
        ),
        action_space=spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 10, (1,), np.float64))),
        algorithm_name="random",
        author="x",
        author_email="x@y",
        code_permalink="c",
        description="d",
        data_format="hdf5",
        jpeg_encoding=jpeg,
    )
    return tmp_path / "root/test/h-v0"


@pytest.mark.filterwarnings("ignore")  # Minari's, on what it was not told
@pytest.mark.parametrize("jpeg", [False, True])
def test_a_dataset_of_minari_becomes_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jpeg: bool
) -> None:
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 4)
    folder = create(tmp_path, monkeypatch, jpeg=jpeg)
    expected = list(minari.load_dataset("test/h-v0").iterate_episodes())
    done = import_dataset(MinariReader(folder), tmp_path / "back.exp")
    assert (done.rows, done.episodes) == (16, 3)
    assert any("'infos/word' has no number" in note for note in done.notes)
    assert any("JPEG" in note for note in done.notes) is jpeg
    with expstore.open(tmp_path / "back.exp", mode="r") as rb:
        found = rb.sql("SELECT length, status, info->>'seed' FROM episodes ORDER BY episode_id").fetchall()
        assert found == [(4, "terminated", "5"), (1, "terminated", "6"), (11, "truncated", "7")]
        assert rb.meta["minari"]["algorithm_name"] == "random"
        for number, episode in enumerate(expected, 1):
            steps = rb.trajectory(number)
            for name, values in episode.observations.items():
                assert (steps["observation", name].numpy() == values[:-1]).all()
                assert (steps["next", "observation", name].numpy() == values[1:]).all()
            assert (steps["action", "0"].numpy() == episode.actions[0]).all()
            assert (steps["action", "1"].numpy() == episode.actions[1]).all()
            assert steps["next", "reward"].shape == (len(episode), 1)
            assert (steps["next", "reward"][:, 0].numpy() == episode.rewards).all()
            assert steps["next", "info", "deep", "y"].tolist() == episode.infos["deep"]["y"][1:].tolist()
            assert steps["info", "x"].tolist() == episode.infos["x"][:-1].tolist()
        export_minari(rb, tmp_path / "again")
    again = minari.MinariDataset(tmp_path / "again/data")
    assert again.spec.observation_space == minari.load_dataset("test/h-v0").spec.observation_space
    for one, other in zip(expected, again.iterate_episodes(), strict=True):
        assert (one.observations["frame"] == other.observations["frame"]).all()
        assert (one.rewards == other.rewards).all()
        assert (one.actions[1] == other.actions[1]).all()


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "run.exp").close()
    store, out, back = (str(tmp_path / name) for name in ("run.exp", "out", "back.exp"))
    assert run(["export", store, out, "--minari", "--dataset-id", "a/b-v3", "--episodes", "1-2"]) == 0
    assert json.loads((tmp_path / "out/data/metadata.json").read_text())["dataset_id"] == "a/b-v3"
    assert "sources" in capsys.readouterr().err
    assert run(["import", out, back]) == 0
    assert run(["import", out + "/data", back + "2", "--json"]) == 0
    capsys.readouterr()
    assert run(["export", store, out + "2", "--npz", "--dataset-id", "x-v0"]) == 2
    assert "--dataset-id requires --minari" in capsys.readouterr().err


@pytest.mark.slow
def test_bad_datasets_are_refused(tmp_path: Path) -> None:
    with make(tmp_path / "run.exp") as rb:
        export_minari(rb, tmp_path / "good", episodes=[1, 2])
    good = (tmp_path / "good/data/main_data.hdf5").read_bytes()
    about = (tmp_path / "good/data/metadata.json").read_text()

    def bad(name: str, change: Any = None, *, text: str = about, data: bytes = good) -> Path:
        folder = tmp_path / "in" / name
        folder.mkdir(parents=True)
        (folder / "metadata.json").write_text(text)
        (folder / "main_data.hdf5").write_bytes(data)
        if change is not None:
            with h5py.File(folder / "main_data.hdf5", "a") as file:
                change(file)
        return folder

    def shorter(file: Any) -> None:
        values = file["episode_1/actions"][1:]
        del file["episode_1/actions"]
        file["episode_1/actions"] = values

    def remove(name: str) -> Any:
        return lambda file: file.__delitem__(name)

    (tmp_path / "in/none").mkdir(parents=True)
    for folder, kind, words in (
        (tmp_path / "in/none", NotFoundError, "no Minari dataset"),
        (bad("text", data=b"hello"), StorageError, "cannot read .* as HDF5"),
        (bad("half", data=good[:5000]), StorageError, "cannot read .* as HDF5"),
        (bad("json", text="{"), StorageError, "metadata.json is damaged"),
        (bad("lance", text='{"data_format": "lance"}'), SchemaError, "has the format 'lance'"),
        (bad("arrow", text='{"data_format": "arrow"}'), SchemaError, "contains no episodes"),
        (bad("short", shorter), SchemaError, r"episode_1 has \d+ 'actions' for \d+ rewards"),
        (bad("gone", remove("episode_1/actions")), SchemaError, "episode_1 has no 'actions'"),
        (bad("rewards", remove("episode_0/rewards")), SchemaError, "episode_0 has no 'rewards'"),
        (
            bad("empty", lambda file: [remove(name)(file) for name in list(file)]),
            SchemaError,
            "contains no episodes",
        ),
    ):
        with pytest.raises(kind, match=words):
            import_dataset(MinariReader(folder), tmp_path / "back.exp")
    # The rows before the damage are kept for the next attempt.
    assert sorted(os.listdir(tmp_path)) == [".back.exp.import", "good", "in", "run.exp"]


@pytest.mark.slow
def test_nothing_is_seen_of_what_ended_early(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with make(tmp_path / "run.exp") as rb:
        with pytest.raises(KeyboardInterrupt):
            export_minari(rb, tmp_path / "out", progress=stop)
        assert os.listdir(tmp_path) == ["run.exp"]
        export_minari(rb, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        import_dataset(MinariReader(tmp_path / "out"), tmp_path / "back.exp", progress=stop)
    assert sorted(os.listdir(tmp_path)) == [".back.exp.import", "out", "run.exp"]
    assert import_dataset(MinariReader(tmp_path / "out"), tmp_path / "back.exp").rows == 120
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp"]
