"""Files that other libraries and scripts wrote become the right episodes, or are refused with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import expstore
from expstore.cli.app import run
from expstore.core import tuning
from expstore.datasets import Hdf5EpisodesReader, import_dataset
from expstore.errors import SchemaError
from expstore.exchange import (
    Imported,
    import_arrow,
    import_csv,
    import_hdf5,
    import_npz,
    import_parquet,
)
from expstore.exchange.foreign_rows import SYNONYMS, name_fields, rows_differ
from tests.support.paths import ROOT

# What rows mean is decided behind the readers of the formats: two of them show it.
pytestmark = [pytest.mark.usefixtures("no_syncs"), pytest.mark.some(2)]

FILES = ROOT / "tests/fixtures/foreign"
Arrays = dict[str, np.ndarray]


def write_npz(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)
    return path


def write_hdf5(path: Path, arrays: Arrays) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name.replace(".", "/")] = array if array.dtype.kind != "U" else array.astype("S")
    return path


def _table(arrays: Arrays) -> Any:
    columns = {
        name: pa.array(list(array)) if array.ndim > 1 else pa.array(array) for name, array in arrays.items()
    }
    after = {name.removeprefix("next."): columns.pop(name) for name in list(columns) if name[:5] == "next."}
    if after:
        columns["next"] = pa.StructArray.from_arrays(list(after.values()), list(after))
    return pa.table(columns)


def write_parquet(path: Path, arrays: Arrays) -> Path:
    pq.write_table(_table(arrays), path)
    return path


def write_arrow(path: Path, arrays: Arrays) -> Path:
    table = _table(arrays)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    return path


def write_csv(path: Path, arrays: Arrays) -> Path:
    columns = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            columns[name] = array
        else:
            columns |= {f"{name}_{place}": array[:, place] for place in range(array.shape[1])}
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


FORMATS: dict[str, tuple[Callable[[Path, Arrays], Path], Callable[..., Imported]]] = {
    "npz": (write_npz, import_npz),
    "hdf5": (write_hdf5, import_hdf5),
    "parquet": (write_parquet, import_parquet),
    "arrow": (write_arrow, import_arrow),
    "csv": (write_csv, import_csv),
}


@pytest.fixture(params=sorted(FORMATS))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(form: str, folder: Path, arrays: Arrays, **options: Any) -> tuple[Imported, list[Any]]:
    """Import arrays from a file; return the result and `(length, return, status)` of the episodes."""
    write, back = FORMATS[form]
    path = write(folder / f"in.{form}", arrays)
    target = folder / f"{len(list(folder.iterdir()))}.exp"
    done = back(path, target, **options)
    return done, episodes_of(target)


def episodes_of(path: Path) -> list[Any]:
    with expstore.open(path, mode="r") as rb:
        return rb.sql('SELECT length, "return", status FROM episodes ORDER BY episode_id').fetchall()


def steps(count: int = 30, every: int = 10) -> Arrays:
    """Return rows with rewards of 1 and an end flag in every tenth row."""
    number = np.arange(count)
    return {
        "obs": np.stack([number, number % every], axis=1).astype("f4"),
        "act": np.zeros((count, 2), "f4"),
        "reward": np.ones(count, "f4"),
        "done": number % every == every - 1,
    }


TEN = (10, 10.0, "terminated")
WHOLE = [TEN, (10, 20.0, "terminated"), (10, 30.0, "truncated")]
WRAPPED = [(4, 4.0, "terminated"), *WHOLE[1:]]
OPEN = [*WHOLE[:2], (10, 30.0, "cut")]
REAL: dict[str, list[Any] | str] = {
    "cpprb_wrapped.npz": [*WRAPPED[:2], (10, 30.0, "terminated")],  # one flag for every end
    "d3rlpy_tuple.h5": WHOLE,
    "d3rlpy_v1.h5": WHOLE,
    "groups.h5": WHOLE,
    "imitation.npz": OPEN,  # marks no truncation
    "pandas_filtered.parquet": [WHOLE[0], WHOLE[2]],
    "pandas_nullable.parquet": WHOLE,
    "pandas_shuffled.parquet": "sort the rows by episode and step",
    "polars_enum.arrow": WHOLE,
    "polars_stream.arrows": WHOLE,
    "rllib_columns.parquet": WHOLE,
    "rllib_compressed.parquet": "compressed pickles of RLlib",
    "rllib_episodes.parquet": "packed episodes of RLlib",
    "sb3_arrays.npz": [*WHOLE, *WHOLE],  # two environments
    "spinningup_wrapped.npz": [*WRAPPED[:2], OPEN[2]],  # marks no truncation
    "spreadsheet.csv": WHOLE,
    "spreadsheet_quoted.csv": WHOLE,
    "spreadsheet_semicolon.csv": WHOLE,
    "tianshou_open.hdf5": [*WHOLE[:2], (5, 15.0, "cut")],
    "tianshou_vector_wrapped.hdf5": [
        *WRAPPED,
        *[(n, r + 30.0 * n, s) for n, r, s in WRAPPED],
    ],
    "tianshou_wrapped.hdf5": WRAPPED,
}


@pytest.mark.guarantee(
    "exchange/imports",
    "Files of other libraries become the right episodes, with a summary of what became of their columns, "
    "or are refused.",
)
@pytest.mark.some(len(REAL))  # each is a library of its own
@pytest.mark.parametrize("name", sorted(REAL))
def test_files_of_real_libraries(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, store = REAL[name], tmp_path / "x.exp"
    code = run(["import", str(FILES / name), str(store)])
    said = capsys.readouterr()
    if isinstance(expected, str):
        assert code == 2
        assert expected in said.err
        assert not store.exists()
        return
    assert code == 0
    assert episodes_of(store) == expected
    assert "next.reward" in said.out
    with expstore.open(store, mode="r") as rb:
        schema = rb.schema
        assert ("observation",) in schema or any(key[0] == "observation" for key in schema.keys)
        assert ("action",) in schema


def test_every_file_here_is_imported() -> None:
    assert {path.name for path in FILES.iterdir()} == set(REAL)


def test_a_ring_is_read_from_its_oldest_row(tmp_path: Path) -> None:
    for name in ("tianshou_wrapped.hdf5", "spinningup_wrapped.npz"):
        assert run(["import", str(FILES / name), str(tmp_path / f"{name}.exp")]) == 0
        with expstore.open(tmp_path / f"{name}.exp", mode="r") as rb:
            rows = rb[:]
            now, after = rows["observation"], rows["next", "observation"]
            assert now[0].tolist() == [0.0, 6.0, 6.0, 0.5]
            assert (after[:3] == now[1:4]).all()
            assert len(rb) == 24


# -- names ----------------------------------------------------------------------------------------------


FLAG_NAMES = [name for key, names in SYNONYMS.items() if key[-1] in ("terminated", "done") for name in names]


@pytest.mark.parametrize("kind", ["?", "i8", "f4"])
@pytest.mark.parametrize("name", FLAG_NAMES)
@pytest.mark.some(4)
def test_end_flags_of_every_name_and_dtype(tmp_path: Path, form: str, name: str, kind: str) -> None:
    arrays = steps()
    arrays[name] = arrays.pop("done").astype(kind)
    done, episodes = load(form, tmp_path, arrays)
    assert episodes == [TEN] * 3
    assert done.statuses == {"terminated": 3}
    assert done.warnings == ()


def test_flags_below_next_and_of_the_state_before(tmp_path: Path, form: str) -> None:
    """In TorchRL's layout flags at the root belong to the state before the step."""
    arrays = steps()
    ends = arrays.pop("done")
    rewards = arrays.pop("reward")
    layout = {**arrays, "done": np.zeros(30, bool), "next.done": ends, "next.rewards": rewards}
    done, episodes = load(form, tmp_path, layout)
    assert episodes == [TEN] * 3
    assert {"done", "next.done", "next.reward"} <= set(done.fields)


