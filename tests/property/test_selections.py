"""A selection is the same after everything that happens to a store, and only its rows are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import RandomSampler, Sampler
from expstore.cold import pull, push
from expstore.errors import ArgumentError, NotFoundError, NotReadyError, QueryError, SchemaError, StateError
from expstore.exchange import export_arrow, export_parquet, import_arrow, import_parquet
from tests.property.test_splits import NUMPY, SAMPLERS, rows

pytestmark = pytest.mark.usefixtures("no_syncs")

WITHOUT_WHERE = ("streaming_slices", "prompt_groups")
IN_CLEAN = "selection('clean-v1')"


def opened(path: Path, **options: Any) -> Any:
    seed = {} if path.exists() else {"seed": 3}
    return expstore.open(path, **{"batches": NUMPY} | seed | options)


def write(rb: Any, tags: list[int], **options: Any) -> None:
    """Append an episode of `tag % 7 + 2` rows for each tag, which are all values of its field `run`."""
    for tag in tags:
        data = rows(tag % 7 + 2, False)
        rb.extend(data | {"run": np.full(data["x"].size, tag)}, **options)


def drawn(rb: Any, sampler: Sampler, draws: int = 40) -> set[int]:
    """Return the tags that draws have."""
    rb.set_sampler(sampler)
    return {int(tag) for _ in range(draws) for tag in np.asarray(rb.sample(32)["run"]).ravel()}


def members(rb: Any, name: str = "clean-v1") -> set[int]:
    """Return the tags of the members that have rows."""
    found = rb.sql(
        "SELECT DISTINCT run FROM transitions WHERE _episode IN "
        f"(SELECT episode_id FROM episodes WHERE selection('{name}'))"
    )
    return {tag for (tag,) in found.fetchall()}


def exported(export: Callable[..., Any], read: Callable[..., Any]) -> Callable[[Any, Path], Any]:
    def change(rb: Any, place: Path) -> Any:
        export(rb, place / "rows", episodes=IN_CLEAN)
        read(place / "rows", place / "read.exp")
        return opened(place / "read.exp")

    return change


def merged(rb: Any, place: Path) -> Any:
    rb.close()
    with opened(place / "other.exp") as other:
        write(other, [100, 101])
    expstore.merge([place / "other.exp", place / "run.exp"], out=place / "both.exp")
    return opened(place / "both.exp")


def restored(rb: Any, place: Path) -> Any:
    rb.dumps(place / "versions")
    rb.selections.drop("clean-v1")
    write(rb, [102])
    rb.loads(place / "versions")
    return rb


def pushed(rb: Any, place: Path) -> Any:
    pytest.importorskip("obstore", reason="the extra expstore[s3] is not installed")
    from tests.support.object_stores import WatchedStorage

    storage = WatchedStorage()
    push(rb, storage)
    pull(storage, place / "pulled.exp")
    return opened(place / "pulled.exp")


def widened(rb: Any, place: Path) -> Any:
    rb.columns.add("mark", sql=f"CASE WHEN {IN_CLEAN} THEN 1 ELSE 0 END", dtype="int64", default=0)
    marked = rb.sql("SELECT DISTINCT run FROM transitions WHERE mark = 1").fetchall()
    assert {tag for (tag,) in marked} == members(rb)
    return rb


def resized(rb: Any, place: Path) -> Any:
    rb.close()
    expstore.resize(place / "run.exp", capacity=10_000)
    return opened(place / "run.exp")


def noted(rb: Any, place: Path) -> Any:
    write(rb, [103, 104])
    for number in rb.episodes().arrow()["episode_id"].to_pylist():
        rb.episodes.annotate(number, note="later")
    return rb


CHANGES: dict[str, Callable[[Any, Path], Any]] = {
    "rows": noted,
    "merge": merged,
    "restore": restored,
    "push": pushed,
    "column": widened,
    "resize": resized,
    "parquet": exported(export_parquet, import_parquet),
    "arrow": exported(export_arrow, import_arrow),
}


@pytest.mark.guarantee(
    "draw/selections",
    "A selection has the same episodes after more rows, merges, restores, pushes and pulls, new columns, "
    "resizes, exports and imports, and samplers with its condition draw exactly the rows of its episodes.",
)
@pytest.mark.parametrize("kind", CHANGES)
def test_a_selection_is_the_same_after(tmp_path: Path, kind: str) -> None:
    with ExitStack() as stack:
        rb = stack.enter_context(opened(tmp_path / "run.exp"))
        write(rb, [*range(10), 4])
        former = rb.selections.create("clean-v1", "length BETWEEN 4 AND 7", reason="demos", by="ada")
        rb.selections.exclude("clean-v1", [3], reason="hangs", by="bob")  # the episode with the definition
        rb.selections.include("clean-v1", [1], reason="checked", by="bob")
        expected = {0, 3, 4, 5, 9}
        assert members(rb) == drawn(rb, RandomSampler(where=IN_CLEAN)) == expected
        changed = stack.enter_context(CHANGES[kind](rb, tmp_path))
        assert members(changed) == drawn(changed, RandomSampler(where=IN_CLEAN)) == expected
        found = changed.selections["clean-v1"]
        assert found == former
        assert [one["reason"] for one in found.changes()][-1:] == ["checked"]
        if kind != "rows":
            return
        assert found.changes()[0] | {"time": 0} == {
            "episode_id": 3, "act": "exclude", "by": "bob", "reason": "hangs", "time": 0
        }  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind not in WITHOUT_WHERE])
def test_every_sampler_draws_exactly_its_rows(tmp_path: Path, kind: str) -> None:
    how = {} if kind == "where" else {"where": IN_CLEAN}
    make = SAMPLERS[kind] if how else lambda **_: RandomSampler(where=f"episode.length > 0 AND {IN_CLEAN}")
    with opened(tmp_path / "a.exp") as rb:
        write(rb, [1, 2, 3, 4])
        write(rb, [5], split="eval")
        rb.selections.create("clean-v1", episodes=[1, 3, 4, 5])
        found = set()
        rb.set_sampler(make(**how))
        for _ in range(60):
            try:
                found |= {int(tag) for tag in np.asarray(rb.sample(4)["run"]).ravel()}
            except NotReadyError:
                break  # without replacement
        assert found == {1, 3, 4}
        rb.selections.exclude("clean-v1", 3, reason="late")
        sampler = make(**how)
        rb.set_sampler(sampler)
        assert 3 not in {int(tag) for tag in np.asarray(rb.sample(4)["run"]).ravel()}


def test_changes_by_hand_reach_samplers_followers_and_no_recorded_draw(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with opened(path) as rb:
        write(rb, [1, 2, 3])
        rb.selections.create("clean-v1", "true")
        consumer = rb.consumer("learner", sampler=RandomSampler(where=IN_CLEAN), batch_size=64)
        before = [consumer.sample()["run"].copy() for _ in range(2)]
        recorded = rb.sql("FROM draws").fetchall()
        rb.set_sampler(RandomSampler(where=IN_CLEAN))
        assert 2 in rb.sample(64)["run"]
        with opened(path, mode="r") as follower:
            follower.set_sampler(RandomSampler(where=IN_CLEAN))
            follower.sample(8)
            rb.selections.exclude("clean-v1", [2], reason="wrong labels")
            assert follower.selections["clean-v1"].episodes().tolist() == [1, 3]
            follower.sampler.filter.refresh(follower.storage)
            rb.sampler.filter.refresh(rb.storage)
            for source in (follower, rb):
                assert 2 not in source.sample(64)["run"]
            with pytest.raises(StateError):
                follower.selections.include("clean-v1", 2, reason="no")
        assert rb.sql("FROM draws").fetchall() == recorded
        assert {2} <= {int(tag) for batch in before for tag in batch}
        rb.selections.include("clean-v1", [2], reason="right after all")
        assert [one["act"] for one in rb.selections["clean-v1"].changes()] == ["exclude", "include"]
        assert members(rb) == {1, 2, 3}
        rb.sampler.filter.refresh(rb.storage)
        assert 2 in rb.sample(64)["run"]


def test_members_without_rows_are_missing_and_the_rest_is_drawn(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        write(rb, [1, 2, 3])
        rb.selections.create("clean-v1", "true")
        found = rb.selections["clean-v1"]
        assert found.episodes(strict=True).tolist() == [1, 2, 3]
        rb.episodes.delete("episode_id = 2")
        assert found.missing().tolist() == [2]
        assert rb.selections().arrow()["missing"].to_pylist() == [1]
        assert found.episodes().tolist() == [1, 2, 3]
        assert drawn(rb, RandomSampler(where=IN_CLEAN)) == {1, 3}
        with pytest.raises(StateError, match=r"lost rows: 2\b"):
            found.episodes(strict=True)
    with opened(tmp_path / "ring.exp", capacity=7) as rb:
        write(rb, [1, 2])
        rb.selections.create("clean-v1", "true")
        write(rb, [3])
        assert rb.selections["clean-v1"].missing().tolist() == [1, 2]  # 2 has lost its first row


def test_a_model_of_selections(tmp_path: Path, rng: np.random.Generator) -> None:
    """Random changes, by hand and by conditions, with writes and restarts between them."""
    model: dict[str, set[int]] = {}
    count, names = 0, ["a", 'b "quoted" ~0', "ü's"]
    rb = opened(tmp_path / "a.exp")
    for _ in range(60):
        act, name = (
            rng.choice(["write", "create", "include", "exclude", "drop", "open"]),
            str(rng.choice(names)),
        )
        some = {int(one) for one in rng.integers(1, count + 1, 3)} if count else set()
        if act == "write":
            write(rb, [int(rng.integers(0, 7))])
            count += 1
        elif act == "open":
            rb.close()
            rb = opened(tmp_path / "a.exp")
        elif act == "create" and count:
            if name in model:
                with pytest.raises(StateError):
                    rb.selections.create(name, "true")
                continue
            where = None if rng.random() < 0.5 else "episode_id % 2 = 1"
            rb.selections.create(name, where, episodes=sorted(some) if where is None else None)
            model[name] = some if where is None else set(range(1, count + 1, 2))
        elif act != "create" and count:
            asked = (sorted(some),) if act != "drop" else ()
            how = {"reason": "chance"} if act != "drop" else {}
            if name not in model:
                with pytest.raises(NotFoundError):
                    getattr(rb.selections, act)(name, *asked, **how)
                continue
            getattr(rb.selections, act)(name, *asked, **how)
            if act == "drop":
                del model[name]
            else:
                model[name] = model[name] | some if act == "include" else model[name] - some
        assert set(rb.selections) == set(model)
        for one, numbers in model.items():
            text = one.replace("'", "''")
            assert set(rb.selections[one].episodes().tolist()) == numbers
            listed = rb.episodes(f"selection('{text}')").arrow()["episode_id"].to_pylist()
            assert set(listed) == numbers
    for first in model:
        for second in model:
            found = rb.selections.diff(first, second)
            assert set(found.only_first) == model[first] - model[second]
            assert set(found.both) == model[first] & model[second]
    rb.close()


@pytest.fixture
def rb(tmp_path: Path) -> Iterator[Any]:
    with opened(tmp_path / "a.exp") as rb:
        write(rb, [1, 2])
        rb.selections.create("clean-v1", "true")
        yield rb


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda rb: rb.episodes("selection('clean')"), QueryError, "did you mean clean-v1"),
        (lambda rb: rb.sql("FROM episodes WHERE selection(7)"), QueryError, "takes one text"),
        (lambda rb: rb.sql(f"FROM transitions WHERE {IN_CLEAN}"), QueryError, "_episode IN"),
        (lambda rb: drawn(rb, RandomSampler(where="selection('x')")), QueryError, "no selection 'x'"),
        (lambda rb: rb.columns.add("y", sql="selection('x')::INT"), QueryError, "no selection 'x'"),
        (lambda rb: rb.selections.create("a/b", "true"), ArgumentError, "is not a name"),
        (lambda rb: rb.selections.create("a"), ArgumentError, "either where="),
        (lambda rb: rb.selections.create("a", "length >"), QueryError, "length >"),
        (lambda rb: rb.selections.create("a", "length > 99"), NotFoundError, "no episode that has ended"),
        (lambda rb: rb.selections.create("a", episodes=[3]), NotFoundError, "no episode 3"),
        (lambda rb: rb.selections.exclude("clean-v1", 1, reason=""), ArgumentError, "a reason is missing"),
        (lambda rb: rb.episodes.annotate(1, _selections={}), SchemaError, "the store's own"),
    ],
)  # fmt: skip
def test_what_is_refused(rb: Any, act: Callable[[Any], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        act(rb)
    assert list(rb.selections) == ["clean-v1"]
    assert rb.selections["clean-v1"].changes() == []


def test_text_that_is_no_call_is_not_changed(rb: Any) -> None:
    texts = ["'selection(''clean-v1'')'", "$$selection('clean-v1')$$", "$a$'$a$ || 'selection(''x'')'"]
    for text in texts:
        sql = f"SELECT {text} /* selection('x') */ -- selection('y')\n"
        (found,) = rb.sql(sql).fetchall()[0]
        assert "selection('" in found
    assert rb.sql("SELECT count(*) FROM episodes WHERE SELECTION ( 'clean-v1' )").fetchall() == [(2,)]


def test_an_open_episode_is_a_member_only_by_hand(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        write(rb, [1])
        data = rows(3, False)
        data["next"]["terminated"][:] = data["next"]["done"][:] = False
        rb.extend(data)
        assert rb.selections.create("clean-v1", "true").episodes().tolist() == [1]
        rb.selections.include("clean-v1", [2], reason="running")
        rb.extend(data)
        assert rb.sql(f"SELECT sum(length) FROM episodes WHERE {IN_CLEAN}").fetchall() == [(3 + 6,)]


def test_selections_of_one_name_are_merged_if_their_conditions_are_equal(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.exp" for number in range(3)]
    for number, path in enumerate(paths):
        with opened(path) as rb:
            write(rb, [3 * number, 3 * number + 1, 3 * number + 2])
            rb.selections.create("same", "episode_id > 1")
            rb.selections.create("own", f"episode_id > {number // 2}")
    expstore.merge(paths[:2], out=tmp_path / "both.exp")
    with opened(tmp_path / "both.exp") as rb:
        assert members(rb, "same") == {1, 2, 4, 5}
        assert rb.selections().arrow()["episodes"].to_pylist() == [6, 4]
    with pytest.raises(SchemaError, match="selection 'own' has another condition"):
        expstore.merge(paths, out=tmp_path / "all.exp")
    assert not (tmp_path / "all.exp").exists()
    with opened(paths[2]) as rb:
        rb.selections.drop("own")
    expstore.merge(paths, out=tmp_path / "all.exp")
