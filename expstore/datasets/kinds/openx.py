"""Read Open X-Embodiment's data sets from the Hugging Face Hub: tar archives of pickled episodes.

Source of the format: https://huggingface.co/datasets/jxu124/OpenX-Embodiment. The archives of a data set are
called `NAME/NAME_00000.tar` and so on. A member `KEY.data.pickle` is a dict whose `steps` are dicts of the
step's observation, action, reward and flags. An image is a dict of `bytes`, a PNG or JPEG file, and `path`.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, cast

import numpy as np

from expstore.core.values import Key, key_name
from expstore.datasets.download import HUGGING_FACE, RemoteFile, list_hub
from expstore.datasets.episode import Episode, Part, Reader
from expstore.datasets.kind import Kind, Request
from expstore.datasets.recognition import ARCHIVES, Source
from expstore.datasets.samples import encode_tar, make_walks, write_file
from expstore.datasets.source_paths import check_exists, parses_source
from expstore.datasets.steps import LastStep, Steps
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import ExpStoreError, NotFoundError, SchemaError, StorageError
from expstore.exchange.base import open_to_read
from expstore.exchange.numpy_unpickler import load_arrays

FieldKind = Literal["numbers", "image", "text", "left out"]

_SUFFIX = ".data.pickle"
_PIECE_BYTES = 16 << 20
_REPOSITORY = "jxu124/OpenX-Embodiment"
#: TorchRL's names, in its order. "*" stands for `_converted_externally_to_rlds`.
_IDS = [
    "fractal20220817_data", "kuka", "bridge", "taco_play", "jaco_play", "berkeley_cable_routing",
    "roboturk", "nyu_door_opening_surprising_effectiveness", "viola", "berkeley_autolab_ur5", "toto",
    "language_table", "columbia_cairlab_pusht_real", "stanford_kuka_multimodal_dataset*",
    "nyu_rot_dataset*", "stanford_hydra_dataset*", "austin_buds_dataset*", "nyu_franka_play_dataset*",
    "maniskill_dataset*", "furniture_bench_dataset*", "cmu_franka_exploration_dataset*",
    "ucsd_kitchen_dataset*", "ucsd_pick_and_place_dataset*", "austin_sailor_dataset*",
    "austin_sirius_dataset*", "bc_z", "usc_cloth_sim*", "utokyo_pr2_opening_fridge*",
    "utokyo_pr2_tabletop_manipulation*", "utokyo_saytap*", "utokyo_xarm_pick_and_place*",
    "utokyo_xarm_bimanual*", "robo_net", "berkeley_mvp*", "berkeley_rpt*", "kaist_nonprehensile*",
    "stanford_mask_vit*", "tokyo_u_lsmo*", "dlr_sara_pour*", "dlr_sara_grid_clamp*",
    "dlr_edan_shared_control*", "asu_table_top*", "stanford_robocook*", "eth_agent_affordances",
    "imperialcollege_sawyer_wrist_cam", "iamlab_cmu_pickup_insert*", "uiuc_d3field", "utaustin_mutex",
    "berkeley_fanuc_manipulation", "cmu_playing_with_food", "cmu_play_fusion", "cmu_stretch",
    "berkeley_gnm_recon", "berkeley_gnm_cory_hall", "berkeley_gnm_sac_son",
]  # fmt: skip
#: Errors of reading a damaged or truncated archive.
_DAMAGED = (tarfile.TarError, EOFError, zlib.error)
#: A few bytes of a pickle can expand to a huge number of fields or values, by referring to one list
#: repeatedly.
_MOST_FIELDS = 1000
_MOST_VALUES = 1 << 26


class OpenXReader(Reader):
    """Read the episodes of a data set of Open X-Embodiment.

    - `observation`, `action`, `reward` of a step become `observation`, `action`, `next.reward`. Other numbers
      (`discount`, `language_embedding`) keep their names, `is_first` becomes `is_init`.
    - Images become uint8 `(channels, height, width)`. Python floats become float32, arrays keep their dtype.
    - Texts (`language_instruction`) become annotations of the episode; a text that changes is a list of
      `{"step", "text"}`.
    - `episode` is the number of the episode in the data set, `frame` the number of the step in its episode.
    - The last step determines how an episode ends: terminated if `is_terminal` is set, cut if `is_last` is
      not set, otherwise truncated. Both flags are used only in the last step.
    - `rb.meta["openx"]["left_out"]` names what cannot be stored (None, lists of texts). Episodes without
      steps have no rows.

    `numpy_unpickler` reads the pickles, without running code that they name.

    Args:
        source: An archive, or a folder of archives, or a folder of files `KEY.data.pickle`, read in the order
            of their names.
        last_step: Meaning of the last step of an episode. "transition", as in TorchRL: a row like the others;
            the observation after it is not recorded. "observation", as in RLDS: only its observation is used,
            as the one after the last action; episodes of one step have no rows.
        trust_pickle: Whether to use Python's own unpickler, which accepts classes other than NumPy's. Pickles
            can run any code: set it only if you trust the authors of the files.

    Raises:
        NotFoundError: The archive does not exist, or the folder has none.
        SchemaError: A file does not contain such a dict, or the fields of episodes differ.
        MissingExtraError: There are images, and Pillow is not installed.

    Example:
        >>> from expstore.datasets import OpenXReader, import_dataset, make_sample
        >>> source = make_sample("openx", "cmu_stretch")
        >>> done = import_dataset(OpenXReader(source), "data.exp")
    """

    format: ClassVar[str] = "openx"

    @parses_source
    def __init__(
        self, source: str | Path, *, last_step: LastStep = "transition", trust_pickle: bool = False
    ) -> None:
        if last_step not in ("observation", "transition"):
            raise SchemaError(f"last_step={last_step!r} is not one of 'observation' and 'transition'")
        path, disk = local_path(source), ReadingDisk()
        check_exists(path)
        self._last_step, self._trust_pickle = last_step, trust_pickle
        files = [path / name for name in sorted(disk.names(path))] if disk.is_dir(path) else [path]
        archives = [one for one in files if one.name.endswith(ARCHIVES)]
        pickles = [one for one in files if one.name.endswith(_SUFFIX)]
        if archives:
            self._parts = [Part(name=one.name, files=[one]) for one in archives]
        elif pickles:
            self._parts = [Part(name=path.name, files=pickles)]
        else:
            raise NotFoundError(f"there is no .tar archive and no *{_SUFFIX} file in {path}")
        #: Number of records by part, as far as it is known.
        self._records: dict[str, int] = {}
        self._known: dict[Key, FieldKind] | None = None

    def parts(self) -> list[Part]:
        """Return the archives; a folder without archives is one part."""
        return self._parts

    def options(self) -> Mapping[str, Any]:
        """Return the meaning of the last step."""
        return {"last_step": self._last_step}

    def facts(self) -> Mapping[str, Any]:
        """Return which fields of a step are texts, and which are left out."""
        field_kinds = self._read_field_kinds()
        return {
            "openx": {
                "texts": [".".join(key) for key, kind in field_kinds.items() if kind == "text"],
                "left_out": [".".join(key) for key, kind in field_kinds.items() if kind == "left out"],
            }
        }

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the episodes, long ones in pieces of 16 MB."""
        number = self._first_number(part)
        for name, file in self._files(part):
            with _name_file(name):
                columns = self._read(file)
                if columns is not None:
                    yield from self._check(columns).pieces(number, self._last_step, _PIECE_BYTES, {})
            number += 1

    # -- files -----------------------------------------------------------------------------------------

    def _check(self, columns: _Columns) -> Steps:
        """Return the steps of an episode, which must have the fields of the first episode."""
        known = self._read_field_kinds()
        if columns.field_kinds != known:
            differing = sorted(key_name(key) for key, _ in columns.field_kinds.items() ^ known.items())
            raise SchemaError(f"the steps differ from those of the first episode in {', '.join(differing)}")
        return columns.steps()

    def _read(self, file: BinaryIO) -> _Columns | None:
        """Return the columns of an episode; None if it has no steps."""
        if self._trust_pickle:
            try:
                found = pickle.load(file)
            except Exception as exc:  # code that a pickle names may raise anything
                raise StorageError(f"cannot read a pickle: {exc!r}") from exc
        else:
            found = load_arrays(file)
        if not isinstance(found, dict) or not isinstance(found.get("steps"), list):
            raise SchemaError("the pickle has no list 'steps'")
        return _Columns(found["steps"]) if found["steps"] else None

    def _read_field_kinds(self) -> Mapping[Key, FieldKind]:
        """Return the fields of the first episode and how they are stored; all episodes must have these."""
        if self._known is None:
            for part in self._parts:
                for name, file in self._files(part):
                    with _name_file(name):
                        columns = self._read(file)
                    if columns is not None:
                        self._known = columns.field_kinds
                        return self._known
            raise SchemaError("the source has no episodes")
        return self._known

    def _first_number(self, part: Part) -> int:
        """Return the number of episodes in the parts before this one; archives are listed, not read."""
        number = 0
        for before in self._parts:
            if before.name == part.name:
                break
            if before.name not in self._records:
                with _archive(Path(before.files[0])) as archive:
                    self._records[before.name] = sum(map(_is_record, archive))
            number += self._records[before.name]
        return number

    def _files(self, part: Part) -> Iterator[tuple[str, BinaryIO]]:
        if Path(part.files[0]).name.endswith(_SUFFIX):
            for path in map(Path, part.files):
                with open_to_read(path) as raw, io.BufferedReader(cast(Any, raw)) as file:
                    yield path.name, file
            return
        with _archive(Path(part.files[0])) as archive:
            for member in archive:
                if _is_record(member):
                    yield member.name, cast(BinaryIO, archive.extractfile(member))