def test_each_name_stands_for_its_field() -> None:
    names = [(key, name) for key, names in SYNONYMS.items() for name in names if key != ("episode",)]
    for key, name in names:
        assert name_fields([(name,)], {}) == {(name,): key}
        assert name_fields([(name.upper(),), ("speed",)], {})[name.upper(),] == key


def test_a_state_is_an_observation_only_if_there_is_no_other() -> None:
    assert name_fields([("state",), ("next_state",)], {}) == {
        ("state",): ("observation",),
        ("next_state",): ("next", "observation"),
    }
    assert name_fields([("state",), ("obs",)], {})[("state",)] == ("state",)


def test_a_flag_that_is_none_is_refused(tmp_path: Path, form: str) -> None:
    arrays = steps() | {"done": np.full(30, 0.5)}
    with pytest.raises(SchemaError, match=r"'done' is read as a flag, but has the value 0\.5"):
        load(form, tmp_path, arrays)
    assert [path.suffix for path in tmp_path.iterdir()] == [f".{form}"]
    done, _ = load(form, tmp_path, arrays, names={"done": "its_done"})
    assert "its_done" in done.fields
    assert any("no end flag" in warning for warning in done.warnings)


@pytest.mark.parametrize("callback", ["progress", "tell"])
def test_an_error_of_a_callback_is_no_error_of_the_file(tmp_path: Path, form: str, callback: str) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("no such widget")

    with pytest.raises(LookupError, match="no such widget"):
        load(form, tmp_path, steps(), **{callback: fail})
    assert [path.suffix for path in tmp_path.iterdir()] == [f".{form}"]


