"""The formats under test: how a small source is made, how it is mutated, and how it is read."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import zlib
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tensordict import TensorDict

import expstore
from expstore import exchange
from expstore.core import tuning
from expstore.datasets import import_dataset, importer
from expstore.datasets.formats import make_reader
from expstore.errors import ExpStoreError
from expstore.exchange import hdf5, npz, table_files, table_import, table_layout
from expstore.exchange.formats import format_of
from expstore.maintenance.verify import verify
from expstore.storages import follower
from expstore.storages.format import manifest
from expstore.storages.format.journal import HEADER, parse_record
from tests.fuzz.mutations import NUMBERS, forge_json, mutate, mutate_json
from tests.support.paths import ROOT

ROWS = 60


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format.

    Args:
        make: Write a source below a folder.
        read: Read the source in a folder; the flag is whether to import it whole, or write to it, which is
            slow.
        targets: Glob patterns of the files that are mutated, relative to the folder.
        forge: Mutate a file in a way of its own; None: `mutate`.
    """

    make: Callable[[Path], object]
    read: Callable[[Path, bool], object]
    targets: tuple[str, ...]
    forge: Callable[[Path, random.Random], None] | None = None


def run_case(form: Format, source: Path, work: Path, seed: int) -> None:
    """Copy a source, mutate a file of it, and read it."""
    rng = random.Random(seed)
    _tune()
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work, symlinks=True)
    try:
        files = sorted(path for pattern in form.targets for path in work.glob(pattern) if path.is_file())
        file = rng.choice(files)
        if form.forge is not None and rng.random() < 0.6:
            form.forge(file, rng)
        elif file.suffix == ".json" and rng.random() < 0.7:
            file.write_bytes(mutate_json(file.read_bytes(), rng))
        else:
            file.write_bytes(mutate(file.read_bytes(), rng))
        form.read(work, seed % 16 == 0)
    finally:
        shutil.rmtree(work, ignore_errors=True)


# -- stores ----------------------------------------------------------------------------------------------


def _rows(first: int = 0, count: int = ROWS) -> TensorDict:
    at = torch.arange(first, first + count)
    return TensorDict(
        {
            "observation": at[:, None].float() + torch.arange(3),
            "action": at % 4,
            "next": {
                "observation": at[:, None].float() + 1 + torch.arange(3),
                "reward": at[:, None].float(),
                "terminated": (at % 20 == 19)[:, None],
                "truncated": torch.zeros(count, 1, dtype=torch.bool),
            },
        },
        [count],
    )


def read_intact(form: Format, source: Path, work: Path) -> None:
    """Read a source that is not mutated."""
    _tune()
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work)
    form.read(work, True)
    shutil.rmtree(work)


def _tune() -> None:
    """Make files short, because every case copies and reads them, and do not wait for writers."""
    tuning.JOURNAL_SEGMENT_BYTES, tuning.FLAT_SHARD_ROWS = 1 << 16, 4096
    follower._PAUSE_SECONDS = 0.0


def make_source(form: Format, folder: Path) -> None:
    """Write a source."""
    _tune()
    form.make(folder)


def _store(folder: Path, index: bool = False, **settings: Any) -> None:
    with expstore.open(folder / "a.exp", seed=3, **settings) as rb:
        rb.extend(_rows(0), source="arm")
        rb.flush()
        rb.episodes.annotate(1, note="x")
        rb.extend(_rows(ROWS, 20))
        rb.episodes.delete("episode_id = 2") if settings.get("capacity") is None else None
        rb.sql("SELECT count(*) FROM transitions")
    if not index:
        (folder / "a.exp/index.duckdb").unlink()


def _read_store(folder: Path, whole: bool) -> None:
    path = folder / "a.exp"
    acts = [partial(_follow, path, whole), partial(verify, path), *([partial(_write, path)] if whole else [])]
    _run_all(acts)


def _run_all(acts: Sequence[Callable[[], object]]) -> None:
    """Run each function, and raise the last error of expstore."""
    error = None
    for act in acts:
        try:
            act()
        except ExpStoreError as exc:
            error = exc
    if error is not None:
        raise error


def _follow(path: Path, sql: bool = False) -> None:
    with expstore.open(path, mode="r", batch_size=8) as rb:
        rb[:]
        if sql:
            rb.sql("SELECT count(*), sum(_id) FROM transitions").fetchall()
            rb.sql("SELECT * FROM episodes").fetchall()
        if len(rb):
            rb.sample()


