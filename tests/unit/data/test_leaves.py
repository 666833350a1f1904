"""Tensors as arrays."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict

import expstore


def test_lazy_conjugates_and_negatives_are_stored_as_values(tmp_path: Path) -> None:
    wave = torch.complex(torch.arange(4.0), torch.arange(4.0))
    data = TensorDict({"wave": wave.conj(), "part": wave.conj().imag}, [4])
    with expstore.open(tmp_path / "a.exp") as rb:
        for _ in range(2):
            rb.extend(data)
        rb.add(data[3])
        rb.extend(data.to_dict())
        wanted = [*range(4), *range(4), 3, *range(4)]
        assert rb[:]["part"].tolist() == [-number for number in wanted]
        assert rb[:]["wave"].tolist() == [complex(number, -number) for number in wanted]