def test_rows_differ_by_value() -> None:
    one = np.array([[0.0, np.nan], [1.0, 2.0], [0.1, 0.0]])
    other = np.array([[-0.0, np.nan], [1.0, np.nan], [0.1, 0.0]])
    assert rows_differ(one, other).tolist() == [False, True, False]
    assert rows_differ(one, other.astype("f4")).tolist() == [False, True, False]  # 0.1 was rounded
    assert rows_differ(np.arange(3), np.array([0, 5, 2])).tolist() == [False, True, False]
    assert rows_differ(one[:0], other[:0]).tolist() == []


def test_names_are_mapped_in_every_format(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = steps()
    arrays = {"score": arrays["reward"], "over": arrays["done"], "x": np.arange(30), "y": np.arange(30)}
    write, _ = FORMATS[form]
    path, store = write(tmp_path / f"x.{form}", arrays), tmp_path / "x.exp"
    options = ["--map", "score=next.reward", "--map", "over=next.terminated", "--map", "x="]
    assert run(["import", str(path), str(store), *options]) == 0
    assert episodes_of(store) == [TEN] * 3
    with expstore.open(store, mode="r") as rb:
        assert ("x",) not in rb.schema
        assert ("y",) in rb.schema
    assert run(["import", str(path), str(tmp_path / "y.exp"), "--map", "ghost=x"]) == 2
    assert "there is no 'ghost' to map" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["parquet", "arrow"])
def test_names_of_an_export_are_mapped(tmp_path: Path, name: str) -> None:
    rows = steps()
    load("npz", tmp_path, rows)
    (store,) = tmp_path.glob("*.exp")
    assert run(["export", str(store), str(tmp_path / "out"), f"--{name}"]) == 0
    done = FORMATS[name][1](tmp_path / "out", tmp_path / "back.exp", names={"action": "torque"})
    assert "torque" in done.fields
    assert episodes_of(tmp_path / "back.exp") == [TEN] * 3


def test_ids_and_indices_of_batches_are_left_out_with_a_note(tmp_path: Path, form: str) -> None:
    told: list[str] = []
    arrays = steps() | {"index": np.arange(30), "id": np.arange(30)}
    done, _ = load(form, tmp_path, arrays, tell=told.extend)
    assert not {"id", "index"} & set(done.fields)
    assert sum("as batches have" in note for note in told) == 2
    done, _ = load(form, tmp_path, arrays, names={"id": "row_id", "index": ""})
    assert "row_id" in done.fields


# -- episodes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("ids", ["numbers", "text"])
def test_rows_of_interleaved_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, ids: str, size: int
) -> None:
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", size)
    number = np.arange(30)
    lane = number % 3
    arrays = {
        "eps_id": lane + 5 if ids == "numbers" else np.array([f"run-{n}" for n in lane]),
        "t": number // 3,
        "obs": np.stack([lane, number], axis=1).astype("f4"),
        "rew": np.ones(30),
        "dones": number >= 27,
    }
    done, episodes = load(form, tmp_path, arrays)
    assert episodes == [TEN] * 3
    assert done.warnings == ()
    (store,) = tmp_path.glob("*.exp")
    with expstore.open(store, mode="r") as rb:
        for lane_number in range(3):
            observation = rb.trajectory(lane_number + 1)["observation"]
            assert (observation[:, 0] == lane_number).all()
            assert observation[:, 1].tolist() == list(range(lane_number, 30, 3))
        facts = rb.sql("SELECT trajectory_id, info FROM episodes ORDER BY episode_id").fetchall()
        if ids == "numbers":
            assert [row[0] for row in facts] == [5, 6, 7]
        else:
            assert [json.loads(row[1])["eps_id"] for row in facts] == ["run-0", "run-1", "run-2"]
            assert ("eps_id",) not in rb.schema