def _write(path: Path) -> None:
    with expstore.open(path, mode="a", batch_size=8) as rb:
        rb.extend(_rows(200, 5))
        rb.sql("SELECT count(*), sum(_id) FROM transitions").fetchall()
        rb.sample()


def _read_index(folder: Path, whole: bool) -> None:
    path = folder / "a.exp"
    _run_all([partial(_write, path)] if whole else [partial(_sql, path), partial(verify, path)])


def _sql(path: Path) -> None:
    with expstore.open(path, mode="a") as rb:
        rb.sql("SELECT count(*), sum(_id) FROM transitions").fetchall()
        rb.sql("SELECT * FROM episodes").fetchall()


def _forge_manifest(file: Path, rng: random.Random) -> None:
    data = json.loads(file.read_text())
    del data["crc32c"]
    if rng.random() < 0.15:
        numbers = [rng.choice(NUMBERS) % (1 << 64) for _ in range(rng.choice((1, 2, 4)))]
        packed = np.array(numbers, np.uint64).tobytes() if rng.random() < 0.7 else bytes(1 << 20)
        data["gaps"] = b64encode(zlib.compress(packed)).decode()
    else:
        data = forge_json(data, rng)
    data["crc32c"] = manifest._checksum(data)
    file.write_text(json.dumps(data))


def _forge_record(file: Path, rng: random.Random) -> None:
    """Mutate the body of a record of the journal, and make its checksum match."""
    data, places, at = file.read_bytes(), [], 0
    while (found := parse_record(data, at, None)) is not None:
        places.append((at, found[0]))
        at = found[2]
    if not places:
        file.write_bytes(mutate(data, rng))
        return
    at, record = rng.choice(places)
    body = record.body
    if body[:1] == b"{":
        forged = json.dumps(forge_json(json.loads(body), rng)).encode()
        body = forged.ljust(len(body)) if len(forged) <= len(body) else forged
    else:
        body = mutate(body, rng).ljust(len(body), b"\0")[: len(body)]
    salt = HEADER.unpack_from(data, at)[2]
    head = HEADER.pack(len(body), 0, salt, record.sequence, record.kind)
    crc = google_crc32c.extend(google_crc32c.value(head[:4] + head[8:]), body)
    whole = head[:4] + crc.to_bytes(4, "little") + head[8:] + body
    end = at + len(whole)
    file.write_bytes(data[:at] + whole + data[end:])


def _forge_log(file: Path, rng: random.Random) -> None:
    """Mutate an entry of episodes.log, and make its checksum match."""
    data = bytearray(file.read_bytes())
    places, at = [], 0
    while at + 8 <= len(data):
        places.append(at)
        at += max(8, int.from_bytes(data[at : at + 4], "little"))
    at = rng.choice(places)
    size = int.from_bytes(data[at : at + 4], "little")
    body = mutate(bytes(data[at + 8 : at + size]), rng).ljust(size - 8, b"\0")[: size - 8]
    data[at + 4 : at + 8] = int(google_crc32c.value(body)).to_bytes(4, "little")
    data[at + 8 : at + size] = body
    file.write_bytes(data)


def _forge_state(file: Path, rng: random.Random) -> None:
    """Set words of STATE, and make its seal match."""
    words = np.frombuffer(file.read_bytes(), np.int64).copy()
    for _ in range(rng.choice((1, 1, 3))):
        words[rng.randrange(48)] = np.uint64(rng.choice(NUMBERS) % (1 << 64)).astype(np.int64)
    if rng.random() < 0.8:
        page = words.tobytes()
        crc = google_crc32c.extend(google_crc32c.value(page[:320]), page[328:])
        words[40] = 0x53454144 << 32 | int(crc)
    file.write_bytes(words.tobytes())


def _make_texts(folder: Path) -> None:
    rows = [
        {"prompt": f"text {n}" * (n % 7), "tokens": list(range(n % 5)), "reward": n * 1.0}
        for n in range(ROWS)
    ]
    schema = {"prompt": str, "tokens": ("int32", (None,)), "reward": "float64"}
    with expstore.open(
        folder / "a.exp", seed=3, layout={"kind": "arrow", "compression": "lz4"}, schema=schema
    ) as rb:
        rb.extend(rows)
        rb.flush()


def _read_texts(folder: Path, whole: bool) -> None:
    _run_all([partial(_follow, folder / "a.exp", whole), partial(verify, folder / "a.exp")])


def _make_columns(folder: Path) -> None:
    _store(folder)
    with expstore.open(folder / "b.exp", seed=3, layout="packed") as rb:
        rb.extend(_rows())


