"""Calls to a language model: passed on byte for byte, and stored as rows of episodes."""

from __future__ import annotations

import json
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import expstore
from expstore.api import Settings
from expstore.api.capture.calls import CHAT, RESPONSES, EventStream, message_text
from expstore.api.capture.recorder import store_settings
from expstore.api.settings import Capture
from expstore.cli.app import run
from expstore.errors import ArgumentError, StateError, StorageError
from tests.support import warm_processes
from tests.support.fake_upstream import FakeUpstream, chat_events, response_events
from tests.support.paths import ROOT
from tests.support.servers import Serving
from tests.support.waits import ManualClock, wait_until

#: Headers that belong to one connection, or to the time of the answer.
_OTHERS = {"date", "transfer-encoding", "connection"}
post = partial(httpx.post, timeout=60)
_KEY = "sk-secret"


def _chat(word: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": word}]
    return {"model": "fake", "messages": messages, **more}


def _response(word: str, **more: Any) -> dict[str, Any]:
    return {"model": "fake", "input": word, **more}


_BODIES = {CHAT: _chat, RESPONSES: _response}


@contextmanager
def _proxy(
    folder: Path, upstream: str, group_size: int | None = None, **settings: Any
) -> Iterator[tuple[Serving, Any]]:
    """Serve a new store with a proxy; yield the server and the store's buffer."""
    path = folder / "run.exp"
    if not path.exists():
        expstore.open(path, **store_settings(group_size)).close()
    known = {name: settings.pop(name) for name in ("on_error", "omit", "ask_logprobs") if name in settings}
    with Serving(Settings(path=path, capture=Capture(upstream=upstream, **known), **settings)) as serving:
        yield serving, serving.app.state.proxy.start()._rb


def _post(url: str, path: str, body: Any, **headers: str) -> tuple[int, list[tuple[str, str]], bytes, bool]:
    """Return status, headers and bytes of an answer, and whether it arrived whole."""
    parts, is_whole = [], True
    with httpx.Client(timeout=60) as client:
        try:
            with client.stream("POST", f"{url}/{path}", json=body, headers=headers) as answer:
                for part in answer.iter_raw():
                    parts.append(part)
        except httpx.RemoteProtocolError:
            is_whole = False
    kept = [(name, value) for name, value in answer.headers.multi_items() if name not in _OTHERS]
    return answer.status_code, kept, b"".join(parts), is_whole


def _rows(rb: Any, columns: str, where: str = "event = 'call'") -> list[tuple[Any, ...]]:
    return rb.sql(f"SELECT {columns} FROM transitions WHERE {where} ORDER BY _id").fetchall()


@pytest.mark.some(4)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("word", ["hello", "2 ✓ \n\n", "429", "500", "half", "x" * 100_000])
def test_answers_are_those_of_the_upstream_and_each_call_is_a_row(
    tmp_path: Path, path: str, stream: bool, word: str
) -> None:
    body = _BODIES[path](word, stream=stream, unknown={"a": [1, None]})
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, rb):
        expected = _post(upstream.url, path, body)
        assert _post(f"{serving.url}/episodes/e1/v1", path, body) == expected
        ((outcome, status, error, request, last),) = _rows(
            rb, "outcome, status, error, request, messages[-1]"
        )
        assert upstream.requests[0][1] == upstream.requests[1][1]
    assert status == expected[0]
    assert outcome == ("answered" if expected[3] else "cut")
    assert (error is None) == (status == 200 and expected[3])
    assert json.loads(request)["unknown"] == {"a": [1, None]}
    said = json.loads(last)["content"] if status == 200 and expected[3] else f"{word}!"
    assert f"{word}!" in (said if isinstance(said, str) else said[0]["text"])


def test_other_paths_are_passed_on_and_not_stored(tmp_path: Path) -> None:
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, rb):
        with httpx.Client(timeout=60) as client:
            for start in ("", "/episodes/e1"):
                url = f"{serving.url}{start}/v1"
                found = client.get(
                    f"{url}/models/a%2Fb?limit=2&x-expstore-group=7&q=%20", headers={"x-a": "1"}
                )
                assert found.json()["path"] == "/v1/models/a%2Fb?limit=2&q=%20"
                assert found.headers["x-other"] == "1"
                assert client.post(f"{url}/files", content=b"a" * 70_000).json()["bytes"] == 70_000
            for tail in (
                "%2e%2e/admin", "a/%2E./b", "a%2f..%2fb", "a\\..\\b", "..;/b", "%252e%252e/b", "..%5Cb",
            ):  # fmt: skip
                assert client.get(f"{serving.url}/v1/{tail}").status_code == 400
        assert all("x-expstore" not in head.lower() for head, _ in upstream.requests)
        assert _rows(rb, "*", "true") == []


