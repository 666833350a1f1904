"""Series of episodes in groups and bins, compared with NumPy, and rows per second."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

import expstore
from tests.api.test_episode_pages import add_episode
from tests.support.arrow_bodies import ACCEPT_ARROW
from tests.support.asgi import api_client

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"
COUNT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("runs")
    numbers = np.random.default_rng(0)
    for first in (0, COUNT // 2):  # two sessions
        with expstore.open(found / "run.exp") as rb:
            for number in range(first, first + COUNT // 2):
                facts = {"score": number % 25, "kind": f"</script>{number % 2}\u202e"} if number % 3 else None
                reward = float("nan") if number == 7 else float(numbers.normal())
                add_episode(rb, 1 + number % 5, reward, source=f"s{number % 3}", episode_info=facts)
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["writer", "reader"])
def client(request: pytest.FixtureRequest, folder: Path) -> Iterator[httpx.Client]:
    with api_client(folder, read_only=request.param, sql_seconds=30) as client:
        yield client


@pytest.fixture(scope="module")
def episodes(client: httpx.Client) -> list[dict[str, Any]]:
    table = pa.ipc.open_stream(client.get(f"{RUN}/episodes", headers=ACCEPT_ARROW).content).read_all()
    rows = table.to_pylist()
    for row, last in zip(rows, np.cumsum([row["length"] for row in rows]), strict=True):
        row["rows"], row["info"] = int(last), json.loads(row["info"] or "{}")
    return rows


def ask(client: httpx.Client, **params: Any) -> Any:
    answer = client.get(f"{RUN}/series", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_group(group: Any, x: list[float], y: list[float], low: float, width: float, points: int) -> None:
    """Compare a group with the values of its episodes."""
    bins: dict[int, list[int]] = {}
    for place, value in enumerate(x):
        bins.setdefault(int((value - low) * points // width), []).append(place)
    members = [bins[number] for number in sorted(bins)]
    assert group["count"] == [len(places) for places in members]
    tenth = [(name, lambda part, q=q: np.quantile(part, q), y) for name, q in (("p10", 0.1), ("p90", 0.9))]
    for name, function, values in (
        ("x", np.mean, x), ("mean", np.mean, y), ("min", np.min, y), ("max", np.max, y),
        ("median", np.median, y), *tenth,
    ):  # fmt: skip
        expected = [function([values[place] for place in places]) for places in members]
        np.testing.assert_allclose(group[name], expected, rtol=1e-12)


@pytest.mark.some(4)
@pytest.mark.parametrize("points", [500, 7])
@pytest.mark.parametrize("x", ["episode", "rows", "time"])
@pytest.mark.parametrize("y", ["return", "length"])
def test_bins_are_those_of_numpy(
    client: httpx.Client, episodes: list[dict[str, Any]], y: str, x: str, points: int
) -> None:
    told = ask(client, y=y, x=x, points=points)
    (group,) = told["groups"]
    assert (told["y"], told["x"], told["truncated"], group["name"]) == (y, x, False, None)
    chosen = [row for row in episodes if np.isfinite(row[y])]
    assert len(chosen) == (59 if y == "return" else 60)
    places = {
        "episode": lambda row: row["episode_id"],
        "rows": lambda row: row["rows"],
        "time": lambda row: row["end_time"].timestamp() * 1000 // 1,
    }
    values = [float(places[x](row)) for row in chosen]
    if x != "time":
        check_group(
            group, values, [row[y] for row in chosen], min(values), max(values) - min(values) + 1, points
        )
    assert sum(group["count"]) == len(chosen)
    assert len(group["x"]) <= points
    assert group["x"] == sorted(group["x"])


def test_groups(client: httpx.Client, episodes: list[dict[str, Any]]) -> None:
    told = ask(client, y="length", by="source", points=6)
    assert sorted(group["name"] for group in told["groups"]) == ["s0", "s1", "s2"]
    for group in told["groups"]:
        mine = [row for row in episodes if row["source"] == group["name"]]
        x = [row["episode_id"] for row in mine]
        check_group(group, x, [row["length"] for row in mine], 1, COUNT, 6)
    sessions = ask(client, by="session", y="length")["groups"]
    assert [sum(group["count"]) for group in sessions] == [30, 30]
    assert len({group["name"] for group in sessions}) == 2
    assert [group["name"] for group in ask(client, by="status")["groups"]] == ["terminated"]
    kinds = ask(client, by="info.kind", y="length")["groups"]
    assert {group["name"]: sum(group["count"]) for group in kinds} == {
        None: 20,
        "</script>0\u202e": 20,
        "</script>1\u202e": 20,
    }


def test_small_groups_are_together(client: httpx.Client, episodes: list[dict[str, Any]]) -> None:
    told = ask(client, by="info.score", y="length")
    assert told["truncated"] is True
    assert len(told["groups"]) == 20
    assert [group["other"] for group in told["groups"]] == [False] * 19 + [True]
    assert told["groups"][-1]["name"] is None
    assert sum(sum(group["count"]) for group in told["groups"]) == COUNT
    sizes = [sum(group["count"]) for group in told["groups"][:-1]]
    assert sizes == sorted(sizes, reverse=True)


def test_any_number_of_an_episode_is_a_series(client: httpx.Client, episodes: list[dict[str, Any]]) -> None:
    """Facts are those of `info`, and fields are the means of the readable rows."""
    scored = [row for row in episodes if "score" in row["info"]]
    x, scores = [float(row["episode_id"]) for row in scored], [float(row["info"]["score"]) for row in scored]
    (group,) = ask(client, y="info.score")["groups"]
    check_group(group, x, scores, x[0], x[-1] - x[0] + 1, 500)
    (group,) = ask(client, y="field.next.reward")["groups"]
    paid = [
        (row["episode_id"], row["return"] / row["length"]) for row in episodes if np.isfinite(row["return"])
    ]
    np.testing.assert_allclose(group["mean"], [value for _, value in paid], rtol=1e-6)
    assert ask(client, y="measure.still.state")["groups"] == ask(client, y="info.kind")["groups"] == []
    for y, word in (("field.nothing", "no field"), ("field.next.reward:0", "no number"), ("field.", "")):
        answer = client.get(f"{RUN}/series", params={"y": y})
        assert answer.status_code == 422
        assert word in answer.json()["error"]["message"]


def test_versions_are_facts_or_a_field(tmp_path: Path) -> None:
    ends = np.array([False, True])
    for name, of_rows in (("fact", False), ("field", True)):
        with expstore.open(tmp_path / f"{name}.exp") as rb:
            for number in range(6):
                version = {"policy_version": number // 2}
                rows: dict[str, Any] = {
                    "state": np.full((2, 3), number, np.float32),
                    "next": {"reward": np.ones(2) * number, "done": ends, "terminated": ends},
                }
                if of_rows:
                    rows["policy_version"] = np.full(2, number // 2)
                rb.extend(rows, episode_info={} if of_rows else version)
            rb.episodes.measure()
    with api_client(tmp_path, read_only=True, sql_seconds=30) as client:
        for name in ("fact", "field"):
            for y, factor in (("return", 2), ("field.state:1", 1), ("measure.level.state:2", 1)):
                answer = client.get(f"/v1/stores/{name}/series", params={"x": "version", "y": y})
                (group,) = answer.json()["groups"]
                assert (group["x"], group["count"]) == ([0, 1, 2], [2, 2, 2])
                assert group["median"] == [0.5 * factor, 2.5 * factor, 4.5 * factor]


def test_facets_count_what_episodes_have(client: httpx.Client, episodes: list[dict[str, Any]]) -> None:
    def count(**params: Any) -> dict[str, Any]:
        answer = client.get(f"{RUN}/facets", params=params)
        assert answer.status_code == 200, answer.text
        return {one["name"]: one for one in answer.json()["facets"]}

    found = count()
    assert sorted(found) == ["info.kind", "info.score", "source", "split", "status"]
    for name, read in (
        ("source", lambda row: row["source"]),
        ("info.score", lambda row: row["info"].get("score")),
    ):
        values = [str(read(row)) for row in episodes if read(row) is not None]
        assert (found[name]["distinct"], found[name]["episodes"]) == (len({*values}), len(values))
        counts = [value["count"] for value in found[name]["values"]]
        assert counts == sorted(counts, reverse=True)
        for value in found[name]["values"]:
            same = [row["episode_id"] for row in episodes if str(read(row)) == value["value"]]
            assert (value["count"], value["first"]) == (len(same), same[0])
    assert len(found["info.score"]["values"]) == 10
    assert len(count(values=100)["info.score"]["values"]) == found["info.score"]["distinct"]
    assert count(where="length > 3")["status"]["episodes"] == sum(row["length"] > 3 for row in episodes)
    assert count(where="false") == {}
    assert client.get(f"{RUN}/facets", params={"where": "1) UNION SELECT 1 --"}).status_code == 422


@pytest.mark.slow
def test_conditions_and_limits_of_sql(client: httpx.Client, folder: Path) -> None:
    (group,) = ask(client, where="length > 1 AND info->>'score' IS NOT NULL", y="length")["groups"]
    assert sum(group["count"]) == 32
    assert ask(client, where="length > 100")["groups"] == []
    for params in ({"where": "nothing > 1"}, {"where": "1=1) AS e; DROP TABLE x; --"}, {"by": "length"},
                   {"y": "throughput", "by": "source"}, {"points": 0}, {"x": "other"}):  # fmt: skip
        assert client.get(f"{RUN}/series", params=params).status_code == 422
    with api_client(folder, sql_rows=100, read_only=True, sql_seconds=30) as other:
        (group,) = ask(other, where="length > 1", y="length")["groups"]
        assert len(group["x"]) == 5
        assert sum(group["count"]) == 48
    with api_client(folder, sql=False, read_only=True) as other:
        assert other.get(f"{RUN}/series", params={"where": "length > 1"}).status_code == 403


def test_rows_per_second(client: httpx.Client) -> None:
    told = ask(client, y="throughput", points=10)
    (group,) = told["groups"]
    assert sum(group["count"]) == sum(1 + number % 5 for number in range(COUNT))
    assert len(group["x"]) == 10
    width = (group["x"][1] - group["x"][0]) / 1000
    np.testing.assert_allclose(group["mean"], np.array(group["count"]) / width, rtol=1e-4)
    assert told["x"] == "time"


@pytest.mark.slow
def test_an_empty_store_has_empty_series(tmp_path: Path) -> None:
    with api_client(tmp_path) as client:
        client.put(RUN, json={}).raise_for_status()
        for params in ({}, {"by": "info.x", "x": "rows"}, {"y": "throughput"}, {"where": "length > 1"}):
            assert ask(client, **params)["groups"] == []