def _read_columns(folder: Path, whole: bool) -> None:
    for name in ("a.exp", "b.exp"):
        _run_all([partial(_follow, folder / name, whole), partial(verify, folder / name)])


def _make_versions(folder: Path) -> None:
    from obstore.store import MemoryStore

    _store(folder)
    store = MemoryStore()
    with expstore.open(folder / "a.exp") as rb:
        expstore.cold.push(rb, store)
    shutil.rmtree(folder / "a.exp")
    for item in (item for page in store.list() for item in page):
        path = folder / "bucket" / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(item["path"]).bytes())


def _forge_versions(file: Path, rng: random.Random) -> None:
    from expstore.cold import version_list

    data = json.loads(file.read_text())
    del data["sha256"]
    sealed = version_list.seal(forge_json(data, rng))
    if file.name != "versions.json":  # the list has the checksum of the list of files
        import hashlib

        digest = hashlib.sha256(sealed).hexdigest()
        listed = file.parents[2] / "versions.json"
        about = json.loads(listed.read_text())
        del about["sha256"]
        about["versions"][0]["manifest"] = digest
        listed.write_bytes(version_list.seal(about))
        file = file.with_name(f"{digest}.json")
    file.write_bytes(sealed)


def _read_versions(folder: Path, whole: bool) -> None:
    from obstore.store import MemoryStore

    store = MemoryStore()
    for path in (folder / "bucket").rglob("*"):
        if path.is_file():
            store.put(path.relative_to(folder / "bucket").as_posix(), path.read_bytes())
    expstore.cold.versions(store)
    expstore.cold.pull(store, folder / "b.exp")
    _follow(folder / "b.exp")


# -- data sets -------------------------------------------------------------------------------------------