def test_a_step_counter_that_begins_again_begins_an_episode(tmp_path: Path, form: str) -> None:
    arrays = {"reward": np.ones(12), "t": np.array([0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 1, 2])}
    done, episodes = load(form, tmp_path, arrays)
    assert [length for length, _, _ in episodes] == [4, 1, 5, 2]
    assert any("no end flag" in warning for warning in done.warnings)


def test_ids_that_are_used_again(tmp_path: Path, form: str) -> None:
    """An end, or the step counter, tells that another episode begins; otherwise a warning says it."""
    ids = np.repeat([0, 1, 0, 1], 5)
    reward = np.ones(20)
    ended = {"episode": ids, "reward": reward, "done": np.tile(np.arange(5) == 4, 4)}
    assert load(form, tmp_path, ended)[1] == [(5, 5.0, "terminated")] * 4
    counted = {"episode": ids, "reward": reward, "step": np.tile(np.arange(5), 4)}
    assert [length for length, _, _ in load(form, tmp_path, counted)[1]] == [5] * 4
    done, episodes = load(form, tmp_path, {"episode": ids, "reward": reward})
    assert [length for length, _, _ in episodes] == [10, 10]
    assert any("come again after other ids" in warning for warning in done.warnings)


def test_missing_rows_are_told(tmp_path: Path, form: str) -> None:
    kept = np.array([n for n in range(30) if n not in (14, 15)])
    arrays = {"episode": kept // 10, "t": kept % 10, "reward": np.ones(28), "done": kept % 10 == 9}
    done, episodes = load(form, tmp_path, arrays)
    assert [length for length, _, _ in episodes] == [10, 8, 10]
    assert any("skips values in 1 places" in warning for warning in done.warnings)
    skipping = {"t": np.arange(30) % 10 * 4, "reward": np.ones(30), "done": steps()["done"]}
    assert load(form, tmp_path, skipping)[0].warnings == ()


def test_shuffled_transitions_are_told(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(100)
    arrays = {"obs": order * 1.0, "next_obs": order + 1.0, "rew": np.ones(100), "done": order % 10 == 9}
    done, episodes = load("npz", tmp_path, arrays)
    assert len(episodes) > 90
    assert any("shuffled or n-step" in warning for warning in done.warnings)


def test_rows_that_are_no_transitions_are_told(tmp_path: Path, form: str) -> None:
    ids = np.repeat([0, 1, -1], 10)
    done, episodes = load(form, tmp_path, steps() | {"collector.traj_ids": ids})
    assert episodes == [TEN] * 2
    assert any(warning.startswith("10 rows are no transitions") for warning in done.warnings)


def test_the_room_of_a_buffer_is_told(tmp_path: Path, form: str) -> None:
    arrays = {name: np.concatenate([array, np.zeros_like(array[:12])]) for name, array in steps().items()}
    done, _ = load(form, tmp_path, arrays)
    assert any(warning.startswith("the last 12 rows are 0") for warning in done.warnings)


# -- rings ----------------------------------------------------------------------------------------------


def test_a_ring_without_its_position_is_rotated_to_the_end_of_an_episode(tmp_path: Path) -> None:
    number = np.roll(np.arange(100, 130), 13)
    arrays = {"obs": number * 1.0, "next_obs": number + 1.0, "rew": np.ones(30), "done": number % 10 == 9}
    done, episodes = load("npz", tmp_path, arrays)
    assert sorted(episodes) == [TEN] * 3
    assert any("as in a ring buffer that is full" in warning for warning in done.warnings)
    # States that are numbers are equal by chance: nothing is rotated.
    arrays |= {"obs": number % 3, "next_obs": (number + 1) % 3}
    done, episodes = load("npz", tmp_path, arrays)
    assert not any("ring buffer" in warning for warning in done.warnings)


@pytest.mark.parametrize("facts", [{"ptr": 40, "size": 20}, {"ptr": 5, "size": 20}, {"pos": -1, "size": 30}])
def test_a_position_that_does_not_fit_is_refused(tmp_path: Path, facts: dict[str, int]) -> None:
    arrays = steps() | {name: np.array(value) for name, value in facts.items()}
    with pytest.raises(SchemaError, match="a ring buffer of 30 rows"):
        load("npz", tmp_path, arrays)


# -- tables ---------------------------------------------------------------------------------------------


def test_columns_without_values_and_indices_are_left_out(tmp_path: Path) -> None:
    frame = pd.DataFrame({"agent": [None] * 6, "reward": np.ones(6), "done": np.arange(6) == 5})
    frame["empty"] = pd.array([None] * 6, dtype="Int64")
    told: list[str] = []
    frame[frame.index != 2].to_parquet(tmp_path / "x.parquet")
    done = import_parquet(tmp_path / "x.parquet", tmp_path / "x.exp", tell=told.extend)
    assert done.fields == ("next.reward", "next.done")
    assert sorted(told) == [
        "'__index_level_0__' is the index of a pandas frame, and left out",
        "'agent' has no value in any row, and is left out",
        "'empty' has no value in any row, and is left out",
    ]
    kept = {"__index_level_0__": "frame_row"}
    assert "frame_row" in import_parquet(tmp_path / "x.parquet", tmp_path / "y.exp", names=kept).fields


def test_missing_floats_of_pandas_are_nan(tmp_path: Path) -> None:
    pd.DataFrame({"speed": [1.0, np.nan, 3.0], "done": [0, 0, 1]}).to_parquet(tmp_path / "x.parquet")
    import_parquet(tmp_path / "x.parquet", tmp_path / "x.exp")
    with expstore.open(tmp_path / "x.exp", mode="r") as rb:
        assert str(rb.schema["speed",]) == "float64[]"
        assert np.isnan(rb[:]["speed"].numpy()).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["1.0", "2.0"], "'reward' holds string or rows without a value"),
        ([1.0, None], "'reward' holds float64 or rows without a value"),
        ([[1.0, 2.0], [1.0, 2.0]], r"'reward' has \[2\] values per row"),
    ],
)
def test_rewards_that_are_no_numbers_are_refused(tmp_path: Path, column: list[Any], words: str) -> None:
    pq.write_table(pa.table({"reward": column}), tmp_path / "x.parquet")
    with pytest.raises(SchemaError, match=words):
        import_parquet(tmp_path / "x.parquet", tmp_path / "x.exp")