@pytest.mark.parametrize(("word", "outcome"), [("die", "failed"), ("hang", "left")])
def test_a_call_without_an_answer_is_a_row(tmp_path: Path, word: str, outcome: str) -> None:
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, rb):
        url = f"{serving.url}/episodes/e1/v1/{CHAT}"
        if word == "die":
            assert post(url, json=_chat(word)).status_code == 502
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=_chat(word), timeout=httpx.Timeout(60, read=0.3))
        wait_until(lambda: len(rb))
        assert _rows(rb, "outcome, status, len(messages)") == [(outcome, None, 2)]


def _stream_of(path: str, word: str) -> list[bytes]:
    return chat_events(word, {}) if path == CHAT else response_events(word)


@given(path=st.sampled_from([CHAT, RESPONSES]), cuts=st.lists(st.integers(0, 2000)), crlf=st.booleans())
def test_a_stream_is_split_into_the_same_bytes_however_it_arrives(
    path: str, cuts: list[int], crlf: bool
) -> None:
    events = _stream_of(path, "tool" if len(cuts) % 2 else "what?")
    events = [one.replace(b"\n", b"\r\n") for one in events] if crlf else events
    whole = b"".join(events)
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    stream, sent, held = EventStream(path), b"", b""
    for start, stop in pairwise(places):
        ready, more = stream.feed(whole[start:stop])
        assert b"" in (ready, held), "nothing passes the event that is held"
        sent, held = sent + ready, held + more
    assert (sent, held, stream.rest) == (b"".join(events[:-1]), events[-1], b"")
    assert stream.has_ended
    at_once = EventStream(path)
    at_once.feed(whole)
    assert stream.answer == at_once.answer


def _reverse(value: Any) -> Any:
    """Return JSON whose objects have their keys in another order, as those of clients' classes."""
    if isinstance(value, list):
        return [_reverse(item) for item in value]
    if isinstance(value, dict):
        return {name: _reverse(value[name]) for name in reversed(value)}
    return value


def test_a_copy_of_an_answer_is_stored_once(tmp_path: Path) -> None:
    """An agent's loop: each request has all messages before; streamed and whole answers are equal."""
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, rb):
        messages: list[Any] = [{"role": "user", "content": "tool"}]
        for number in range(4):
            body = {
                "model": "fake",
                "messages": messages,
                "tools": [{"type": "function"}],
                "stream": number % 2 == 1,
            }
            answer = post(f"{serving.url}/episodes/talk/v1/{CHAT}", json=body)
            stored = json.loads(_rows(rb, "messages[-1]")[-1][0])
            if not body["stream"]:
                said = answer.json()["choices"][0]["message"]
                assert message_text(said) == message_text(stored)
                stored = _reverse({name: value for name, value in said.items() if value})  # as agents copy it
            tool = {"role": "tool", "tool_call_id": "t1", "content": "tool"}
            messages = [*messages, stored, tool]
        rows = _rows(rb, "messages, finish_reason, input_tokens, output_tokens, tools")
        for (before, *_), (after, *_) in pairwise(rows):
            assert after[: len(before)] == before
            assert len(after) == len(before) + 2
        assert {row[1:4] for row in rows} == {("tool_calls", 7, 2)}
        assert rows[-1][4] == ['{"type":"function"}']


def test_logprobs_and_token_ids_are_stored_if_they_are_asked_for(tmp_path: Path) -> None:
    names = "prompt_token_ids, token_ids, logprobs, token_texts"
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url, ask_logprobs=True) as (serving, rb):
        post(f"{serving.url}/v1/{CHAT}", json=_chat("hi"))
        post(f"{serving.url}/v1/{CHAT}", json=_chat("hi", logprobs=False, return_token_ids=False))
        assert _rows(rb, names) == [([1, 2, 3], [4, 5], [-0.5, -0.5], ["hi", "!"]), ([], [], [], [])]


