"""JSON lines become stores with types that fit all lines; wrong lines are named, and leave nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import expstore
from expstore.cli.app import run
from expstore.core import tuning
from expstore.errors import NotFoundError, SchemaError, StorageError
from expstore.exchange import Imported, import_jsonl, table_files
from tests.support.exchange_formats import read_fields, write_lines
from tests.support.refusals import check_refusals

pytestmark = pytest.mark.usefixtures("no_syncs")


def load(folder: Path, rows: Iterable[Any], **options: Any) -> tuple[Imported, list[dict[str, Any]]]:
    """Import rows; return the result and the stored fields of each row."""
    done = import_jsonl(write_lines(folder / "in.jsonl", rows), folder / "in.exp", **options)
    return done, read_fields(done.path)


def test_transitions_become_episodes(tmp_path: Path) -> None:
    rows = [{"obs": [n, n / 2], "act": n % 2, "reward": 1, "done": n % 5 == 4} for n in range(20)]
    done, stored = load(tmp_path, rows)
    assert (done.rows, done.episodes, done.warnings) == (20, 4, ())
    assert stored[3] == {"observation": [3.0, 1.5], "action": 1, "next": {"reward": 1, "done": False}}


@pytest.mark.parametrize("lines", [1, 2, 1024])
def test_types_follow_from_all_lines(tmp_path: Path, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "_LINES", lines)
    rows = [
        {"number": 1, "tokens": [], "facts": {"kind": "a"}, "said": "hi", "calls": [], "empty": {}},
        {"number": 2.5, "tokens": [1, 2], "facts": {"kind": None}, "said": [{"text": "é"}], "empty": {}},
        {
            "number": 3,
            "tokens": [3],
            "facts": {"kind": "b"},
            "said": None,
            "calls": [{"id": 1}],
            "late": True,
        },
        {"number": 4, "tokens": [4], "facts": {"kind": "c"}, "said": ["x"], "calls": []},
    ]
    notes: list[str] = []
    _, stored = load(tmp_path, rows, tell=notes.extend)
    assert [row["number"] for row in stored] == [1, 2.5, 3, 4]
    assert [row["tokens"] for row in stored] == [[], [1, 2], [3], [4]]
    assert [row["facts"] for row in stored] == [{"kind": kind} for kind in ("a", None, "b", "c")]
    assert [row["said"] for row in stored] == ["hi", '[{"text": "é"}]', None, '["x"]']
    assert [row["calls"] for row in stored] == ["[]", None, '[{"id": 1}]', "[]"]
    assert [row["late"] for row in stored] == [None, None, True, None]
    assert {
        "'said' has objects or lists, which are stored as JSON text",
        "'calls' has objects or lists, which are stored as JSON text",
        "'empty' has no value in any row, and is left out",
        "'late' has rows without a value",
    } <= set(notes)


def test_a_member_that_is_left_out_may_have_any_type(tmp_path: Path) -> None:
    rows = [{"x": 1, "y": 1}, {"x": 2, "y": "two"}, {"x": 3, "y": [[{}], 1]}]
    done, stored = load(tmp_path, rows, names={"y": "", "x": "z"})
    assert stored == [{"z": 1}, {"z": 2}, {"z": 3}]
    assert "'y' is left out" in done.notes


def test_members_without_any_value_are_left_out(tmp_path: Path) -> None:
    rows = [{"x": 1, "calls": [], "info": {"error": None, "more": {"y": []}, "z": 2}}, {"x": 2, "info": None}]
    done, stored = load(tmp_path, rows)
    assert stored == [{"x": 1, "info": {"z": 2}}, {"x": 2, "info": None}]
    left_out = {f"{name!r} has no value in any row, and is left out" for name in ("calls", "info.error")}
    assert left_out | {"'info.more' has no value in any row, and is left out"} <= set(done.notes)
    assert len(done.notes) == len(set(done.notes))


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    folder.mkdir()
    for step in (1, 2, 10):
        write_lines(
            folder / f"{step}.jsonl", [{"step": step, "score": step / 2 if step > 1 else 1, "said": []}]
        )
    write_lines(folder / "10.jsonl", [{"step": 10, "score": 5, "said": "text"}])
    assert run(["import", str(folder), str(tmp_path / "a.exp")]) == 0
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        found = rb.sql("SELECT step, score, said FROM transitions ORDER BY _id").fetchall()
    assert found == [(1, 1.0, "[]"), (2, 1.0, "[]"), (10, 5.0, "text")]
    write_lines(folder / "11.jsonl", [{"step": "eleven"}])
    with pytest.raises(SchemaError, match=r"11\.jsonl does not have the types of the files before"):
        import_jsonl(folder, tmp_path / "b.exp")


def test_lines_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lines are read by their bytes, so memory does not follow from their number."""
    monkeypatch.setattr(tuning, "EXCHANGE_BYTES", 8 * 1000)
    path = write_lines(tmp_path / "in.jsonl", [{"text": "x" * (300 * (n % 7))} for n in range(70)])
    part = table_files.JsonPart(path)
    pieces = list(part.batches(1024))
    assert max(sum(map(len, piece["text"].to_pylist())) for piece in pieces) < 1000 + 7 * 300
    assert [one for piece in pieces for one in piece["text"].to_pylist()] == [
        "x" * (300 * (n % 7)) for n in range(70)
    ]