def _export(form: str, name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        with expstore.open(folder / "rows.exp") as rb:
            rb.extend(_rows())
            getattr(exchange, f"export_{form}")(rb, folder / name)
        shutil.rmtree(folder / "rows.exp")

    return make


def _import(form: str, name: str) -> Callable[[Path, bool], object]:
    def read(folder: Path, whole: bool) -> None:
        if whole or form not in _READ:
            getattr(exchange, f"import_{form}")(folder / name, folder / "out.exp")
        else:
            _READ[form](folder / name)

    return read


def _read_flat_hdf5(path: Path) -> None:
    with hdf5._open_hdf5(path) as file:
        with hdf5._parsing(path):
            reader = hdf5._Reader(file, path)
        _read_flat(reader)


def _read_flat_npz(path: Path) -> None:
    with ExitStack() as stack:
        with npz.reading_npz(path):
            reader = npz._Reader(path, stack)
        _read_flat(reader)


def _read_flat(reader: Any) -> None:
    for column in reader.columns:
        reader.read([column], 0, min(reader.lengths))


def _read_parquet(path: Path) -> None:
    parts = [table_files.ParquetPart(one) for one in table_import.parquet_files(path)]
    _read_tables(path, parts, table_import._read_facts(path / "episodes.parquet", pq.read_table))


def _read_arrow(path: Path) -> None:
    parts = [table_files.ArrowPart(path / "rows.arrow")]
    facts = table_import._read_facts(path / "episodes.arrow", lambda file: pa.ipc.open_file(file).read_all())
    _read_tables(path, parts, facts)


def _read_tables(path: Path, parts: Sequence[table_files.Part], facts: Any) -> None:
    with table_files.reading_arrow(path):
        for part in parts:
            table_layout.needs_survey(part.schema)
            table_layout.read_layout(part.schema)
            part.row_bytes(), part.first_id()
            for batch in part.batches(1000):
                batch.to_pylist()
        for episode in range(1, 4):
            facts(episode)


_READ = {"hdf5": _read_flat_hdf5, "npz": _read_flat_npz, "parquet": _read_parquet, "arrow": _read_arrow}


def _data_sets(*sources: tuple[str, str]) -> Callable[[Path, bool], object]:
    def read(folder: Path, whole: bool) -> None:
        _run_all([partial(_data_set, form, folder / name, whole) for form, name in sources])

    return read


def _data_set(form: str, source: Path, whole: bool) -> None:
    """Import a data set, or read all of it as the importer does."""
    if whole:
        import_dataset(make_reader(form, source), source.with_name(f"{form}.{source.name}.exp"))
        return
    reader = make_reader(form, source)
    with importer._reading("the source"):
        parts = list(reader.parts())
        reader.facts()
    importer._total(reader, parts)
    for part in parts:
        deque(importer._read(reader, part), maxlen=0)


def _make_hdf5(folder: Path) -> None:
    import h5py

    at = np.arange(ROWS)
    arrays = {
        "observations": at[:, None] + np.zeros((1, 3), "f4"),
        "actions": np.zeros((ROWS, 2), "f4"),
        "rewards": at.astype("f4"),
        "terminals": at % 20 == 19,
        "timeouts": np.zeros(ROWS, bool),
        "infos/qpos": at[:, None] * 1.0,
    }
    with h5py.File(folder / "flat.hdf5", "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, chunks=(20, *values.shape[1:]), compression="gzip")
        # Of a fixed length: libhdf5 1.14 itself never ends with some forged heaps of variable-length text.
        file["metadata/algorithm"] = np.bytes_("sac")
    with h5py.File(folder / "episodes.hdf5", "w") as file:
        for number in range(3):
            group = file.create_group(f"data/demo_{number}")
            group.attrs["num_samples"] = 20
            group["obs/pos"] = arrays["observations"][:20]
            for name in ("actions", "rewards"):
                group[name] = arrays[name][:20]
            group["dones"] = arrays["terminals"][:20]
        file["data"].attrs["env_args"] = np.bytes_("{}")
        file["link"] = h5py.SoftLink("/data/demo_0")


def _read_hdf5(folder: Path, whole: bool) -> None:
    sources = (("d4rl", "flat.hdf5"), ("robomimic", "episodes.hdf5"), ("hdf5", "episodes.hdf5"))
    _run_all(
        [
            partial(_data_sets(*sources), folder, whole),
            partial(_import("hdf5", "flat.hdf5"), folder, whole),
        ]
    )


def _make_npz(folder: Path) -> None:
    at = np.arange(ROWS)
    np.savez_compressed(
        folder / "a.npz",
        observations=at[:, None] * 1.0,
        actions=at,
        rewards=at * 1.0,
        terminals=at % 20 == 19,
    )
    np.savez(
        folder / "v.npz", image=np.zeros((ROWS, 3, 4, 4), "u1"), action=np.zeros((ROWS, 2)),
        reward=np.zeros(ROWS), is_first=at % 20 == 0,
    )  # fmt: skip


def _read_npz(folder: Path, whole: bool) -> None:
    _run_all(
        [
            partial(_import("npz", "a.npz"), folder, whole),
            partial(_data_sets(("vd4rl", "v.npz")), folder, whole),
        ]
    )


def _copy(*names: str) -> Callable[[Path], None]:
    """Return a function that copies files of other libraries."""

    def make(folder: Path) -> None:
        for name in names:
            shutil.copy(ROOT / "tests/fixtures/foreign" / name, folder)

    return make


def _import_each(folder: Path, whole: bool) -> None:
    """Import every file by the format that is recognised."""
    paths = sorted(folder.iterdir())
    _run_all([partial(_import_recognised, path, folder / f"{path.name}.exp") for path in paths])


def _import_recognised(path: Path, target: Path) -> None:
    getattr(exchange, f"import_{format_of(path)}")(path, target)


def _make_sb3(folder: Path) -> None:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    saved = ReplayBuffer(40, spaces.Box(-1, 1, (3,)), spaces.Discrete(2), "cpu", n_envs=2)
    for step in range(30):
        values = np.full((2, 3), step, np.float32)
        ends = np.array([step % 10 == 9] * 2)
        saved.add(values, values + 1, np.zeros((2, 1)), np.ones(2), ends, [{}, {}])
    (folder / "a.pkl").write_bytes(pickle.dumps(saved))


def _make_rlds(folder: Path) -> None:
    from tests.unit.datasets.test_rlds import small

    (folder / "a").mkdir()
    small(folder / "a")


def _forge_tfrecord(file: Path, rng: random.Random) -> None:
    """Mutate a record, or its length, and make the checksums match."""
    if file.suffix == ".json":
        file.write_bytes(mutate_json(file.read_bytes(), rng))
        return
    from tests.unit.datasets.test_rlds import masked_crc

    data, places, at = file.read_bytes(), [], 0
    while at + 12 <= len(data):
        places.append(at)
        at += 16 + int.from_bytes(data[at : at + 8], "little")
    at = rng.choice(places)
    size = int.from_bytes(data[at : at + 8], "little")
    if rng.random() < 0.2:
        head = (rng.choice(NUMBERS) % (1 << 64)).to_bytes(8, "little")
        file.write_bytes(data[:at] + head + masked_crc(head) + data[at + 12 :])
        return
    body = mutate(data[at + 12 : at + 12 + size], rng)
    head = len(body).to_bytes(8, "little")
    whole = head + masked_crc(head) + body + masked_crc(body)
    file.write_bytes(data[:at] + whole + data[at + 16 + size :])


def _make_lerobot(folder: Path) -> None:
    from tests.unit.datasets.test_lerobot import write_v2, write_v3

    (folder / "3").mkdir()
    (folder / "2").mkdir()
    write_v3(folder / "3")
    write_v2(folder / "2")


def _make_tensordict(folder: Path) -> None:
    data = _rows()
    data["texts"] = "one text"
    data.memmap(folder / "a")


def _make_minari(folder: Path) -> None:
    from tests.support.minari_sets import write_old_minari

    write_old_minari(folder / "a")
    tables = folder / "b" / "data"
    tables.mkdir(parents=True)
    about = json.loads((folder / "a/data/metadata.json").read_text())
    about |= {"data_format": "parquet", "total_episodes": 2}
    (tables / "metadata.json").write_text(json.dumps(about))
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(2):
        place = tables / str(number)
        place.mkdir()
        steps = 5
        at = np.arange(steps + 1.0)
        lists = {
            name: pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(at, size)), size)
            for name, size in (("observations", 3), ("actions", 1))
        }
        flags = pa.array([False] * (steps + 1))
        pq.write_table(
            pa.table(
                {
                    "episode_id": [number] * (steps + 1),
                    **lists,
                    "rewards": at,
                    "terminations": flags,
                    "truncations": flags,
                }
            ),
            place / "main_data.parquet",
        )
        (place / "metadata.json").write_text(json.dumps({"id": number, "total_steps": steps, "seed": 1}))


