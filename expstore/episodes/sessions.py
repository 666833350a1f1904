"""Sessions: which writer wrote when, and the numbers of its sources.

Used by `expstore.episodes.table`. A session is one writer's life: one opening for writing, one connection to
a served store, one buffer in RAM. Rows of two sessions never share an episode. This module has names and
numbers; it uses no rows or files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from expstore.episodes.log import Episode


class SessionKey(NamedTuple):
    """The key of a session.

    Args:
        id: Its id: 32 hexadecimal digits, or the id that a client of the server has chosen.
        remote: Whether it writes through a server. A local session ends when the store is opened for writing
            again; a remote one survives restarts of the server.
    """

    id: str
    remote: bool = False


class NewSource(NamedTuple):
    """Declare a source: one lane of one named or unnamed stream of one session.

    Args:
        number: Its number, unique in the store.
        name: The name that users see.
        named: Whether a user chose the name.
        session: Id of its session.
        remote: Whether the session is remote.
    """

    number: int
    name: str
    named: bool
    session: str
    remote: bool = False

    @property
    def key(self) -> SessionKey:
        """The key of its session."""
        return SessionKey(self.session, self.remote)


@dataclass(slots=True)
class Heir:
    """A source that has adopted episodes, until rows have continued them. Only in RAM, for the writer.

    Args:
        unchecked: Adopted episodes whose next row must continue them.
        has_written: Whether the source has written rows.
    """

    unchecked: set[int] = field(default_factory=set)
    has_written: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """End the open episodes of some sources.

    Open episodes become `cut`. Truncated ones keep their status and get no more rows.

    Args:
        time: Microseconds since 1970.
        sources: Numbers of the sources; None: all sources of the store.
        sessions: Sessions that have ended, with all their sources.
        episodes: Single episodes. Their session can reopen them, as after the end of a session.
    """

    time: int
    sources: tuple[int, ...] | None = ()
    sessions: tuple[SessionKey, ...] = ()
    episodes: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """Return the body of a journal record."""
        body = {
            "time": self.time,
            "sources": self.sources,
            "sessions": self.sessions,
            "episodes": self.episodes,
        }
        return json.dumps(body).encode()

    @classmethod
    def unpack(cls, body: Mapping[str, Any]) -> End:
        """Build the change from the parsed body of its record."""
        sources = body["sources"]
        return cls(
            int(body["time"]),
            None if sources is None else tuple(sources),
            tuple(SessionKey(*key) for key in body["sessions"]),
            tuple(body["episodes"]),
        )


@dataclass(frozen=True, slots=True)
class Resume:
    """Reopen episodes that the end of a session has cut.

    Args:
        time: Microseconds since 1970.
        session: The session that had ended.
        sources: Sources of another session that adopt its episodes; if that one has ended, it continues, too.
            Empty: the session itself continues.
        numbers: For each of `sources` the number of the ended session's source.
        episodes: Ids of the episodes. A reader may still know cut episodes that the writer has dropped.
    """

    time: int
    session: SessionKey
    sources: tuple[NewSource, ...] = ()
    numbers: tuple[int, ...] = ()
    episodes: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """Return the body of a journal record."""
        body = {
            "time": self.time,
            "session": self.session,
            "sources": self.sources,
            "numbers": self.numbers,
            "episodes": self.episodes,
        }
        return json.dumps(body).encode()

    @classmethod
    def unpack(cls, body: Mapping[str, Any]) -> Resume:
        """Build the change from the parsed body of its record."""
        return cls(
            int(body["time"]),
            SessionKey(*body["session"]),
            tuple(NewSource(*source) for source in body["sources"]),
            tuple(body["numbers"]),
            tuple(body["episodes"]),
        )


@dataclass(slots=True)
class Session:
    """The state of one session.

    Args:
        key: Its key.
        started: When its first source was declared, in microseconds since 1970.
        ended: When it ended; 0: it is live.
        named: Numbers of the sources that a user named, by name.
        unnamed: Numbers of its other sources, by name.
        cut: Episodes that its end has cut, by source and trajectory id. They can be resumed.
    """

    key: SessionKey
    started: int
    ended: int = 0
    named: dict[str, int] = field(default_factory=dict)
    unnamed: dict[str, int] = field(default_factory=dict)
    cut: dict[tuple[int, int | None], Episode] = field(default_factory=dict)

    def numbers(self) -> list[int]:
        """Return the numbers of all its sources."""
        return [*self.named.values(), *self.unnamed.values()]

    def sources(self) -> Iterable[NewSource]:
        """Yield all its sources."""
        for named, known in ((True, self.named), (False, self.unnamed)):
            for name, number in known.items():
                yield NewSource(number, name, named, *self.key)

    def to_dict(self) -> dict[str, Any]:
        """Return the values for a base record."""
        return {
            "key": self.key,
            "started": self.started,
            "ended": self.ended,
            "named": self.named,
            "unnamed": self.unnamed,
            "cut": [episode.to_dict() for episode in self.cut.values()],
        }
