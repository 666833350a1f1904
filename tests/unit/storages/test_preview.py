"""What notebooks show for buffers, storages, schemas and results: bounded, cheap, every text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import expstore
from expstore.core.values import IntArray
from expstore.errors import CorruptionError
from expstore.sql.result import Result
from tests.support.html import Page, read_html

#: The elements of every preview.
TAGS = {"div", "style", "b", "bdi", "table", "thead", "tbody", "tr", "th", "td"}


def rows(count: int) -> dict[str, Any]:
    number = np.arange(count)
    return {
        "image": np.full((count, 20, 20), 7, np.uint8),
        "speed": number[:, None] / 4 + np.arange(2),
        "action": number,
        "next": {"reward": np.ones((count, 1), np.float32), "done": number % 5 == 4},
    }


def page_of(thing: Any) -> Page:
    page = read_html(thing._repr_html_())
    assert page.tags <= TAGS
    assert page.attributes <= {"class"}
    return page


def test_a_buffer_shows_what_it_holds(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "<b>.exp", capacity=1000, sampler="prioritized") as rb:
        rb.extend(rows(30))
        page = page_of(rb)
        heading = page.text.split("field")[0]
        facts = ("TensorDictReplayBuffer", "<b>.exp", "30 rows", "capacity 1,000", "6 episodes", "12.9 kB")
        assert not [fact for fact in (*facts, "PrioritizedSampler(") if fact not in heading]
        assert page.cells[:4] == ["field", "dtype", "shape", "bytes a row"]
        assert page.cells[4:8] == ["image", "uint8", "[20, 20]", "400"]
        first = page.cells.index("_id")
        assert page.cells[first + 1 : first + 6] == ["image", "speed", "action", "next.reward", "next.done"]
        assert page.cells[first + 6 : first + 12] == ["1", "uint8[20, 20]", "[0, 1]", "0", "1", "False"]
        assert len(page.cells) == first + 6 * 6
        assert page.text.endswith("... 30 rows")


def test_a_buffer_without_rows_and_a_closed_one(tmp_path: Path) -> None:
    rb = expstore.open(tmp_path / "a.exp")
    page = page_of(rb)
    assert "0 rows" in page.text
    assert "unbounded" in page.text
    assert page.text.endswith("no fields yet")
    rb.extend(rows(3))
    rb.close()
    page = page_of(rb)
    assert "closed" in page.text
    assert "cannot be read" not in page.text
    assert "bytes a row" in page.cells
    assert "_id" not in page.cells


@pytest.mark.parametrize("mode", ["w", "r"])
def test_a_ring_shows_its_oldest_rows(tmp_path: Path, mode: str) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=10) as writer:
        writer.extend(rows(5))
        with expstore.open(tmp_path / "a.exp", mode="r") as reader:
            writer.extend(rows(9))
            writer.flush()  # readers see rows that are in the columns
            page = page_of(writer if mode == "w" else reader)
    first = page.cells.index("_id")
    assert [int(page.cells[k]) for k in range(first + 6, len(page.cells), 6)] == [5, 6, 7, 8, 9]


def test_the_repr_of_a_storage_says_kind_path_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with expstore.open(path, capacity=10) as rb:
        rb.extend(rows(5))
        rb.flush()
        assert repr(rb.storage) == f"ZarrStorage('{path}', 5 rows, capacity 10)"
        with expstore.open(path, mode="r") as reader:
            assert repr(reader.storage) == f"FollowerStorage('{path}', 5 rows, capacity 10)"
    assert repr(rb.storage) == f"ZarrStorage('{path}', closed, capacity 10)"
    assert repr(expstore.MemoryStorage()) == "MemoryStorage(0 rows)"


def test_deleted_rows_are_left_out(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend(rows(20))
        rb.episodes.delete("episode_id = 1")
        page = page_of(rb)
    assert page.cells[page.cells.index("_id") + 6] == "6"


def test_wide_fields_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend(rows(2000))
        read, asked = rb.storage.read, []

        def record(ids: IntArray, places: Sequence[int] | None = None) -> list[Any]:
            asked.append((ids.size, places))
            return read(ids, places)

        monkeypatch.setattr(rb.storage, "read", record)
        page_of(rb.storage)
    assert asked == [(5, [1, 2, 3, 4])]


def test_texts_numbers_and_objects_of_all_kinds(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    with expstore.open(tmp_path / "a.exp", layout="arrow") as rb:
        rb.extend(
            {
                "text": [evil, "\x1b[2J"],
                "list": [[1, 2, 3, 4], []],
                "half": torch.tensor([0.5, 2.0], dtype=torch.bfloat16),
            }
        )
        page = page_of(rb)
    assert page.cells[-8:] == ["1", evil, "[1, 2, 3, ... 4]", "0.5", "2", "\ufffd[2J", "[]", "2"]
    memory = expstore.ReplayBuffer(storage=expstore.ListStorage(10))
    memory.extend([object(), {"a": 1}])
    assert page_of(memory).cells[-4:] == ["1", "<object>", "2", "<dict>"]


def test_rows_that_cannot_be_read_do_not_hide_the_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[Any]:
        raise CorruptionError("<b>chunk</b> 3 is damaged")

    with expstore.open(tmp_path / "a.exp") as rb:
        rb.extend(rows(5))
        monkeypatch.setattr(rb.storage, "read", fail)
        page = page_of(rb.storage)
    assert "image" in page.cells
    assert "the first rows cannot be read: <b>chunk</b> 3 is damaged" in page.text


def test_a_schema_shows_its_fields() -> None:
    fields = [expstore.Field((f"field{k}",), "float32", (k + 1,)) for k in range(40)]
    text = expstore.Field(("words",), "arrow", (), '"string"')
    page = page_of(expstore.Schema([text, *fields]))
    assert "41 fields" in page.text
    assert "3.28 kB a row" in page.text
    assert "1 fields of variable length" in page.text
    assert page.cells[4:8] == ["words", str(text), "", "None"]
    assert page.cells[8:12] == ["field0", "float32", "[1]", "4"]
    assert len(page.cells) == 4 * 31
    assert page.text.endswith("... 41 fields")


@pytest.mark.index
def test_episodes_and_results_show_their_first_rows(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp") as rb:
        evil = "<script>a</script>"
        rb.extend(rows(100), source=evil, episode_info={"<b>": "</td>"})
        page = page_of(rb.episodes())
        assert "20 rows" in page.text
        assert page.cells[:3] == ["episode_id", "source", "length"]
        assert page.cells[len(page.cells) // 11 :][:3] == ["1", evil, "5"]
        assert page.text.endswith("live_rows, info")
        facts = page_of(rb.sql('SELECT info, 1 AS "<u>" FROM episodes LIMIT 1'))
        assert facts.cells == ["info", "<u>", '{"<b>": "</td>"}', "1"]
        assert repr(rb.episodes()).splitlines()[1].split()[:3] == ["1", evil, "5"]


def test_lists_in_results_show_their_first_items() -> None:
    table = pa.table(
        {
            "image": pa.array([list(range(7056))] * 3, pa.list_(pa.int32())),
            "group": pa.array([{"list": [1.5, 2, 3, 4], "n": None}] * 3),
            "none": pa.array([None, [1], []], pa.list_(pa.int8())),
        }
    )
    page = page_of(Result(table))
    assert page.cells[3:6] == ["[0, 1, 2, ... 7056]", "{list: [1.5, 2, 3, ... 4]..."[:25] + "...", "None"]
    assert page.cells[8] == "[1]"
    assert page.cells[11] == "[]"
