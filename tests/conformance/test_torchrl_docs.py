"""The examples in TorchRL's docstrings run with only the imports replaced, and print the same.

Docstrings are taken from the installed torchrl when the tests run. Each is run twice, with TorchRL's classes
and with ours. The output must be equal except for sampled values.
"""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensordict
import torch
import torchrl.data
import torchrl.data.replay_buffers as theirs

import expstore
from tests.support.torchrl_names import NAMES, find_own, find_own_module, their

#: Blocks of a docstring that cannot run anywhere here, by the name and a line in them.
CANNOT = {
    ("SliceSampler", "RobosetExperienceReplay"): "downloads a data set",
    ("SliceSamplerWithoutReplacement", "RobosetExperienceReplay"): "downloads a data set",
    ("MultiStepTransform", "auto_reset=False"): "the first step of its rollouts has one field more: refused",
    ("TensorDictMaxValueWriter", "GymEnv"): "needs an environment whose library is not installed",
}


#: Examples that print something else here, by the name and a line in them, or with the line before, too.
DIFFERENT = {
    ("NonTensor", "batched=True, shape=(3,))\nspec.rand()"): "one object for each element, as its text says",
    ("ReplayBuffer.append_transform", "rb.append_transform("): "a buffer describes itself otherwise",
    ("LazyMemmapStorage", "dumps("): "the version that was made is returned",
    ("Sequence", "sorted(info.keys())"): "rows have ids, too",
    ("SliceSampler", "print(s)"): "an index is one number per row; how many rows come, is drawn",
    ("SliceSampler", 'print("sample:'): "an index is one number per row",
    ("SliceSamplerWithoutReplacement", 'print("sample:'): "an index is one number per row",
}


def documented() -> dict[str, str]:
    """Return the docstrings with examples of all classes, methods and functions that are offered here."""
    found: dict[str, str] = {}
    for name in NAMES:
        if find_own_module(name) is None:
            continue
        other = their(name)
        found[name] = other.__doc__ or ""
        for base in inspect.getmro(other) if inspect.isclass(other) else ():
            if base.__module__.startswith(theirs.__name__):
                for member, value in vars(base).items():
                    offered = not member.startswith("_") and hasattr(find_own(name), member)
                    if offered and home(value).startswith("torchrl."):
                        found.setdefault(f"{base.__name__}.{member}", getattr(value, "__doc__", None) or "")
    return {name: text for name, text in found.items() if ">>> " in text}


def home(member: Any) -> str:
    """Return the module of a method or property: what tensordict gives to classes is none of TorchRL's."""
    member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
    return str(getattr(member, "__module__", ""))


DOCS = documented()
IMPORT = re.compile(
    r"from torchrl\.(?:data|collectors\.utils|envs\.transforms)[\w.]* import (?:\(([^)]*)\)|([^\n;]*))"
)


def replaced(source: str) -> str:
    """Return an example with what is offered here imported from here."""

    def rewrite(match: re.Match[str]) -> str:
        names = [name.strip() for name in (match[1] or match[2]).split(",") if name.strip()]
        homes = {name: find_own_module(name.split(" as ")[0]) for name in names}
        rest = [name for name, place in homes.items() if place is None]
        lines = [f"from {place} import {name}" for name, place in homes.items() if place]
        if rest:
            lines.append(re.sub(r"import.*", f"import {', '.join(rest)}", match[0], flags=re.DOTALL))
        return "; ".join(lines)

    return IMPORT.sub(rewrite, source)


@dataclass(frozen=True)
class Outcome:
    """Say what an example printed, and how it failed."""

    source: str
    printed: str
    failure: str = ""


def examples(name: str) -> Iterator[doctest.Example]:
    """Yield the examples of a docstring, without the blocks that cannot run."""
    text, block = inspect.cleandoc(DOCS[name]), []
    # A line of prose ends a block; what an example prints is indented like it.
    for piece in [*doctest.DocTestParser().parse(text), "the end"]:
        if isinstance(piece, doctest.Example):
            block.append(piece)
        elif piece.strip():
            reasons = [why for (of, line), why in CANNOT.items() if of == name and line in sources(block)]
            if not reasons:
                yield from block
            block = []


def sources(block: list[doctest.Example]) -> str:
    return "".join(one.source for one in block)


def run(name: str, *, here: bool) -> list[Outcome]:
    """Run a docstring's examples in one namespace, as an interpreter would; go on after failures."""
    home = expstore if here else torchrl.data
    names: dict[str, Any] = {word: getattr(home, word) for word in dir(home) if not word.startswith("_")}
    if here:
        names |= {word: find_own(word) for word in NAMES if find_own_module(word)}
    names |= {"torch": torch, "TensorDict": tensordict.TensorDict, "__name__": "example"}
    outcomes = []
    for example in examples(name):
        source = replaced(example.source) if here else example.source
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "displayhook", lambda value: None if value is None else print(repr(value)))
                exec(compile(source, name, "single"), names)
        except Exception as exc:
            outcomes.append(Outcome(source, printed.getvalue(), f"{type(exc).__name__}: {exc}"))
        else:
            outcomes.append(Outcome(source, printed.getvalue()))
    return outcomes


#: What is drawn, and differs from run to run: numbers in tensors and lists, and how many; but not shapes.
DRAWN = re.compile(r"(?<!Size\()\[[^\[\]]*\]")
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]\d+)?|True|False|None")


def normalize(printed: str) -> str:
    """Return what is printed without drawn values, and without what a tensor lies in."""
    text = printed.replace("MemoryMappedTensor(", "Tensor(").replace("device=cpu", "device=None")
    text = " ".join(DRAWN.sub(lambda found: NUMBER.sub("#", found[0]), text).split())
    text = re.sub(r"NonTensorStack\( .*?batch_size", "NonTensorStack(# batch_size", text)
    return re.sub(r"\[ ?#(?:, *#)*\]", "[#]", text)


@pytest.mark.guarantee("torchrl/programs")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DOCS)
def test_examples_run_and_print_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It only draws a bar.
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=iter))  # type: ignore[misc]
    outcomes = {}
    for here in (True, False):
        folder = tmp_path / str(here)
        folder.mkdir()
        monkeypatch.chdir(folder)
        torch.manual_seed(0)
        outcomes[here] = run(name, here=here)
    broken, before = False, ""
    for own, other in zip(outcomes[True], outcomes[False], strict=True):
        # TorchRL's own examples are not all well; what came after a failure says nothing.
        broken |= bool(other.failure)
        if broken:
            assert not own.failure or other.failure, own.source
            continue
        assert not own.failure, (own.source, own.failure)
        both, before = before + other.source, other.source
        reasons = [
            why
            for (of, line), why in DIFFERENT.items()
            if of == name and line in (both if "\n" in line else other.source)
        ]
        if reasons:
            assert normalize(own.printed) != normalize(other.printed), f"no longer so: {reasons}"
            continue
        assert normalize(own.printed) == normalize(other.printed), own.source
