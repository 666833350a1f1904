"""Convert columns of a LeRobot data set to a TensorDict with the keys of TorchRL's LeRobot class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, is_tensor_collection

from expstore.core.values import Key
from expstore.errors import ArgumentError
from expstore.exchange.lerobot_format import LEROBOT_KEYS, lerobot_key


def lerobot_columns_to_tensordict(
    columns: Mapping[str, Any], *, key_map: Mapping[str, str | Key] | None = None
) -> TensorDict:
    """Return the columns as a TensorDict of shape `[N]`.

    Single values below "next" have the shape `[N, 1]`. The result equals TorchRL's for the same columns.

    Args:
        columns: Columns by their names in the data set: tensors, lists of texts, lists of numbers, or tensor
            classes of length N, such as TorchRL's `VideoClipRef`.
        key_map: Keys of columns, instead of the default ones.

    Raises:
        ArgumentError: No column has a length, or one mixes texts with other values.

    Example:
        >>> from expstore.datasets import lerobot_columns_to_tensordict
        >>> columns = {"observation.state": torch.zeros(4, 7), "task": ["pick"] * 4}
        >>> lerobot_columns_to_tensordict(columns)["observation", "state"].shape
        torch.Size([4, 7])
    """
    keys = {**LEROBOT_KEYS, **(key_map or {})}
    sized = (value for value in columns.values() if _is_tensor(value) or isinstance(value, (list, tuple)))
    first = next(sized, None)
    if first is None:
        raise ArgumentError("Could not infer the number of frames from `columns`.")
    count = first.shape[0] if _is_tensor(first) else len(first)
    found = TensorDict({}, batch_size=[count])
    for name, value in columns.items():
        found.set(lerobot_key(name, keys), _entry(name, lerobot_key(name, keys), value))
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_tensor_collection(value)


def _entry(name: str, key: str | Key, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            value.unsqueeze(-1)
            if value.ndim == 1 and isinstance(key, tuple) and key[:1] == ("next",)
            else value
        )
    if is_tensor_collection(value):
        return value
    if isinstance(value, (list, tuple)):
        texts = sum(isinstance(item, str) for item in value)
        if texts == len(value):
            return NonTensorStack.from_list(list(value))
        if texts:
            raise ArgumentError(
                f"Column {name!r} mixes strings and non-strings; expected a homogeneous column."
            )
    return torch.as_tensor(value)