@contextmanager
def _archive(path: Path) -> Iterator[tarfile.TarFile]:
    with open_to_read(path) as raw:
        try:
            with tarfile.open(fileobj=cast(Any, raw), mode="r:*") as archive:
                yield archive
        except _DAMAGED as exc:
            raise StorageError(
                f"{path} is not a tar archive, or ends early: {exc}", hint="copy the file again"
            ) from exc


def _is_record(member: tarfile.TarInfo) -> bool:
    return member.isfile() and member.name.endswith(_SUFFIX)


@contextmanager
def _name_file(name: str) -> Iterator[None]:
    """Add the name of a file to errors, including those of the archive that contains it."""
    try:
        yield
    except ExpStoreError as exc:
        raise exc.at(name) from exc
    except _DAMAGED as exc:
        raise StorageError(f"cannot read {name}: {exc}", hint="copy the archive again") from exc


# -- the steps of an episode -----------------------------------------------------------------------------


class _Columns:
    """Sort the values of an episode's steps by what can be stored.

    Args:
        steps: One dict per step; at least one.

    Raises:
        SchemaError: The steps do not have the same fields.
    """

    def __init__(self, steps: Sequence[Any]) -> None:
        #: The fields, and how they are stored.
        self.field_kinds: dict[Key, FieldKind] = {}
        self._values: dict[Key, Any] = {}
        rows = [dict(_leaves((), step, [0])) for step in steps]
        for place, row in enumerate(rows):
            if row.keys() != rows[0].keys():
                differing = ", ".join(sorted(key_name(key) for key in row.keys() ^ rows[0].keys()))
                raise SchemaError(f"step {place} has other fields than step 0: {differing}")
        for key in rows[0]:
            self.field_kinds[key], self._values[key] = _column(key, [row[key] for row in rows])
        for name in ("observation", "action"):
            if not any(
                key[0] == name and kind in ("numbers", "image") for key, kind in self.field_kinds.items()
            ):
                raise SchemaError(f"the steps have no {name}")

    def steps(self) -> Steps:
        """Return the steps under the keys of their fields."""
        columns = {
            key: self._values[key] for key, kind in self.field_kinds.items() if kind in ("numbers", "image")
        }
        texts = {key: self._values[key] for key, kind in self.field_kinds.items() if kind == "text"}
        if ("is_first",) in columns:
            first = columns.pop(("is_first",))
            columns["is_init",] = first.reshape(len(first), 1) > 0.5
        return Steps(columns, texts)


