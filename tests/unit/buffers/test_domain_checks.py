"""A store keeps the specs of its fields, and checks rows against them on request.

Run with the other tests.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import expstore
from expstore import Bounded, Categorical, Composite, MemoryStorage
from expstore.buffers import domain_checks
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, SchemaError, StateError, StorageError
from expstore.specs import Choice, NonTensor
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ZarrStorage


def rows(n: int, action: int = 1, reward: float = 0.5) -> TensorDict:
    return TensorDict(
        {
            "observation": torch.zeros(n, 3),
            "action": torch.full((n,), action),
            "next": {"reward": torch.full((n, 1), reward), "done": torch.zeros(n, 1, dtype=torch.bool)},
        },
        [n],
    )


def specs() -> Composite:
    return Composite(
        {
            "observation": Bounded(-math.inf, math.inf, shape=(3,)),
            "action": Categorical(3, mask=torch.tensor([True, True, False])),
            ("next", "reward"): Bounded(0.0, 1.0, shape=(1,)),
            ("next", "done"): None,
        }
    )


# -- kept ------------------------------------------------------------------------------------------


def test_specs_stay_with_the_store(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with expstore.open(path, capacity=100, schema=specs()) as rb:
        assert rb.specs == specs()
        assert rb.schema is None
    with expstore.open(path) as rb:
        assert rb.specs == specs()
        rb.extend(rows(5))
        assert rb.specs == specs()
        before = rb.schema
        rb.specs.set("action", None)  # type: ignore[union-attr]
        assert rb.specs == specs(), "a copy was handed out"
        with expstore.open(path, mode="r") as follower:
            assert follower.specs == specs()
            rb.set_specs(None)
            assert rb.specs is follower.specs is None
            rb.set_specs(specs())
            assert follower.specs == specs()
    with expstore.open(path, schema=specs().clone()) as rb:
        assert rb.schema == before
        copied = pickle.loads(pickle.dumps(rb))
        assert copied.specs == specs()
        copied.close()


def test_versions_and_loads_take_them_along(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=100, schema=specs()) as rb:
        rb.extend(rows(5))
        rb.dumps(tmp_path / "versions")
        rb.set_specs(None)
        assert expstore.open(tmp_path / "versions", mode="r").specs == specs()
        rb.loads(tmp_path / "versions")
        assert rb.specs == specs()
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.specs == specs()
    ram = expstore.TensorDictReplayBuffer(storage=MemoryStorage(100))
    ram.loads(tmp_path / "versions")
    assert ram.specs == specs()


def test_versions_without_specs_keep_fitting_specs(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=100) as rb:
        rb.extend(rows(5))
        rb.dumps(tmp_path / "versions")
    with expstore.open(tmp_path / "b.exp", capacity=100, schema=specs()) as rb:
        rb.loads(tmp_path / "versions")
        assert rb.specs == specs()
    with expstore.open(tmp_path / "c.exp", capacity=100, schema=Composite(pixels=Categorical(9))) as rb:
        with pytest.raises(SchemaError, match="'pixels'"):
            rb.loads(tmp_path / "versions")
        assert len(rb) == 0
        assert rb.specs == Composite(pixels=Categorical(9))


@pytest.mark.guarantee("kill/rows")
def test_a_store_that_was_killed_keeps_what_was_set(tmp_path: Path) -> None:
    storage = ZarrStorage(tmp_path / "a.exp", 100)
    rb = expstore.TensorDictReplayBuffer(storage=storage)
    rb.extend(rows(3))
    rb.set_specs(specs())
    storage.background.stop()  # as if the process had gone
    storage.lock_file.release()
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.recovered is not None
        assert rb.specs == specs()


class Failing(Disk):
    """A disk on which no file can be replaced any more."""

    failing = False

    def write_whole(self, path: Path, data: bytes) -> None:
        if self.failing:
            raise StorageError(f"{path} cannot be written")
        super().write_whole(path, data)


def test_nothing_changes_on_a_disk_that_fails(tmp_path: Path) -> None:
    disk = Failing()
    storage = ZarrStorage(tmp_path / "a.exp", 100, disk=disk)
    rb = expstore.TensorDictReplayBuffer(storage=storage)
    rb.set_specs(specs())
    disk.failing = True
    with pytest.raises(StorageError):
        rb.set_specs(None)
    assert rb.specs == specs()
    with contextlib.suppress(StorageError):
        rb.close()
    disk.failing = False
    with expstore.open(tmp_path / "a.exp") as rb:
        assert rb.specs == specs()


def generation_of(path: Path) -> int:
    return int(json.loads((path / "expstore.json").read_text())["generation"])


# -- refused ---------------------------------------------------------------------------------------


def test_specs_of_other_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    wrong: list[tuple[Composite, str]] = [
        (Composite(pixels=Categorical(3)), "a field 'pixels' .int64..., the rows have none"),
        (Composite(action=Categorical(3, dtype=torch.int32)), "'action': the specs say int32"),
        (Composite(next=Composite(reward=Bounded(0, 1, shape=()))), "'next.reward': the specs say float32"),
        (Composite(observation=Bounded(0, 1, shape=(4,))), r"float32\[4\], the rows have float32\[3\]"),
        (Composite(observation=Bounded(0, 1, shape=(5, 3)), shape=(5,)), r"batch size \[5\]"),
        (Composite(data_cls=TensorDict), "data_cls"),
    ]
    with expstore.open(path, capacity=100) as rb:
        rb.extend(rows(3))
        for specs, message in wrong:
            with pytest.raises(SchemaError, match=message):
                rb.set_specs(specs)
        assert rb.specs is None
    generation = generation_of(path)
    for specs, message in wrong:
        with pytest.raises(SchemaError, match=message):
            expstore.open(path, schema=specs)
    assert generation_of(path) == generation, "it was opened for writing"
    with expstore.open(path) as rb:
        assert rb.specs is None
        assert len(rb) == 3


def test_rows_of_other_fields_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    wrong = rows(3)
    wrong["action"] = wrong["action"].int()
    with expstore.open(tmp_path / "a.exp", capacity=100, schema=specs()) as rb:
        with pytest.raises(SchemaError, match="'action': the specs say int64.*the rows have int32"):
            rb.extend(wrong)
        with pytest.raises(SchemaError, match="'observation'"):
            rb.extend(rows(3).exclude("observation"))
        assert rb.schema is None
        assert not (tmp_path / "a.exp" / "columns").exists()
        rb.extend(rows(3))


def test_opening_with_other_specs_than_those_kept_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with expstore.open(path, schema=specs()):
        pass
    generation = generation_of(path)
    for mode in ("a", "r"):
        with pytest.raises(StateError, match="differ from those that were passed"):
            expstore.open(path, schema=Composite(action=Categorical(4)), mode=mode)
    assert generation_of(path) == generation
    shuffled = Composite({key: specs()[key] for key in reversed(list(specs().keys()))})
    expstore.open(path, schema=shuffled).close()
    expstore.open(path, schema=specs(), mode="r").close()
    with expstore.open(path, mode="w", schema=Composite(action=Categorical(4))) as rb:
        assert rb.specs == Composite(action=Categorical(4))
        rb.set_specs(None)
        with pytest.raises(StateError, match="a reader cannot set them"):
            expstore.open(path, schema=specs(), mode="r")


def test_only_composites_are_specs_of_rows(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Composite of expstore"):
        expstore.open(tmp_path / "a.exp", schema=Categorical(3))  # type: ignore[arg-type]
    assert not (tmp_path / "a.exp").exists()
    with expstore.open(tmp_path / "a.exp") as rb, pytest.raises(TypeError, match="give a Composite"):
        rb.set_specs({"action": Categorical(3)})  # type: ignore[arg-type]


def test_schema_and_specs_must_fit_before_the_folder_is_made(tmp_path: Path) -> None:
    schema = expstore.Schema([expstore.Field(("action",), "int32", ())])
    text = expstore.specs.to_text(Composite(action=Categorical(3)))
    with pytest.raises(SchemaError, match="'action'"):
        ZarrStorage(tmp_path / "a.exp", settings=Settings(schema=schema, specs=text))
    assert not (tmp_path / "a.exp").exists()


def test_damaged_specs_say_so(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", schema=specs()) as rb:
        damaged = rb.storage.description.specs.replace("Categorical", "Cauliflower")
        rb.storage._describe(replace(rb.storage.description, specs=damaged))
        with pytest.raises(CorruptionError, match="Cauliflower"):
            assert rb.specs is None


# -- values ----------------------------------------------------------------------------------------


def bad(rb: Any, batch: TensorDict, message: str) -> None:
    count, written = len(rb), rb.write_count
    with pytest.raises(SchemaError, match=message):
        rb.extend(batch, validate="domain")
    assert (len(rb), rb.write_count) == (count, written)


@pytest.mark.guarantee("rows/refused")
def test_values_are_looked_at_when_asked_for(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=2000, schema=specs()) as rb:
        batch = rows(1000)
        batch["next", "reward"][731] = 1.5
        bad(rb, batch, r"row 731: field 'next.reward' is \[1.5\], .* not allow: Bounded\(low=0.0, high=1.0\)")
        assert rb.schema is None, "the first rows were refused, and fix nothing"
        batch["next", "reward"][3] = math.nan
        bad(rb, batch, "row 3: field 'next.reward' is .nan.")
        rb.extend(rows(4), validate="domain")
        batch = rows(5)
        batch["action"][4] = 2
        bad(rb, batch, "row 4: field 'action' is 2, .*mask")
        with pytest.raises(SchemaError, match="row 0: field 'action' is 7"):
            rb.add(rows(1, action=7)[0], validate="domain")
        assert len(rb) == 4
        rb.extend(batch)
        rb.extend(batch, validate="schema")
        rb.add(rows(1, action=7)[0])
        assert len(rb) == 15


def test_specs_are_read_once_until_they_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    real = domain_checks.read_stored

    def read(text: str) -> Any:
        nonlocal reads
        reads += 1
        return real(text)

    monkeypatch.setattr(domain_checks, "read_stored", read)
    rb = expstore.TensorDictReplayBuffer(storage=MemoryStorage(100, seed=0))
    rb.set_specs(specs())
    for _ in range(3):
        rb.extend(rows(4), validate="domain")
    assert reads == 1
    rb.set_specs(Composite(action=Categorical(1)))
    bad(rb, rows(4), "row 0: field 'action' is 1")
    assert reads == 2
    assert len(rb) == 12
    rb.set_specs(None)
    with pytest.raises(StateError, match="this store has none"):
        rb.extend(rows(4), validate="domain")


def test_rows_that_are_dropped_may_contain_anything(tmp_path: Path) -> None:
    batch = rows(4)
    batch["collector", "traj_ids"] = torch.tensor([0, -1, 0, 0])
    batch["action"][1] = 99
    with expstore.open(tmp_path / "a.exp", schema=specs()) as rb:
        rb.extend(batch, validate="domain")
        assert len(rb) == 3
        batch["action"][3] = 99
        bad(rb, batch, "row 3: field 'action' is 99")


def test_many_lanes_and_dtypes(tmp_path: Path) -> None:
    half = Composite(x=Bounded(-1, 1, shape=(2,), dtype=torch.bfloat16))
    with expstore.open(tmp_path / "a.exp", schema=half) as rb:
        batch = TensorDict({"x": torch.zeros(3, 4, 2, dtype=torch.bfloat16)}, [3, 4])
        rb.extend(batch, validate="domain")
        batch["x"][1, 2] = 3
        bad(rb, batch, "row 6: field 'x' is .3.0, 3.0.")


def test_rows_of_unlike_agents() -> None:
    agents = torch.stack([Composite(act=Categorical(2)), Composite(act=Categorical(5))])
    rb = expstore.TensorDictReplayBuffer(storage=MemoryStorage(10))
    rb.set_specs(Composite(agents=agents))
    with pytest.raises(SchemaError, match=r"row 1: field 'agents.act' is \[4, 1\]"):
        rb.extend(TensorDict({"agents": {"act": torch.tensor([[1, 4], [4, 1]])}}, [2]), validate="domain")
    rb.extend(TensorDict({"agents": {"act": torch.tensor([[1, 4], [0, 1]])}}, [2]), validate="domain")
    assert rb.specs == Composite(agents=agents)


def test_without_specs_there_is_nothing_to_validate_by() -> None:
    rb = expstore.TensorDictReplayBuffer(storage=MemoryStorage(10))
    with pytest.raises(StateError, match="set_specs"):
        rb.extend(rows(3), validate="domain")
    assert rb.schema is None
    with pytest.raises(ValueError, match="validate is 'values'"):
        rb.extend(rows(3), validate="values")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="validate is 'values'"):
        rb.add(rows(3)[0], validate="values")  # type: ignore[arg-type]


def test_results_of_transforms_are_validated() -> None:
    class Halve(torch.nn.Module):
        def forward(self, td: TensorDict) -> TensorDict:
            return td

        def inv(self, td: TensorDict) -> TensorDict:
            return td.set(("next", "reward"), td["next", "reward"] / 2)

    rb = expstore.TensorDictReplayBuffer(storage=MemoryStorage(10), transform=Halve())
    rb.set_specs(specs())
    rb.extend(rows(3, reward=1.5), validate="domain")
    with pytest.raises(SchemaError, match=r"is \[1.25\]"):
        rb.extend(rows(3, reward=2.5), validate="domain")


# -- info ------------------------------------------------------------------------------------------


def test_objects_and_choices_are_validated_row_by_row() -> None:
    rb = expstore.TensorDictReplayBuffer(storage=MemoryStorage(10))
    rb.set_specs(
        Composite(
            text=Choice([NonTensorData("a"), NonTensorData("b")]),
            more=NonTensor((), example_data="x"),
            level=Choice([Bounded(0, 1, shape=()), Bounded(5, 6, shape=())]),
        )
    )

    def batch(texts: list[str], levels: list[float]) -> TensorDict:
        more = {"text": NonTensorStack(*texts), "more": NonTensorStack(*texts)}
        return TensorDict({"level": torch.tensor(levels), **more}, [len(texts)])

    rb.extend(batch(["a", "b", "a"], [0.5, 5.5, 0.0]), validate="domain")
    with pytest.raises(SchemaError, match="row 2: field 'level' is 3.0"):
        rb.extend(batch(["a", "b", "a"], [0.5, 5.5, 3.0]), validate="domain")
    with pytest.raises(SchemaError, match="row 1: field 'text' is c"):
        rb.extend(batch(["a", "c", "a"], [0.5, 5.5, 0.0]), validate="domain")
    rb.extend(batch(["a", "c", "a"], [0.5, 5.5, 3.0]))
    with pytest.raises(SchemaError, match="'level': the specs say objects, the rows have float32"):
        rb.set_specs(Composite(level=NonTensor()))
    assert len(rb) == 6


@pytest.mark.parametrize(
    ("spec", "first", "then", "kind"),
    [
        (expstore.specs.NonTensor(shape=()), None, "go", "string"),
        (expstore.specs.NonTensor(shape=(), example_data=1.5), None, 0.5, "float64"),
        (expstore.Unbounded(shape=(-1,), dtype=torch.float32), None, [1.0], "float32[?]"),
        (expstore.Unbounded(shape=(-1,), dtype=torch.float32), [], [1.0], "float32[?]"),
    ],
    ids=str,
)
def test_rows_that_begin_with_none_have_the_type_of_their_spec(
    store_path: Path, spec: Any, first: Any, then: Any, kind: str
) -> None:
    """Also in a group; a NonTensor without an example is text."""
    specs = expstore.Composite(
        t=expstore.Unbounded(shape=(), dtype=torch.int64),
        note=spec,
        inner=expstore.Composite(note=spec.clone()),
    )
    with expstore.open(store_path, layout="arrow", schema=specs) as rb:
        for t, value in enumerate((first, then, first)):
            rb.add({"t": t, "note": value, "inner": {"note": value}})
        assert rb.storage.schema is not None
        assert [str(entry) for entry in rb.storage.schema.fields[1:]] == [kind, kind]
        assert rb[:]["t"].tolist() == [0, 1, 2]


def test_a_field_with_a_spec_may_not_be_absent_at_first(store_path: Path) -> None:
    specs = expstore.Composite(note=expstore.specs.NonTensor(shape=()))
    with expstore.open(store_path, layout="arrow", schema=specs) as rb:
        with pytest.raises(SchemaError, match="the specs have a field 'note' .*, the rows have none"):
            rb.add({"t": 0})
        rb.add({"t": 0, "note": None})
