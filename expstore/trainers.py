"""Replay buffers as hooks of a training loop: torchrl's `Trainer`, or one of your own.

Built on the buffers. It imports torchrl only when `to_torchrl` is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase, is_tensor_collection, pad

from expstore.buffers.arguments import check_batch_size
from expstore.buffers.ensemble import ReplayBufferEnsemble
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import ArgumentError, SchemaError, StateError

__all__ = ["ReplayBufferTrainer", "to_torchrl"]

_MASK = ("collector", "mask")
_TRUNCATED = ("next", "truncated")


class ReplayBufferTrainer:
    """Store collected batches, sample batches to learn from, and write back their priorities.

    `extend`, `sample` and `update_priority` are the hooks; `register` registers them with torchrl's
    `Trainer`. You can also call them from your own loop.

    Threads: `sample` and `extend` may run at the same time. Processes: a process that follows a store may
    sample, but not extend. Crashes: stored rows are as durable as in the storage, whether the trainer was
    saved or not. A loaded trainer continues with the batches that would have followed when it was saved.
    (torchrl's unified `Checkpoint` makes the buffer create a snapshot of all rows each time, and restores it;
    other ways of saving save the state of a store on disk, which is a few numbers.)

    Args:
        replay_buffer: The buffer of the rows; only a `TensorDictReplayBuffer` can write back priorities.
        batch_size: Batch size of `sample`; None: the buffer's.
        memmap: Must be False: a store on disk has its rows in mapped files anyway.
        device: Device of the samples; None: the buffer's.
        flatten_tensordicts: Whether to make one row of each step of a batch: of the steps that `("collector",
            "mask")` marks if there is a mask, otherwise of all steps. A store of `expstore.open` writes them
            lane by lane, as they were collected, so that episodes continue with the next batch; in other
            storages each lane is truncated at its end.
        max_dims: Sizes to which batches are padded with zeros, so that trajectories of different lengths fit
            into one storage; -1 leaves a dim unchanged.
        iterate: Whether to iterate over the buffer batch by batch, with the buffer's `batch_size`. At the end
            of an iteration `sample` raises StopIteration, which ends a trainer's epoch; the next call starts
            again.

    Raises:
        ArgumentError: `replay_buffer` is not a buffer of expstore, or `max_dims` are not sizes; the sampler
            uses priorities, which only a `TensorDictReplayBuffer` can read from batches; or an argument is
            not supported, and the message says why.

    Example:
        >>> from expstore import ReplayBufferTrainer
        >>> hook = ReplayBufferTrainer(rb, batch_size=32, flatten_tensordicts=True)
        >>> hook.extend(batch)  # a trainer of TorchRL makes these calls after hook.register(trainer)
        >>> sample = hook.sample()
        >>> hook.update_priority(sample.set("td_error", torch.ones(32)))
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer | ReplayBufferEnsemble,
        batch_size: int | None = None,
        memmap: bool = False,
        device: torch.device | str | int | None = None,
        flatten_tensordicts: bool = False,
        max_dims: Sequence[int] | None = None,
        iterate: bool = False,
    ) -> None:
        _check_buffer(replay_buffer)
        batch_size = check_batch_size(batch_size)
        if memmap:
            raise ArgumentError(
                "memmap=True is not supported: stores on disk keep their rows in mapped files, and batches "
                "are written to them without an intermediate copy; leave it out"
            )
        _check_sizes(max_dims)
        if flatten_tensordicts and max_dims is not None:
            raise ArgumentError(
                "max_dims pads trajectories to one length; with flatten_tensordicts=True every step is a "
                "row, and there is nothing to pad: give one of them"
            )
        if max_dims is not None and _takes_all_dims(replay_buffer):
            raise ArgumentError(
                "max_dims pads trajectories to one length, but in this store every step is a row: zeros "
                "would be stored as steps; leave it out, or use a storage of trajectories (LazyMemmapStorage)"
            )
        if iterate and batch_size not in (None, replay_buffer.batch_size):
            raise ArgumentError(
                f"iterate=True uses the buffer's own batch_size, {replay_buffer.batch_size}, not "
                f"batch_size={batch_size}: give it to the buffer"
            )
        self.replay_buffer = replay_buffer
        self.batch_size = batch_size
        self.memmap = False
        self.device = None if device is None else torch.device(device)
        self.flatten_tensordicts = flatten_tensordicts
        self.max_dims = max_dims
        self.iterate = iterate
        self._batches: Iterator[Any] | None = None
        self._takes_priorities()

    def extend(self, batch: TensorDictBase) -> TensorDictBase:
        """Store a batch; return it as it was stored.

        Args:
            batch: A collector's batch; it is not changed. Batch size `[T]`, `[B, T]`, and so on.

        Returns:
            With `flatten_tensordicts`, batch size `[rows]`; otherwise the batch, padded to `max_dims`. On
            the CPU.

        Raises:
            ArgumentError: The batch is not a TensorDict; nothing was stored.
            SchemaError: The batch does not fit the store, or is larger than `max_dims`; nothing was
                stored.
        """
        if not is_tensor_collection(batch):
            raise ArgumentError(f"batch must be a TensorDict, got {_kind(batch)}")
        batch = batch.cpu()
        rows = batch
        if self.flatten_tensordicts:
            rows, batch = self._flat(batch)
        elif self.max_dims is not None:
            rows = batch = _pad(batch, self.max_dims)
        self.replay_buffer.extend(rows)
        return batch

    def _flat(self, batch: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Return the batch to store, and the same as one row after another."""
        if (mask := batch.get(_MASK, None)) is not None:
            flat = batch[mask]
            return flat, flat
        if _takes_all_dims(self.replay_buffer):
            return batch, batch.reshape(-1)
        flags = batch.get(_TRUNCATED, None)
        if flags is not None and batch.batch_dims and batch.numel():
            flags = flags.clone()
            flags.select(batch.batch_dims - 1, -1).fill_(True)
            batch = batch.copy()
            batch["next"] = batch["next"].copy().set("truncated", flags)
        flat = batch.reshape(-1)
        return flat, flat

    def sample(self, batch: TensorDictBase | None = None) -> TensorDictBase:
        """Return a batch to learn from.

        Args:
            batch: The last collected batch, which trainers pass; ignored.

        Returns:
            What `sample()` of the buffer returns. Batch size `[batch_size]`.

        Raises:
            StopIteration: The end of an iteration, with `iterate`.
            NotReadyError: The store is empty, or no more rows may be drawn.
            ArgumentError: The buffer returns NumPy arrays.
        """
        if self.iterate:
            if self._batches is None:
                self._batches = iter(self.replay_buffer)
            try:
                sample = next(self._batches)
            except BaseException:
                self._batches = None  # the next call starts again
                raise
        else:
            sample = self.replay_buffer.sample(self.batch_size)
        if isinstance(sample, dict):
            raise ArgumentError("a trainer needs TensorDicts, and this buffer was made with as_numpy=True")
        return cast(TensorDictBase, sample if self.device is None else sample.to(self.device))

    def update_priority(self, batch: TensorDictBase) -> None:
        """Set the priorities of a sample's rows if the buffer draws by priority.

        Args:
            batch: A sample with the buffer's `priority_key`, whose entry has the shape `(n,)` or `(n, 1)`.

        Raises:
            ArgumentError: The batch is not a TensorDict.
            SchemaError: The batch has no priorities.
            PriorityError: A priority is negative, NaN or infinite; none was set.
        """
        if self._takes_priorities():
            if not is_tensor_collection(batch):
                raise ArgumentError(f"priorities are read from a sample, a TensorDict, got {_kind(batch)}")
            cast(TensorDictReplayBuffer, self.replay_buffer).update_tensordict_priority(batch)

    def _takes_priorities(self) -> bool:
        """Return whether the buffer draws by priority; checked each time, since the sampler can be set."""
        buffer = self.replay_buffer
        members = self._members()
        if not any(member.sampler.prioritized for member in members):
            return False
        if not isinstance(buffer, TensorDictReplayBuffer):
            raise ArgumentError(
                "Prioritized sampler not supported for replay buffer trainer if not within a "
                f"TensorDictReplayBuffer, this is a {type(buffer).__name__}"
            )
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`: which batch is next, and of storages in RAM the rows."""
        return {"replay_buffer": self.replay_buffer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the batch that would have followed `state_dict`.

        Rows that were added to a store on disk since are kept. The open episodes of the buffer end, because
        collectors restart and reuse trajectory ids.

        Raises:
            StateError: The state is not of such a hook, or of another buffer; nothing was changed.
        """
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("replay_buffer"), Mapping):
            raise StateError(
                f"this is not a state of a {type(self).__name__}: it has no entry 'replay_buffer'",
                hint="pass the result of its state_dict()",
            )
        self.replay_buffer.load_state_dict(state_dict["replay_buffer"])
        self._batches = None

    def _members(self) -> list[ReplayBuffer]:
        """Return the buffer, or the members of the ensemble."""
        buffer = self.replay_buffer
        return [buffer] if isinstance(buffer, ReplayBuffer) else [buffer[n] for n in range(len(buffer))]

    def register(self, trainer: Any, name: str = "replay_buffer") -> None:
        """Register the hooks with a torchrl `Trainer`, which also saves and loads the buffer's state.

        Args:
            trainer: The trainer.
            name: Name of the state in its checkpoints.

        Raises:
            ArgumentError: `trainer` is not a trainer.
        """
        if not all(hasattr(trainer, method) for method in ("register_op", "register_module")):
            raise ArgumentError(
                f"hooks are registered with a torchrl Trainer, not with {_kind(trainer)}; in your own loop "
                "call extend, sample and update_priority"
            )
        trainer.register_op("batch_process", self.extend)
        trainer.register_op("process_optim_batch", self.sample)
        trainer.register_op("post_loss", self.update_priority)
        trainer.register_module(name, self)


def to_torchrl(replay_buffer: Any) -> Any:
    """Return an `OfflineToOnlineReplayBuffer` as an instance of TorchRL's class, too.

    TorchRL's `OfflineToOnlineTrainer` takes only instances of TorchRL's `OfflineToOnlineReplayBuffer`. The
    object returned is the same buffer: it shares the rows, the draws and the fraction.

    Args:
        replay_buffer: An `OfflineToOnlineReplayBuffer` of expstore.

    Raises:
        ArgumentError: It is another object.
        MissingExtraError: TorchRL is not installed.

    Example:
        >>> from expstore.datasets import OfflineToOnlineReplayBuffer
        >>> both = OfflineToOnlineReplayBuffer(rb, online_capacity=100_000, batch_size=256)
        >>> buffer = expstore.trainers.to_torchrl(both)  # the replay_buffer= of an OfflineToOnlineTrainer
    """
    from expstore.datasets.offline_to_online import OfflineToOnlineReplayBuffer

    if not isinstance(replay_buffer, OfflineToOnlineReplayBuffer):
        raise ArgumentError(
            f"to_torchrl takes an OfflineToOnlineReplayBuffer of expstore, got {_kind(replay_buffer)}; for "
            "other buffers there is expstore.trainers.ReplayBufferTrainer"
        )
    from expstore.torchrl import TorchRLOfflineToOnline

    made = TorchRLOfflineToOnline.__new__(TorchRLOfflineToOnline)
    made.__dict__ = replay_buffer.__dict__
    return made


def _check_buffer(found: Any) -> None:
    if isinstance(found, ReplayBuffer | ReplayBufferEnsemble):
        return
    if type(found).__module__.startswith("torchrl."):
        todo = "torchrl.trainers.ReplayBufferTrainer takes torchrl's own"
    else:
        todo = "expstore.open() returns one"
    raise ArgumentError(f"replay_buffer must be a buffer of expstore, got {_kind(found)}; {todo}")


def _check_sizes(sizes: Any) -> None:
    if sizes is not None and not (
        isinstance(sizes, Sequence) and all(isinstance(size, int) and size >= -1 for size in sizes)
    ):
        raise ArgumentError(
            f"max_dims must be one size for each dim of a batch, -1 for any size, not {sizes!r}"
        )


def _kind(found: Any) -> str:
    """Return a description of a value of the wrong type, for messages."""
    if found is None or isinstance(found, str | int | float):
        return repr(found)
    kind = found if isinstance(found, type) else type(found)
    called = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"the class {called}" if isinstance(found, type) else f"a {called}"


def _takes_all_dims(buffer: ReplayBuffer | ReplayBufferEnsemble) -> bool:
    return isinstance(buffer, ReplayBuffer) and buffer.storage.description.flatten


def _pad(batch: TensorDictBase, sizes: Sequence[int]) -> TensorDictBase:
    """Pad a batch with zeros; -1 leaves a dim unchanged."""
    shape = tuple(batch.batch_size)
    if len(sizes) != len(shape):
        raise SchemaError(
            f"max_dims={list(sizes)} has {len(sizes)} sizes, the batch has {len(shape)} dims: {list(shape)}",
            hint="give one size for each dim, -1 for any size",
        )
    ends: list[int] = []
    for size, most in zip(shape, sizes, strict=True):
        if size > most != -1:
            raise SchemaError(
                f"the batch has shape {list(shape)}, and max_dims={list(sizes)} is smaller",
                hint="set max_dims to the longest trajectories",
            )
        ends += [0, 0 if most == -1 else most - size]
    return cast(TensorDictBase, pad(batch, ends))
