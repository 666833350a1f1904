"""A served store, a store of this process and a copy of a shared one, for tests of several stores."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import expstore
from expstore.api import Settings
from expstore.remote import Retries
from tests.support.servers import Serving
from tests.support.shard_rows import fill
from tests.support.waits import wait_until

SOON = Retries(seconds=60, first=0.01, longest=0.05, seed=3)
#: The number of the store of each place.
SERVED, LOCAL, SHARED = range(3)


def source_for(rb: expstore.cluster.ShardedReplayBuffer, number: int) -> str:
    """Return the name of a source whose rows go to the store of this number."""
    return next(name for n in range(99) if rb._route(name := f"s{n}").number == number)


class MixedStores(NamedTuple):
    """Stores of which each is in another kind of place.

    Args:
        places: The arguments of `expstore.connect`: an address, a buffer, and a copy of a shared buffer.
        owner: The buffer that owns the shared store.
    """

    places: list[Any]
    owner: expstore.TensorDictReplayBuffer

    def connect(self, **options: Any) -> expstore.cluster.ShardedReplayBuffer:
        defaults: dict[str, Any] = {"batch_size": 256, "seed": 5, "ahead": 8, "retries": SOON}
        return expstore.connect(self.places, **defaults | options)

    def wait_for_rows(self, count: int) -> None:
        """Wait until the copy can read as many rows: its owner writes small batches a moment later."""
        wait_until(lambda: len(self.places[SHARED]) >= count)


@contextmanager
def open_mixed_stores(folder: Path, *, filled: bool) -> Iterator[MixedStores]:
    """Open stores in a folder, without rows or with those of `shard_rows.fill`."""
    served = folder / "served"
    served.mkdir()
    with (
        expstore.open(served / "run.exp", seed=0) as first,
        expstore.open(folder / "local.exp", seed=1) as local,
        expstore.open(folder / "owner.exp", seed=2).share() as owner,
    ):
        if filled:
            for number, rb in enumerate((first, local, owner)):
                fill(rb, number)
            owner.flush()
        first.close()
        with (
            Serving(Settings(path=served, sql_seconds=60.0)) as server,
            pickle.loads(pickle.dumps(owner)) as copy,
        ):
            yield MixedStores([f"{server.url}/run", local, copy], owner)
