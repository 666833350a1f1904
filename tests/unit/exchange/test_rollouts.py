"""Rollouts in the forms of trainers become rows of one form; what is missing or wrong is said."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import expstore
from expstore.cli.app import run
from expstore.errors import SchemaError, StorageError
from expstore.exchange import Imported, export_parquet, import_parquet, import_rollouts, read_rollouts
from expstore.specs import Rollout
from tests.support.exchange_formats import read_fields, write_lines
from tests.support.refusals import check_refusals

pytestmark = pytest.mark.usefixtures("no_syncs")

FULL: dict[str, Any] = {
    "prompt": "1 + 1?",
    "response": "2",
    "prompt_tokens": [5, 6, 5],
    "tokens": [2, 0],
    "loss_mask": [True, False],
    "logprobs": [-0.5, -0.25],
    "policy_version": 3,
    "group": "a",
    "reward": 1.0,
}
MESSAGES = [{"role": "user", "content": "hi"}]


def load(
    folder: Path, rows: Iterable[Any] | pa.Table, **options: Any
) -> tuple[Imported, list[dict[str, Any]]]:
    """Import rollouts from JSON lines, or a table from Parquet; return the result and the stored fields."""
    if isinstance(rows, pa.Table):
        pq.write_table(rows, folder / "in.parquet")
        done = import_rollouts(folder / "in.parquet", folder / "in.exp", **options)
    else:
        done = import_rollouts(write_lines(folder / "in.jsonl", rows), folder / "in.exp", **options)
    return done, read_fields(done.path)


def expected(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as the store has it."""
    rest = {name: value for name, value in row.items() if name != "reward"}
    return {**rest, "next": {"reward": row["reward"], "done": True}}


def test_every_part_is_read_and_the_store_opens_with_the_preset(tmp_path: Path) -> None:
    rows = [FULL, {**FULL, "tokens": [], "loss_mask": [], "logprobs": [], "response": None, "reward": -1.0}]
    done, found = load(tmp_path, rows)
    assert found == [expected(row) for row in rows]
    assert (done.episodes, done.statuses, done.notes, done.warnings) == (2, {"terminated": 2}, (), ())
    with expstore.open(done.path, batch_size=2, **Rollout().settings()) as rb:
        rb.extend([expected(FULL)])
        assert rb.sql('SELECT "return" FROM episodes ORDER BY episode_id').fetchall() == [
            (1.0,),
            (-1.0,),
            (1.0,),
        ]
        done_out = export_parquet(rb, tmp_path / "out")
    import_parquet(done_out.path, tmp_path / "again.exp")
    assert read_fields(tmp_path / "again.exp") == read_fields(done.path)


@pytest.mark.guarantee("exchange/imports")
def test_trl(tmp_path: Path) -> None:
    """Of rollout functions: tokens and a reward for each function."""
    rows = [
        {
            "prompt_ids": [1, 2],
            "completion_ids": [3, 4],
            "logprobs": [-0.5, -1],
            "rewards": {"a": 1, "b": 0.5},
        },
        {"prompt_ids": [1], "completion_ids": [3], "logprobs": [-0.25], "rewards": {"a": 0, "b": 0.25}},
    ]
    done, found = load(tmp_path, rows)
    assert found[1] == {
        "prompt_tokens": [1],
        "tokens": [3],
        "logprobs": [-0.25],
        "next": {"reward": 0.25, "done": True},
        "rewards": {"a": 0.0, "b": 0.25},
    }
    assert "the reward is the sum of rewards.a, rewards.b" in done.notes
    assert (
        "there is no prompt, response, loss_mask, policy_version, group, which become no fields" in done.notes
    )


def test_trl_tables_of_completions(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "step": [7, 7],
            "prompt": ["p", "p"],
            "completion": ["c", "d"],
            "accuracy": [1.0, 0.0],
            "format": [0.5, 0.25],
            "advantage": [0.7, -0.7],
        },
        index=[3, 4],
    )
    names = {"accuracy": "reward", "format": "reward"}
    done, found = load(tmp_path, pa.Table.from_pandas(frame), names=names)
    assert found[0] == {
        "prompt": "p",
        "response": "c",
        "next": {"reward": 1.5, "done": True},
        "step": 7,
        "accuracy": 1.0,
        "format": 0.5,
        "advantage": 0.7,
    }
    assert "the reward is the sum of accuracy, format" in done.notes
    assert "'__index_level_0__' is the index of a pandas frame, and left out" in done.notes


