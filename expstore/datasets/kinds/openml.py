"""Read OpenML's classification data sets as bandits: features `X` and the class `y` of every row.

Source of the formats: ARFF, https://waikato.github.io/weka-wiki/formats_and_processing/arff/, read with
SciPy; CSV, read with pandas. scikit-learn prepares the features as in TorchRL's `OpenMLExperienceReplay`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np

from expstore.core.values import Array
from expstore.datasets.download import RemoteFile, fetch_json
from expstore.datasets.episode import Part, Reader, Rows
from expstore.datasets.kind import Kind, Request
from expstore.datasets.samples import write_file
from expstore.datasets.source_paths import check_file, parses_source
from expstore.disk.local_path import local_path
from expstore.errors import SchemaError, StorageError
from expstore.exchange.base import import_library, open_to_read

OpenMLName = Literal[
    "adult_num", "adult_onehot", "mushroom_num", "mushroom_onehot", "covertype", "shuttle", "magic"
]

#: The class that is predicted for adult; OpenML uses the income instead.
_ADULT_CLASS = "occupation"
_ROWS = 65_536
_ADDRESS = "https://www.openml.org"
#: Name and version on OpenML.
_PUBLIC = {
    "adult_num": ("adult", 1),
    "adult_onehot": ("adult", 1),
    "mushroom_num": ("mushroom", 1),
    "mushroom_onehot": ("mushroom", 1),
    "covertype": ("covertype", 3),
    "shuttle": ("shuttle", 1),
    "magic": ("MagicTelescope", 1),
}


class OpenMLReader(Reader):
    """Read one of OpenML's data sets: rows `X` float64 `(n, features)` and `y` int64 `(n,)`.

    Categories become numbers for names that end with `_num`, and one-hot vectors for names that end with
    `_onehot`; numbers are scaled to mean 0 and variance 1. The last column of the file is the class. For
    adult, `occupation` is the class, and rows with missing values are left out. The file is read into memory
    as a whole.

    Args:
        source: An ARFF or a CSV file.
        name: How the columns are prepared. None uses the beginning of the file's name.

    Raises:
        NotFoundError: The file does not exist.
        SchemaError: The name is unknown, or the file does not have the columns.
        MissingExtraError: scikit-learn or pandas is not installed.

    Example:
        >>> from expstore.datasets import OpenMLReader, import_dataset, make_sample
        >>> source = make_sample("openml", "shuttle.arff")
        >>> done = import_dataset(OpenMLReader(source, name="shuttle"), "data.exp")
    """

    format: ClassVar[str] = "openml"

    @parses_source
    def __init__(self, source: str | Path, *, name: OpenMLName | None = None) -> None:
        self._path = local_path(source)
        check_file(self._path)
        names: tuple[str, ...] = get_args(OpenMLName)
        if name is None:
            fitting = [one for one in names if self._path.name.startswith(one)]
            name = cast(OpenMLName, fitting[0]) if fitting else None
        if name not in names:
            raise SchemaError(
                f"{name or self._path.name!r} is not one of {', '.join(names)}", hint="pass name="
            )
        self._name = name
        import_library("sklearn.preprocessing")
        self._pandas = import_library("pandas")

    def parts(self) -> list[Part]:
        """Return the file."""
        return [Part(name=self._path.name, files=[self._path])]

    def options(self) -> Mapping[str, Any]:
        """Return how the columns are prepared."""
        return {"name": self._name}

    def episodes(self, part: Part) -> Iterator[Rows]:
        """Yield the rows in their order."""
        features, classes = self._prepare(self._read())
        for start in range(0, len(classes), _ROWS):
            rows = slice(start, start + _ROWS)
            yield Rows(columns_by_key={"X": features[rows], "y": classes[rows]})

    def _read(self) -> Any:
        """Return the table: categories as pandas categories, missing values as NaN."""
        with open_to_read(self._path) as raw:
            if self._path.suffix.lower() == ".csv":
                try:
                    table = self._pandas.read_csv(raw, na_values=["?"], skipinitialspace=True)
                except (ValueError, UnicodeDecodeError) as exc:
                    raise StorageError(f"cannot read {self._path} as CSV: {exc}") from exc
                texts = table.select_dtypes(exclude=["number", "bool"]).columns
                return table.astype(dict.fromkeys(texts, "category"))
            arff = import_library("scipy.io.arff")
            text = bytes(raw.read()).decode("utf-8", "replace")
        try:
            values, about = arff.loadarff(io.StringIO(text))
        except (arff.ArffError, ValueError, NotImplementedError, StopIteration, IndexError) as exc:
            raise StorageError(f"cannot read {self._path} as ARFF: {exc}") from exc
        table = self._pandas.DataFrame(values)
        for column in about.names():
            if about[column][0] == "nominal":
                table[column] = table[column].str.decode("utf-8").replace("?", None).astype("category")
        return table

    def _prepare(self, table: Any) -> tuple[Array, Array]:
        """Return features and classes."""
        prepare = import_library("sklearn.preprocessing")
        if len(table.columns) < 2 or not len(table):
            raise SchemaError(f"{self._path} has {len(table.columns)} columns and {len(table)} rows")
        X, y = table.iloc[:, :-1].copy(), table.iloc[:, -1]
        is_adult, is_mushroom = self._name.startswith("adult"), self._name.startswith("mushroom")
        if is_adult:
            if _ADULT_CLASS not in X:
                raise SchemaError(f"{self._path} has no column {_ADULT_CLASS!r}")
            X = X[~X.isna().any(axis=1)].copy()
            y = X.pop(_ADULT_CLASS)
        categories = list(X.columns if is_mushroom else X.select_dtypes(include=["category"]).columns)
        if categories and not (is_adult or is_mushroom):
            raise SchemaError(f"{self._path} has columns that are not numeric: {', '.join(categories)}")
        for column in categories:
            X[column] = prepare.LabelEncoder().fit_transform(X[column].astype(object))
        if self._name.endswith("_onehot"):
            encoded = prepare.OneHotEncoder(sparse_output=False).fit_transform(X[categories])
            numbers = X.drop(columns=categories)
            scaled = [prepare.StandardScaler().fit_transform(numbers)] if len(numbers.columns) else []
            features = np.concatenate([*scaled, encoded], axis=1)
        else:
            features = prepare.StandardScaler().fit_transform(X)
        classes = prepare.LabelEncoder().fit_transform(y.astype(object) if y.dtype == "category" else y)
        return np.asarray(features, np.float64), np.asarray(classes, np.int64)


def _list_files(request: Request) -> list[RemoteFile]:
    """Ask OpenML for the address of a data set's file.

    Source of the interface: https://www.openml.org/apis.
    """
    public, version = _PUBLIC[request.dataset_id]
    base = f"{request.mirror}/api/v1/json/data"
    listing = fetch_json(f"{base}/list/data_name/{public}/data_version/{version}")
    about = fetch_json(f"{base}/{listing['data']['dataset'][0]['did']}")["data_set_description"]
    return [RemoteFile(url=about["url"], name=f"{request.dataset_id}.arff")]


def _make_sample(path: Path) -> None:
    """Write a table with numbers alone, which the names "shuttle", "magic" and "covertype" prepare."""
    random = np.random.default_rng(0)
    rows = [[*random.normal(size=4).round(3).tolist(), kind] for kind in random.integers(1, 4, 60).tolist()]
    lines = ["@relation sample", *(f"@attribute V{number} numeric" for number in range(4))]
    lines += ["@attribute class {1,2,3}", "@data", *(",".join(map(str, row)) for row in rows)]
    write_file(path, "\n".join([*lines, ""]).encode())


KIND = Kind(
    reader=OpenMLReader,
    files="an ARFF or a CSV file",
    make_sample=_make_sample,
    endings="the rows are no episodes; they are one, which is cut",
    recognize=lambda source: source.suffix == ".arff",
    prefix="openml",
    buffer="OpenMLExperienceReplay",
    ids=list(_PUBLIC),
    unknown_id="Dataset does not exist: {!r}",
    public=_ADDRESS,
    mirror=_ADDRESS,
    list_files=_list_files,
    options=lambda dataset_id: {"name": dataset_id},
)
