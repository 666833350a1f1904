"""Store calls as rows of episodes, and mark the calls that a kill leaves without an answer.

Used by the proxy. It sends nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expstore.api.capture import calls
from expstore.api.errors import Refusal
from expstore.api.settings import Capture
from expstore.api.stores import Served
from expstore.disk.files import Disk, File
from expstore.episodes.facts import TRAIN
from expstore.errors import ExpStoreError, StateError
from expstore.schema.field_parser import schema_of
from expstore.storages.episode_lookup import steps_of_episode
from expstore.storages.read_view import read_stable
from expstore.wire.call_rows import build_row, describe_fields

_log = logging.getLogger("expstore.api")
#: Session of calls without an episode, and prefix of the sessions of episodes: one session each.
_SESSION = "capture"
#: Field of rewards that come after the end of their episode.
LATE = "late_reward"
#: Fields that follow from the body of a request.
_IN_BODY = frozenset({"messages", "tools", "request"})
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
    #: Fields of its row that follow from the request, once it was parsed.
    fields: dict[str, Any] = field(default_factory=dict)
    #: Returns what the answer says.
    read_answer: Callable[[], dict[str, Any] | None] = lambda: None


def store_settings(group_size: int | None) -> dict[str, Any]:
    """Return the arguments of `expstore.open` for a store of calls.

    Args:
        group_size: Number of episodes of a group; None: groups are closed by `rb.groups.close`.
    """
    size = {} if group_size is None else {"group_size": group_size}
    return {"layout": "arrow", "schema": describe_fields(), "episodes": {"group": "group"} | size}


class Recorder:
    """Write the rows of calls into a store.

    A file in the store's folder marks each call from before it is passed on until its row is in the journal.
    The marks that a kill leaves become rows with the outcome `unanswered` at the next start.

    Threads: the event loop calls `begin` and `forget`, one other thread all other methods. Crashes: a row
    survives the end of the process when `record` returns.

    Args:
        served: The store.
        settings: How calls are recorded.

    Raises:
        StateError: The store cannot be written, or has other fields than calls.
    """

    def __init__(self, served: Served, settings: Capture) -> None:
        served.rb.storage.writer()
        self._served, self._rb = served, served.rb
        expected = schema_of(describe_fields())
        assert expected is not None
        found = {one.key: one for one in served.rb.schema.fields} if served.rb.schema else {}
        if any(found.get(one.key) != one for one in expected.fields):
            raise StateError(
                f"store {served.name!r} does not have the fields of calls",
                hint="create one with expstore capture NEW.exp --upstream URL",
            )
        self._omit = settings.omit
        self._marks = _Marks(served.path / "calls")
        #: Number of calls that are being made, by session.
        self.running: Counter[str] = Counter()
        served.running = self.running
        self._recover()
        #: Closes the files of marks; calls that are being made keep theirs.
        self.close = self._marks.close

    def begin(self, call: Call) -> None:
        """Mark a call, before it is passed on.

        Raises:
            StorageError: The disk failed or is full.
        """
        self.running[_session_of(call.asked.episode)] += 1
        # A body of which a part must not be stored is not stored here either.
        self._marks.write(call, b"" if _IN_BODY.intersection(self._omit) else call.body)

    def forget(self, call: Call) -> None:
        """Remove the mark of a call that was recorded, or whose loss was reported."""
        session = _session_of(call.asked.episode)
        self.running[session] -= 1
        if self.running[session] <= 0:
            del self.running[session]
        try:
            self._marks.erase(call)
        except ExpStoreError as exc:
            _log.error("the mark of call %s could not be removed: %s", call.id, exc)

    def prepare(self, call: Call) -> None:
        """Parse the request of a call, unless that was done."""
        if not call.fields:
            call.fields = calls.parse_request(call.path, call.body)
            call.fields["digest"] = hashlib.blake2b(call.body, digest_size=16).hexdigest()

    def record(self, call: Call) -> None:
        """Append the row of a call.

        Raises:
            ExpStoreError: The store cannot be written, or the episode has another split.
        """
        self.prepare(call)
        asked = call.fields
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
            raise Refusal(
                409, f"episode {episode!r} has ended", kind="ended", hint="POST .../reward adds one"
            )
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
        row: dict[Any, Any] = {"event": event, "group": asked.group, "policy_version": asked.policy_version}
        row |= {("next", "terminated"): ends, **values}
        session = _session_of(asked.episode)
        self._rb.extend(
            build_row(row, self._omit),
            source=asked.episode,
            session=session,
            episode_info=asked.facts or None,
            split=None if asked.split == TRAIN else asked.split,
        )
        self._served.heard.note(session, has_written=True)
        self._served.member.note_write()

    def _recover(self) -> None:
        """Append rows for the calls that a kill has left unanswered, and remove their marks."""
        left = self._marks.read()
        if left:
            query = "SELECT call FROM transitions WHERE list_contains($names, call)"
            found = self._rb.sql(query, {"names": [call.id for call in left]}).fetchall()
            for call in left:
                if (call.id,) not in found:
                    self.record(call)
        self._marks.clear()


class _Marks:
    """Files with a call each, which are used again: to create a file for each call takes half a millisecond.

    Threads: `erase` is called by another thread than `write`. Crashes: a mark survives the end of the process
    when `write` returns.

    Args:
        folder: The folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._disk, self._folder = Disk(), folder
        self._disk.make_dir(folder)
        self._free: list[File] = []
        self._used: dict[str, File] = {}
        self._count = 0

    def write(self, call: Call, body: bytes) -> None:
        """Mark a call."""
        asked = {**vars(call.asked), "facts": dict(call.asked.facts)}
        head = {"id": call.id, "path": call.path, "started": call.started, "asked": asked}
        head |= {"bytes": len(body), "crc32": zlib.crc32(body)}
        try:
            file = self._free.pop()
        except IndexError:
            self._count += 1
            file = self._disk.open(self._folder / str(self._count), create=True)
        self._used[call.id] = file
        file.write(json.dumps(head).encode() + b"\n" + body, 0)

    def erase(self, call: Call) -> None:
        """Remove the mark of a call, if it has one."""
        if (file := self._used.pop(call.id, None)) is not None:
            file.write(b"\n", 0)
            self._free.append(file)

    def read(self) -> list[Call]:
        """Return the marked calls, in the order of their begin."""
        found = []
        for name in self._disk.names(self._folder):
            head, _, rest = self._disk.read_whole(self._folder / name).partition(b"\n")
            said = calls.load_object(head) or {"bytes": -1}
            body = rest[: max(0, said["bytes"])]
            # Otherwise the mark was being written, and the call was not passed on.
            if len(body) == said["bytes"] and zlib.crc32(body) == said["crc32"]:
                found.append(Call(said["path"], body, Asked(**said["asked"]), said["id"], said["started"]))
        return sorted(found, key=lambda call: call.started)

    def clear(self) -> None:
        """Remove all files; there are no calls yet."""
        for name in self._disk.names(self._folder):
            self._disk.unlink(self._folder / name)

    def close(self) -> None:
        """Close the files."""
        for file in (*self._free, *self._used.values()):
            file.close()


def _session_of(episode: str | None) -> str:
    return _SESSION if episode is None else f"{_SESSION}:{episode}"
