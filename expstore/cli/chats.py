"""Conversations with a language model: print those of an episode, and export them for supervised training.

Used by the commands `episode` and `export`, for stores that `expstore capture` has written. Stores are read
in SQL and not changed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from expstore.core.tables import printable
from expstore.errors import NotFoundError

if TYPE_CHECKING:
    from expstore.schema.schema import Schema

#: Characters of a message that are printed.
_WIDTH = 2000
_CALLS = """
SELECT t._episode, e.source, e.split, e."return", t."group", t.messages, t.tools
FROM transitions t JOIN episodes e ON e.episode_id = t._episode
WHERE t.event = 'call' AND t.outcome = 'answered' AND t.status = 200 AND {where} ORDER BY t._id
"""


def has_calls(schema: Schema | None) -> bool:
    """Return whether a store has the calls of agents to a language model."""
    return schema is not None and {("event",), ("outcome",), ("messages",)} <= set(schema.keys)


def find_conversations(path: Path, where: str) -> Iterator[dict[str, Any]]:
    """Yield the conversations of a store: the answered calls that no later call of their episode continues.

    Args:
        path: The folder of the store.
        where: A condition over `t`, the rows, and `e`, their episodes.
    """
    from expstore.cli.query import ask

    found = ask([path], _CALLS.format(where=where), None)
    names = ("episode_id", "source", "split", "return", "group", "messages", "tools")
    by_episode: dict[int, list[dict[str, Any]]] = {}
    for row in found.fetchall():
        call = dict(zip(names, row, strict=True))
        earlier = by_episode.setdefault(call["episode_id"], [])
        earlier[:] = [one for one in earlier if call["messages"][: len(one["messages"])] != one["messages"]]
        earlier.append(call)
    for earlier in by_episode.values():
        yield from earlier


def show_conversations(path: Path, episode: int) -> None:
    """Print the conversations of an episode, a message a paragraph."""
    for call in find_conversations(path, f"t._episode = {episode:d}"):
        typer.echo("")
        for text in call["messages"]:
            for line in _describe(json.loads(text)):
                typer.echo(printable(line[:_WIDTH]))


def _describe(message: Any) -> Iterator[str]:
    """Yield the lines of a message: of a chat completion, or an item of a response."""
    if not isinstance(message, Mapping):
        yield str(message)
        return
    who = message.get("role") or message.get("type")
    content = message.get("content", message.get("output"))
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = " ".join(
            str(part.get("text", part)) if isinstance(part, Mapping) else str(part) for part in content
        )
    if content:
        yield f"{who}: {content}"
    called = [one.get("function", one) for one in message.get("tool_calls", ())]
    for call in [message] if message.get("type") == "function_call" else called:
        yield f"{who} calls {call.get('name')}({call.get('arguments')})"


def export_chat(path: Path, target: Path, where: str) -> int:
    """Write conversations of chat completions as JSON lines; return their number.

    A line has `messages` and, if there are any, `tools`, as trainers take them; and `episode_id`, `source`,
    `split`, `return` and `group`. The file exists completely or not at all.

    Args:
        path: The folder of the store.
        target: The file, which must not exist.
        where: A condition over the relation `episodes`.

    Raises:
        NotFoundError: No answered chat completion matches.
        StateError: The file exists.
    """
    from expstore.disk.atomic_build import build_atomically
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import check_target

    disk = Disk()
    check_target(disk, target)
    lines, condition = [], f"e.episode_id IN (SELECT episode_id FROM episodes WHERE {where})"
    for call in find_conversations(path, f"t.path = 'chat/completions' AND ({condition})"):
        for name in ("messages", "tools"):
            call[name] = [json.loads(text) for text in call[name] or ()]
        if not call["tools"]:
            del call["tools"]
        lines.append(json.dumps(call, ensure_ascii=False) + "\n")
    if not lines:
        raise NotFoundError(
            f"{path} has no answered chat completion that matches", hint="see expstore episode"
        )
    with build_atomically(disk, target, single=True) as folder:
        with contextlib.closing(disk.open(folder / target.name, create=True)) as file:
            file.write("".join(lines).encode(), 0)
            file.sync()
    return len(lines)
