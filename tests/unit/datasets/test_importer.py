"""Imports with a reader: rows, sources, annotations; repeated, killed and resumed imports; errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import expstore
from expstore.buffers.episodes import Episodes
from expstore.datasets import Episode, Part, Reader, import_dataset
from expstore.errors import CorruptionError, LockedError, NotFoundError, SchemaError, StateError, StorageError
from expstore.maintenance import verify


class NpzReader(Reader):
    """One .npz file a part: `x` (the serials of its steps), `ends`, one letter per episode."""

    format: ClassVar[str] = "serials"

    def __init__(
        self, folder: Path, change: Callable[[int], None] = lambda step: None, named: str = "number"
    ) -> None:
        self.folder, self.change, self.named = folder, change, named

    def parts(self) -> list[Part]:
        return [Part(name=one.stem, files=[one]) for one in sorted(self.folder.glob("*.npz"))]

    def facts(self) -> Mapping[str, Any]:
        return {"author": "ada"}

    def count_rows(self, part: Part) -> int:
        with np.load(part.files[0]) as file:
            return len(file["x"])

    def episodes(self, part: Part) -> Iterator[Episode]:
        with np.load(part.files[0]) as file:
            x, lengths, ends = file["x"], file["lengths"], str(file["ends"])
        at = 0
        for number, (length, letter) in enumerate(zip(lengths.tolist(), ends, strict=True)):
            last = at + length
            self.change(at)
            # Long episodes come in pieces of 7 steps.
            for start in range(at, last, 7):
                stop = min(start + 7, last)
                kind = "open" if stop < last else {"t": "terminated", "T": "truncated", "c": "cut"}[letter]
                states = np.append(x[start:stop], x[stop - 1] + 1)
                wide = np.zeros((len(states), 40, 40), np.uint8) + states[:, None, None].astype(np.uint8)
                yield Episode(
                    observation={"pos": states[:, None].astype(np.float32), "frame": wide},
                    action=x[start:stop] % 3,
                    reward=np.ones(stop - start, np.float32),
                    end=kind,  # type: ignore[arg-type]
                    info={"step": states},
                    fields={self.named: np.full(stop - start, number)},
                    facts={"seed": number} if number % 2 else {},
                )
            at = last


def make_source(folder: Path, seed: int = 0, parts: int = 3, episodes: int = 12) -> Path:
    random = np.random.default_rng(seed)
    folder.mkdir()
    for part in range(parts):
        lengths = random.integers(1, 30, episodes)
        starts = 1000 * part + np.cumsum(lengths) - lengths  # all states join: only the reader knows the ends
        x = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        ends = "".join(random.choice(list("tTc"), episodes))
        np.savez(folder / f"part{part}.npz", x=x, lengths=lengths, ends=ends)
    return folder


def picture(path: Path) -> tuple[Any, ...]:
    """Return all that two equal imports have in common."""
    assert verify(path) == []
    with expstore.open(path, mode="r") as rb:
        rows = rb[:]
        values = [
            (str(key), rows[key].numpy().tobytes())
            for key in sorted(rows.keys(True, True), key=str)
            if str(key) not in ("index_generation",)
        ]
        episodes = rb.sql(
            'SELECT episode_id, source, length, "return", status, info FROM episodes ORDER BY episode_id'
        ).fetchall()
        return values, episodes, rb.meta


def test_rows_sources_and_facts(tmp_path: Path) -> None:
    source = make_source(tmp_path / "raw")
    told: list[tuple[int, int]] = []
    done = import_dataset(NpzReader(source), tmp_path / "a.exp", progress=lambda a, b: told.append((a, b)))
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        rows = rb[:]
        episodes = rb.sql("SELECT source, length, status, info FROM episodes ORDER BY episode_id").fetchall()
        assert rb.meta["author"] == "ada"
        assert [part["name"] for part in rb.meta["import"]["parts"]] == ["part0", "part1", "part2"]
    assert done.rows == len(rows) == told[-1][0] == told[-1][1]
    assert (done.episodes, len(episodes)) == (36, 36)
    at = 0
    for part in range(3):
        with np.load(source / f"part{part}.npz") as file:
            x, lengths, ends = file["x"], file["lengths"].tolist(), str(file["ends"])
        there = slice(at, at + len(x))
        np.testing.assert_array_equal(rows["observation", "pos"][there, 0].numpy(), x)
        np.testing.assert_array_equal(rows["next", "observation", "pos"][there, 0].numpy(), x + 1)
        np.testing.assert_array_equal(
            rows["next", "observation", "frame"][there, 3, 3].numpy(), (x + 1) % 256
        )
        np.testing.assert_array_equal(rows["next", "info", "step"][there].numpy(), x + 1)
        own = episodes[12 * part : 12 * part + 12]
        assert [name.split("@")[0] for name, *_ in own] == [f"part{part}"] * 12
        assert [length for _, length, *_ in own] == lengths
        names = {"t": "terminated", "T": "truncated", "c": "cut"}
        assert [status for _, _, status, _ in own] == [names[letter] for letter in ends]
        facts = [info and json.loads(info) for *_, info in own]
        assert facts == [{"seed": n} if n % 2 else None for n in range(12)]
        at += len(x)
    assert rows["next", "reward"].shape == (len(rows), 1)
    done_flags = rows["next", "done"]
    assert (done_flags == (rows["next", "terminated"] | rows["next", "truncated"])).all()
    assert not any(rows[name].any() for name in ("done", "terminated", "truncated"))


def test_a_second_import_does_nothing_and_other_files_are_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path / "raw")
    target = tmp_path / "a.exp"
    first = import_dataset(NpzReader(source), target)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    assert import_dataset(NpzReader(source), target) == first
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    other = make_source(tmp_path / "other", seed=1)
    with pytest.raises(StateError, match="was not imported from these files"):
        import_dataset(NpzReader(other), target)
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="exists already"):
        import_dataset(NpzReader(source), tmp_path / "file")
    with pytest.raises(NotFoundError, match="there is no folder"):
        import_dataset(NpzReader(source), tmp_path / "none" / "b.exp")


def kill_import(source: Path, target: Path, calls: int, named: str = "number") -> bool:
    """Import in a child that is killed when the reader begins its n-th episode; say whether it ended."""
    child = os.fork()
    if not child:
        left = calls

        def count(_: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            import_dataset(NpzReader(source, count, named), target)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status == 0


@pytest.mark.slow
@pytest.mark.parametrize("named", ["number", "episode"])  # "episode" is a trajectory id
def test_killed_ten_times_it_equals_an_uninterrupted_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr("expstore.datasets.importer._BATCH_ROWS", 5)  # a batch ends within episodes
    source = make_source(tmp_path / "raw")
    import_dataset(NpzReader(source, named=named), tmp_path / "whole.exp")
    random = np.random.default_rng(5)
    kills = 0
    target = tmp_path / "killed.exp"
    while not kill_import(source, target, int(random.integers(6, 16)), named):
        kills += 1
        assert not target.exists()
        assert kills < 100
        if kills >= 10:
            import_dataset(NpzReader(source, named=named), target)
            break
    assert kills >= 5
    whole, killed = picture(tmp_path / "whole.exp"), picture(target)
    assert killed[1:] == whole[1:]
    assert killed[0] == whole[0]
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.slow
def test_killed_between_the_rows_of_an_episode_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "raw")
    import_dataset(NpzReader(source), tmp_path / "whole.exp")
    with monkeypatch.context() as patch:
        patch.setattr(Episodes, "end", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert not kill_import(source, tmp_path / "killed.exp", 1000)
    import_dataset(NpzReader(source), tmp_path / "killed.exp")
    assert picture(tmp_path / "killed.exp") == picture(tmp_path / "whole.exp")


@pytest.mark.slow
def test_another_source_starts_over(tmp_path: Path) -> None:
    source, other = make_source(tmp_path / "raw"), make_source(tmp_path / "other", seed=1)
    target = tmp_path / "a.exp"
    assert not kill_import(source, target, 20)
    assert (tmp_path / ".a.exp.import").is_dir()
    done = import_dataset(NpzReader(other), target)
    assert done == import_dataset(NpzReader(other), target)
    assert not (tmp_path / ".a.exp.import").exists()


def test_two_imports_exclude_each_other(tmp_path: Path) -> None:
    source = make_source(tmp_path / "raw")
    target = tmp_path / "a.exp"
    seen: list[str] = []

    def meanwhile(_: int) -> None:
        if not seen:
            with pytest.raises(LockedError) as caught:
                import_dataset(NpzReader(source), target)
            seen.append(str(caught.value))

    import_dataset(NpzReader(source, meanwhile), target)
    assert seen


class Given(Reader):
    """Yield what a test gives."""

    format: ClassVar[str] = "given"

    def __init__(self, file: Path, *episodes: Episode | Exception) -> None:
        self.file, self.given = file, episodes

    def parts(self) -> list[Part]:
        return [Part(name="part", files=[self.file])]

    def episodes(self, part: Part) -> Iterator[Episode]:
        for one in self.given:
            if isinstance(one, Exception):
                raise one
            yield one


def episode(steps: int = 3, **changes: Any) -> Episode:
    plain: dict[str, Any] = {
        "observation": np.zeros((steps + 1, 2)),
        "action": np.zeros(steps),
        "reward": np.zeros(steps),
        "end": "terminated",
    }
    return Episode(**(plain | changes))


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observation": np.zeros((2, 2))}, "part, episode 1: 'observation' has 2 rows for 3 steps; 3 or 4"),
        ({"reward": np.zeros(4)}, "part, episode 1: 'next.reward' has 4 rows for 3 steps"),
        ({"end": "done"}, "end='done' is not one of terminated, truncated, cut, open"),
        ({"action": np.zeros(0)}, "part, episode 1: the episode has no steps"),
        ({"info": {"x": 3.0}}, "'info.x' is a single value"),
        ({"fields": {("next", "done"): np.zeros(3)}}, "two values are stored as 'next.done'"),
        ({"fields": {"more": np.zeros(3)}}, "some episodes have more, and others do not"),
        ({"observation": np.zeros((4, 3))}, "'observation' has rows of different shapes"),
        ({"observation": np.zeros((3, 2)), "end": "open"}, "a piece that is continued needs 4 rows"),
    ],
)
def test_episodes_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "raw"
    file.write_text("")
    with pytest.raises(SchemaError) as caught:
        import_dataset(Given(file, episode(), episode(**changes)), tmp_path / "a.exp")
    assert message in str(caught.value)
    assert not (tmp_path / "a.exp").exists()


def test_errors_of_a_reader_name_part_and_episode(tmp_path: Path) -> None:
    file = tmp_path / "raw"
    file.write_text("")
    with pytest.raises(StorageError, match=r"cannot read part, episode 1: EOFError\('short'\)"):
        import_dataset(Given(file, episode(), EOFError("short")), tmp_path / "a.exp")
    with pytest.raises(SchemaError, match="the source has no rows"):
        import_dataset(Given(file), tmp_path / "b.exp")
    with pytest.raises(NotFoundError, match="there is no file"):
        import_dataset(Given(tmp_path / "none", episode()), tmp_path / "a.exp")


def test_errors_of_a_reader_keep_kind_and_hint(tmp_path: Path) -> None:
    file = tmp_path / "raw"
    file.write_text("")
    wrong = StorageError("a link leads out", kind="outside", hint="put a copy in its place")
    with pytest.raises(StorageError) as caught:
        import_dataset(Given(file, episode(), wrong), tmp_path / "a.exp")
    assert caught.value.message == "part, episode 1: a link leads out"
    assert (caught.value.kind, caught.value.hint) == ("outside", "put a copy in its place")
    assert str(caught.value) == "part, episode 1: a link leads out; put a copy in its place"
    damaged = CorruptionError("a checksum differs")
    with pytest.raises(CorruptionError) as caught:
        import_dataset(Given(file, damaged), tmp_path / "b.exp")
    assert str(caught.value).count(CorruptionError.default_hint) == 1
