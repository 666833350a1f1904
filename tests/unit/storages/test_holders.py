"""Objects that hold a storage are notified of replaced content while they live."""

from __future__ import annotations

from typing import Any

from expstore.storages.read_view import Holders


class Buffer:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def _note_renewal(self, storage: Any) -> None:
        self.heard.append(storage)


def test_all_holders_are_notified_and_held_weakly() -> None:
    holders, one, other = Holders(), Buffer(), Buffer()
    for buffer in (one, other, one):
        holders.add(buffer)
    holders.tell("first")
    del other
    holders.tell("second")
    assert one.heard == ["first", "second"]
    assert len(holders._known) == 1