VERL = [
    {
        "prompts": [0, 0, 7, 8],
        "responses": [1, 2, 0],
        "attention_mask": [0, 0, 1, 1, 1, 1, 0],
        "response_mask": [1, 0, 0],
        "rollout_log_probs": [-0.5, -1.0, 0.0],
        "token_level_scores": [0.0, 1.5, 0.0],
        "uid": "u1",
    },
    {
        "prompts": [0, 9, 7, 8],
        "responses": [1, 2, 3],
        "attention_mask": [0, 1, 1, 1, 1, 1, 1],
        "response_mask": [1, 1, 1],
        "rollout_log_probs": [-0.5, -1.0, -2.0],
        "token_level_scores": [0.0, 0.0, 0.5],
        "uid": "u1",
    },
]


@pytest.mark.guarantee("exchange/imports")
def test_verl_batches_lose_their_padding(tmp_path: Path) -> None:
    done, found = load(tmp_path, VERL)
    padded = ("attention_mask", "token_level_scores")
    assert found == [
        {
            "prompt_tokens": prompt,
            "tokens": tokens,
            "loss_mask": mask,
            "logprobs": logprobs,
            "group": "u1",
            "next": {"reward": reward, "done": True},
            **{name: row[name] for name in padded},
        }
        for row, prompt, tokens, mask, logprobs, reward in [
            (VERL[0], [7, 8], [1, 2], [True, False], [-0.5, -1.0], 1.5),
            (VERL[1], [9, 7, 8], [1, 2, 3], [True] * 3, [-0.5, -1.0, -2.0], 0.5),
        ]
    ]
    assert "padding of prompts and responses is removed, by 'attention_mask'" in done.notes


def test_verl_padding_stays_without_the_mask(tmp_path: Path) -> None:
    done, found = load(tmp_path, VERL, names={"attention_mask": ""})
    assert [row["tokens"] for row in found] == [[1, 2, 0], [1, 2, 3]]
    assert not any("padding" in note for note in done.notes)


