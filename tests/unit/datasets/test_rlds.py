"""The RLDS reader on folders like those of TensorFlow Datasets: steps, ends, shards, damage."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from PIL import Image

import expstore
from expstore.datasets import RLDSReader, import_dataset
from expstore.datasets.tfrecord import parse_example, read_records
from expstore.errors import NotFoundError, SchemaError, StorageError
from tests.support.refusals import check_refusals

# -- a writer --------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(values: Any, packed: bool = True) -> bytes:
    if isinstance(values, list):
        return field(1, b"".join(field(1, value) for value in values))
    flat = np.asarray(values).reshape(-1)
    if flat.dtype.kind == "f":
        floats = [struct.pack("<f", value) for value in flat.tolist()]
        return field(2, field(1, b"".join(floats)) if packed else b"".join(b"\x0d" + one for one in floats))
    numbers = [varint(int(value) & (2**64 - 1)) for value in flat]
    return field(3, field(1, b"".join(numbers)) if packed else b"".join(b"\x08" + one for one in numbers))


def example(features: Mapping[str, Any], packed: bool = True) -> bytes:
    entries = (field(1, name.encode()) + field(2, feature(one, packed)) for name, one in features.items())
    return field(1, b"".join(field(1, entry) for entry in entries))


def masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + masked_crc(head) + data + masked_crc(data)


def pixels(value: int) -> Any:
    return np.full((4, 5, 3), value, np.uint8) + np.arange(3, dtype=np.uint8)


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(value)).save(file, "PNG")
    return file.getvalue()


CLASS = "tensorflow_datasets.core.features"


def tensor(dtype: str, *shape: int, encoding: str = "none") -> dict[str, Any]:
    dims = {"dimensions": [str(size) for size in shape]} if shape else {}
    return {
        "pythonClassName": f"{CLASS}.tensor_feature.Tensor",
        "tensor": {"shape": dims, "dtype": dtype, "encoding": encoding},
    }


def group(**features: Any) -> dict[str, Any]:
    return {
        "pythonClassName": f"{CLASS}.features_dict.FeaturesDict",
        "featuresDict": {"features": features},
    }


def steps_of(features: dict[str, Any]) -> dict[str, Any]:
    return {
        "pythonClassName": f"{CLASS}.dataset_feature.Dataset",
        "sequence": {"feature": features, "length": "-1"},
    }


TEXT = {"pythonClassName": f"{CLASS}.text_feature.Text", "text": {}}
IMAGE = {
    "pythonClassName": f"{CLASS}.image_feature.Image",
    "image": {"shape": {"dimensions": ["4", "5", "3"]}, "dtype": "uint8", "encodingFormat": "png"},
}
STEP = {
    "observation": group(state=tensor("float32", 3), image=IMAGE),
    "action": tensor("float32", 2),
    "reward": tensor("float64"),
    "discount": tensor("float32"),
    "is_first": tensor("bool"),
    "is_last": tensor("bool"),
    "is_terminal": tensor("bool"),
    "language_instruction": TEXT,
}
#: Steps of each episode, the last observation not counted, and whether it is terminal.
EPISODES = [(3, True), (5, False), (0, False), (2, True)]


def episode(number: int, length: int, is_terminal: bool) -> dict[str, Any]:
    steps = np.arange(length + 1)
    return {
        "episode_id": np.array([number - 1]),
        "episode_metadata/file_path": [f"raw/{number}.hdf5".encode()],
        "steps/observation/state": np.repeat(100.0 * number + steps, 3),
        "steps/observation/image": [png(10 * number + step) for step in steps.tolist()],
        "steps/action": np.repeat(steps + number, 2) / 2,
        "steps/reward": steps / 4,
        "steps/discount": np.ones(length + 1),
        "steps/is_first": steps == 0,
        "steps/is_last": steps == length,
        "steps/is_terminal": (steps == length) & is_terminal,
        "steps/language_instruction": [b"pick" if step < 2 or number else b"place" for step in steps],
    }


def write(
    folder: Path,
    shards: list[list[bytes]],
    step: dict[str, Any] = STEP,
    file_format: str = "tfrecord",
    **splits: list[int],
) -> Path:
    """Write a folder. `splits`: how many episodes the shards of each split have."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = group(file_path=TEXT)
    features = group(steps=steps_of(group(**step)), episode_id=tensor("int64"), episode_metadata=metadata)
    (folder / "features.json").write_text(json.dumps(features))
    named = splits or {"train": [len(records) for records in shards]}
    info = {
        "name": "my_env",
        "version": "1.0.0",
        "fileFormat": file_format,
        "splits": [
            {
                "name": name,
                "shardLengths": [str(length) for length in lengths],
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
            }
            for name, lengths in named.items()
        ],
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    left = iter(shards)
    for name, lengths in named.items():
        for place in range(len(lengths)):
            file = folder / f"my_env-{name}.{file_format}-{place:05d}-of-{len(lengths):05d}"
            records = next(left)
            if file_format == "tfrecord":
                file.write_bytes(b"".join(map(record, records)))
            else:
                write_array_record(file, records)
    return folder


def write_array_record(file: Path, records: list[bytes]) -> None:
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(file), "group_size:1")
    for data in records:
        writer.write(data)
    writer.close()


