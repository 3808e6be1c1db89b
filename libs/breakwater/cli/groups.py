"""Groups of commands."""

from __future__ import annotations

import typer
import typer.core


class ListsByItself(typer.core.TyperGroup):
    """Does `list` where no command is named: `breakwater breakers --json` is `breakwater breakers list --json`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the context's class is private to typer
        """Takes the arguments of the group."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


class ListsOrShows(typer.core.TyperGroup):
    """Does `list` where no command is named, and gives it what is: `breakwater executions ID` shows that one."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]  # the context's class is private to typer
        """Takes the arguments of the group."""
        if not args or args[0] not in self.commands:
            args = ["list", *args]
        return super().parse_args(ctx, args)