def test_conversations_are_printed_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = str(tmp_path / "run.exp"), tmp_path / "chat.jsonl"
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, _):
        url = f"{serving.url}/episodes/e1/v1"
        said = post(f"{url}/{CHAT}", json=_chat("tool", tools=[{"type": "function"}])).json()["choices"][0]
        messages = [*_chat("tool")["messages"], said["message"], {"role": "tool", "content": "4"}]
        post(f"{url}/{CHAT}", json={"model": "fake", "messages": messages})
        for word in ("another", "500"):
            post(f"{url}/{CHAT}", json=_chat(word))
        post(f"{url}/{RESPONSES}", json=_response("yes"))
        _act(serving, "end", {"reward": 2})
    assert run(["export", path, str(target), "--chat", "--where", "status = 'open'"]) == 2
    assert not target.exists()
    assert run(["export", path, str(target), "--chat", "--where", '"return" > 1']) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [[one["content"] for one in line["messages"] if "content" in one] for line in lines] == [
        ["Be brief.", "tool", "4", "4!"],
        ["Be brief.", "another", "another!"],
    ]
    assert {(line["source"], line["return"]) for line in lines} == {("e1", 2.0)}
    assert run(["export", path, str(target), "--chat", "--parquet"]) == 2
    capsys.readouterr()
    assert run(["episode", path, "1"]) == 0
    printed = capsys.readouterr().out
    for line in ("user: tool", 'assistant calls add({"a":2,"b":2})', "tool: 4", "assistant: yes!"):
        assert line in printed.splitlines()


@pytest.mark.guarantee("access/model-key", "The key of a language model's server is never stored or logged.")
def test_the_key_and_omitted_fields_are_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    secret = "a text that is left out"
    with (
        FakeUpstream() as upstream,
        _proxy(tmp_path, upstream.url, omit=("messages", "response", "error")) as (serving, rb),
    ):
        for word in (secret, "500", "die"):
            body = _chat(word, stream=True)
            body["messages"][0]["content"] = secret
            headers = {"Authorization": f"Bearer {_KEY}", "api-key": _KEY}
            post(f"{serving.url}/v1/{CHAT}?api-key={_KEY}", json=body, headers=headers)
        head, _ = upstream.requests[0]
        assert f"authorization: bearer {_KEY}" in head.lower()
        assert _rows(rb, "messages, response, error") == [([], None, None)] * 3
        rb.flush()
        for file in (file for file in tmp_path.rglob("*") if file.is_file()):
            data = file.read_bytes()
            assert _KEY.encode() not in data
            assert secret.encode() not in data
    ours = [one for one in caplog.records if one.name.partition(".")[0] not in ("httpx", "httpcore")]
    assert ours
    assert _KEY not in "\n".join(one.getMessage() for one in ours)


def _act(serving: Serving, act: str, body: Any, episode: str = "e1") -> httpx.Response:
    return post(f"{serving.url}/episodes/{episode}/{act}", json=body)


def test_rewards_facts_groups_and_ends_of_episodes(tmp_path: Path) -> None:
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url, group_size=2) as (serving, rb):
        assert _act(serving, "reward", {"reward": 1}).status_code == 404
        for episode in ("e1", "e2"):
            headers = {
                "x-expstore-group": "g", "x-expstore-policy-version": "3",
                "x-expstore-facts": '{"task": "add"}', "x-expstore-episode": episode,
            }  # fmt: skip
            for _ in range(2):
                post(f"{serving.url}/v1/{CHAT}", json=_chat("hi"), headers=headers)
        assert _act(serving, "reward", {"reward": 0.25}).json()["late"] is False
        assert _act(serving, "facts", {"ok": True}).json()["info"]["ok"] is True
        assert _act(serving, "end", {"reward": 1}).json()["status"] == "terminated"
        assert _act(serving, "end", {}).status_code == 409
        assert _act(serving, "end", {"truncated": True}, "e2").json()["status"] == "truncated"
        assert _act(serving, "reward", {"reward": 7}).json()["late"] is True
        for body in ({"reward": "1"}, {"reward": None}, {}, [], {"rewards": 1}):
            assert _act(serving, "reward", body).status_code == 422
        episodes = "source, length, \"return\", status, info->>'task', info->>'ok'"
        assert rb.sql(f"SELECT {episodes} FROM episodes ORDER BY source").fetchall() == [
            ("e1", 4, 1.25, "terminated", "add", "true"),
            ("e2", 3, 0.0, "truncated", "add", None),
        ]
        groups = rb.groups().arrow().to_pylist()
        assert [(one["key"], one["status"], one["max_version"]) for one in groups] == [("g", "complete", 3)]
        assert _rows(rb, "late_reward", "event = 'end'") == [(7.0,), (None,)]
        post(f"{serving.url}/episodes/e1/v1/{CHAT}?x-expstore-split=eval", json=_chat("hi"))
        assert rb.sql("SELECT split, status FROM episodes WHERE source = 'e1'").fetchall()[-1] == (
            "eval",
            "open",
        )