def small(folder: Path, packed: bool = True, file_format: str = "tfrecord") -> Path:
    found = [example(episode(n, *one), packed) for n, one in enumerate(EPISODES)]
    return write(folder, [found[:2], found[2:]], file_format=file_format)


def load(path: Path) -> Any:
    with expstore.open(path, mode="r") as rb:
        return rb[:]


# -- tests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["packed", "unpacked", "array_record"])
def test_episodes(tmp_path: Path, kind: str) -> None:
    file_format = "array_record" if kind == "array_record" else "tfrecord"
    source = small(tmp_path / "raw/1.0.0", kind != "unpacked", file_format)
    done = import_dataset(RLDSReader(source), tmp_path / "a.exp")
    assert (done.rows, done.episodes) == (10, 3)
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        rows, meta = rb[:], rb.meta["rlds"]
        found = rb.sql("SELECT length, status, source, info FROM episodes ORDER BY episode_id").fetchall()
    assert [(length, status) for length, status, *_ in found] == [
        (3, "terminated"),
        (5, "truncated"),
        (2, "terminated"),
    ]
    assert [text.split("-of-")[0].split(f".{file_format}-")[1] for _, _, text, _ in found] == [
        "00000",
        "00000",
        "00001",
    ]
    assert [json.loads(info) for *_, info in found] == [
        {
            "split": "train",
            "episode_id": number - 1,
            "file_path": f"raw/{number}.hdf5",
            "language_instruction": text,
        }
        for number, text in (
            (0, [{"step": 0, "text": "pick"}, {"step": 2, "text": "place"}]),
            (1, "pick"),
            (3, "pick"),
        )
    ]
    assert meta == {
        "name": "my_env",
        "version": "1.0.0",
        "splits": {"train": 4},
        "texts": ["language_instruction"],
        "left_out": [],
    }
    number = np.repeat([0, 1, 3], [3, 5, 2])
    step = np.concatenate([np.arange(3), np.arange(5), np.arange(2)])
    state = (100.0 * number + step)[:, None].repeat(3, 1)
    assert rows["episode"].tolist() == number.tolist()
    np.testing.assert_array_equal(rows["observation", "state"], state)
    np.testing.assert_array_equal(rows["next", "observation", "state"], state + 1)
    images = np.stack([pixels(10 * n + t).transpose(2, 0, 1) for n, t in zip(number, step, strict=True)])
    np.testing.assert_array_equal(rows["observation", "image"], images)
    np.testing.assert_array_equal(rows["next", "observation", "image"], images + 1)
    np.testing.assert_array_equal(rows["action"], ((step + number) / 2)[:, None].repeat(2, 1))
    np.testing.assert_array_equal(rows["next", "reward"], (step / 4)[:, None])
    np.testing.assert_array_equal(rows["is_init"], step == 0)
    np.testing.assert_array_equal(rows["frame"], step)
    last = np.array([2, 7, 9])
    assert np.flatnonzero(rows["next", "done"]).tolist() == last.tolist()
    assert np.flatnonzero(rows["next", "terminated"]).tolist() == [2, 9]
    assert not rows["done"].any()
    assert set(rows.keys()) >= {"discount", "is_init"}
    assert "is_last" not in set(rows.keys())


