"""The commands and the examples in their help; results of commands, with the fixture `cli` or otherwise."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import typer

from expstore.cli.app import app


class Done(NamedTuple):
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Done]


def find_commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group and of its groups, by their words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from find_commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


COMMANDS = dict(find_commands(typer.main.get_command(app)))


def examples_of(command: Any) -> list[list[str]]:
    """Return the examples in the help of a command, as words without the program."""
    _, _, listed = command.epilog.partition("Examples:\n")
    return [shlex.split(line)[1:] for line in listed.splitlines()]
