"""SAC that is killed and goes back to its checkpoint has, to the bit, the parameters of SAC without kills."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict

import expstore
from tests.support.forks import collect_from_child
from tests.support.paths import ROOT

STEPS, FIRST_ROWS, CHECKPOINT_EVERY, KILLS, BATCH = 1000, 200, 100, 5, 64


@pytest.fixture(scope="module")
def sac() -> Iterator[Any]:
    """The module examples/sac.py."""
    spec = importlib.util.spec_from_file_location("expstore_example_sac", ROOT / "examples" / "sac.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def recorded() -> TensorDict:
    """What a separate collector has recorded: transitions of Pendulum under random actions."""
    environment, steps = gym.make("Pendulum-v1"), []
    environment.action_space.seed(1)
    observation, _ = environment.reset(seed=1)
    for _ in range(FIRST_ROWS + STEPS):
        action = environment.action_space.sample()
        after, reward, terminated, truncated, _ = environment.step(action)
        steps.append((observation, action, after, reward, terminated))
        observation = environment.reset()[0] if truncated else after
    environment.close()
    first, actions, second, rewards, ends = map(torch.tensor, zip(*map(_as_lists, steps), strict=True))
    following = {"observation": second, "reward": rewards[:, None], "terminated": ends[:, None]}
    return TensorDict({"observation": first, "action": actions, "next": following}, [len(steps)])


def _as_lists(step: Any) -> tuple[Any, ...]:
    observation, action, after, reward, terminated = step
    return observation.tolist(), action.tolist(), after.tolist(), float(reward), bool(terminated)


class Training:
    """Trains SAC from a consumer's batches, with a checkpoint every 100 steps.

    Args:
        sac: The module of the example.
        folder: Where the store and the checkpoint are.
        recorded: The rows, in the order in which the collector appends them.
    """

    def __init__(self, sac: Any, folder: Path, recorded: TensorDict) -> None:
        folder.mkdir(exist_ok=True)
        self.path, self._checkpoint = folder / "run.exp", folder / "agent.pt"
        self._sac, self._recorded = sac, recorded

    def make_agent(self) -> Any:
        torch.manual_seed(0)
        return self._sac.Agent(self._sac.Args(), 3, gym.spaces.Box(-2.0, 2.0, (1,)))

    def live(self, kill_at: int | None = None) -> dict[str, Any]:
        """Train to the end, or until a step; return the agent's state."""
        agent, step = self.make_agent(), 0
        with (
            expstore.open(self.path, batch_size=BATCH, batches={"as_numpy": True}, seed=3) as rb,
            rb.consumer("learner", keep="all") as consumer,
        ):
            if self._checkpoint.exists():
                state = torch.load(self._checkpoint, weights_only=True)
                step = state["step"]
                agent.load(state["agent"])
                torch.set_rng_state(state["rng"])
                consumer.seek(state["position"])
            while step < STEPS:
                if not consumer.replaying and rb.write_count < FIRST_ROWS + step:
                    rb.extend(self._recorded[rb.write_count : FIRST_ROWS + step])
                agent.learn(consumer.sample())
                step += 1
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % CHECKPOINT_EVERY == 0:
                    state = {"step": step, "agent": agent.state(), "position": consumer.position}
                    temporary = self._checkpoint.with_suffix(".tmp")
                    torch.save(state | {"rng": torch.get_rng_state()}, temporary)
                    temporary.replace(self._checkpoint)
                    consumer.commit()
        found: dict[str, Any] = agent.state()
        return found


def live_and_die(act: Callable[[], object]) -> None:
    """Run `act` in a forked child, which kills itself."""
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            act()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the child was not killed"


def in_child(act: Callable[[], Any]) -> Any:
    """Return what `act` returns in a forked child."""
    (found,) = collect_from_child(lambda tell: tell(act()))
    if isinstance(found, BaseException):
        raise found
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two states have the same bits."""
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.guarantee("consumers/learner")
@pytest.mark.slow
def test_kills_do_not_change_a_bit_of_the_parameters(sac: Any, recorded: TensorDict, tmp_path: Path) -> None:
    expected = in_child(Training(sac, tmp_path / "whole", recorded).live)
    chance, killed = random.Random(5), Training(sac, tmp_path / "killed", recorded)
    at = sorted(chance.sample(range(50, STEPS), KILLS))
    for step in at:
        live_and_die(lambda step=step: killed.live(step))
    assert same(in_child(killed.live), expected)


@pytest.mark.guarantee("consumers/learner")
@pytest.mark.slow
def test_a_version_and_an_order_train_the_same_again(sac: Any, recorded: TensorDict, tmp_path: Path) -> None:
    """A version has the rows, and an exported order the draws: elsewhere they give the same parameters."""
    training, order = Training(sac, tmp_path / "run", recorded), tmp_path / "order.parquet"
    expected = in_child(training.live)
    with expstore.open(training.path) as rb:
        rb.dumps(tmp_path / "versions")
        rb.sql("SELECT draw, place, id FROM draws").to_parquet(order)

    def train_again() -> dict[str, Any]:
        agent = training.make_agent()
        with expstore.open(tmp_path / "elsewhere.exp", batches={"as_numpy": True}) as rb:
            rb.loads(tmp_path / "versions")
            with rb.consumer("again", manifest=order) as consumer:
                for batch in consumer:
                    agent.learn(batch)
        return agent.state()  # type: ignore[no-any-return]

    assert same(in_child(train_again), expected)
