"""A common interface for expstore and other replay buffers; each is used as its documentation recommends.

Used by `peers.py` and `samplers.py`. Rows are prepared beforehand in the format of each side. Callers leave
out sides whose packages are not installed; a package is imported when its side is used.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import is_tensor_collection

import expstore
from benchmarks.probes import rss_anon

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

BATCH = 256


class Missing(Exception):
    """Raised if a package or program that a side needs is missing."""


def need(package: str) -> None:
    """Raise Missing if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise Missing(f"{package} is not installed: pip install --group bench")


def columns_of(batch: TensorDict) -> dict[str, Any]:
    """Return a batch's leaves as arrays, with names like `next.reward`."""
    leaves = batch.items(include_nested=True, leaves_only=True)
    return {key if isinstance(key, str) else ".".join(key): value.numpy() for key, value in leaves}


def disk_bytes(folder: Path) -> int:
    """Return the disk space of all files below a folder in bytes."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


class Side:
    """Hold rows of one kind in one buffer.

    Args:
        folder: Folder for files.
        capacity: Maximum number of rows.
        sample: An example batch, which shows the fields.
    """

    #: Whether calls are so slow that fewer are made.
    slow = False
    #: Maximum number of rows; rows of this side are too expensive for more.
    most = 1 << 62
    #: The calls that are measured.
    acts = ("sample", "extend", "add")
    #: Whether the buffer keeps references to its input tensors.
    keeps_inputs = False

    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        self.folder, self.capacity = folder, capacity

    def take(self, batch: TensorDict) -> Any:
        """Return rows in the format of this side. It may modify them."""
        return batch.clone()

    def extend(self, rows: Any) -> None:
        raise NotImplementedError

    def add(self, row: Any) -> None:
        raise NotImplementedError

    def sample(self, _: Any) -> object:
        raise NotImplementedError

    def settle(self) -> None:
        """Finish work in the background."""

    def elsewhere(self) -> int:
        """Return the memory of the rows in other processes in bytes."""
        return 0

    def close(self) -> None:
        """Release all resources."""


class _Buffer(Side):
    """A buffer with TorchRL's interface."""

    rb: Any

    def extend(self, rows: Any) -> None:
        self.rb.extend(rows)

    def add(self, row: Any) -> None:
        self.rb.add(row)

    def sample(self, _: Any) -> object:
        return self.rb.sample()

    def close(self) -> None:
        del self.rb


class Ours(_Buffer):
    layout = "auto"

    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        super().__init__(folder, capacity, sample)
        self.rb = expstore.open(
            folder / "store.exp", capacity=capacity, batch_size=BATCH, layout=self.layout, seed=1
        )

    def settle(self) -> None:
        self.rb.flush()

    def close(self) -> None:
        self.rb.close()


class OursFlat(Ours):
    layout = "flat"


class OursNumpy(Ours):
    """Nested dicts of arrays as input and output."""

    def take(self, batch: TensorDict) -> Any:
        return _arrays(batch)

    def sample(self, _: Any) -> object:
        return self.rb.sample(as_numpy=True)


def _arrays(batch: TensorDict) -> dict[str, Any]:
    """Return copies of a batch's leaves as nested dicts of arrays; as numbers for single values."""
    return {
        name: _arrays(value) if is_tensor_collection(value) else value.clone().numpy()[()]
        for name, value in batch.items()
    }


class OursMemory(_Buffer):
    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        super().__init__(folder, capacity, sample)
        storage = expstore.MemoryStorage(capacity, seed=1)
        self.rb = expstore.TensorDictReplayBuffer(storage=storage, batch_size=BATCH)


class _TorchRL(_Buffer):
    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        super().__init__(folder, capacity, sample)
        need("torchrl")
        from torchrl import data

        logging.getLogger("torchrl").setLevel(logging.WARNING)
        self.rb = data.TensorDictReplayBuffer(storage=self._storage(data), batch_size=BATCH)

    def _storage(self, data: Any) -> Any:
        raise NotImplementedError


