"""The fields of a rollout of a language model, as settings of `expstore.open`.

Used by programs, and by imports of rollouts. This module opens no files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from expstore.core.values import Key, check_key, key_name
from expstore.errors import ArgumentError
from expstore.schema.continued import Continued

FieldKey = str | tuple[str, ...]
#: Type of the field of each part, as `schema=` of `expstore.open` takes it.
_TYPES: dict[str, Any] = {
    "prompt": str,
    "response": str,
    "prompt_tokens": ("int32", (None,)),
    "tokens": ("int32", (None,)),
    "loss_mask": ("bool", (None,)),
    "logprobs": ("float32", (None,)),
    "policy_version": "int64",
    "group": str,
    "reward": "float32",
    "done": "bool",
    "parent": "int64",
}
#: The parts that continue the row that `parent` names.
_CONTINUED = ("prompt_tokens", "tokens", "loss_mask", "logprobs")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The fields of a rollout: a prompt and one response of a language model.

    A rollout is one row, and an episode of one step: write `done` as True in every row. Each argument is the
    key of a field, or None, which leaves the field out. All rows have all fields; only texts may be None.

    Args:
        prompt: The prompt, a text.
        response: The response, a text.
        prompt_tokens: The tokens of the prompt. Any length, int32.
        tokens: The tokens of the response. Any length, int32.
        loss_mask: Which tokens of the response count in the loss. As many as `tokens`, bool.
        logprobs: The log-probabilities of `tokens` when they were sampled. As many as `tokens`, float32.
        policy_version: Number of the policy that sampled the response, int64.
        group: The group of the rollout, such as an id of the prompt; a text.
        reward: The reward of the whole response, float32. Its sum is the return of the episode.
        done: Whether the rollout has ended: always True, bool.
        parent: The id of the row that the row continues, int64: its prompt or response begins with that of
            the other row, such as the turn before. 0 for none. With this field, `prompt_tokens`, `tokens`,
            `loss_mask` and `logprobs` are `Continued`: elements that both rows begin with are stored once.

    Raises:
        ArgumentError: An argument is neither a key nor None, `done` is None, or two parts have one key.

    Example:
        >>> from expstore.specs import Rollout
        >>> rollout = Rollout(prompt_tokens=None, loss_mask=None, group="question")
        >>> with expstore.open("rollouts.exp", batch_size=8, **rollout.settings()) as rb:
        ...     rb.storage.schema.keys[-3:]
        (('question',), ('next', 'reward'), ('next', 'done'))
    """

    prompt: FieldKey | None = "prompt"
    response: FieldKey | None = "response"
    prompt_tokens: FieldKey | None = "prompt_tokens"
    tokens: FieldKey | None = "tokens"
    loss_mask: FieldKey | None = "loss_mask"
    logprobs: FieldKey | None = "logprobs"
    policy_version: FieldKey | None = "policy_version"
    group: FieldKey | None = "group"
    reward: FieldKey | None = ("next", "reward")
    done: FieldKey = ("next", "done")
    parent: FieldKey | None = None

    def __post_init__(self) -> None:
        keys: dict[Key, str] = {}
        for part in fields(self):
            given = getattr(self, part.name)
            if given is None and part.name != "done":
                continue
            key = check_key(part.name, given)
            if key in keys:
                raise ArgumentError(
                    f"{keys[key]} and {part.name} are both the field {key_name(key)!r}",
                    hint="give each part a key of its own, or leave one out with None",
                )
            keys[key] = part.name

    @property
    def keys(self) -> dict[str, Key]:
        """The key of the field of each part; parts that are left out are not in it."""
        names = [part.name for part in fields(self)]
        return {
            name: check_key(name, getattr(self, name)) for name in names if getattr(self, name) is not None
        }

    def settings(self, parts: Iterable[str] | None = None) -> dict[str, Any]:
        """Return `layout`, `schema` and `episodes` for `expstore.open`.

        The schema is a dict of types by key; add fields of your own to it: `settings["schema"]["source"] =
        str`.

        Args:
            parts: Only these parts become fields; None: all that are not left out.
        """
        keys = {name: key for name, key in self.keys.items() if parts is None or name in set(parts)}
        episodes = {"done": [keys["done"]]} | ({"reward": keys["reward"]} if "reward" in keys else {})
        types = dict(_TYPES)
        if "parent" in keys:
            types |= {name: Continued(_TYPES[name][0], parent=keys["parent"]) for name in _CONTINUED}
        return {
            "layout": "arrow",
            "schema": {key: types[name] for name, key in keys.items()},
            "episodes": episodes,
        }
