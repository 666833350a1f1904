"""Idempotency keys in memory: which are known, for how long, and errors."""

from __future__ import annotations

import pytest

from expstore.core import tuning
from expstore.core.idempotency import KEPT_US, NO_KEY, WriteKey, WriteKeys, Written
from expstore.errors import StateError

HOUR = 3600 * 1_000_000


def key(name: str, digest: bytes | None = None) -> WriteKey:
    return WriteKey.of(name, digest)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> WriteKeys:
    """Keys of which five are known, in a ring of eight."""
    monkeypatch.setattr(tuning, "IDEMPOTENCY_KEYS", 5)
    monkeypatch.setattr(tuning, "IDEMPOTENCY_SLOTS", 8)
    return WriteKeys()


def test_a_key_is_known_once_it_is_noted() -> None:
    keys = WriteKeys()
    assert keys.find(key("a"), 0) is None
    keys.note(key("a"), 7, 3, 100)
    found = keys.find(key("a"), 200)
    assert found == Written(7, 3, dropped=False)
    assert found.last_id == 9
    assert keys.find(key("b"), 200) is None
    assert len(keys) == 1


def test_text_and_bytes_name_the_same_write() -> None:
    assert WriteKey.of("ä", None) == WriteKey.of("ä".encode(), None)
    assert WriteKey.of("a", None) != WriteKey.of("b", None)
    assert WriteKey.of("a", None).name != NO_KEY


def test_another_digest_is_refused() -> None:
    keys = WriteKeys()
    keys.note(key("a", b"1" * 16), 1, 2, 0)
    assert keys.find(key("a", b"1" * 16), 0) is not None
    for digest in (b"2" * 16, None):
        with pytest.raises(StateError, match="belongs to another write: 2 rows from id 1 on") as caught:
            keys.find(key("a", digest), 0)
        assert caught.value.kind == "key_reused"


def test_invalid_keys_are_refused() -> None:
    for name, digest, error in [
        ("", None, ValueError), (b"", None, ValueError), (3, None, TypeError), ("a", b"x", ValueError),
        ("a", "x" * 16, TypeError), ("a", b"", ValueError),
    ]:  # fmt: skip
        with pytest.raises(error):
            WriteKey.of(name, digest)  # type: ignore[arg-type]


def test_the_newest_ones_are_known(few: WriteKeys) -> None:
    for number in range(100):
        few.note(key(str(number)), number + 1, 1, number)
        known = [n for n in range(number + 1) if few.find(key(str(n)), number) is not None]
        assert known == list(range(max(0, number - 4), number + 1))
        assert len(few) == len(known)
    assert len(few._ring) == 8 * 64


def test_a_key_that_was_forgotten_may_be_used_again(few: WriteKeys) -> None:
    for number in range(4):
        few.note(key("a"), 10 * number + 1, 1, number * (KEPT_US + 1))
    assert few.find(key("a"), 3 * (KEPT_US + 1)) == Written(31, 1, dropped=False)
    assert len(few) == 1
    for number in range(4):
        few.note(key(str(number)), 100, 1, 3 * (KEPT_US + 1))
        assert few.find(key("a"), 3 * (KEPT_US + 1)) is not None  # the first ones that go were used again
    few.note(key("b"), 100, 1, 3 * (KEPT_US + 1))
    assert few.find(key("a"), 3 * (KEPT_US + 1)) is None


def test_keys_are_known_for_a_day(few: WriteKeys) -> None:
    few.note(key("a"), 1, 1, 0)
    few.note(key("b"), 2, 1, HOUR)
    assert few.find(key("a"), KEPT_US) is not None
    assert few.find(key("a"), KEPT_US + 1) is None
    few.note(key("c"), 3, 1, KEPT_US + 1)
    assert len(few) == 2
    few.note(key("d"), 4, 1, 3 * KEPT_US)
    assert len(few) == 1


def test_a_clock_that_jumps_forgets_earlier_or_later(few: WriteKeys) -> None:
    few.note(key("a"), 1, 1, 10 * KEPT_US)
    few.note(key("b"), 2, 1, 0)  # set back by ten days
    assert few.find(key("a"), 0) is not None
    assert few.find(key("b"), 0) is not None
    few.note(key("c"), 3, 1, 2 * KEPT_US)
    assert few.find(key("a"), 2 * KEPT_US) is not None
    assert few.find(key("b"), 2 * KEPT_US) is None
    few.note(key("d"), 4, 1, 12 * KEPT_US)
    assert few.find(key("a"), 12 * KEPT_US) is None
    assert few.find(key("d"), 12 * KEPT_US) is not None
    for number in range(20):  # and none stays for ever
        few.note(key(str(number)), 5, 1, 0)
    assert len(few) == 5