FORMATS = {
    "hdf5": Format(make=_make_hdf5, read=_read_hdf5, targets=("*.hdf5",)),
    "npz": Format(make=_make_npz, read=_read_npz, targets=("*.npz",)),
    "csv": Format(
        make=_copy("spreadsheet.csv", "spreadsheet_semicolon.csv"), read=_import_each, targets=("*.csv",)
    ),
    "rings": Format(
        make=_copy("tianshou_vector_wrapped.hdf5", "spinningup_wrapped.npz", "sb3_arrays.npz"),
        read=_import_each,
        targets=("*",),
    ),
    "sb3": Format(make=_make_sb3, read=_import("sb3", "a.pkl"), targets=("*.pkl",)),
    "parquet": Format(
        make=_export("parquet", "a"), read=_import("parquet", "a"), targets=("a/*", "a/**/*.parquet")
    ),
    "arrow": Format(make=_export("arrow", "a"), read=_import("arrow", "a"), targets=("a/*",)),
    "rlds": Format(make=_make_rlds, read=_data_sets(("rlds", "a")), targets=("a/*",), forge=_forge_tfrecord),
    "minari": Format(
        make=_make_minari,
        read=_data_sets(("minari", "a"), ("minari", "b")),
        targets=("*/data/*", "b/data/*/*"),
    ),
    "lerobot": Format(
        make=_make_lerobot,
        read=_data_sets(("lerobot", "2"), ("lerobot", "3")),
        targets=("*/meta/*", "*/data/*/*", "*/meta/*/*/*"),
    ),
    "tensordict": Format(make=_make_tensordict, read=_data_sets(("tensordict", "a")), targets=("a/**/*",)),
    "columns": Format(
        make=_make_columns, read=_read_columns, targets=("*.exp/columns/**/*", "*.exp/checksums/*")
    ),
    "manifest": Format(
        make=_store, read=_read_store, targets=("a.exp/expstore.json",), forge=_forge_manifest
    ),
    "state": Format(
        make=lambda folder: _store(folder, capacity=50),
        read=_read_store,
        targets=("a.exp/STATE",),
        forge=_forge_state,
    ),
    "journal": Format(make=_store, read=_read_store, targets=("a.exp/journal/*",), forge=_forge_record),
    "episodes": Format(make=_store, read=_read_store, targets=("a.exp/episodes.log",), forge=_forge_log),
    "segments": Format(
        make=_make_texts, read=_read_texts, targets=("a.exp/columns/segments/**/*", "a.exp/segments/**/*")
    ),
    "index": Format(make=partial(_store, index=True), read=_read_index, targets=("a.exp/index.duckdb",)),
    "versions": Format(
        make=_make_versions,
        read=_read_versions,
        targets=("bucket/versions.json", "bucket/manifests/*/*.json"),
        forge=_forge_versions,
    ),
}