def test_marks_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"x": 1}\r\n\r\n  \n{"x": 2}')
    assert import_jsonl(path, tmp_path / "in.exp").rows == 2


@pytest.mark.guarantee("exchange/imports")
def test_wrong_files_name_the_line_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "LONGEST_LINE", 1 << 20)
    good, target = '{"x": 1, "y": {"z": 1}}\n', tmp_path / "out.exp"

    def case(text: str | bytes, name: str = "in.jsonl") -> Any:
        def call() -> object:
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
            return import_jsonl(tmp_path / name, target)

        return call

    (tmp_path / "nothing").mkdir()
    check_refusals(
        [
            (
                case(good * 2 + '{"x": 1, "y'),
                StorageError,
                r"line 3 of .*in\.jsonl is not JSON: Unterminated",
            ),
            (case(good + "\n" + "[" * 100_000), StorageError, "line 3 of .* is not JSON"),
            (case(good.encode() + b'{"x": "\xff"}'), StorageError, "line 2 of .* is not JSON: 'utf-8' codec"),
            (case(good + "x" * (2 << 20)), StorageError, "line 2 of .* is longer than 1 MiB"),
            (case("[" + good + "]"), StorageError, "line 1 of .* is not JSON"),
            (case('[{"x": 1}]'), SchemaError, "line 1 of .* is not an object, .*jq -c"),
            (
                case(good + '{"x": "one"}'),
                SchemaError,
                "line 2 of .* types of the lines before: int64 and string",
            ),
            (case(good + '{"y": {"z": true}}'), SchemaError, "line 2 of .* int64 and bool"),
            (case(good + '{"x": [1, "a"]}'), SchemaError, "line 2 of .* does not have the types"),
            (case(good + '{"x": 99999999999999999999999}'), SchemaError, "line 2 of"),
            (case("\n \n"), SchemaError, "has no lines"),
            (case(""), SchemaError, "has no lines"),
            (case("{}\n{}\n"), SchemaError, "no column can be a field"),
            (lambda: import_jsonl(tmp_path / "nothing", target), NotFoundError, r"no files \*\.jsonl"),
            (lambda: import_jsonl(tmp_path / "ghost.jsonl", target), NotFoundError, "there is no file"),
            (
                lambda: import_jsonl(
                    write_lines(tmp_path / "in.jsonl", [{"x": 1}]), target, names={"y": "z"}
                ),
                SchemaError,
                "there is no 'y' to map",
            ),
        ],
        absent=target,
    )
    assert run(["import", str(tmp_path / "rows.json")]) == 2
