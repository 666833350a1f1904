"""Store calls as rows of episodes, and mark the calls that a kill leaves without an answer.

Used by the proxy. It sends nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expstore.api.capture import calls
from expstore.api.errors import Refusal
from expstore.api.settings import Capture
from expstore.api.stores import Served
from expstore.disk.files import Disk
from expstore.episodes.facts import TRAIN
from expstore.errors import ExpStoreError, StateError
from expstore.schema.field_parser import schema_of
from expstore.storages.episode_lookup import steps_of_episode
from expstore.storages.read_view import read_stable

_log = logging.getLogger("expstore.api")
#: Session of calls without an episode, and prefix of the sessions of episodes: one session each.
_SESSION = "capture"
#: Field of rewards that come after the end of their episode.
LATE = "late_reward"
#: Outcomes of calls.
ANSWERED, CUT, FAILED, LEFT, UNANSWERED = "answered", "cut", "failed", "left", "unanswered"


@dataclass(frozen=True)
class Asked:
    """What a client says about a call besides its body.

    Args:
        episode: Its name for the episode; None: the call is an episode of its own.
        group: The group of the episode.
        policy_version: The version of the policy.
        split: The split of the episode.
        facts: Facts about the episode.
        retry: The number of attempts before this one, as the client counts them.
    """

    episode: str | None = None
    group: str | None = None
    policy_version: int = 0
    split: str = TRAIN
    facts: Mapping[str, Any] = field(default_factory=dict)
    retry: int = 0


@dataclass
class Call:
    """A call that is being made.

    Args:
        path: Its path below `/v1/`.
        body: The body of the request, as the client has sent it.
        asked: What the client says about it.
    """

    path: str
    body: bytes
    asked: Asked
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: int = field(default_factory=lambda: time.time_ns() // 1000)
    began: float = field(default_factory=time.perf_counter)
    #: HTTP status of the answer; None: there was no answer.
    status: int | None = None
    #: Seconds until the first bytes of the answer.
    first_byte: float | None = None
    outcome: str = UNANSWERED
    error: str | None = None
    #: Returns what the answer says.
    read_answer: Callable[[], dict[str, Any] | None] = lambda: None


def store_settings(group_size: int | None) -> dict[str, Any]:
    """Return the arguments of `expstore.open` for a store of calls.

    Args:
        group_size: Number of episodes of a group; None: groups are closed by `rb.groups.close`.
    """
    size = {} if group_size is None else {"group_size": group_size}
    return {"layout": "arrow", "schema": calls.describe_fields(), "episodes": {"group": "group"} | size}


class Recorder:
    """Write the rows of calls into a store.

    A file beside the store marks each call from before it is passed on until its row is in the journal. The
    files that a kill leaves become rows with the outcome `unanswered` at the next start.

    Threads: one thread at a time calls methods other than `begin` and `forget`. Crashes: a row survives the
    end of the process when `record` returns.

    Args:
        served: The store.
        settings: How calls are recorded.

    Raises:
        StateError: The store cannot be written, or has other fields than calls.
    """

    def __init__(self, served: Served, settings: Capture) -> None:
        served.rb.storage.writer()
        self._served, self._rb = served, served.rb
        expected = schema_of(calls.describe_fields())
        assert expected is not None
        found = {one.key: one for one in served.rb.schema.fields} if served.rb.schema else {}
        if any(found.get(one.key) != one for one in expected.fields):
            raise StateError(
                f"store {served.name!r} does not have the fields of calls",
                hint="create one with expstore capture NEW.exp --upstream URL",
            )
        self._omit = settings.omit
        self._disk = Disk()
        self._folder = served.path.with_name(f".{served.path.name}.calls")
        self._disk.make_dir(self._folder)
        #: Number of calls that are being made, by session.
        self.running: Counter[str] = Counter()
        served.running = self.running
        self._recover()

    def begin(self, call: Call) -> None:
        """Mark a call, before it is passed on.

        Raises:
            StorageError: The disk failed or is full.
        """
        asked = {**vars(call.asked), "facts": dict(call.asked.facts)}
        head = json.dumps({"path": call.path, "started": call.started, "asked": asked}).encode()
        # A body of which a part must not be stored is not stored here either.
        body = b"" if {"messages", "tools", "request"}.intersection(self._omit) else call.body
        self.running[_session_of(call.asked.episode)] += 1
        self._disk.put(self._folder / call.id, head + b"\n" + body)

    def forget(self, call: Call) -> None:
        """Remove the mark of a call that was recorded, or whose loss was reported."""
        session = _session_of(call.asked.episode)
        self.running[session] -= 1
        if self.running[session] <= 0:
            del self.running[session]
        try:
            self._disk.unlink(self._folder / call.id)
        except ExpStoreError as exc:
            _log.error("the mark of call %s could not be removed: %s", call.id, exc)

    def record(self, call: Call) -> None:
        """Append the row of a call.

        Raises:
            ExpStoreError: The store cannot be written, or the episode has another split.
        """
        asked = calls.parse_request(call.path, call.body)
        found = calls.parse_answer(call.path, call.read_answer(), is_whole=call.outcome == ANSWERED)
        known = {
            "call": call.id,
            "outcome": call.outcome,
            "status": call.status,
            "path": call.path,
            "error": call.error,
            "started": call.started,
            "first_byte": call.first_byte,
            "seconds": None if call.outcome == UNANSWERED else time.perf_counter() - call.began,
            "retry": call.asked.retry,
            "digest": hashlib.blake2b(call.body, digest_size=16).hexdigest(),
        }
        row = asked | found | known | {"messages": asked["messages"] + found["messages"]}
        self._append("call", row, call.asked, ends=call.asked.episode is None)

    def reward(self, episode: str, value: float) -> dict[str, Any]:
        """Give an episode a reward: a row, or after its end an annotation of its last row.

        Raises:
            Refusal: 404: there is no such episode.
            ExpStoreError: The store cannot be written.
        """
        number, is_open = self.find(episode)
        if is_open:
            self._append("reward", {("next", "reward"): value}, Asked(episode))
        else:
            ids, _ = read_stable(self._rb.storage, lambda: steps_of_episode(self._rb.storage, number))
            self._rb.annotate(ids[-1:], {LATE: [value]}, by=_SESSION)
        return {"episode_id": number, "reward": value, "late": not is_open}

    def end(self, episode: str, reward: float, *, truncated: bool) -> dict[str, Any]:
        """End an episode by a row with its last reward.

        Raises:
            Refusal: 404: there is no such episode. 409: it has ended, or one of its calls is being made.
            ExpStoreError: The store cannot be written.
        """
        number, is_open = self.find(episode)
        session = _session_of(episode)
        if not is_open:
            raise Refusal(409, f"episode {episode!r} has ended", kind="ended", hint="POST .../reward adds one")
        if self.running[session]:
            raise Refusal(409, f"{self.running[session]} calls of episode {episode!r} are being made",
                          kind="in_use", hint="end it after their answers")  # fmt: skip
        values = {("next", "reward"): reward, ("next", "truncated"): truncated}
        self._append("end", values, Asked(episode), ends=not truncated)
        self._rb.episodes.end_session([session])
        return {"episode_id": number, "reward": reward, "status": "truncated" if truncated else "terminated"}

    def facts(self, episode: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Attach facts to an episode, and return all of its facts.

        Raises:
            Refusal: 404: there is no such episode.
            ExpStoreError: JSON cannot represent a fact, or the store cannot be written.
        """
        number, _ = self.find(episode)
        return {"episode_id": number, "info": self._rb.episodes.annotate(number, **facts)}

    def find(self, episode: str) -> tuple[int, bool]:
        """Return the id of the newest episode of a name, and whether it is open.

        Raises:
            Refusal: 404.
        """
        found = self._rb.episodes.find_open(episode).tolist()
        if found:
            return found[-1], True
        ended = self._rb.episodes("source = ?", "episode_id DESC", 1, params=[episode]).fetchall()
        if not ended:
            raise Refusal(404, f"there is no episode {episode!r}", kind="not_found",
                          hint="it begins with its first call")  # fmt: skip
        return ended[0][0], False

    def _append(self, event: str, values: Mapping[Any, Any], asked: Asked, *, ends: bool = False) -> None:
        """Append a row."""
        row = {"event": event, "group": asked.group, "policy_version": asked.policy_version}
        row |= {("next", "terminated"): ends} | values
        session = _session_of(asked.episode)
        self._rb.extend(
            calls.build_row(row, self._omit),
            source=asked.episode,
            session=session,
            episode_info=asked.facts or None,
            split=None if asked.split == TRAIN else asked.split,
        )
        self._served.heard.note(session, has_written=True)
        self._served.member.note_write()

    def _recover(self) -> None:
        """Append rows for the calls that a kill has left unanswered, and remove their marks."""
        left = sorted(self._disk.names(self._folder))
        if not left:
            return
        known = {
            one for (one,) in self._rb.sql(
                "SELECT call FROM transitions WHERE list_contains($names, call)", {"names": left}
            ).fetchall()
        }  # fmt: skip
        for name in left:
            head, _, body = self._disk.read_whole(self._folder / name).partition(b"\n")
            marked = calls.load_object(head)
            # A mark without its first line was being written: the call was not passed on.
            if name not in known and marked is not None:
                call = Call(marked["path"], body, Asked(**marked["asked"]), name, marked["started"])
                self.record(call)
            self._disk.unlink(self._folder / name)


def _session_of(episode: str | None) -> str:
    return _SESSION if episode is None else f"{_SESSION}:{episode}"

