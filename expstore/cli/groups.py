"""Groups of commands: the headings in their help, and the notes and examples below the help of each command.

Used by `expstore.cli.app` and by the modules of groups such as `expstore versions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from expstore.cli.exit_codes import USAGE

#: Headings of `expstore --help`.
LOOK, MOVE, VERSIONS, CHANGE, SERVE = "Look", "Move", "Versions", "Change", "Serve"
#: Heading of the commands of other groups.
_COMMANDS = "Commands"
_HEADINGS = (LOOK, MOVE, VERSIONS, CHANGE, SERVE, _COMMANDS)
#: Number of characters of the first sentence of a command's help.
_SENTENCE = 200


class Group(TyperGroup):
    """A group whose help lists the commands below their headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names of the commands and what they do."""
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _HEADINGS}
        for name, command in commands:
            heading = getattr(command, "rich_help_panel", None)
            rows = sections[heading if isinstance(heading, str) else _COMMANDS]
            rows.append((name, command.get_short_help_str(_SENTENCE)))
        for heading, rows in sections.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def make_group(**settings: Any) -> typer.Typer:
    """Return a group without commands, whose help has no frames.

    Args:
        settings: Arguments of `typer.Typer`.
    """
    return typer.Typer(cls=Group, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)


def add_command(
    group: typer.Typer,
    act: Callable[..., Any],
    *,
    name: str | None = None,
    heading: str | None = None,
    notes: str = "",
    examples: tuple[str, str],
) -> None:
    """Add a command to a group.

    Args:
        group: The group.
        act: The command; its docstring and its parameters are its help.
        name: Name of the command; None: that of the function, with hyphens.
        heading: Heading below which the group's help lists it.
        notes: Paragraphs below the help.
        examples: Two lines for a shell, which the help shows.
    """
    listed = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)
    epilog = "\n\n".join(filter(None, [notes, listed]))
    group.command(name, epilog=epilog, rich_help_panel=heading)(act)


def show_help(context: typer.Context) -> int:
    """Show the help of a group if none of its commands is given: its callback."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        return USAGE
    return 0
