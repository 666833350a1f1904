"""Only a close seals STATE: kills at every operation of a life, and damage of every bit.

A sealed page fits its checksum and belongs to a journal that ends with a close; a page that does not fit is
rebuilt from that journal. The rule is broken in two ways, both of which the kills must detect.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.disk.files import Disk
from expstore.errors import CorruptionError
from expstore.maintenance import repair, verify
from expstore.samplers import SamplerWithoutReplacement
from expstore.storages.engine import store
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.factory import ZarrStorage
from expstore.storages.follower import FollowerStorage
from expstore.storages.format.control_page import StatePage
from expstore.storages.format.journal import Kind, read_journal
from tests.crash.killing_disks import KillingDisk
from tests.support.damaged_stores import flip
from tests.support.stores import NoKeeper, build_store, copy_folder

pytestmark = pytest.mark.usefixtures("no_syncs")

CAPACITY, PROGRESS, LIMITS = 50, (3, 1, 4, 1), (15, 9265)
#: The used words of the page; the last one is the seal.
WORDS = range(41)


@pytest.fixture(autouse=True)
def _no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "Keeper", NoKeeper)


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count)}, [count])


def open_storage(path: Path, disk: Disk | None = None) -> ZarrStorage:
    return ZarrStorage(path, CAPACITY, settings=Settings(seed=1), disk=disk)


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """Return a closed store of this start of the machine, from which batches were sampled under a limiter."""
    path = build_store(tmp_path / "closed.exp", rows(20), capacity=CAPACITY, seed=1)
    storage = open_storage(path, KillingDisk())
    for _ in range(5):
        storage.draws.next()
    storage.draws.note_progress(PROGRESS)
    storage.close()
    # These cause neither a draw nor a record.
    storage = open_storage(path, KillingDisk())
    storage.draws.note_limits(*LIMITS)
    storage.close()
    return path


def live(path: Path, disk: Disk, pipe: int) -> None:
    """Open, sample, delete rows, sample, close; write the number of draws to a pipe."""
    storage = open_storage(path, disk)
    for _ in range(2):
        os.write(pipe, bytes([storage.draws.next() + 1]))
    storage._retire(3)
    os.write(pipe, bytes([storage.draws.next() + 1]))
    storage.close()


def faults(closed: Path, folder: Path, warnings: Callable[[], list[str]]) -> list[str]:
    """Kill a life before every operation; return the errors of its STATE."""
    found = []
    for at in itertools.count(1):
        path = copy_folder(closed, folder / f"{at}.exp")
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                live(path, KillingDisk(at, serial=True), write_end)
            finally:
                os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            drawn = max(pipe.read(), default=5)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            return found if at > 20 else ["no kills"]
        seen = verify(path, disk=KillingDisk())
        found += [f"act {at}: {one.message}" for one in seen if one.kind == "state" or one.fatal]
        try:
            storage = open_storage(path, KillingDisk())
        except CorruptionError as exc:
            found.append(f"act {at}: {exc.message}")
            continue
        draws = storage.draws
        if (draws.number, draws.progress, draws.limits) != (drawn, PROGRESS, LIMITS):
            found.append(f"act {at}: {draws.number} draws of {drawn}, {draws.progress}, {draws.limits}")
        found += [f"act {at}: {line}" for line in warnings()]
        storage.close()
        shutil.rmtree(path)
    raise AssertionError


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the messages about STATE since the last call."""

    def look() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if "STATE" in record.getMessage()]
        caplog.clear()
        return lines

    return look