def test_a_silent_episode_is_cut_and_resumed_but_never_during_a_call(tmp_path: Path) -> None:
    clock = ManualClock()
    with (
        FakeUpstream() as upstream,
        _proxy(tmp_path, upstream.url, session_timeout=100.0, clock=clock) as (serving, rb),
    ):
        served = serving.app.state.stores.get("run")

        def status() -> str:
            clock.now += 101
            served.end_silent()
            return rb.sql("SELECT string_agg(status, ' ') FROM episodes").fetchone()[0]

        url = f"{serving.url}/episodes/e1/v1/{CHAT}"
        post(url, json=_chat("hi"))
        hung = threading.Thread(target=post, args=(url,), kwargs={"json": _chat("hang"), "timeout": 60})
        hung.start()
        wait_until(lambda: served.running)
        assert status() == "open"
        upstream.has_ended.set()
        hung.join()
        assert status() == "cut"
        post(url, json=_chat("hi"))
        assert rb.sql("SELECT length, status FROM episodes").fetchall() == [(3, "open")]


def test_retries_of_a_client_have_the_digest_of_the_first_attempt(tmp_path: Path) -> None:
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, rb):
        for retry in range(3):
            headers = {"x-stainless-retry-count": str(retry)}
            post(f"{serving.url}/episodes/e1/v1/{CHAT}", json=_chat("500"), headers=headers)
        rows = _rows(rb, "retry, digest")
        assert [retry for retry, _ in rows] == [0, 1, 2]
        assert len({digest for _, digest in rows}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_cannot_be_stored_fail_or_pass_as_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise StorageError("the disk is full", kind="disk_full")

    for on_error in ("fail", "pass"):
        with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url, on_error=on_error) as (serving, rb):
            body = _chat("hi", stream=stream)
            expected = _post(upstream.url, CHAT, body)
            monkeypatch.setattr(rb, "extend", fail)
            found = _post(f"{serving.url}/v1", CHAT, body)
            if on_error == "pass":
                assert found == expected
            elif stream:
                assert found[2:] == (b"".join(chat_events("hi", {})[:-1]), False)
            else:
                assert (found[0], json.loads(found[2])["error"]["kind"]) == (507, "not_recorded")
            assert "expstore_calls_lost_total 1.0" in httpx.get(f"{serving.url}/metrics", timeout=60).text
            assert "was not recorded: the disk is full" in caplog.text
            monkeypatch.undo()
            assert serving.app.state.proxy.start()._marks.read() == []


def test_a_token_of_the_server_is_a_header_of_its_own(tmp_path: Path) -> None:
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url, token=b"secret") as (serving, _):
        url = f"{serving.url}/v1/{CHAT}"
        refused = post(url, json=_chat("hi"), headers={"Authorization": "Bearer secret"})
        assert refused.status_code == 401
        assert not upstream.requests
        headers = {"Authorization": "Bearer other", "x-expstore-token": "secret"}
        assert post(url, json=_chat("hi"), headers=headers).status_code == 200
        assert "secret" not in upstream.requests[0][0]


def test_what_a_client_says_of_an_episode_is_checked_before_its_call(tmp_path: Path) -> None:
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, rb):
        for name, value in (
            ("episode", "a b"), ("episode", "x" * 101), ("policy-version", "-1"), ("facts", "[1]"),
            ("facts", "{"), ("split", "a/b"), ("facts", '{"a": NaN}'), ("facts", '{"_group": 1}'),
            ("facts", '{"a": "\\ud800"}'),
        ):  # fmt: skip
            headers = {f"x-expstore-{name}": value}
            assert post(f"{serving.url}/v1/{CHAT}", json=_chat("hi"), headers=headers).status_code == 400
        assert not upstream.requests
        assert len(rb) == 0


def test_headers_of_one_connection_are_not_passed_on(tmp_path: Path) -> None:
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, _):
        sent = {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "X-End": "ü".encode(), "TE": "trailers"}
        assert post(f"{serving.url}/v1/{CHAT}", json=_chat("hi"), headers=sent).status_code == 200
        head = upstream.requests[0][0].lower()
    assert "x-end: \xe3\xbc" in head, "in lower case"
    assert not any(name in head for name in ("x-hop", "te:"))


