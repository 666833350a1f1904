"""Hooks around a fork: each is called, whatever the others do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from expstore.core.fork_hooks import call_each


def test_hooks_that_fail_are_logged_and_prevent_no_other(caplog: pytest.LogCaptureFixture) -> None:
    called = []

    def hook(number: int) -> None:
        called.append(number)
        if number % 2:
            raise ValueError(f"hook {number} fails")

    call_each(range(5), hook)
    assert called == [0, 1, 2, 3, 4]
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "hook 1 fails",
        "hook 3 fails",
    ]
    assert caplog.messages == ["a forked process may not be able to use an object of type int"] * 2


def test_objects_that_are_added_meanwhile_are_called() -> None:
    class Growing:
        """A set to which another thread adds an object while it is listed for the first time."""

        def __init__(self) -> None:
            self.numbers = {1}

        def __iter__(self) -> Iterator[int]:
            for number in self.numbers:
                self.numbers.add(2)
                yield number

    called: list[int] = []
    call_each(Growing(), called.append)
    assert called == [1, 2]
