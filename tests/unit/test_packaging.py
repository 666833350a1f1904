"""Content of the wheel and the sdist.

Run with the other tests, from a checkout; builds both into a temporary folder, without a network, and
never writes into the checkout.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def build(source: Path, kind: str, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = into.iterdir()
    return built


def names_in_wheel(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sdist = build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        assert all(member.isreg() or member.isdir() for member in archive.getmembers())
        assert max(Counter(archive.getnames()).values()) == 1
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


def test_the_wheel_installs_one_name(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names_in_wheel(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"expstore"}


def test_the_wheel_holds_every_module_once(wheel: Path) -> None:
    held = [name for name in names_in_wheel(wheel) if ".dist-info" not in name]
    links = {ROOT / "expstore" / name for name in ("api", "migrations")}
    expected = {"expstore/py.typed"}
    for folder, suffix in (
        (ROOT / "expstore", "*.py"),
        (ROOT / "api", "*.py"),
        (ROOT / "api" / "static", "*"),
        (ROOT / "migrations", "*.sql"),
    ):
        for file in folder.rglob(suffix):
            if file.is_file() and links.isdisjoint(file.parents):
                name = file.relative_to(ROOT).as_posix()
                expected.add(name if folder.name == "expstore" else f"expstore/{name}")
    assert "expstore/migrations/0001_initial.sql" in expected
    assert expected <= set(held)
    assert max(Counter(held).values()) == 1
    assert not [name for name in held if "__pycache__" in name or name.endswith(".pyc")]
    assert not [name for name in held if name.startswith("expstore/api/") and name.endswith(".json")]


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (scripts,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "expstore = expstore.__main__:main" in archive.read(scripts).decode()
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_the_sdist_holds_each_folder_once(unpacked_sdist: Path) -> None:
    for wanted in (
        "api/__init__.py",
        "migrations/0001_initial.sql",
        "expstore/py.typed",
        "tests/conftest.py",
    ):
        assert (unpacked_sdist / wanted).is_file()
    for file in ("api/__init__.py", "migrations/0001_initial.sql"):
        folder, name = file.split("/")
        found = {path.relative_to(unpacked_sdist) for path in unpacked_sdist.rglob(name)}
        assert {path for path in found if path.parent.name == folder and path.parts[0] != "tests"} == {
            Path(file)
        }


def test_the_sdist_makes_the_same_wheel(unpacked_sdist: Path, wheel: Path, tmp_path: Path) -> None:
    again = build(unpacked_sdist, "wheel", tmp_path)
    assert sorted(names_in_wheel(again)) == sorted(names_in_wheel(wheel))


def test_every_extra_is_described() -> None:
    """The page about installing has a row for each extra that users may want."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "installing.md").read_text()
    rows = "".join(line for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in extras if f"`{name}`" not in rows] == []


def test_what_a_checkout_needs_is_not_published(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {*project["dependency-groups"]} == {"bench", "dev", "docs"}
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        text = files.read(name).decode()
    assert {*re.findall(r"^Provides-Extra: (.+)$", text, re.M)} == {
        *project["project"]["optional-dependencies"]
    }


def test_pydantic_has_what_the_server_imports() -> None:
    """FastAPI accepts older versions, which have no FailFast; it came with 2.8."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "pydantic>=2.8" in required
