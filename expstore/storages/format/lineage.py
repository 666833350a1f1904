"""Lineage: by which steps a store got its rows. It is part of expstore.json.

Used by stores, which add a step where they replace expstore.json anyway, so that a step and what it
describes take effect together. A step says which rows it concerns by their ids; where rows get other ids,
steps do in the same moment. The rows of a session end where those of the next session begin: the next opening
writes the last id, when it knows which rows were not lost. Nothing is written while rows are appended.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from expstore.core.parsing import MOST_IDS
from expstore.core.values import Window

#: The kinds of steps, by what they did. A session collects or imports rows; the other steps are single acts.
COLLECT, IMPORT = "collect", "import"
ADD_COLUMN, MERGE, RESTORE, PULL, RESIZE = "add_column", "merge", "restore", "pull", "resize"
KINDS = (COLLECT, IMPORT, ADD_COLUMN, MERGE, RESTORE, PULL, RESIZE)
#: Names of the facts that the library records about sessions.
OWN_FACTS = frozenset(
    {"program", "versions", "host", "user", "git_commit", "dirty", "sessions", "source", "files", "sha256"}
)
#: The fact of a session that says how many sessions with equal facts it stands for.
SESSIONS = "sessions"


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Args:
        kind: One of `KINDS`.
        time: When it began, microseconds since 1970.
        first: The first id of its rows; 0: the store has none of them any more.
        last: The last id; None: the session still writes, and has all rows from `first` on.
        store: The uuid of the store in which it took place; "": the store that gets it.
        session: The id of the session, for `COLLECT` and `IMPORT`.
        facts: What else is known, as values that JSON can store.

    Raises:
        ValueError: These are not the values of a step.
    """

    kind: str
    time: int
    first: int = 0
    last: int | None = 0
    store: str = ""
    session: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = self.time, self.first, self.first if self.last is None else self.last
        texts = self.kind, self.store, self.session or ""
        is_valid = all(type(one) is int and 0 <= one <= MOST_IDS for one in numbers)
        if not (is_valid and all(isinstance(one, str) for one in texts) and isinstance(self.facts, dict)):
            raise ValueError(f"a step of the lineage is {self!r:.200}")

    @property
    def key(self) -> tuple[str, int, str]:
        """What remains when the step is copied to another store, and when later sessions join it."""
        return self.kind, self.time, self.store

    def replace(self, **changes: Any) -> Step:
        """Return a copy with some values changed; without rows its ids are 0."""
        step = dataclasses.replace(self, **changes)
        is_empty = step.last is not None and step.last < step.first
        return dataclasses.replace(step, first=0, last=0) if is_empty else step


