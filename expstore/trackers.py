"""Figures of a buffer in TensorBoard and Weights & Biases: `expstore.trackers`.

Built on the buffers. It imports neither library: it calls the writer or the run that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.core.values import Array
from expstore.disk.files import Disk
from expstore.errors import ArgumentError
from expstore.remote.client import RemoteReplayBuffer

__all__ = ["Tracker"]

_LAST_AND_OPEN = """
    SELECT coalesce(max(episode_id), 0), coalesce(list(episode_id) FILTER (status = 'open'), []) FROM episodes
"""


class Tracker:
    """Log episodes, size and sampling age of a buffer to TensorBoard or Weights & Biases.

    | name | meaning |
    |---|---|
    | `episode/return`, `return_min`, `return_max` | returns of episodes that ended since the last call |
    | `episode/length`, `episode/count` | their mean length in steps, and how many they are |
    | `store/rows`, `store/written` | rows that can be sampled, and rows that were ever written |
    | `store/bytes` | bytes of all files of the store; only for a store on this machine |
    | `sampling/age`, `sampling/age_max` | how many rows were written after a row of a batch: mean, largest |

    Episodes that ended before the tracker was created are not logged, and neither are `cut` ones. Each call
    reads only episodes that are new or were open at the call before, in 2 to 20 ms of CPU time, mostly to
    bring the index up to date.

    Threads: one thread uses a tracker. Processes: a tracker of a reader (`mode="r"`) or of a served store
    (`expstore.connect`) logs what another process writes.

    Args:
        rb: The buffer.
        target: A `torch.utils.tensorboard.SummaryWriter` or another object with
            `add_scalar(name, value, step)`; or a run of `wandb.init` or another object with
            `log(values, step=...)`.
        every: Number of written rows after which `log` logs again.
        prefix: Put before every name.

    Raises:
        ArgumentError: `target` has neither method, or `every` is less than 1.

    Example:
        >>> class Writer:  # or torch.utils.tensorboard.SummaryWriter("runs/dqn")
        ...     def add_scalar(self, name, value, step):
        ...         pass
        >>> tracker = expstore.trackers.Tracker(rb, Writer(), every=1_000)
        >>> batch = rb.sample()
        >>> tracker.log(batch)
    """

    def __init__(
        self,
        rb: ReplayBuffer | RemoteReplayBuffer,
        target: Any,
        *,
        every: int = 1_000,
        prefix: str = "expstore/",
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ArgumentError(f"every must be an integer of at least 1, got {every!r}")
        self._rb, self._every, self._prefix = rb, every, prefix
        self._write = _make_writer(target)
        self._next = rb.write_count + every
        self._last, open_ids = rb.sql(_LAST_AND_OPEN).fetchall()[0]
        self._open: list[int] = list(open_ids)

    def log(self, batch: Any = None, *, step: int | None = None) -> dict[str, float]:
        """Log if at least `every` rows were written since the last time; otherwise do nothing.

        Args:
            batch: A batch that was sampled just now, for `sampling/age`; it needs `id`. None: no ages.
            step: Number of the step in the diagrams; None: the number of rows that were ever written, which
                continues after a restart.

        Returns:
            The logged values by name; empty if nothing was logged.

        Raises:
            ArgumentError: The batch has no `id`; nothing was logged.
        """
        return self.log_now(batch, step=step) if self._rb.write_count >= self._next else {}

    def log_now(self, batch: Any = None, *, step: int | None = None) -> dict[str, float]:
        """Log, as after the last step of a program. Arguments, result and errors are those of `log`."""
        stats = self._rb.stats()
        ages = {} if batch is None else _describe_ages(batch, stats["last_id"])
        found = self._rb.episodes(
            "episode_id > $last OR list_contains($open, episode_id)",
            params={"last": self._last, "open": self._open},
        ).arrow()
        episodes = found.select(["episode_id", "status", "length", "return"]).to_pylist()
        values = _describe_episodes(episodes) | self._describe_store(stats) | ages
        written = {self._prefix + name: value for name, value in values.items()}
        self._write(written, stats["write_count"] if step is None else step)
        self._next = stats["write_count"] + self._every
        self._last = max([self._last, *(episode["episode_id"] for episode in episodes)])
        self._open = [episode["episode_id"] for episode in episodes if episode["status"] == "open"]
        return written

    def _describe_store(self, stats: Mapping[str, Any]) -> dict[str, float]:
        values = {"store/rows": float(stats["size"]), "store/written": float(stats["write_count"])}
        if isinstance(self._rb, ReplayBuffer) and "path" in stats:
            values["store/bytes"] = float(Disk().measure_space(Path(stats["path"])))
        return values


def _make_writer(target: Any) -> Callable[[dict[str, float], int], None]:
    """Return a function that writes values of one step to TensorBoard or to Weights & Biases."""

    def add_scalars(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            target.add_scalar(name, value, step)

    def log(values: dict[str, float], step: int) -> None:
        target.log(values, step=step)

    if callable(getattr(target, "add_scalar", None)):
        return add_scalars
    if callable(getattr(target, "log", None)):
        return log
    raise ArgumentError(
        f"cannot log to a {type(target).__name__}: it has neither add_scalar() nor log()",
        hint="pass a torch.utils.tensorboard.SummaryWriter, or what wandb.init() returns",
    )


def _describe_episodes(episodes: list[dict[str, Any]]) -> dict[str, float]:
    ended = [episode for episode in episodes if episode["status"] in ("terminated", "truncated")]
    values = {"episode/count": float(len(ended))}
    if ended:
        values["episode/length"] = float(np.mean([episode["length"] for episode in ended]))
    returns = [episode["return"] for episode in ended if episode["return"] is not None]
    if returns:
        values["episode/return"] = float(np.mean(returns))
        values["episode/return_min"], values["episode/return_max"] = min(returns), max(returns)
    return values


def _describe_ages(batch: Any, last_id: int) -> dict[str, float]:
    try:
        ids: Any = batch["id"]
    except (IndexError, KeyError, TypeError) as exc:
        raise ArgumentError(
            f"cannot log the age of a {type(batch).__name__} without ids",
            hint="pass what rb.sample() returned",
        ) from exc
    on_host: Array = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
    ages = last_id - on_host
    return {"sampling/age": float(ages.mean()), "sampling/age_max": float(ages.max())}