@pytest.mark.guarantee("exchange/imports")
def test_verl_generations(tmp_path: Path) -> None:
    """A folder with a file for each step, whose members are those of rewards, too."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in (2, 10):
        row = {"input": "p", "output": "r", "gts": None, "score": step / 4, "step": step, "acc": True}
        write_lines(folder / f"{step}.jsonl", [row])
    done = import_rollouts(folder, tmp_path / "a.exp")
    assert read_fields(done.path) == [
        {"prompt": "p", "response": "r", "next": {"reward": s / 4, "done": True}, "step": s, "acc": True}
        for s in (2, 10)
    ]
    assert done.roles["plain fields"][:2] == ("prompt (input)", "response (output)")


@pytest.mark.guarantee("exchange/imports")
def test_verifiers_and_prime_rl(tmp_path: Path) -> None:
    row = {
        "example_id": 3,
        "prompt": MESSAGES,
        "completion": [{"role": "assistant", "content": "é"}],
        "completion_ids": [1, 2],
        "completion_mask": [1, 0],
        "completion_logprobs": [-0.5, -1],
        "reward": 1,
        "policy_version": 4,
        "metrics": {"length": 2.0},
        "trajectory": [{"tokens": {"prompt_ids": [5]}}],
        "id": "x",
    }
    done, found = load(tmp_path, [row, {**row, "example_id": 4, "id": "y"}])
    assert found[0] == {
        "prompt": json.dumps(MESSAGES),
        "response": '[{"role": "assistant", "content": "é"}]',
        "tokens": [1, 2],
        "loss_mask": [True, False],
        "logprobs": [-0.5, -1.0],
        "policy_version": 4,
        "group": "3",
        "next": {"reward": 1.0, "done": True},
        "metrics": {"length": 2.0},
        "trajectory": '[{"tokens": {"prompt_ids": [5]}}]',
    }
    assert any(note.startswith("'id' is left out, as batches have an 'id'") for note in done.notes)


def test_messages_in_parquet(tmp_path: Path) -> None:
    table = pa.table({"prompt": [MESSAGES, None], "completion": ["a", "b"], "_id": [1, 2]})
    done, found = load(tmp_path, table)
    assert [row["prompt"] for row in found] == [json.dumps(MESSAGES), None]
    assert any("'_id' is left out" in note for note in done.notes)
    assert done.warnings == ("there is no reward: returns are 0",)


def test_a_map_leads_to_parts_fields_and_into_objects(tmp_path: Path) -> None:
    rows = [{"text": "p", "ids": [1], "info": {"score": n, "other": 2}, "x": 1, "id": 5} for n in range(2)]
    names = {"text": "prompt", "ids": "answer", "info.score": "next.score", "x": "deep.x", "id": "row_id"}
    rollout = Rollout(tokens="answer", reward=("next", "score"))
    done, found = load(tmp_path, rows, names=names, rollout=rollout, capacity=1)
    assert found == [
        {
            "prompt": "p",
            "answer": [1],
            "next": {"score": 1.0, "done": True},
            "info": {"score": 1, "other": 2},
            "deep": {"x": 1},
            "row_id": 5,
        }
    ]
    assert (done.rows, done.kept) == (2, 1)
    assert done.roles["reward"] == ("next.score (info.score)",)


@pytest.mark.guarantee("exchange/imports")
def test_wrong_rollouts_name_the_row_and_leave_nothing(tmp_path: Path) -> None:
    target = tmp_path / "out.exp"

    def case(*rows: Any, rollout: Rollout | None = None, **names: str) -> Any:
        def call() -> object:
            path = write_lines(tmp_path / "in.jsonl", rows)
            return import_rollouts(path, target, names=names, rollout=rollout)

        return call

    def changed(**values: Any) -> Any:
        return case(*[FULL] * 1500, {**FULL, **values})

    np.savez(tmp_path / "in.npz", tokens=np.zeros(3))
    check_refusals(
        [
            (changed(logprobs=[-1.0]), SchemaError, "row 1,501: 'logprobs' has 1 values, and tokens has 2"),
            (changed(tokens=None), SchemaError, "row 1,501: 'tokens' has no value.*--map tokens=its_tokens"),
            (changed(reward=None), SchemaError, "row 1,501: 'reward' has no value"),
            (
                changed(tokens=[1, None]),
                SchemaError,
                "'tokens' is list.* which cannot be tokens .*lacks a value",
            ),
            (
                changed(tokens=[1, 1 << 40]),
                SchemaError,
                "'tokens' is list<item: int64>, which cannot be tokens",
            ),
            (changed(tokens=[1, 1.5]), SchemaError, "'tokens' is list<item: double>"),
            (changed(policy_version=1.5), SchemaError, "'policy_version' is double"),
            (case({**FULL, "reward": "good"}), SchemaError, "'reward' is string.* a reward is a number"),
            (case({**FULL, "tokens": 5}), SchemaError, "'tokens' is int64, which cannot be tokens"),
            (case({"x": 1}), SchemaError, "has no part of a rollout, but x.*--map THEIRS=PART"),
            (case(FULL, ghost="tokens"), SchemaError, "there is no 'ghost' to map.*prompt, response"),
            (case({**FULL, "end": 1}, end="done"), SchemaError, "'end' cannot be done"),
            (case({**FULL, "a": [1], "b": [1]}, a="tokens", b="tokens"), SchemaError, "stand for 'tokens'"),
            (case({**FULL, "a": "x"}, a="prompt"), SchemaError, "stand for 'prompt'"),
            (
                case({**VERL[0], "attention_mask": [1]}),
                SchemaError,
                "row 1: 'attention_mask' has 1 values.* 7",
            ),
            (case(FULL, "text"), SchemaError, "line 2 of .* is not an object"),
            (
                lambda: import_rollouts(tmp_path / "in.npz", target),
                SchemaError,
                "format npz, which has no rollouts",
            ),
        ],
        absent=target,
    )
    (tmp_path / "half.jsonl").write_text(json.dumps(FULL) + "\n" + json.dumps(FULL)[:50])
    with pytest.raises(StorageError, match=r"line 2 of .*half\.jsonl is not JSON"):
        import_rollouts(tmp_path / "half.jsonl", target)
    assert not target.exists()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", [{"q": "1 + 1?", "answer_ids": [5, 2], "score": 1, "junk": 0}]
    )
    store = str(tmp_path / "a.exp")
    options = ["--format", "rollouts", "--map", "q=prompt", "--map", "answer_ids=tokens", "--map", "junk="]
    assert run(["import", str(source), store, *options]) == 0
    said = capsys.readouterr()
    assert "1 rows of 1 episodes: 1 terminated" in said.out
    assert "prompt (q), tokens (answer_ids)" in said.out
    assert "note: 'junk' is left out" in said.err
    assert "note: there is no response, prompt_tokens, loss_mask" in said.err
    (row,) = read_fields(tmp_path / "a.exp")
    assert row == {"prompt": "1 + 1?", "tokens": [5, 2], "next": {"reward": 1.0, "done": True}}
    assert run(["import", str(source), store + "2", "--format", "rollouts", "--storage", "zarr"]) == 2
    assert "applies to arrow, csv, jsonl, parquet only" in " ".join(capsys.readouterr().err.split())
    assert run(["import", str(source), store + "2", "--format", "rollouts", "--map", "ghost=tokens"]) == 2
    assert "there is no 'ghost' to map" in capsys.readouterr().err
    assert not (tmp_path / "a.exp2").exists()


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_batches_in_memory_are_appended(tmp_path: Path, convert: Any) -> None:
    """The tensors of a batch of verl become the rows that its lines become."""
    batch = {
        name: [row[name] for row in VERL] if name == "uid" else convert([row[name] for row in VERL])
        for name in VERL[0]
    }
    rollout = Rollout(prompt=None, response=None, policy_version=None)
    with expstore.open(tmp_path / "a.exp", **rollout.settings()) as rb:
        rb.extend(read_rollouts(batch, rollout=rollout))
    _, lines = load(tmp_path, VERL)
    unused = ("attention_mask", "token_level_scores")
    assert read_fields(tmp_path / "a.exp") == [
        {name: value for name, value in row.items() if name not in unused} for row in lines
    ]


def test_a_table_has_parts_and_what_is_named() -> None:
    """What a rollout function of TRL returns."""
    batch = {
        "prompt_ids": [[5], [6, 7]],
        "completion_ids": [[1, 2], [3]],
        "rewards": [{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 0.25}],
        "answers": [1, 2],
        "more": [[1, 2], [3, 4]],
    }
    table = read_rollouts(batch, names={"more": "own.more"})
    assert table.to_pylist() == [
        {"prompt_tokens": [5], "tokens": [1, 2], "next.reward": 1.5, "next.done": True, "own.more": [1, 2]},
        {"prompt_tokens": [6, 7], "tokens": [3], "next.reward": 0.25, "next.done": True, "own.more": [3, 4]},
    ]
    check_refusals(
        [
            (
                lambda: read_rollouts({"tokens": [[1]], "reward": [1, 2]}),
                SchemaError,
                "the batch is no table",
            ),
            (lambda: read_rollouts({"tokens": [[1]], "reward": 5}), SchemaError, "the batch is no table"),
            (lambda: read_rollouts({"tokens": [[1], "x"]}), SchemaError, "the batch is no table"),
            (lambda: read_rollouts({"x": [1]}), SchemaError, "the batch has no part of a rollout, but x"),
            (lambda: read_rollouts({"tokens": []}), SchemaError, "no column can be a field"),
            (
                lambda: read_rollouts({"tokens": [[1]], "logprobs": [[1, 2]]}),
                SchemaError,
                "row 1: 'logprobs' has 2",
            ),
        ]
    )