class TorchRLList(_TorchRL):
    slow, most, keeps_inputs = True, 10_000, True

    def _storage(self, data: Any) -> Any:
        return data.ListStorage(self.capacity)


class TorchRLTensor(_TorchRL):
    def _storage(self, data: Any) -> Any:
        return data.LazyTensorStorage(self.capacity)


class TorchRLMemmap(_TorchRL):
    def _storage(self, data: Any) -> Any:
        return data.LazyMemmapStorage(self.capacity, scratch_dir=str(self.folder / "torchrl"))


@contextmanager
def redis(folder: Path) -> Iterator[tuple[int, int]]:
    """Run a Redis server without persistence; yield its process id and port."""
    need("redis")
    program = shutil.which("redis-server")
    if program is None:
        raise Missing("redis-server is not installed: apt-get install redis-server")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    command = [program, "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            _wait_for(port)
            yield server.pid, port
        finally:
            server.terminate()
            server.wait(60)


def _wait_for(port: int) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError as exc:
            if time.monotonic() > until:
                raise Missing(f"redis-server does not answer: {exc}") from exc
            time.sleep(0.05)


class TorchRLStore(_TorchRL):
    """Rows in a Redis server on this machine."""

    slow, most = True, 10_000

    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        self._server = redis(folder)
        self._pid, self._port = self._server.__enter__()
        super().__init__(folder, capacity, sample)

    def _storage(self, data: Any) -> Any:
        return data.StoreStorage(self.capacity, host="127.0.0.1", port=self._port)

    def elsewhere(self) -> int:
        return rss_anon(self._pid)

    def close(self) -> None:
        super().close()
        gc.collect()
        self._server.__exit__(None, None, None)


class StableBaselines(Side):
    """stable-baselines3's ReplayBuffer, which takes one step of one environment per call."""

    most = 200_000

    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        super().__init__(folder, capacity, sample)
        need("stable_baselines3")
        import gymnasium
        from stable_baselines3.common.buffers import ReplayBuffer

        row = columns_of(sample[:1])
        if not {"observation", "action", "next.observation", "next.reward", "next.done"} <= row.keys():
            raise Missing("its rows have only observation, action, reward and done")
        seen, done = row["observation"][0], row["action"][0]
        images = seen.dtype == np.uint8
        space = gymnasium.spaces.Box(*((0, 255) if images else (-np.inf, np.inf)), seen.shape, seen.dtype)
        actions: Any = gymnasium.spaces.Discrete(18)
        if done.shape:
            actions = gymnasium.spaces.Box(-1, 1, done.shape, done.dtype)
        self.rb = ReplayBuffer(capacity, space, actions, device="cpu")

    def take(self, batch: TensorDict) -> Any:
        columns = columns_of(batch if batch.batch_dims else batch[None])
        names = ("observation", "next.observation", "action", "next.reward", "next.done")
        given = [columns[name] for name in names]
        return [
            (
                *(part[n : n + 1] for part in given[:3]),
                given[3][n],
                given[4][n],
                [{}],
            )
            for n in range(len(given[0]))
        ]

    def extend(self, rows: Any) -> None:
        for row in rows:
            self.rb.add(*row)

    add = extend

    def sample(self, _: Any) -> object:
        sampled: object = self.rb.sample(BATCH)
        return sampled

    def close(self) -> None:
        del self.rb


class Cpprb(Side):
    """cpprb's ReplayBuffer, or with `priorities` its prioritized buffer."""

    priorities: dict[str, float] = {}  # noqa: RUF012 - never changed

    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        super().__init__(folder, capacity, sample)
        need("cpprb")
        import cpprb

        fields = {
            name: {"shape": column.shape[1:] or 1, "dtype": column.dtype}
            for name, column in columns_of(sample).items()
        }
        make = cpprb.PrioritizedReplayBuffer if self.priorities else cpprb.ReplayBuffer
        self.rb = make(capacity, fields, **self.priorities)

    def take(self, batch: TensorDict) -> Any:
        return columns_of(batch.clone())

    def extend(self, rows: Any) -> None:
        self.rb.add(**rows)

    add = extend

    def sample(self, _: Any) -> object:
        sampled: object = self.rb.sample(BATCH)
        return sampled

    def close(self) -> None:
        del self.rb


class Lance(Side):
    """A Lance dataset: reads with `take`, one version per write call."""

    slow, most = True, 200_000

    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        super().__init__(folder, capacity, sample)
        need("lance")
        self._path, self._rng = str(folder / "rows.lance"), np.random.default_rng(1)
        self.data: Any = None
        self.rows = 0

    def take(self, batch: TensorDict) -> Any:
        import pyarrow as pa

        columns = columns_of(batch if batch.batch_dims else batch[None])

        def array(values: np.ndarray) -> Any:
            flat = pa.array(values.reshape(-1))
            size = prod(values.shape[1:])
            return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, size)

        return pa.table({name.replace(".", "_"): array(values) for name, values in columns.items()})

    def extend(self, rows: Any) -> None:
        import lance

        self.data = lance.write_dataset(rows, self._path, mode="create" if self.data is None else "append")
        self.rows += rows.num_rows

    add = extend

    def sample(self, _: Any) -> object:
        taken: object = self.data.take(np.sort(self._rng.integers(0, self.rows, BATCH)).tolist())
        return taken

    def close(self) -> None:
        del self.data


