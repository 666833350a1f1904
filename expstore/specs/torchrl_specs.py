"""Convert specs between TorchRL and expstore: classes, shapes, bounds, masks and names are kept.

TorchRL is imported only when a spec is converted to one of its specs.
"""

from __future__ import annotations

import importlib
from typing import Any

from expstore import specs
from expstore.errors import MissingExtraError
from expstore.specs.base import TensorSpec
from expstore.specs.spec_tree import build, take_apart


def from_torchrl(spec: Any) -> Any:
    """Convert a spec of TorchRL to a spec of expstore; tensors are copied.

    Args:
        spec: A spec of any kind, including composites. None is returned as None.

    Raises:
        TypeError: The argument is not a spec, or of an unknown class.
        ValueError: The spec has `use_register=True`.

    Example:
        >>> from expstore.specs import from_torchrl
        >>> import torchrl.data
        >>> from_torchrl(torchrl.data.Composite(action=torchrl.data.OneHot(4)))["action"].n
        4
    """
    return None if spec is None else build(take_apart(spec), specs)


def from_env(env: Any) -> specs.Composite:
    """Return the specs of the rows that TorchRL's collectors make from a TorchRL environment.

    They are observations, states, actions and done flags, and under `next` observations, rewards and done
    flags. For a batch of environments, they are the specs of one of them.

    Args:
        env: A TorchRL environment, with its transforms.

    Raises:
        TypeError: `env` is not a TorchRL environment.

    Example:
        >>> from expstore.specs import from_env
        >>> from torchrl.envs import GymEnv
        >>> from_env(GymEnv("CartPole-v1"))["next", "observation"].shape
        torch.Size([4])
    """
    if "EnvBase" not in [kind.__name__ for kind in type(env).__mro__]:
        raise TypeError(
            f"from_env takes an environment of TorchRL; got a {type(env).__module__}.{type(env).__name__}. "
            "For gymnasium use from_space(env.observation_space) and from_space(env.action_space)"
        )

    def part(spec: Any) -> specs.Composite:
        found: specs.Composite = from_torchrl(spec).clear_device_()
        return found[(0,) * len(env.batch_size)] if env.batch_size else found

    observed, done = part(env.full_observation_spec), part(env.full_done_spec)
    row = observed.clone().update(part(env.full_state_spec)).update(part(env.full_action_spec)).update(done)
    return row.update({"next": observed.update(part(env.full_reward_spec)).update(done)})


def to_torchrl(spec: TensorSpec | None) -> Any:
    """Convert a spec to a spec of TorchRL; tensors are copied.

    Raises:
        MissingExtraError: TorchRL is not installed.

    Example:
        >>> from expstore import Bounded
        >>> from expstore.specs import to_torchrl
        >>> to_torchrl(Bounded(-1, 1, shape=(3,))).shape
        torch.Size([3])
    """
    if spec is None:
        return None
    try:
        home = importlib.import_module("torchrl.data.tensor_specs")
    except ModuleNotFoundError as exc:
        raise MissingExtraError(
            "TorchRL's specs need TorchRL, which is not installed", hint="pip install torchrl"
        ) from exc
    return build(take_apart(spec), home)