def test_last_step_is_a_transition(tmp_path: Path) -> None:
    source = small(tmp_path / "raw")
    done = import_dataset(RLDSReader(source, last_step="transition"), tmp_path / "a.exp")
    assert (done.rows, done.episodes) == (14, 4)
    rows = load(tmp_path / "a.exp")
    last = np.cumsum([4, 6, 1, 3]) - 1
    assert rows["observation", "state"][:4, 0].tolist() == [0, 1, 2, 3]
    assert rows["next", "observation", "state"][:4, 0].tolist() == [1, 2, 3, 0]
    assert not rows["next", "observation", "image"][last].any()
    assert np.flatnonzero(rows["next", "done"]).tolist() == last.tolist()
    assert np.flatnonzero(rows["next", "terminated"]).tolist() == [3, 13]
    with pytest.raises(SchemaError, match="last_step='both'"):
        RLDSReader(source, last_step="both")  # type: ignore[arg-type]


@pytest.mark.slow
def test_splits(tmp_path: Path) -> None:
    found = [example(episode(n, 2, True)) for n in range(4)]
    source = write(tmp_path / "raw", [found[:1], found[1:2], found[2:]], train=[1, 1], val=[2])
    import_dataset(RLDSReader(source), tmp_path / "all.exp")
    assert load(tmp_path / "all.exp")["episode"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    import_dataset(RLDSReader(source, split="val"), tmp_path / "val.exp")
    with expstore.open(tmp_path / "val.exp", mode="r") as rb:
        assert rb[:]["episode"].tolist() == [2, 2, 3, 3]
        assert rb.meta["rlds"]["splits"] == {"val": 2}
        assert rb.meta["import"]["options"] == {"split": "val", "last_step": "observation"}
    with pytest.raises(NotFoundError, match=r"no split 'test'; it has train, val"):
        RLDSReader(source, split="test")


def test_kinds_of_features(tmp_path: Path) -> None:
    step = {
        "observation": group(
            depth=tensor("uint16", 2, 2, encoding="zlib"),
            mask=tensor("bool", 2),
            raw=tensor("int16", 3, encoding="bytes"),
        ),
        "action": group(arm=tensor("float64", 2), grip={"classLabel": {"numClasses": "3"}}),
        "is_last": tensor("bool"),
        "waypoints": {"sequence": {"feature": tensor("float32", 2), "length": "3"}},
        "clip": {"pythonClassName": f"{CLASS}.video_feature.Video", "video": {}},
        "words": {"sequence": {"feature": TEXT}},
    }
    depth = np.arange(16, dtype="<u2").reshape(4, 2, 2) + 1000
    raw = -np.arange(12, dtype="<i2").reshape(4, 3)
    features = {
        "episode_id": np.array([0]),
        "episode_metadata/file_path": [b"x"],
        "steps/observation/depth": [zlib.compress(one.tobytes()) for one in depth],
        "steps/observation/mask": np.arange(8) % 3 == 0,
        "steps/observation/raw": [one.tobytes() for one in raw],
        "steps/action/arm": np.arange(8) / 2,
        "steps/action/grip": np.array([0, 1, 2, -1]),
        "steps/is_last": np.zeros(4, bool),
        "steps/waypoints/ragged_flat_values": np.arange(24.0),
        "steps/waypoints/ragged_row_lengths_0": np.full(4, 3),
    }
    source = write(tmp_path / "raw", [[example(features)]], step)
    import_dataset(RLDSReader(source), tmp_path / "a.exp")
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        rows = rb[:]
        # The last step of the record is not the last one of the episode.
        assert rb.sql("SELECT status FROM episodes").fetchall() == [("cut",)]
        assert rb.meta["rlds"]["left_out"] == ["steps.clip", "steps.words"]
    np.testing.assert_array_equal(rows["observation", "depth"], depth[:3])
    np.testing.assert_array_equal(rows["next", "observation", "raw"], raw[1:])
    assert rows["observation", "mask"].tolist() == [[True, False], [False, True], [False, False]]
    assert rows["action", "arm"].dtype is torch.float64
    assert rows["action", "grip"].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(rows["waypoints"], np.arange(18.0).reshape(3, 3, 2))
    features["steps/waypoints/ragged_row_lengths_0"] = np.array([3, 3, 4, 2])
    source = write(tmp_path / "ragged", [[example(features)]], step)
    with pytest.raises(SchemaError, match=r"waypoints' is ragged: it has between 2 and 4 values per step"):
        import_dataset(RLDSReader(source), tmp_path / "b.exp")
    assert not (tmp_path / "b.exp").exists()


def test_images_of_other_types(tmp_path: Path) -> None:
    def image(dtype: str, channels: int = 1) -> dict[str, Any]:
        shape = {"dimensions": ["2", "3", str(channels)]}
        return {"image": {"shape": shape, "dtype": dtype, "encodingFormat": "png"}}

    def coded(pixels: Any) -> bytes:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        return file.getvalue()

    meters = np.random.default_rng(0).normal(size=(3, 2, 3)).astype("<f4")
    millimeters = (np.arange(18).reshape(3, 2, 3) * 3000).astype(np.uint16)
    gray = np.arange(18, dtype=np.uint8).reshape(3, 2, 3)
    step = {
        "observation": group(m=image("float32"), mm=image("uint16"), gray=image("uint8")),
        "action": tensor("int32"),
    }
    features: dict[str, Any] = {
        "steps/action": np.arange(3),
        "steps/observation/m": [coded(one[..., None].view(np.uint8)) for one in meters],
        "steps/observation/mm": [coded(one) for one in millimeters],
        "steps/observation/gray": [coded(one) for one in gray],
    }
    import_dataset(RLDSReader(write(tmp_path / "raw", [[example(features)]], step)), tmp_path / "a.exp")
    rows = load(tmp_path / "a.exp")
    np.testing.assert_array_equal(rows["observation", "m"], meters[:2, None])
    np.testing.assert_array_equal(rows["next", "observation", "mm"], millimeters[1:, None])
    np.testing.assert_array_equal(rows["observation", "gray"], gray[:2, None])
    source = write(
        tmp_path / "c", [[example(features)]], {**step, "observation": group(gray=image("uint16"))}
    )
    with pytest.raises(SchemaError, match=r"images of uint8, but features\.json says uint16"):
        import_dataset(RLDSReader(source), tmp_path / "c.exp")
    features["steps/observation/m"] = features["steps/observation/gray"]
    source = write(tmp_path / "b", [[example(features)]], step)
    with pytest.raises(SchemaError, match="images of float32, which need four channels"):
        import_dataset(RLDSReader(source), tmp_path / "b.exp")


@pytest.mark.slow
def test_damaged_files(tmp_path: Path) -> None:
    source = small(tmp_path / "raw")
    shard = source / "my_env-train.tfrecord-00001-of-00002"
    whole = shard.read_bytes()
    assert len(list(read_records(shard))) == 2
    for at, message in ((3, "record at byte 0"), (40, "record at byte 0"), (len(whole) - 1, "checksum")):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        shard.write_bytes(damaged)
        with pytest.raises(StorageError, match=message):
            import_dataset(RLDSReader(source), tmp_path / "a.exp")
    for length in (1 << 40, (1 << 64) - 1):
        head = length.to_bytes(8, "little")
        shard.write_bytes(head + masked_crc(head) + whole[12:])
        with pytest.raises(StorageError, match="ends in the middle"):
            list(read_records(shard))
    for size in (5, 30, len(whole) - 3):
        shard.write_bytes(whole[:size])
        with pytest.raises(StorageError, match=r"00001-of-00002, episode \d: .*ends in the middle"):
            import_dataset(RLDSReader(source), tmp_path / "a.exp")
    first = 16 + int.from_bytes(whole[:8], "little")
    shard.write_bytes(whole[:first])
    with pytest.raises(SchemaError, match=r"the shard has 1 episodes, but dataset_info\.json says 2"):
        import_dataset(RLDSReader(source), tmp_path / "a.exp")
    shard.write_bytes(record(b"\x0a\x05abc") + record(b""))
    with pytest.raises(StorageError, match=r"not a tf\.train\.Example"):
        import_dataset(RLDSReader(source), tmp_path / "a.exp")
    assert not (tmp_path / "a.exp").exists()
    shard.write_bytes(whole)
    assert import_dataset(RLDSReader(source), tmp_path / "a.exp").rows == 10


def test_records_that_do_not_fit_the_features(tmp_path: Path) -> None:
    good = episode(0, 3, True)

    def fail(match: str, **changed: Any) -> None:
        features = {**good, **{f"steps/{name}": value for name, value in changed.items()}}
        features = {name: value for name, value in features.items() if value is not None}
        source = write(tmp_path / "raw", [[example(features)]])
        with pytest.raises((SchemaError, StorageError), match=match):
            import_dataset(RLDSReader(source), tmp_path / "a.exp")
        assert not (tmp_path / "a.exp").exists()

    fail("has no feature 'steps/action'", action=None)
    fail("'steps/action' has 7 values", action=np.arange(7.0))
    fail("different numbers of steps", action=np.arange(6.0))
    fail("'steps/reward' has values of int64, but features.json says float64", reward=np.arange(4))
    fail("'steps/is_first' has values of bytes", is_first=[b"x"] * 4)
    fail("'steps/language_instruction' has values of int64", language_instruction=np.arange(4))
    fail("an image of 3 bytes cannot be decoded", **{"observation/image": [b"abc"] * 4})
    other = io.BytesIO()
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(other, "JPEG")
    fail("images of different sizes", **{"observation/image": [png(1), other.getvalue(), png(1), png(1)]})


def test_unsuitable_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    source = small(tmp_path / "my_env/1.0.0")
    info = json.loads((source / "dataset_info.json").read_text())

    def with_info(**changed: Any) -> Callable[[], object]:
        def read() -> object:
            (source / "dataset_info.json").write_text(json.dumps({**info, **changed}))
            return RLDSReader(source)

        return read

    def with_features(features: Mapping[str, Any]) -> Callable[[], object]:
        def read() -> object:
            (source / "dataset_info.json").write_text(json.dumps(info))
            (source / "features.json").write_text(json.dumps(features))
            return RLDSReader(source)

        return read

    def with_step(**step: Any) -> Callable[[], object]:
        return with_features(group(steps=steps_of(group(**step))))

    outside = {"name": "train", "shardLengths": ["1"], "filepathTemplate": "../{DATASET}"}
    gone = {"name": "test", "shardLengths": ["1"]}
    check_refusals(
        [
            (lambda: RLDSReader(tmp_path / "none"), NotFoundError, r"there is no folder .*none"),
            (lambda: RLDSReader(tmp_path / "empty"), NotFoundError, r"no file .*features\.json"),
            (lambda: RLDSReader(source.parent), NotFoundError, r"the folder of a version: 1\.0\.0"),
            (with_info(fileFormat="riegeli"), SchemaError, "'riegeli' cannot be read"),
            (with_info(splits=[{"name": "train"}]), SchemaError, "splits and their shards are not listed"),
            (with_info(splits=[outside]), SchemaError, "is not the name of a file"),
            (with_info(splits=[gone]), NotFoundError, "my_env-test"),
            (with_step(observation=tensor("float32", 3)), SchemaError, "no feature 'steps/action'"),
            (with_step(**STEP, x=tensor("bfloat16")), SchemaError, "'steps.x' has the type 'bfloat16'"),
            (
                with_step(**STEP, x=tensor("float32", -1, 3)),
                SchemaError,
                r"'steps.x' has the shape \[-1, 3\]",
            ),
            (with_features(group(image=IMAGE)), SchemaError, "does not describe episodes"),
        ]
    )
    (source / "dataset_info.json").write_text("no JSON")
    with pytest.raises(SchemaError, match="is not JSON"):
        RLDSReader(source)


def test_numbers_of_all_sizes() -> None:
    numbers = np.array([0, 1, 127, 128, 300, 2**31, 2**63 - 1, -1, -(2**63)])
    for packed in (True, False):
        found = parse_example(example({"x": numbers, "none": np.zeros(0, int)}, packed))
        assert np.asarray(found["x"]).tolist() == numbers.tolist()
        assert np.asarray(found["none"]).size == 0
    assert parse_example(field(1, field(1, field(1, b"x") + field(2, b"")))) == {"x": None}
