"""Writes under idempotency keys happen once, and return the same answer when repeated."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.ensemble import ReplayBufferEnsemble
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.cli.info import facts_of
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.errors import NotReadyError, StateError, StorageError
from expstore.maintenance import repair, verify
from expstore.rate_limiters import SampleToInsertRatio
from expstore.storages.factory import ZarrStorage
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.write_key_file import KEYS
from expstore.storages.memory import MemoryStorage
from expstore.writers.writers import TensorDictMaxValueWriter
from tests.support.batches import closing_factory, numbered_rows
from tests.support.forks import in_child
from tests.support.threads import in_threads

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs", "short_flat_shards")]

DIGEST = b"0123456789abcdef"


def memory(path: Path, capacity: int | None) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=MemoryStorage(capacity), batch_size=4)


def disk(path: Path, capacity: int | None) -> TensorDictReplayBuffer:
    return expstore.open(path / "run.exp", capacity=capacity, batch_size=4)


@pytest.fixture(params=[memory, disk])
def make(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[int | None], TensorDictReplayBuffer]]:
    with closing_factory(lambda capacity=None: request.param(tmp_path, capacity)) as factory:
        yield factory


Make = Callable[..., TensorDictReplayBuffer]


# -- what comes back -------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "kill/keys",
    "A write that is repeated with its idempotency key is stored once and returns the same ids, for 24 "
    "hours and the last 100,000 writes.",
)
def test_a_write_is_made_once(make: Make) -> None:
    rb = make(20)
    first = rb.extend(numbered_rows(3), idempotency_key="a", digest=DIGEST)
    rb.extend(numbered_rows(2))
    again = rb.extend(numbered_rows(3), idempotency_key="a", digest=DIGEST)
    assert again.tolist() == first.tolist() == [0, 1, 2]
    assert again.dtype == first.dtype
    assert rb.extend(numbered_rows(3), idempotency_key="a", digest=DIGEST, return_ids=True).tolist() == [
        1,
        2,
        3,
    ]
    assert rb.add(numbered_rows(1)[0], idempotency_key="b") == 5
    assert rb.add(numbered_rows(1)[0], idempotency_key="b") == 5
    assert rb.write_count == len(rb) == 6
    assert rb.stats()["write_keys"] == 2
    assert rb.stats()["extends"] == 3


def test_the_same_key_for_something_else_is_refused(make: Make) -> None:
    rb = make()
    rb.extend(numbered_rows(3), idempotency_key="a", digest=DIGEST)
    for digest in (DIGEST[::-1], None):
        with pytest.raises(StateError, match="use a new key for each write") as caught:
            rb.extend(numbered_rows(2), idempotency_key="a", digest=digest)
        assert caught.value.kind == "key_reused"
    with pytest.raises(StateError, match="belongs to another write"):
        rb.add({"no": "such rows"}, idempotency_key="a", digest=DIGEST[::-1])
    assert len(rb) == 3


def test_bad_keys_change_nothing(make: Make) -> None:
    rb = make()
    with pytest.raises(ValueError, match="empty"):
        rb.extend(numbered_rows(1), idempotency_key="")
    with pytest.raises(ValueError, match="16 bytes"):
        rb.extend(numbered_rows(1), idempotency_key="a", digest=b"short")
    with pytest.raises(TypeError, match="give both, or neither"):
        rb.add(numbered_rows(1)[0], digest=DIGEST)
    assert len(rb) == 0
    assert rb.stats()["write_keys"] == 0


@pytest.mark.guarantee("kill/keys")
def test_rows_that_have_left_are_answered_for(make: Make) -> None:
    rb = make(10)
    rb.extend(numbered_rows(4), idempotency_key="a")
    for _ in range(10):
        rb.extend(numbered_rows(7))
    assert rb.extend(numbered_rows(4), idempotency_key="a").tolist() == [0, 1, 2, 3]
    rb.empty()
    assert rb.extend(numbered_rows(4), idempotency_key="a", return_ids=True).tolist() == [1, 2, 3, 4]
    assert len(rb) == 0


def dropping(count: int, *dropped: int) -> TensorDict:
    ids = torch.arange(count)
    ids[list(dropped)] = -1
    return TensorDict({"x": torch.arange(count), "collector": {"traj_ids": ids}}, [count])


def test_dropped_rows_keep_their_places(make: Make) -> None:
    rb = make(20)
    rb.extend(dropping(2))
    first = rb.extend(dropping(6, 0, 3), idempotency_key="a", return_ids=True)
    assert first.tolist() == [-1, 3, 4, -1, 5, 6]
    rb.extend(dropping(2))
    assert torch.equal(rb.extend(dropping(6, 0, 3), idempotency_key="a", return_ids=True), first)
    assert rb.extend(dropping(6, 0, 3), idempotency_key="a").tolist() == [-1, 2, 3, -1, 4, 5]
    for other in (dropping(6, 0), dropping(6)):
        with pytest.raises(StateError, match="belongs to another write"):
            rb.extend(other, idempotency_key="a")
    for _ in range(2):  # nothing is kept: nothing is known, and nothing is done twice either
        assert rb.extend(dropping(2, 0, 1), idempotency_key="b").tolist() == [-1, -1]
    assert rb.write_count == 8


def test_transforms_do_not_see_a_repeated_write(make: Make) -> None:
    seen = []

    class Seeing(torch.nn.Module):
        def inv(self, data: TensorDict) -> TensorDict:
            seen.append(len(data))
            return data

        def forward(self, data: TensorDict) -> TensorDict:
            return data

    rb = make(20)
    rb.append_transform(Seeing(), invert=False)
    for _ in range(3):
        rb.extend(numbered_rows(3), idempotency_key="a")
    assert seen == [3]


def test_several_dims(tmp_path: Path) -> None:
    rb = TensorDictReplayBuffer(storage=ZarrStorage(tmp_path / "run.exp", 24, ndim=2), batch_size=4)
    data = TensorDict({"x": torch.arange(12).reshape(4, 3)}, [4, 3])
    first = rb.extend(data, idempotency_key="a")
    assert first.shape == (12, 2)
    assert torch.equal(rb.extend(data, idempotency_key="a"), first)
    step = TensorDict({"x": torch.arange(4)}, [4])
    assert torch.equal(rb.add(step, idempotency_key="b"), rb.add(step, idempotency_key="b"))
    assert (rb.write_count, rb.storage.write_count) == (4, 16)
    rb.close()


# -- who writes ------------------------------------------------------------------------------------------


def test_the_best_rows_take_no_keys(tmp_path: Path) -> None:
    writer = TensorDictMaxValueWriter("number")
    rb = TensorDictReplayBuffer(storage=ZarrStorage(tmp_path / "run.exp", 5), writer=writer, batch_size=4)
    with pytest.raises(StateError, match="does not support idempotency keys") as caught:
        rb.extend(numbered_rows(3), idempotency_key="a")
    assert caught.value.kind == "no_keys"
    assert len(rb) == 0
    rb.close()


def test_a_repeated_write_does_not_wait_for_samples(make: Make) -> None:
    rb = make(100)
    limiter = SampleToInsertRatio(1.0, min_size_to_sample=4, error_buffer=4.0, timeout=0)
    limited = TensorDictReplayBuffer(storage=rb.storage, batch_size=4, rate_limiter=limiter)
    limited.extend(numbered_rows(4), idempotency_key="a")
    limited.extend(numbered_rows(4, 50), idempotency_key="b")
    with pytest.raises(NotReadyError):
        limited.extend(numbered_rows(4))
    before = limiter.describe()
    for _ in range(3):
        assert limited.extend(numbered_rows(4), idempotency_key="a").tolist() == [0, 1, 2, 3]
    assert limiter.describe() == before


@pytest.mark.guarantee("kill/keys")
def test_the_same_key_in_many_threads_at_once(make: Make) -> None:
    rb = make(10_000)
    start, answers = threading.Barrier(4), [dict[int, list[int]]() for _ in range(4)]

    def extend(thread: int) -> None:
        start.wait()
        for number in range(50):
            answers[thread][number] = rb.extend(
                numbered_rows(5, number), idempotency_key=str(number), return_ids=True
            ).tolist()

    in_threads(4, extend)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert rb.write_count == 250


def test_members_keep_a_key_each(tmp_path: Path) -> None:
    members = [disk(tmp_path / str(n), 50) for n in range(2) if (tmp_path / str(n)).mkdir() is None]
    both = ReplayBufferEnsemble(*members, routing_key="to")
    data = numbered_rows(6, to=torch.tensor([0, 1, 1, 0, 0, 1]))
    first = both.extend(data, idempotency_key="a", digest=DIGEST)
    again = both.extend(data, idempotency_key="a", digest=DIGEST)
    assert torch.equal(first["index"], again["index"])
    assert [rb.write_count for rb in members] == [3, 3]
    members[1].set_writer(TensorDictMaxValueWriter("number"))
    with pytest.raises(StateError, match="does not support idempotency keys"):
        both.extend(data, idempotency_key="b")
    assert [rb.write_count for rb in members] == [3, 3]
    for rb in members:
        rb.close()


# -- what lasts ------------------------------------------------------------------------------------------


@pytest.mark.guarantee("kill/keys")
@pytest.mark.some(1)
@pytest.mark.parametrize("durability", ["process", "sync"])
def test_keys_are_known_after_a_kill_exactly_with_their_rows(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "run.exp"
    sizes = [1, 3, 40, 400, 2, 9, 300, 1]

    def life(first: int) -> Callable[[], None]:
        def work() -> None:
            rb = expstore.open(path, capacity=100, durability=durability)
            for number in range(first, first + 8):
                rb.extend(
                    numbered_rows(sizes[number % 8], number), idempotency_key=str(number), digest=DIGEST
                )
                if number % 5 == 3:
                    rb.flush()

        return work

    for first in (0, 8, 16):
        in_child(life(first))
    with expstore.open(path) as rb:
        last = 0
        for number in range(24):
            again = rb.extend(
                numbered_rows(1), idempotency_key=str(number), digest=DIGEST, return_ids=True
            ).tolist()
            assert again == list(range(last + 1, last + 1 + sizes[number % 8]))
            last = again[-1]
        assert rb.write_count == last == 3 * sum(sizes)
        assert rb.extend(numbered_rows(1), idempotency_key="24", return_ids=True).tolist() == [last + 1]
    assert verify(path) == []


def test_stores_without_keys_have_no_file(tmp_path: Path) -> None:
    with disk(tmp_path, 10) as rb:
        rb.extend(numbered_rows(3))
        rb.flush()
        assert not (tmp_path / "run.exp" / KEYS).exists()
        assert not Manifest.load(Disk(), tmp_path / "run.exp").keyed
        rb.extend(numbered_rows(3), idempotency_key="a")
        assert Manifest.load(Disk(), tmp_path / "run.exp").keyed
    assert (tmp_path / "run.exp" / KEYS).exists()
    assert facts_of(tmp_path / "run.exp")["write_keys"] == 1


def test_more_keys_than_the_file_may_owe_wait_for_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "IDEMPOTENCY_KEYS", 20)
    monkeypatch.setattr(tuning, "IDEMPOTENCY_SLOTS", 26)
    rb = disk(tmp_path, 1000)
    for number in range(100):
        rb.add(numbered_rows(1, number)[0], idempotency_key=str(number))
        assert rb.storage.state.write_keys.room >= 0
    shutil.copytree(tmp_path / "run.exp", tmp_path / "copy.exp")  # as a kill leaves it
    rb.close()
    for name in ("run.exp", "copy.exp"):
        with expstore.open(tmp_path / name) as rb:
            assert rb.stats()["write_keys"] == 20
            for number in range(80, 100):
                assert rb.add(numbered_rows(1)[0], idempotency_key=str(number)) == number
            assert rb.write_count == 100
            assert rb.add(numbered_rows(1)[0], idempotency_key="79") == 100
    assert (tmp_path / "run.exp" / KEYS).stat().st_size == 27 * 64


@pytest.mark.guarantee("kill/keys")
def test_keys_stay_where_another_content_comes(tmp_path: Path) -> None:
    rb = disk(tmp_path, 20)
    rb.extend(numbered_rows(4), idempotency_key="a")
    rb.dumps(tmp_path / "backup")
    rb.extend(numbered_rows(4), idempotency_key="b")
    rb.loads(tmp_path / "backup")
    assert rb.extend(numbered_rows(4), idempotency_key="a", return_ids=True).tolist() == [1, 2, 3, 4]
    assert rb.extend(numbered_rows(4), idempotency_key="b", return_ids=True).tolist() == [5, 6, 7, 8]
    assert len(rb) == 4
    rb.extend(numbered_rows(2), idempotency_key="c")
    rb.storage.snapshots.resize(30)
    for key, count in (("a", 4), ("b", 4), ("c", 2)):
        assert len(rb.extend(numbered_rows(count), idempotency_key=key)) == count
    assert len(rb) == 6
    rb.close()
    with disk(tmp_path, None) as rb:
        assert rb.extend(numbered_rows(4), idempotency_key="b", return_ids=True).tolist() == [5, 6, 7, 8]
    assert verify(tmp_path / "run.exp") == []


def test_versions_and_copies_of_rows_know_no_keys(tmp_path: Path) -> None:
    rb = disk(tmp_path, 20)
    rb.extend(numbered_rows(4), idempotency_key="a")
    version = rb.dumps(tmp_path / "backup")
    assert not Manifest.load(Disk(), version.path).keyed
    assert verify(version.path) == []
    (tmp_path / "other").mkdir()
    other = disk(tmp_path / "other", 20)
    other.loads(tmp_path / "backup")
    assert other.extend(numbered_rows(4), idempotency_key="a", return_ids=True).tolist() == [5, 6, 7, 8]
    other.close()
    rb.close()


def test_a_damaged_file_is_named_and_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk(tmp_path, 20) as rb:
        rb.extend(numbered_rows(4), idempotency_key="a")
        rb.extend(numbered_rows(4), idempotency_key="b")
    path = tmp_path / "run.exp"
    data = bytearray((path / KEYS).read_bytes())
    data[80] ^= 4
    (path / KEYS).write_bytes(data)
    (found,) = verify(path)
    assert (found.kind, found.path) == ("keys", KEYS)
    assert "1 keys are lost" in found.message
    assert repair(path, dry_run=True).acts == [f"{KEYS} rebuilt"]
    caplog.clear()
    outcome = repair(path)
    assert outcome.acts[0] == f"{KEYS} rebuilt"
    assert not outcome.left
    assert [r.getMessage() for r in caplog.records if KEYS in r.getMessage()] == [
        f"{path / KEYS} is damaged: 1 keys are lost; it is created again"
    ]
    assert verify(path) == []
    with disk(tmp_path, None) as rb:
        assert rb.extend(numbered_rows(4), idempotency_key="b", return_ids=True).tolist() == [5, 6, 7, 8]
        assert rb.extend(numbered_rows(4), idempotency_key="a", return_ids=True).tolist() == [9, 10, 11, 12]


# -- what fails ------------------------------------------------------------------------------------------


class FailingOnce(Disk):
    """Fail one act; 0: none."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def gate(self, act: str, path: Path) -> None:
        if self.left and act in ("write", "create", "allocate", "truncate", "rename"):
            self.left -= 1
            if not self.left:
                raise OSError(28, "no space left on device")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "act", [pytest.param(act, marks=() if act % 3 == 1 else pytest.mark.torture) for act in range(1, 30)]
)
def test_a_failed_write_is_repeated_under_its_key(tmp_path: Path, act: int) -> None:
    failing = FailingOnce()
    rb = TensorDictReplayBuffer(storage=ZarrStorage(tmp_path / "run.exp", 50, disk=failing), batch_size=4)
    rb.extend(numbered_rows(3))
    failing.left = act
    for number in range(6):
        for _ in range(3):
            try:
                found = rb.extend(
                    numbered_rows(12, 12 * number), idempotency_key=str(number), return_ids=True
                )
                if number % 2:
                    rb.flush()
                break
            except StorageError:
                pass
        assert found.tolist() == list(range(12 * number + 4, 12 * number + 16))
    assert rb.write_count == 75
    rb.close()
    with expstore.open(tmp_path / "run.exp") as again:
        for number in range(6):
            assert (
                again.extend(numbered_rows(12), idempotency_key=str(number), return_ids=True)[0]
                == 12 * number + 4
            )
        assert again.write_count == 75


def interrupt(rows: object) -> None:
    raise KeyboardInterrupt


def test_an_interruption_after_the_record_is_answered_when_it_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb = disk(tmp_path, 50)
    rb.extend(numbered_rows(3))
    with monkeypatch.context() as patched:
        patched.setattr(rb.storage.state, "note_key", lambda *_: interrupt(None))
        with pytest.raises(KeyboardInterrupt):
            rb.extend(numbered_rows(4), idempotency_key="a")
    assert rb.extend(numbered_rows(4), idempotency_key="a", return_ids=True).tolist() == [4, 5, 6, 7]
    assert rb.write_count == 7
    rb.close()