@pytest.mark.guarantee("damage/verify")
@pytest.mark.slow
def test_killed_before_every_act_the_page_is_believed(
    closed: Path, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    assert faults(closed, tmp_path, warnings) == []


@pytest.mark.guarantee("power/tests")
@pytest.mark.slow
def test_a_seal_before_the_close_record_is_found(
    closed: Path, tmp_path: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = Store.sync

    def seal_early(self: Store) -> None:
        sync(self)
        self.shared.page.set("heartbeat", 0)
        self.shared.page.set("sequence", self.state.journal.sequence + 1)
        self.shared.page.seal()

    monkeypatch.setattr(Store, "sync", seal_early)
    assert any("was written" in fault for fault in faults(closed, tmp_path, warnings))


@pytest.mark.guarantee("power/tests")
@pytest.mark.slow
def test_a_seal_that_an_opening_leaves_is_found(
    closed: Path, tmp_path: Path, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StatePage, "unseal", lambda self: None)
    assert any("checksum" in fault for fault in faults(closed, tmp_path, warnings))


# -- a closed store's page is damaged ------------------------------------------------------------------


#: One bit of each word; the long run tests all.
ONE_OF_EACH = [(word, (29 * word + 3) % 64) for word in WORDS]
ALL = list(itertools.product(WORDS, range(64)))


@pytest.mark.guarantee("damage/verify")
@pytest.mark.slow
@pytest.mark.parametrize(
    "bits", [ONE_OF_EACH, pytest.param(ALL, marks=[pytest.mark.torture, pytest.mark.timeout(1800)])]
)
def test_a_flipped_bit_costs_nothing(
    closed: Path, tmp_path: Path, warnings: Callable[[], list[str]], bits: list[tuple[int, int]]
) -> None:
    """For any bit: readers, the check, and an opening, which logs one line."""
    for number, (word, bit) in enumerate(bits):
        path = copy_folder(closed, tmp_path / f"{number}.exp")
        flip(path / "STATE", 8 * word + bit // 8, bit % 8)
        where = f"bit {bit} of word {word}"
        follower = FollowerStorage(path, disk=KillingDisk())
        assert (follower.last, follower.owner) == (20, None), where
        follower.close()
        assert [finding.kind for finding in verify(path, disk=KillingDisk())] == ["state"], where
        storage = open_storage(path, KillingDisk())
        (line,) = warnings()
        assert "does not have its checksum" in line, where
        assert (storage.draws.number, storage.draws.progress, storage.draws.limits) == (
            5,
            PROGRESS,
            LIMITS,
        ), where
        assert storage.last == 20, where
        storage.close()
        shutil.rmtree(path)


@pytest.mark.guarantee("damage/verify")
def test_a_repair_rebuilds_the_page(closed: Path) -> None:
    flip(closed / "STATE", 61, 4)
    (finding,) = verify(closed)
    assert (finding.kind, finding.path, finding.fatal) == ("state", "STATE", False)
    done = repair(closed)
    assert "STATE rebuilt" in done.acts
    assert not done.left
    assert verify(closed) == []


def test_batches_continue_after_the_page_is_damaged(tmp_path: Path) -> None:
    """Sampling continues with the same draws, in the middle of a pass."""
    drawn = []
    for damaged in (False, True):
        path = tmp_path / f"{damaged}.exp"
        with expstore.open(path, capacity=CAPACITY, seed=1, sampler=SamplerWithoutReplacement()) as rb:
            rb.extend(rows(40))
            rb.sample(12)
        if damaged:
            flip(path / "STATE", 80, 3)
        with expstore.open(path, sampler=SamplerWithoutReplacement()) as rb:
            drawn.append([rb.sample(12)["x"].tolist() for _ in range(3)])
    assert drawn[0] == drawn[1]


@pytest.mark.guarantee("damage/verify")
def test_a_journal_shorter_than_the_page_says_stays_damage(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close is lost: opening refuses, the check reports it, and a repair may give up its content."""
    (segment,) = (closed / "journal").iterdir()
    records = read_journal(Disk(), closed / "journal")
    assert records[-1].kind is Kind.CLOSE
    data = segment.read_bytes().rstrip(b"\0")
    end = (len(data) - 1) // 64 * 64
    segment.write_bytes(data[:end].ljust(segment.stat().st_size, b"\0"))
    assert read_journal(Disk(), closed / "journal") == records[:-1]
    lost = f"ends with record {records[-2].sequence}, though {records[-1].sequence} was written"
    disk = KillingDisk()
    with pytest.raises(CorruptionError, match=lost):
        open_storage(closed, disk)
    monkeypatch.setattr(Disk, "boot_id", KillingDisk.boot_id)
    (finding,) = verify(closed)
    assert (finding.kind, finding.fatal) == ("journal", True)
    assert lost in finding.message
    assert repair(closed).left == [finding]
    assert repair(closed, drop_damaged=True).left == []
    storage = open_storage(closed, disk)
    assert (storage.last, storage.draws.number) == (20, 5)
    storage.close()
    assert verify(closed) == []
