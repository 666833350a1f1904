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
from expstore.errors import SchemaError, StateError
from expstore.exchange import export_minari
from tests.support.buffer_bytes import held
from tests.support.exchange_formats import BY_STEPS

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
