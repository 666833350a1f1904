"""`expstore.Collector`: collect transitions from gymnasium environments, in this process or in several.

It owns either a `LaneCollector` or the `Workers`, and the environments and the store that it made itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from expstore._open import open as open_store
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.collectors.environments import is_environment, make_lanes, maker_of
from expstore.collectors.lanes import LaneCollector, TransitionSink, check_steps
from expstore.collectors.plan import Plan
from expstore.collectors.policies import ModulePolicy, check_policy
from expstore.collectors.progress import Progress
from expstore.collectors.space_fields import check_mode
from expstore.collectors.workers import Workers
from expstore.core.arguments import check_whole
from expstore.episodes.facts import pack_info, source_of_split
from expstore.errors import ArgumentError, StateError
from expstore.exchange.base import show_progress

#: Shows how many steps were stored, and the mean return of recent episodes; None: none has ended.
_Show = Callable[[int, float | None], None]


class Collector:
    """Run a policy in gymnasium environments, and store the same episodes under every autoreset mode.

    Steps are gathered in memory and stored in blocks of `steps_per_lane` steps of every lane. Calls that only
    reset a lane are not transitions and are left out.

    Stored per transition: `observation`, `action` and `("next", "observation")`; with shape `(1,)` `("next",
    "reward")` (float32) and `done`, `terminated`, `truncated` (bool, under `next` and, always False, at the
    root); and `("collector", "traj_ids")` (int64), unique in the store. Dict and Tuple spaces become nested
    keys, with "0", "1" and so on for the parts of a Tuple. If the store has no specs of its fields yet, the
    specs of these spaces are stored with the first rows (`rb.specs`). With a module as policy each row has
    the field `policy_version` (int64), so that `StalenessAwareSampler` knows its age.

    With `workers` as many processes each step `lanes` environments of their own, and write through this
    process, each as a source of its own. A worker that dies is replaced, and its open episodes are cut. The
    episodes have facts (`info` in SQL): `worker`, and on the first episode of each lane `origin`: the
    environment, versions of packages, seeds, and `hyperparameters`.

    Without workers, after an error or Ctrl-C in the policy every earlier step is intact: `close` stores these
    steps, or collecting continues. An error inside the environment's step loses that step, and all lanes
    begin new episodes.

    Threads: one thread uses a collector; others may use the buffer. Processes: only the process that made it.
    Crashes: rows of a block that was stored survive this process, as by `extend`.

    Args:
        env: A function that returns a new environment, or the id of a registered one; without workers and
            lanes also a `gymnasium.Env`, or a vector environment.
        policy: Function from a batch of observations (arrays with a leading lane dimension, nested like the
            observation space) to a batch of actions (arrays or tensors, nested like the action space); a
            `torch.nn.Module`, which does the same with tensors; the name of one of them as
            "module:function"; or None for random actions. With workers it is passed to them by cloudpickle.
        store: The buffer, from `expstore.open` or a constructor; or the path of a store, which the collector
            opens and closes.
        workers: How many processes collect. 0: this one does.
        lanes: Environments of each process. None: one, or those of the vector environment.
        steps_per_lane: Steps of each lane in one `extend`.
        source: Name of this stream of writes, as in `extend`; of workers the first part of their names.
        autoreset_mode: How lanes are reset, if `env.metadata` does not say it: "NextStep", "SameStep",
            "Disabled", or gymnasium's enum.
        seed: Seed of the first reset (lane i gets seed + i, counted over all workers) and of the random
            actions; in each worker also of the global generators of torch, NumPy and Python, each with
            numbers of its own. None: a different one each time.
        hyperparameters: Facts of yours about this run, which are kept with `origin`.
        split: The split of the episodes, as in `extend`, such as "eval" for an evaluation; None for "train".
        progress: Show a bar with steps per second and the mean return of recent episodes while `collect`
            runs, if the standard error is a terminal.

    Raises:
        ArgumentError: `env`, `policy` or `store` is something else; a number is too small, the autoreset mode
            is unknown, `split` is not a name, or a space has no fixed numeric shape.
        NotFoundError: There is no such environment or policy.
        SchemaError: JSON cannot represent a hyperparameter.
        StateError: With workers: the rows of the buffer are objects, or it cannot be written to.

    Example:
        >>> from expstore import Collector
        >>> with Collector("CartPole-v1", None, "run.exp", lanes=2, seed=0) as collector:
        ...     collector.collect(100) >= 100
        True
    """

    def __init__(
        self,
        env: Any,
        policy: Callable[[Any], Any] | nn.Module | str | None,
        store: TransitionSink | str | Path,
        *,
        workers: int = 0,
        lanes: int | None = None,
        steps_per_lane: int = 32,
        source: str | None = None,
        autoreset_mode: Any = None,
        seed: int | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        split: str | None = None,
        progress: bool = False,
    ) -> None:
        workers = check_whole("workers", workers)
        lanes = None if lanes is None else check_whole("lanes", lanes)
        if workers < 0 or (lanes is not None and lanes < 1):
            raise ArgumentError(f"workers is {workers} and lanes is {lanes}; use at least 0 and 1")
        check_steps(steps_per_lane)
        if autoreset_mode is not None:
            check_mode(autoreset_mode)
        pack_info(hyperparameters, split)
        plan = Plan(
            check_policy(policy), steps_per_lane, source_of_split(source, split), autoreset_mode, seed,
            hyperparameters or {}, split,
        )  # fmt: skip
        self._policy, self._shows_progress = plan.policy, progress
        self._closing = contextlib.ExitStack()
        self._progress = Progress()  # of this process; workers have theirs
        self._lanes: LaneCollector | None = None
        self._workers: Workers | None = None
        with contextlib.ExitStack() as opened:
            if workers:
                make_env = maker_of(env)
                rb = self._open(store, opened)
                if not isinstance(rb, ReplayBuffer):
                    raise ArgumentError(f"workers write to a buffer of expstore, not to {type(rb).__name__}")
                self._workers = Workers(rb, plan, make_env, lanes or 1, workers)
                opened.callback(self._workers.close)
            else:
                envs = self._find_envs(env, lanes, autoreset_mode, opened)
                self._lanes = plan.collector(envs, self._open(store, opened), self._progress.add)
                opened.callback(self._lanes.close)
            self._closing = opened.pop_all()

    @staticmethod
    def _open(store: TransitionSink | str | Path, opened: contextlib.ExitStack) -> TransitionSink:
        """Return the buffer; open it if a path is given."""
        if isinstance(store, str | Path):
            return opened.enter_context(open_store(store))
        return store

    @staticmethod
    def _find_envs(env: Any, lanes: int | None, autoreset_mode: Any, opened: contextlib.ExitStack) -> Any:
        """Return the environments, of which those that are made here are closed."""
        if lanes is None and is_environment(env):
            return env
        envs = make_lanes(maker_of(env), lanes or 1, autoreset_mode)
        opened.callback(envs.close)
        return envs

    # -- collecting ----------------------------------------------------------------------------------

    def collect(self, steps: int) -> int:
        """Store at least `steps` transitions and return how many were stored.

        All lanes step at once, so up to one transition per lane may be added; with workers up to two blocks
        of each. Pending transitions of an interrupted call count too. After Ctrl-C, and after an error, all
        transitions so far are stored.

        Raises:
            SchemaError: The policy did not return a batch of actions. That step was not taken, and nothing of
                it is stored.
            StateError: The collector is closed, or a worker failed before it stored anything.
        """
        with self._show(steps) as show:
            if self._workers is not None:
                return self._collect_by_workers(self._workers, steps, show)
            return self._collect_here(self._require_lanes(), steps, show)

    def _collect_here(self, lanes: LaneCollector, steps: int, show: _Show | None) -> int:
        if show is None:
            return lanes.collect(steps)
        stored, blocks = 0, iter(lanes)
        while stored < steps:
            left = steps - stored
            stored += next(blocks) if left >= lanes.block_rows else lanes.collect(left)
            show(stored, self._progress.mean_return)
        return stored

    @staticmethod
    def _collect_by_workers(workers: Workers, steps: int, show: _Show | None) -> int:
        before = workers.rows
        workers.run(before + steps)
        try:
            while (
                stored := workers.wait_for(before + steps, None if show is None else 0.2) - before
            ) < steps:
                if show is not None:
                    show(stored, workers.describe()["mean_return"])
        finally:
            workers.pause()
        return workers.rows - before

    def __iter__(self) -> Iterator[int]:
        """Yield, without end, how many transitions were stored since the last time.

        Workers collect while the loop runs, and pause when it ends.
        """
        if self._workers is None:
            yield from self._require_lanes()
            return
        workers, before = self._workers, self._workers.rows
        workers.run()
        try:
            while True:
                rows = workers.wait_for(before + 1)
                yield rows - before
                before = rows
        finally:
            workers.pause()

    def start(self) -> None:
        """Let the workers collect in the background until `stop`.

        Raises:
            StateError: There are no workers, or the collector is closed.
        """
        self._require_workers().run()

    def stop(self) -> None:
        """Let the workers store what they have and pause; return when they have.

        A worker that waits for the rate limiter stores its block at once.
        """
        self._require_workers().pause()

    def update_policy(self) -> int:
        """Use the present weights of the module from the next block on; return their version, from 1 on.

        The version is stored with the rows, as `policy_version`.

        Raises:
            StateError: The policy is not a module, a worker has failed, or the collector is closed.
        """
        if not isinstance(self._policy, ModulePolicy):
            raise StateError(
                "only a torch.nn.Module has weights to update, and the policy of this collector is not one",
                hint="pass the module as policy",
            )
        if self._workers is not None:
            return self._workers.set_weights(self._policy.module)
        lanes = self._require_lanes()
        lanes.policy_version = version = (lanes.policy_version or 0) + 1
        return version

    def stats(self) -> dict[str, Any]:
        """Return what this collector has done so far.

        `rows` that were stored; `episodes` that ended; `mean_return` of the last 100 of these, or None;
        `restarts` of workers; and `policy_version`, which is 0 before the first `update_policy`.
        """
        if self._workers is not None:
            return self._workers.describe()
        return self._progress.describe() | {"policy_version": self._require_lanes().policy_version or 0}

    def _require_workers(self) -> Workers:
        if self._workers is None:
            raise StateError("this collector has no workers", hint="create it with workers=1 or more")
        return self._workers

    def _require_lanes(self) -> LaneCollector:
        assert self._lanes is not None, "a collector has lanes or workers"
        return self._lanes

    @contextlib.contextmanager
    def _show(self, steps: int) -> Iterator[_Show | None]:
        """Show a bar of so many steps, if that is wanted; yield what updates it."""
        if not self._shows_progress:
            yield None
            return
        mean: float | None = None
        note = lambda: "" if mean is None else f"mean return {mean:.1f}"  # noqa: E731
        with show_progress("collecting", "rows", note=note) as tell:

            def show(stored: int, recent: float | None) -> None:
                nonlocal mean
                mean = recent
                tell(stored, steps)

            yield show

    # -- closing -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Store the pending transitions, and close what the collector opened; closing twice is allowed.

        Environments and a buffer that were given stay open. Rows that the buffer refuses stay pending, and
        `close` may be called again.
        """
        if self._lanes is not None:
            self._lanes.close()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as exc:
            if error is None:
                raise
            # Raise the first error, not this one.
            error.add_note(f"pending transitions could not be stored either: {exc}")

    def __repr__(self) -> str:
        return f"Collector({self._workers if self._lanes is None else self._lanes!r})"