def test_odd_bodies_and_answers_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a pair of UTF-16, a number that is too large, JSON that nests deeply, and no JSON."""
    odd = {"token_ids": [1 << 40], "logprobs": {"content": [{"token": "a", "logprob": 10**400}]}}
    monkeypatch.setattr("tests.support.fake_upstream._ODD", odd)
    chat = json.dumps(_chat("half a pair: \ud83d"))
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, rb):
        url = f"{serving.url}/episodes/e1/v1/{CHAT}"
        for body in (chat, json.dumps(_chat("odd")), chat[:-1] + ', "a": ' + "[" * 900 + "]" * 900 + "}"):
            assert post(url, content=body.encode()).status_code == 200
        assert post(url, content=b"{").status_code == 502
        rows = _rows(rb, "outcome, messages[2]::JSON ->> 'content', token_ids, logprobs, response")
    assert [row[0] for row in rows] == ["answered"] * 3 + ["failed"]
    assert rows[0][1] == rows[2][1] == "half a pair: \ufffd"
    assert rows[1][2:4] == ([], [])
    assert json.loads(rows[1][4])["choices"][0]["token_ids"] == [1 << 40]


def test_settings_and_stores_that_cannot_record_are_refused(tmp_path: Path) -> None:
    for url in ("127.0.0.1:8000", "ftp://a/v1", "http://user:key@a/v1", "http://a/v1?b=1"):
        with pytest.raises(ArgumentError):
            Capture(upstream=url)
    for wrong in ({"on_error": "maybe"}, {"omit": ("status",)}):
        with pytest.raises(ArgumentError):
            Capture(upstream="http://a/v1", **wrong)  # type: ignore[arg-type]
    capture = Capture(upstream="http://a/v1")
    with pytest.raises(StateError):
        Settings(path=tmp_path, capture=capture, read_only=True)
    expstore.open(tmp_path / "other.exp", schema={"a": "int64"}).close()
    app = expstore.api.create_app(Settings(path=tmp_path / "other.exp", capture=capture))
    with pytest.raises(StateError):
        app.state.proxy.start()
    app.state.stores.close()
    with pytest.raises(StateError):
        expstore.api.create_app(Settings(path=tmp_path, capture=capture))


def test_the_queries_of_the_page_run(tmp_path: Path) -> None:
    """A query for tokens, one for the reward by turns, for latency, and for errors of tools."""
    page = (ROOT / "docs" / "capture.md").read_text()
    block = re.sub("(?m)^--.*$", "", page.partition("```sql\n")[2].partition("```")[0])
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, rb):
        for episode, count in (("e1", 1), ("e2", 3)):
            for _ in range(count):
                body = {"model": "fake", "messages": [{"role": "tool", "content": f"Error: {episode}"}]}
                post(f"{serving.url}/episodes/{episode}/v1/{CHAT}", json=body)
            post(f"{serving.url}/episodes/{episode}/v1/{CHAT}", json=_chat("500"))
            _act(serving, "end", {"reward": count}, episode)
        tokens, rewards, latency, errors = (
            sorted(rb.sql(query).fetchall(), key=str) for query in block.split(";") if query.strip()
        )
    assert tokens == [(1, 9), (2, 27)]
    assert rewards == [(1, 1, 1.0), (3, 1, 3.0)]
    assert [row[0] for row in latency] == ["fake"]
    assert errors == [(1, "Error: e1"), (2, "Error: e2")]


def test_serve_records_calls_as_capture_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, url = list[Settings](), "http://a/v1"
    monkeypatch.setattr("expstore.api.server.serve", lambda settings, **_: made.append(settings))
    options = ["--on-error", "pass", "--omit", "messages", "--omit", "tools", "--ask-logprobs"]
    path = str(tmp_path / "run.exp")
    assert run(["capture", path, "--upstream", url, *options]) == 0
    assert run(["serve", path, "--capture", url, *options]) == 0
    assert run(["serve", path, "--capture", url]) == 0
    chosen = Capture(upstream=url, on_error="pass", omit=("messages", "tools"), ask_logprobs=True)
    assert [one.capture for one in made] == [chosen, chosen, Capture(upstream=url)]
    for option in (["--on-error", "pass"], ["--omit", "tools"], ["--ask-logprobs"]):
        assert run(["serve", path, *option]) == 2
    assert len(made) == 3


_CURL = ["curl", "-sN", "--data-binary", "@-"]
_FETCH = """
const body = require("fs").readFileSync(0);
fetch(process.argv[1], {method: "POST", body, headers: {"content-type": "application/json"}})
  .then((answer) => answer.arrayBuffer()).then((data) => process.stdout.write(Buffer.from(data)));
