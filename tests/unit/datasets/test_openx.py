"""The Open X-Embodiment reader and class: tars of pickled episodes, read without running code."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

import expstore
from expstore.datasets import Episode, OpenXExperienceReplay, OpenXReader, import_dataset
from expstore.datasets.kinds import openx
from expstore.errors import NotFoundError, SchemaError, StorageError
from tests.support.data_server import serving_files
from tests.support.imported_stores import import_rows
from tests.support.refusals import check_refusals
from tests.support.torchrl_names import module

OfTorchRL = module("torchrl.data.datasets.openx").OpenXExperienceReplay
_format_data = module("torchrl.data.datasets.openx")._format_data

LENGTHS = (5, 3, 8)
ID = "cmu_stretch"


def pixels(number: int, step: int) -> Any:
    return np.random.default_rng(100 * number + step).integers(0, 255, (8, 10, 3), np.uint8)


def png(image: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def episode(
    number: int, count: int, *, terminal: bool = True, word: bytes = b"open the drawer"
) -> dict[str, Any]:
    def step(at: int) -> dict[str, Any]:
        return {
            "observation": {
                "image": {"bytes": png(pixels(number, at)), "path": None},
                "state": np.arange(4, dtype=np.float32) + 10 * number + at,
            },
            "action": np.full(7, at, np.float32),
            "reward": np.float32(at / 7),
            "discount": np.float32(1),
            "is_first": at == 0,
            "is_last": at == count - 1,
            "is_terminal": terminal and at == count - 1,
            "language_instruction": word,
        }

    return {"steps": [step(at) for at in range(count)]}


def archive(path: Path, values: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for number, value in enumerate(values):
            data = value if isinstance(value, bytes) else pickle.dumps(value)
            member = tarfile.TarInfo(f"{ID}_{number:05}.data.pickle")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def episodes() -> list[Any]:
    return [episode(number, count, terminal=number != 1) for number, count in enumerate(LENGTHS)]


def test_rows_equal_those_of_torchrls_class(tmp_path: Path) -> None:
    source = archive(tmp_path / "raw" / "a.tar", episodes())
    rows, ends, facts, _ = import_rows(OpenXReader(source), tmp_path)
    assert ends == [(5, "terminated"), (3, "truncated"), (8, "terminated")]
    assert facts == 3 * [{"language_instruction": "open the drawer"}]
    start = 0
    for number, there in enumerate(episodes()):
        steps = []
        for at, step in enumerate(there["steps"]):  # as their reader decodes them
            step["observation"]["image"] = torch.from_numpy(pixels(number, at)).permute(2, 0, 1)
            del step["language_instruction"]
            steps.append(TensorDict(step, []))
        theirs: Any = torch.stack(steps).contiguous()
        _format_data(theirs, number)
        ours = rows[start : start + len(steps)]
        start += len(steps)
        for key in theirs.keys(True, True):
            # Their is_init has no last dim of 1, and their episode is int32.
            found = ours[key][:, 0] if key == "is_init" else ours[key]
            torch.testing.assert_close(found, theirs[key], check_dtype=key != "episode")


@pytest.mark.slow
def test_archives_and_folders_of_files_number_their_episodes(tmp_path: Path) -> None:
    folder = tmp_path / "archives"
    archive(folder / "b.tar", [{"steps": []}, episode(2, 4)])
    archive(folder / "a.tar", episodes()[:2])
    rows, ends, *_ = import_rows(OpenXReader(folder), tmp_path)
    assert [length for length, *_ in ends] == [5, 3, 4]
    assert rows["episode"].tolist() == 5 * [0] + 3 * [1] + 4 * [3]  # 2 has no steps
    assert rows["frame"].tolist() == [*range(5), *range(3), *range(4)]
    # An import that broke between two archives continues with the same numbers.
    assert [one.fields["episode"][0] for one in read(OpenXReader(folder), 1)] == [3]
    files = tmp_path / "files"
    files.mkdir()
    for number, value in enumerate(episodes()):
        (files / f"{ID}_{number}.data.pickle").write_bytes(pickle.dumps(value))
    assert len(OpenXReader(files).parts()) == 1
    rows = import_rows(OpenXReader(files), tmp_path).rows
    assert rows["episode"].tolist() == 5 * [0] + 3 * [1] + 8 * [2]


def read(reader: OpenXReader, place: int) -> list[Episode]:
    return list(reader.episodes(reader.parts()[place]))


@pytest.mark.parametrize("piece", [1, 16 << 20])
def test_the_last_step_may_be_an_observation_only(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openx, "_PIECE_BYTES", piece)
    source = archive(tmp_path / "raw" / "a.tar", [*episodes(), episode(3, 1)])
    rows, ends, *_ = import_rows(OpenXReader(source, last_step="observation"), tmp_path)
    assert ends == [(4, "terminated"), (2, "truncated"), (7, "terminated")]
    there = np.concatenate(
        [[step["observation"]["state"] for step in one["steps"][1:]] for one in episodes()]
    )
    np.testing.assert_array_equal(rows["next", "observation", "state"].numpy(), there)


def test_steps_with_every_kind_of_field(tmp_path: Path) -> None:
    value = episode(0, 4)
    for at, step in enumerate(value["steps"]):
        step["action"] = {"arm": {"pose": [0.5, at]}, "grip": at > 1, "mode": at}
        step["observation"]["wrist"] = step["observation"]["image"]["bytes"]
        step["observation"]["words"] = "far" if at < 3 else "near"
        step["observation"]["names"], step["observation"]["depth"] = ["a", "b"], None
        step["reward"], step["language_instruction"] = 0.25, "go"
        if at == 3:
            step["is_last"] = step["is_terminal"] = False
    target = tmp_path / "a.exp"
    import_dataset(OpenXReader(archive(tmp_path / "a.tar", [value])), target)
    with expstore.open(target, mode="r") as rb:
        rows = rb[:]
        ((status, words),) = rb.sql("SELECT status, info->>'observation.words' FROM episodes").fetchall()
        assert rb.meta["openx"] == {
            "texts": ["observation.words", "language_instruction"],
            "left_out": ["observation.names", "observation.depth"],
        }
    assert status == "cut"
    assert json.loads(words) == [{"step": 0, "text": "far"}, {"step": 3, "text": "near"}]
    torch.testing.assert_close(
        rows["action", "arm", "pose"], torch.tensor([[0.5, 0], [0.5, 1], [0.5, 2], [0.5, 3]])
    )
    assert (rows["action", "grip"].dtype, rows["action", "mode"].dtype) == (torch.bool, torch.int64)
    assert rows["next", "reward"].dtype == torch.float32
    torch.testing.assert_close(rows["observation", "wrist"], rows["observation", "image"])


@pytest.mark.slow
def test_bad_files_leave_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    odd, short, other, holed, mixed, many, wide = (episode(number, 3) for number in range(2, 9))
    for step in other["steps"]:
        step["extra"] = 1.0
    holed["steps"][1]["observation"]["state"] = None
    mixed["steps"][1]["language_instruction"] = "close it"
    # Few bytes that stand for very much.
    numbers: Any = 1.0
    names: Any = 1.0
    for _ in range(40):
        numbers, names = [numbers, numbers], {"a": names, "b": names}
    many["steps"][2]["action"], wide["steps"][2]["action"] = numbers, names
    odd["steps"][1]["action"] = np.zeros(3, np.float32)
    del short["steps"][2]["reward"]
    target = tmp_path / "x.exp"
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"steps": [Evil()]}, SchemaError, "the pickle names posix.mkdir"),
        ({"steps": 3}, SchemaError, "has no list 'steps'"),
        ({"steps": [1]}, SchemaError, "a step is a int; a dict is expected"),
        ({"steps": [{"action": 1}]}, SchemaError, "the steps have no observation"),
        (odd, SchemaError, f"{ID}_00001.data.pickle: 'action' has another shape in some steps"),
        (short, SchemaError, "step 2 has other fields than step 0: reward"),
        (other, SchemaError, "differ from those of the first episode in extra"),
        (holed, SchemaError, "'observation.state' is None in some steps"),
        (mixed, SchemaError, "'language_instruction' is not bytes in all steps"),
        (many, SchemaError, "has more than 67108864 values"),
        (wide, SchemaError, "a step has more than 1000 fields"),
        (b"hello", StorageError, "cannot read a pickle"),
    ]
    for number, (value, kind, text) in enumerate(cases):
        source = archive(tmp_path / f"raw/{number}.tar", [episode(0, 3), value])
        with pytest.raises(kind, match=text):
            import_dataset(OpenXReader(source), target)
    assert not target.exists()
    assert not (tmp_path / "evil").exists()
    with pytest.raises(SchemaError, match="a step is a NoneType"):
        import_dataset(OpenXReader(tmp_path / "raw/0.tar", trust_pickle=True), target)
    assert (tmp_path / "evil").exists()  # what trust means
    source = archive(tmp_path / "raw/gone.tar", [b"cno_such_module\nx\n."])
    with pytest.raises(StorageError, match="cannot read a pickle: ModuleNotFoundError"):
        import_dataset(OpenXReader(source, trust_pickle=True), target)
    whole = archive(tmp_path / "raw/whole.tar", episodes()).read_bytes()
    for size in (100, len(whole) // 2):
        (tmp_path / "raw/half.tar").write_bytes(whole[:size])
        with pytest.raises(
            StorageError, match="is not a tar archive, or ends early|cannot read .*unexpected end"
        ):
            import_dataset(OpenXReader(tmp_path / "raw/half.tar"), target)
    with pytest.raises(SchemaError, match="the source has no episodes"):
        import_dataset(OpenXReader(archive(tmp_path / "raw/empty.tar", [{"steps": []}])), target)
    with pytest.raises(SchemaError, match="last_step='x' is not one of"):
        OpenXReader(source, last_step="x")  # type: ignore[arg-type]
    assert not target.exists()
    with pytest.raises(NotFoundError, match="no file or folder"):
        OpenXReader(tmp_path / "nothing")
    with pytest.raises(NotFoundError, match=r"no \.tar archive and no \*\.data\.pickle file"):
        OpenXReader(tmp_path)


def test_the_class(tmp_path: Path) -> None:
    folder = tmp_path / "public" / "jxu124" / "OpenX-Embodiment" / ID
    archive(folder / f"{ID}_00000.tar", episodes())
    archive(folder / f"{ID}_00001.tar", [episode(0, 4, word=b"close it"), episode(1, 12)])
    seen: list[Any] = []

    def note(batch: TensorDict) -> TensorDict:
        seen.append(batch["language_instruction"])
        return batch

    with serving_files(tmp_path / "public") as server:
        data = OpenXExperienceReplay(
            ID, num_slices=2, root=tmp_path / "root", mirror=server.url, transform=note
        )
    assert len(data) == 32
    assert data.sample(6).batch_size == (6,)
    assert len(seen) == 1
    rows = data[:]
    assert rows["language_instruction"] == 16 * ["open the drawer"] + 4 * ["close it"] + 12 * [
        "open the drawer"
    ]
    assert rows["episode"].unique().tolist() == [0, 1, 2, 3, 4]
    ordered = OpenXExperienceReplay(
        ID, 3, slice_len=3, replacement=False, shuffle=False, root=tmp_path / "root"
    )
    drawn = ordered.sample()["index"]
    assert (drawn.diff() == 1).all()
    assert drawn.max() < 5  # of the first episode
    assert OpenXExperienceReplay.available_datasets == OfTorchRL.available_datasets


def test_arguments_are_checked(tmp_path: Path) -> None:
    def open_with(**arguments: Any) -> Callable[[], object]:
        return lambda: OpenXExperienceReplay(
            **{"dataset_id": ID, "batch_size": 4, "root": tmp_path, **arguments}
        )

    both = {"num_slices": 2, "sampler": expstore.RandomSampler()}
    check_refusals(
        [
            (open_with(num_slices=2, slice_len=3), ValueError, "but not both"),
            (open_with(streaming=True), ValueError, "kept as stores"),
            (open_with(pad=0), RuntimeError, "only with streaming"),
            (open_with(num_slices=2, shuffle=False), RuntimeError, "shuffle=False"),
            (open_with(**both), ValueError, "exclusive with the `sampler`"),
            (open_with(split_trajs=True), NotImplementedError, "split"),
            (open_with(dataset_id="nothing"), ValueError, "is not one of the data sets"),
        ]
    )