def test_a_column_of_a_type_that_no_field_has_can_be_left_out(tmp_path: Path) -> None:
    odd = pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval())
    with pa.ipc.new_file(
        tmp_path / "x.arrow", pa.schema([("odd", odd.type), ("reward", pa.float64())])
    ) as file:
        file.write_table(pa.table({"odd": odd, "reward": [1.0, 1.0]}))
    done = import_arrow(tmp_path / "x.arrow", tmp_path / "x.exp", names={"odd": ""})
    assert done.fields == ("next.reward",)


def test_text_observations_are_told(tmp_path: Path) -> None:
    pd.DataFrame({"obs": ["[0. 1.]", "[1. 2.]"], "reward": [1, 1]}).to_csv(tmp_path / "x.csv", index=False)
    done = import_csv(tmp_path / "x.csv", tmp_path / "x.exp")
    assert "'observation' is text, not numbers" in done.warnings


# -- CSV ------------------------------------------------------------------------------------------------


def csv(folder: Path, text: str | bytes) -> Path:
    path = folder / "x.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no names of columns"),
        ("1,2,3\n4,5,6\n", "numbers where the names"),
        ("a,reward,a\n1,2,3\n", "two columns of .* are called 'a'"),
        ("reward\n1\n".encode("utf-16"), "is text in UTF-16"),
        ("reward,done\n1,yes\n2,no\n", "'done' holds string"),
        ("obs_0,obs_1\n1,x\n2,y\n", "'obs_1' is not a number in every row"),
    ],
)
def test_bad_csv_files_are_refused(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        import_csv(csv(tmp_path, text), tmp_path / "x.exp")
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("speed;done\n0,5;FALSE\n-1;TRUE\n", [0.5, -1.0]),
        ('speed,done\n"0,5",FALSE\n"1,25",TRUE\n', [0.5, 1.25]),
        ("\ufeffspeed\tdone\r\n0.5\t0\r\n1e3\t1\r\n", [0.5, 1000.0]),
        ("speed,done\n0.5,0\n,1\n,\n", [0.5, np.nan]),
        (",speed ,done\n0,0.5,false\n1,2,true\n", [0.5, 2.0]),
    ],
)
def test_csv_of_spreadsheets(tmp_path: Path, text: str, speed: list[float]) -> None:
    import_csv(csv(tmp_path, text), tmp_path / "x.exp")
    with expstore.open(tmp_path / "x.exp", mode="r") as rb:
        assert np.array_equal(rb[:]["speed"].numpy(), np.array(speed), equal_nan=True)
        assert rb.sql("SELECT length, status FROM episodes").fetchall() == [(2, "terminated")]