def _leaves(key: Key, value: Any, seen: list[int]) -> Iterator[tuple[Key, Any]]:
    """Yield the values of a step by key; an image is represented by its bytes."""
    seen[0] += 1
    if seen[0] > _MOST_FIELDS:
        raise SchemaError(f"a step has more than {_MOST_FIELDS} fields")
    if not isinstance(value, Mapping):
        if not key:
            raise SchemaError(f"a step is a {type(value).__name__}; a dict is expected")
        yield key, value
    elif "bytes" in value and value.keys() <= {"bytes", "path"}:
        yield key, value["bytes"]
    else:
        for name, below in value.items():
            yield from _leaves((*key, str(name)), below, seen)


def _column(key: Key, values: Sequence[Any]) -> tuple[FieldKind, Any]:
    """Return how the values of a field are stored, and the values."""
    first = values[0]
    if isinstance(first, (str, bytes)):
        if not all(isinstance(value, type(first)) for value in values):
            raise SchemaError(f"{key_name(key)!r} is not {type(first).__name__} in all steps")
        if isinstance(first, bytes) and first.startswith((b"\x89PNG", b"\xff\xd8\xff")):
            return "image", values
        return "text", [
            value.decode(errors="replace") if isinstance(value, bytes) else value for value in values
        ]
    if None in (types := {None if value is None else type(value) for value in values}):
        if len(types) > 1:
            raise SchemaError(f"{key_name(key)!r} is None in some steps")
        return "left out", None
    for value in values:
        _check_size(key, value, len(values))
    is_typed = any(isinstance(value, (np.ndarray, np.generic)) for value in values)
    try:
        found = np.asarray(values)
    except ValueError as exc:
        raise SchemaError(f"{key_name(key)!r} has another shape in some steps") from exc
    if found.dtype.kind not in "biuf":
        return "left out", None
    if not is_typed and found.dtype.kind == "f":
        found = found.astype(np.float32)  # torch converts Python floats to float32
    return "numbers", found


