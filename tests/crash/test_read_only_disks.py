"""A store on a read-only file system: reading works, and writing raises a clear error.

The mount is made in a child with its own namespaces (`unshare -rm`), as for full disks.
"""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from expstore.disk.files import Disk
from expstore.errors import StorageError
from expstore.storages.factory import ZarrStorage
from tests.support.stores import build_store, read_files

READ = """
import contextlib, errno, io, os, sys
from pathlib import Path
import torch
import expstore
from expstore.cli.app import run

store, out = Path(sys.argv[1]), Path(sys.argv[2])
try:
    (store / "trial").write_bytes(b"")
except OSError as exc:
    assert exc.errno == errno.EROFS, exc
else:
    raise SystemExit("it can be written to")
with expstore.open(store, mode="r", batch_size=4) as rb:
    assert torch.equal(rb[:]["x"], torch.arange(20))
    assert rb.sample()["x"].shape == (4,)
    assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(20,)]
for command in (
    ["info", store],
    ["sql", store, "SELECT sum(x) FROM transitions"],
    ["verify", store],
    ["export", store, out, "--parquet"],
):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = run([str(word) for word in command])
    assert not code, (command, code, said.getvalue())
assert any(out.rglob("*.parquet")) or out.is_file()
for mode in ("a", "w"):
    try:
        expstore.open(store, mode=mode, capacity=50)
    except expstore.errors.StorageError as exc:
        assert (exc.errno, exc.kind) == (errno.EROFS, "read_only"), repr(exc)
        assert "mode='r'" in str(exc), exc
    else:
        raise SystemExit("it was opened for writing")
try:
    expstore.open(store.parent / "new.exp")
except expstore.errors.StorageError as exc:
    assert exc.kind == "read_only", repr(exc)
print("all")
"""


@pytest.mark.guarantee(
    "disk/read-only",
    'On a file system that is mounted read-only, `mode="r"`, `info`, `sql`, `verify` and `export` work '
    "and write nothing.",
)
@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    rows = TensorDict({"x": torch.arange(20)}, [20])
    store = build_store(folder / "run.exp", rows, capacity=50)
    before = read_files(store)
    (tmp_path / "read.py").write_text(READ)
    mount = f'mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}; cd {tmp_path}; exec "$@"'
    program = [sys.executable, str(tmp_path / "read.py"), str(store), str(tmp_path / "out.parquet")]
    command = ["unshare", "-rm", "sh", "-ec", mount, "sh", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split() == ["all"]
    assert read_files(store) == before


@pytest.mark.guarantee("disk/read-only")
def test_every_act_says_why_not(tmp_path: Path) -> None:
    class ReadOnly(Disk):
        def gate(self, act: str, path: Path) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(StorageError, match="Read-only file system; mount the file system") as caught:
        ZarrStorage(tmp_path / "run.exp", 10, disk=ReadOnly())
    assert (caught.value.kind, caught.value.errno) == ("read_only", errno.EROFS)
    assert not list(tmp_path.iterdir())
