"""Groups of commands that suggest one command for a misspelt one, whatever versions of Typer and Click say."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import click
from typer.core import TyperGroup

__all__ = ["Commands"]


class Commands(TyperGroup):
    """A group of commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(_unknown(args[0], self, ctx.find_root().command))
        return super().resolve_command(ctx, args)


def _unknown(name: str, group: click.Group, root: click.Command) -> str:
    """The sentence about a command that there is not: the nearest one here, or one of that very name in a group."""
    near = difflib.get_close_matches(name, _shown(group), n=1, cutoff=0.5)
    elsewhere = [f"{path} {name}" for path, inner in _groups(root) if name in _shown(inner)] if not near else []
    hint = next((f"; did you mean '{other}'?" for other in (*near, *elsewhere)), ".")
    return f"There is no command '{name}'{hint}"


def _shown(group: click.Group) -> list[str]:
    return [name for name, command in group.commands.items() if not command.hidden]


def _groups(root: click.Command) -> Iterator[tuple[str, click.Group]]:
    if isinstance(root, click.Group):
        yield from ((name, inner) for name, inner in root.commands.items() if isinstance(inner, click.Group))