def test_thousands_are_no_decimals(tmp_path: Path) -> None:
    path = csv(tmp_path, 'speed,done\n"1,000",0\n"12,000",1\n')
    import_csv(path, tmp_path / "x.exp")
    with expstore.open(tmp_path / "x.exp", mode="r") as rb:
        assert str(rb.schema["speed",]) == "string"


# -- what was understood --------------------------------------------------------------------------------


@pytest.mark.guarantee("exchange/imports")
def test_the_summary_says_what_became_of_the_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = steps()
    arrays |= {"speed": np.ones(30), "eps_id": np.array(["a"] * 10 + ["b"] * 10 + ["c"] * 10)}
    path = write_npz(tmp_path / "x.npz", arrays)
    assert run(["import", str(path), str(tmp_path / "x.exp")]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out == (
        f"{tmp_path}/x.exp holds 30 rows of 3 episodes: 3 terminated\n"
        "  observation      observation (obs)\n"
        "  next observation -\n"
        "  action           action (act)\n"
        "  reward           next.reward (reward)\n"
        "  end flags        next.done (done)\n"
        "  episode          eps_id (in the info of episodes)\n"
        "  plain fields     speed\n"
    )
    assert run(["import", str(path), str(tmp_path / "y.exp"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["statuses"] == {"terminated": 3}
    assert facts["roles"]["reward"] == ["next.reward (reward)"]
    assert facts["warnings"] == []


def test_the_store_is_called_like_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "log.csv", steps())
    assert run(["import", "log.csv"]) == 0
    assert episodes_of(tmp_path / "log.exp") == [TEN] * 3


def test_warnings_of_an_import(tmp_path: Path, form: str) -> None:
    done, _ = load(form, tmp_path, {"x": np.arange(1.0, 6.0)})
    assert done.warnings == (
        "there is no reward: returns are 0",
        "there is no end flag: episodes that ended count as cut",
        "one episode holds all 5 rows",
    )
    assert str(done).endswith("warning: one episode holds all 5 rows")


def test_data_sets_end_with_the_summary_too(tmp_path: Path) -> None:
    done = import_dataset(Hdf5EpisodesReader(FILES / "groups.h5"), tmp_path / "x.exp")
    assert done.statuses == {"terminated": 2, "truncated": 1}
    assert done.roles["observation"] == ("observation",)
    assert done.warnings == ()


@pytest.mark.parametrize("has_ends", [True, False])
def test_a_single_file_of_a_lerobot_data_set(tmp_path: Path, has_ends: bool) -> None:
    frame = np.concatenate([np.arange(5), np.arange(7)])
    episode = np.repeat([3, 4], [5, 7])
    columns = {
        "observation.state": pa.array(np.ones((12, 2), np.float32).tolist(), pa.list_(pa.float32())),
        "action": pa.array(np.zeros((12, 3), np.float32).tolist(), pa.list_(pa.float32(), 3)),
        "frame_index": pa.array(frame),
        "episode_index": pa.array(episode),
        "index": pa.array(np.arange(100, 112)),
        "task_index": pa.array(np.zeros(12, np.int64)),
    }
    if has_ends:
        columns["next.done"] = pa.array((frame == 4) & (episode == 3))
    pq.write_table(pa.table(columns), tmp_path / "file-000.parquet")
    import_parquet(tmp_path / "file-000.parquet", tmp_path / "rows.exp")
    with expstore.open(tmp_path / "rows.exp", mode="r") as rb:
        found = rb.sql("SELECT trajectory_id, length, status FROM episodes ORDER BY episode_id").fetchall()
        assert found == [(3, 5, "terminated" if has_ends else "cut"), (4, 7, "cut")]
        assert rb[:]["observation", "state"].shape == (12, 2)
        assert rb[:]["episode"].tolist() == episode.tolist()


def test_an_episode_index_is_a_field_where_another_one_has_the_episodes() -> None:
    keys = name_fields([("episode",), ("episode_index",)], {})
    assert keys == {("episode",): ("episode",), ("episode_index",): ("episode_index",)}