def _check_size(key: Key, value: Any, steps: int) -> None:
    """Raise SchemaError if nested lists expand to more numbers than an episode can have."""
    size = steps
    while isinstance(value, (list, tuple)) and value:
        size *= len(value)
        if size > _MOST_VALUES:
            raise SchemaError(f"{key_name(key)!r} has more than {_MOST_VALUES} values")
        value = value[0]


# -- data sets by name -----------------------------------------------------------------------------------


def _recognize(source: Source) -> bool:
    return source.record.endswith(_SUFFIX) or any(name.endswith(_SUFFIX) for name in source.names)


def _list_files(request: Request) -> list[RemoteFile]:
    return list_hub(
        _REPOSITORY,
        request.dataset_id,
        request.mirror,
        keep=lambda path: path.endswith(".tar"),
        missing=f"has no archives of {request.dataset_id}",
    )


def _make_sample(path: Path) -> None:
    members = {}
    for walk in make_walks():
        steps = [
            {
                "observation": {"state": walk.states[step]},
                "action": walk.actions[step],
                "reward": walk.rewards[step],
                "is_first": step == 0,
                "is_last": step == walk.steps - 1,
                "is_terminal": bool(walk.terminated[step]),
                "language_instruction": b"walk about",
            }
            for step in range(walk.steps)
        ]
        members[f"sample_{walk.number:05}{_SUFFIX}"] = pickle.dumps({"steps": steps})
    write_file(path / "sample_00000.tar", encode_tar(members))


KIND = Kind(
    reader=OpenXReader,
    files="a .tar archive, or a folder of archives or of .data.pickle files",
    make_sample=_make_sample,
    endings="terminated if the last step has `is_terminal`, cut if it has no `is_last`, otherwise truncated",
    recognize=_recognize,
    prefix="openx",
    buffer="OpenXExperienceReplay",
    ids=[name.replace("*", "_converted_externally_to_rlds") for name in _IDS],
    public=f"{HUGGING_FACE}/datasets/{_REPOSITORY}",
    mirror=HUGGING_FACE,
    list_files=_list_files,
    facts="openx",
)