"""
_OPENAI = """
import sys, json, openai
body = json.load(sys.stdin)
client = openai.OpenAI(base_url=sys.argv[1].removesuffix("/chat/completions"), api_key="k")
for chunk in client.chat.completions.create(**body):
    print(chunk.model_dump_json())
"""


@pytest.mark.parametrize("program", ["curl", "node", "openai"])
def test_programs_get_the_same_answers(tmp_path: Path, program: str) -> None:
    if program == "openai":
        pytest.importorskip("openai")
    elif shutil.which(program) is None:
        pytest.skip(f"there is no {program}")
    command = {"curl": _CURL, "node": ["node", "-e", _FETCH], "openai": [sys.executable, "-c", _OPENAI]}[
        program
    ]
    body = json.dumps(_chat("hello", stream=True)).encode()
    with FakeUpstream() as upstream, _proxy(tmp_path, upstream.url) as (serving, rb):
        direct, relayed = (
            subprocess.run([*command, f"{url}/{CHAT}"], input=body, capture_output=True, check=True).stdout
            for url in (upstream.url, f"{serving.url}/episodes/e1/v1")
        )
        assert direct == relayed != b""
        assert _rows(rb, "outcome") == [("answered",)]


class _Client(threading.Thread):
    """Calls one after the other, until the proxy is gone; it notes what it saw of each.

    Args:
        url: The address of the proxy.
        number: Number of the client, a part of its texts.
    """

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        self._url, self._number = url, number
        self.answered: list[str] = []
        self.sent = 0
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while True:
                word = f"w{self._number}-{self.sent}"
                body = _chat(word, stream=self.sent % 3 > 0)
                self.sent += 1
                try:
                    answer = client.post(f"{self._url}/episodes/e{self._number}/v1/{CHAT}", json=body)
                except httpx.TransportError:
                    return
                assert answer.status_code == 200
                if body["stream"]:
                    assert answer.content == b"".join(chat_events(word, {}))
                self.answered.append(word)


def _check_kills(tmp_path: Path, count: int, seed: int) -> None:
    """Kill a proxy after random events of streams; compare its store with what clients saw.

    The stream of that event has stopped; where the calls of the other clients are is left to chance.
    """
    chance = random.Random(seed)
    path, seen = tmp_path / "run.exp", list[str]()
    sent = 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with FakeUpstream() as upstream:
        command = [sys.executable, "-m", "expstore", "capture", str(path), "--upstream", upstream.url]
        for life in range(count):
            with warm_processes.Popen([*command, "--port", str(port)], stdout=subprocess.PIPE) as child:
                try:
                    assert child.stdout is not None
                    assert child.stdout.readline()
                    is_due = upstream.stop_after(chance.randrange(1, 250))
                    clients = [_Client(url, 3 * life + one) for one in range(3)]
                    assert is_due.wait(120)
                finally:
                    child.kill()
                child.wait()
            for one in clients:
                one.join()
                seen += one.answered
                sent += one.sent
    with expstore.open(path, mode="r") as rb:
        last = rb.sql("SELECT max(_id) FROM transitions").fetchone()[0]
    with _proxy(tmp_path, "http://127.0.0.1:9/v1") as (_, rb):
        rows = _rows(rb, "outcome, messages, call")
        assert not list((path / "calls").iterdir())
        assert last <= len(rows)
    assert len({call for *_, call in rows}) == len(rows) <= sent
    asked = [json.loads(messages[1])["content"] for _, messages, _ in rows]
    assert len(set(asked)) == len(asked), "no call is stored twice"
    outcome_of = {word: (outcome, messages) for word, (outcome, messages, _) in zip(asked, rows, strict=True)}
    for word in seen:
        outcome, messages = outcome_of[word]
        assert (outcome, json.loads(messages[2])["content"]) == ("answered", f"{word}!")
    others = {outcome for word, (outcome, _) in outcome_of.items() if word not in set(seen)}
    assert others <= {"unanswered", "answered"}
    assert "unanswered" in {outcome for outcome, *_ in rows}


@pytest.mark.guarantee(
    "kill/calls",
    "A call that a client saw answered is stored once, whenever the proxy is killed; others are marked.",
)
def test_answered_calls_survive_kills(tmp_path: Path) -> None:
    _check_kills(tmp_path, 2, seed=0)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_answered_calls_survive_a_hundred_kills(tmp_path: Path) -> None:
    _check_kills(tmp_path, 100, seed=1)
