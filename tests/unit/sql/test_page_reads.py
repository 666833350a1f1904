"""SQL over scalars of a store of 200,000 images unpacks no image and reads none of their pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.storages.columns.packed import column

pytestmark = [
    pytest.mark.index,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what of a map was touched"),
]

ROWS, STEP, EPISODE = 200_000, 5_000, 250

SCALARS = [
    "SELECT count(*), sum(action), avg(next.reward) FROM transitions",
    "SELECT _episode, max(_step), sum(next.reward) FROM transitions GROUP BY 1 ORDER BY 3 DESC LIMIT 5",
    "SELECT * EXCLUDE (observation, next), next.reward FROM transitions WHERE action = 3",
    "SELECT t.next.reward FROM transitions t WHERE _priority > 0.5 AND next.terminated",
    "SELECT e.status, count(*) FROM transitions t JOIN episodes e ON e.episode_id = t._episode GROUP BY 1",
    "SELECT * FROM episodes ORDER BY length",
    "SELECT next.observation FROM transitions WHERE action > 90",
]


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    frames = (number % 256).to(torch.uint8)[:, None, None].expand(count, 40, 40)
    after = TensorDict({"observation": frames + 1, "reward": (number % 7)[:, None].float()}, [count])
    after["terminated"] = (number % EPISODE == EPISODE - 1)[:, None]
    return TensorDict({"observation": frames, "action": number % 5, "next": after}, [count])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("images") / "run.exp"
    with expstore.open(path, seed=0) as rb:
        for first in range(0, ROWS, STEP):
            rb.extend(rows(first, STEP))
        assert len(rb.storage.unviewed_places) == 2
    return path


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count rows that are taken out of packed columns."""
    gather = column.PackedRows.gather
    counts: list[int] = []

    def counted(self: Any, slots: Any) -> Any:
        counts.append(slots.size)
        return gather(self, slots)

    monkeypatch.setattr(column.PackedRows, "gather", counted)
    return counts


def touched(store: Path) -> tuple[int, int]:
    """Return how many files of images are mapped, and how many KiB of the maps this process has touched."""
    folders = [f"{store}/columns/{name}/" for name in ("observation", "next/observation")]
    files, kilobytes, mine = set(), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            mine = any(words[-1].startswith(folder) for folder in folders)
            files |= {words[-1]} if mine else set()
        elif words[0] == "Rss:" and mine:
            kilobytes += int(words[1])
    return len(files), kilobytes


@pytest.mark.guarantee(
    "exchange/packed",
    "SQL reads no page of a packed field that it does not name, and decompresses only the rows that pass "
    "its conditions.",
)
@pytest.mark.some(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["a", "r"])
def test_scalars_touch_no_image(store: Path, unpacked: list[int], mode: Any) -> None:
    with expstore.open(store, mode=mode) as rb:
        opening = touched(store)[1]  # the newest images, with which the next ones are compared
        assert opening < 128
        for query in SCALARS:
            found = rb.sql(query)
            assert len(found) or "> 90" in query
        count, total, _ = rb.sql(SCALARS[0]).fetchall()[0]
        assert (count, total) == (ROWS, ROWS * 2)
        files, kilobytes = touched(store)
        assert files >= 2 * ROWS // 16384  # they are mapped
        assert (kilobytes, sum(unpacked)) == (opening, 0)
        # It would have been seen: a handful of images touches a handful of chunks.
        assert rb.sql("SELECT observation[1][1] FROM transitions WHERE _id IN (1, 150000)").fetchall() == [
            (0,),
            (149_999 % 256,),
        ]
        assert sum(unpacked) >= 2
        assert opening < touched(store)[1] < 1024