class _Tensors(Side):
    """Rows in torch tensors in memory, one per field. Lower bounds are measured with them."""

    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        super().__init__(folder, capacity, sample)
        self.columns = [self._room(value) for value in self._leaves(sample)]
        self._at = 0

    @staticmethod
    def _leaves(batch: TensorDict) -> list[torch.Tensor]:
        return list(batch.values(include_nested=True, leaves_only=True))

    def _room(self, value: torch.Tensor) -> torch.Tensor:
        return value.new_empty((self.capacity, *value.shape[1:]))

    def take(self, batch: TensorDict) -> Any:
        whole = batch if batch.batch_dims else batch[None]
        return [value.clone() for value in self._leaves(whole)]

    def extend(self, rows: Any) -> None:
        count = len(rows[0])
        if self._at + count > self.capacity:
            self._at = 0
        for column, values in zip(self.columns, rows, strict=True):
            column[self._at : self._at + count].copy_(values)
        self._at += count

    add = extend

    def close(self) -> None:
        self.columns.clear()


class IndexSelect(_Tensors):
    """`index_select` of every field with a known index: the fastest way to read rows with torch."""

    acts = ("sample",)

    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        super().__init__(folder, capacity, sample)
        import torch

        generator = torch.Generator().manual_seed(1)
        self._drawn = [torch.randint(capacity, (BATCH,), generator=generator) for _ in range(64)]
        self._draw = 0

    def sample(self, _: Any) -> object:
        self._draw += 1
        index = self._drawn[self._draw % 64]
        return [column.index_select(0, index) for column in self.columns]


class Memcpy(_Tensors):
    """A copy of as many contiguous bytes."""

    acts = ("sample", "extend")

    def __init__(self, folder: Path, capacity: int, sample: TensorDict) -> None:
        super().__init__(folder, capacity, sample)
        self._first = 0

    def sample(self, _: Any) -> object:
        self._first = (self._first + 7 * BATCH) % max(1, self.capacity - BATCH)
        return [column[self._first : self._first + BATCH].clone() for column in self.columns]


#: The sides in the order of the table; the first three are expstore.
SIDES: dict[str, Callable[[Path, int, TensorDict], Side]] = {
    "expstore-default": Ours,
    "expstore-flat": OursFlat,
    "expstore-numpy": OursNumpy,
    "expstore-memory": OursMemory,
    "torchrl-list": TorchRLList,
    "torchrl-tensor": TorchRLTensor,
    "torchrl-memmap": TorchRLMemmap,
    "torchrl-store": TorchRLStore,
    "stable-baselines3": StableBaselines,
    "cpprb": Cpprb,
    "lance": Lance,
    "index-select": IndexSelect,
    "memcpy": Memcpy,
}
