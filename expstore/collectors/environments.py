"""Make the environments of a collector, and describe where its rows come from.

Used by collectors; needs the extra `expstore[gym]`.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

from expstore.errors import ArgumentError, MissingExtraError, NotFoundError

try:
    import gymnasium as gym
    from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        "collecting needs gymnasium, which is not installed", hint="pip install 'expstore[gym]'"
    ) from exc

AnyVectorEnv = VectorEnv[Any, Any, Any]
EnvMaker = Callable[[], gym.Env[Any, Any]]
_PACKAGES = ("expstore", "gymnasium", "numpy", "torch")


def is_environment(value: Any) -> bool:
    """Return whether a value is an environment, or several that step together."""
    return isinstance(value, gym.Env | VectorEnv)


def maker_of(env: Any) -> EnvMaker:
    """Return a function that makes an environment, given such a function or the id of a registered one.

    Raises:
        ArgumentError: It is neither.
        NotFoundError: gymnasium knows no environment of this id.
    """
    if isinstance(env, str):
        try:
            gym.spec(env)
        except gym.error.Error as exc:
            raise NotFoundError(f"environment {env!r}: {exc}") from exc
        return lambda: gym.make(env)
    if is_environment(env) or not callable(env):
        raise ArgumentError(
            f"env is a {type(env).__name__}; with lanes= or workers= pass a function that returns a new "
            "environment, or the id of a registered one such as 'CartPole-v1'"
        )
    found: EnvMaker = env
    return found


def make_lanes(make_env: EnvMaker, lanes: int, autoreset_mode: Any) -> AnyVectorEnv:
    """Return several environments that step together.

    Args:
        make_env: Returns a new environment.
        lanes: How many.
        autoreset_mode: How they are reset; None: "NextStep".
    """
    mode = AutoresetMode.NEXT_STEP if autoreset_mode is None else AutoresetMode(autoreset_mode)
    return SyncVectorEnv([make_env] * lanes, autoreset_mode=mode)


def describe_origin(envs: AnyVectorEnv | gym.Env[Any, Any]) -> dict[str, Any]:
    """Return the environment and the versions of packages, as JSON can keep them."""
    one: Any = envs.envs[0] if isinstance(envs, SyncVectorEnv) else envs
    spec = one.spec
    return {
        "env": type(one.unwrapped).__qualname__ if spec is None else spec.id,
        "env_kwargs": {} if spec is None else {key: repr(value) for key, value in spec.kwargs.items()},
        "packages": {package: importlib.metadata.version(package) for package in _PACKAGES},
        "python": platform.python_version(),
    }