@dataclass(frozen=True, slots=True)
class Lineage:
    """The steps of a store in the order in which they took place. At most one of them is an open session.

    Args:
        steps: The steps.

    Example:
        >>> from expstore.storages.format.lineage import Lineage, Step
        >>> first = Step("collect", 1, session="a", facts={"program": "one.py"})
        >>> other = Step("collect", 2, session="b", facts={"program": "other.py"})
        >>> [(step.first, step.last) for step in Lineage().begin(first, 0).begin(other, 50).steps]
        [(1, 50), (51, None)]
    """

    steps: tuple[Step, ...] = ()

    @classmethod
    def from_text(cls, text: str) -> Lineage:
        """Return the lineage that `to_text` wrote.

        Raises:
            ValueError: A step has other values than steps have.
            TypeError: The text is no list of steps.
        """
        return cls(tuple(Step(*step) for step in json.loads(text)))

    def to_text(self) -> str:
        """Return the steps as JSON text without spaces: an indented one takes ten times as long."""
        steps = [[getattr(step, name) for name in Step.__slots__] for step in self.steps]
        return json.dumps(steps, separators=(",", ":"), ensure_ascii=False)

    def add(self, kind: str, time: int, window: Window, store: str = "", **facts: Any) -> Lineage:
        """Return the lineage with another step, which concerns the rows of a window."""
        step = Step(kind, time, window.low + 1, window.last, store, facts=facts)
        return Lineage((*self.steps, step.replace()))

    def begin(self, session: Step, last: int) -> Lineage:
        """Return the lineage when a session begins to write.

        The session before is closed, or removed if it wrote no rows. If it has the facts of the session
        before it, both become one step, so that programs that are restarted often need no room.

        Args:
            session: The new session; `first` and `last` are set here.
            last: The newest id, which is on the disk. Steps may name rows after it that were lost.
        """
        if any(step.last is None and step.session == session.session for step in self.steps):
            return self
        return Lineage((*self.close(last).steps, session.replace(first=last + 1, last=None)))

    def close(self, last: int) -> Lineage:
        """Return the lineage without an open session; `last` is the newest id."""
        found: list[Step] = []
        for step in self.steps:
            if step.last is not None:
                found.append(step.replace(last=min(step.last, last)))
                continue
            step = step.replace(last=last)
            if step.last and found and _are_alike(found[-1], step):
                number = found[-1].facts.get(SESSIONS, 1) + step.facts.get(SESSIONS, 1)
                facts = {**step.facts, SESSIONS: number}
                step = step.replace(time=found[-1].time, first=found.pop().first, facts=facts)
            found += [step] if step.last else []
        return Lineage(tuple(found))

    def add_facts(self, time: int, last: int, facts: Mapping[str, Any], kind: str | None = None) -> Lineage:
        """Return the lineage with more facts about the rows that the open session writes from now on.

        Args:
            time: The time, microseconds since 1970.
            last: The newest id. If the session has written rows, they keep their step, and a new one begins.
            facts: The facts; None removes one.
            kind: The kind of the session; None: as before.
        """
        steps = []
        for step in self.steps:
            if step.last is not None:
                steps.append(step)
                continue
            merged = {name: value for name, value in {**step.facts, **facts}.items() if value is not None}
            new = step.replace(kind=kind or step.kind, facts=merged)
            if new != step and step.first <= last:
                steps.append(step.replace(last=last))
                new = new.replace(time=time, first=last + 1)
            steps.append(new)
        return Lineage(tuple(steps))

    def complete(self, session: str, last: int, facts: Mapping[str, Any]) -> Lineage:
        """Return the lineage with facts of a session that were not known when it began, if it wrote rows."""
        return Lineage(
            tuple(
                step.replace(facts={**facts, **step.facts})
                if step.session == session and step.first <= last
                else step
                for step in self.steps
            )
        )

    def move(self, count: Callable[[int], int], base: int, last: int) -> Lineage:
        """Return the steps with the ids that their rows get in other content; no session is open there.

        Args:
            count: Returns how many rows up to an id are in the other content, which has them in their order.
            base: The id before the first one in the other content.
            last: The newest id now.
        """
        steps = []
        for step in self.close(last).steps:
            before, upto = count(max(0, step.first - 1)), count(step.last or 0)
            steps.append(step.replace(first=base + before + 1, last=base + upto))
        return Lineage(tuple(steps))

    def adopt(self, content: Lineage, last: int, store: str) -> Lineage:
        """Return the lineage of a store whose content is replaced.

        The store's own steps remain, without rows, unless the new content has them, too.

        Args:
            content: The steps of the new content, with their new ids. Those without a store get this one.
            last: The newest id of the former content.
            store: The uuid of the store.
        """
        theirs = [step.replace(store=step.store or store) for step in content.steps]
        known = {step.key for step in theirs}
        own = [step.replace(first=0, last=0) for step in self.close(last).steps if step.key not in known]
        return Lineage(tuple(sorted([*own, *theirs], key=lambda step: step.time)))


NO_STEPS = Lineage()


def _are_alike(former: Step, step: Step) -> bool:
    """Return whether a step continues the one before it, by another session with the same facts."""
    facts = [{**one.facts, SESSIONS: 1} for one in (former, step)]
    return (
        former.session is not None
        and former.last == step.first - 1
        and (former.kind, former.store, facts[0]) == (step.kind, step.store, facts[1])
    )
