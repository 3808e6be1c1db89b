"""The command `breakwater`. It imports a subcommand only when it is called, so that `--help` is fast."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core

from breakwater import __version__
from breakwater.kernel.commands import errors, interrupts
from breakwater.kernel.commands.errors import EXIT_CODES, CliError, ExitCode

COMMANDS = {
    "Run": {
        "init": ("config.commands.init", "Write a first config, and check it."),
        "up": ("local.commands.up", "Run the whole plane on this machine: NATS, Redis, ClickHouse and all services."),
        "demo": (
            "local.demo.command",
            "Show the whole plane at work: failing providers, retries, breakers, budgets, alerts.",
        ),
        "console": ("local.commands.console", "Print a link that signs in to the console of a local stack."),
        "doctor": ("cli.doctor", "Check the plane: config, servers, streams, schema, lags, clocks, providers."),
        "simulate": (
            "local.commands.simulate",
            "Break the simulated provider of a running `breakwater up --simulate`.",
        ),
        "backup": ("backup.commands", "Make, check and restore backups of the whole plane."),
        "config": ("config.commands.check", "Check the config file, apply it, and print what follows from it."),
        "keys": ("identity.commands", "API keys of the HTTP API, and their scopes."),
        "encryption": ("config.commands.encryption", "Keys that encrypt stored texts, and decryption of such texts."),
        "size": ("sizing.commands", "Print the nodes, cores, memory and disks that a load needs."),
        "erase": ("erasure.commands", "Erase the texts and names of a user or a tenant in all stores."),
    },
    "Work": {
        "submit": ("jobs.commands.submit", "Submit a job, and wait for its answer."),
        "cancel": (
            "jobs.commands.cancel",
            "Cancel jobs: a waiting job makes no further call, and a call in flight is aborted.",
        ),
    },
    "Look": {
        "tail": (
            "records.commands.tail",
            "Show live events: attempts, executions, breakers, budgets, guards, alerts, progress.",
        ),
        "logs": ("local.commands.logs", "Show the logs of a local stack, of its services and its servers."),
        "query": (
            "records.commands.query",
            "Run SQL on the records: executions, attempts, transitions, budgets, alerts.",
        ),
        "plan": ("replay.commands", "Show what a changed config would have done with recorded jobs."),
        "suggest": ("replay.commands", "Search the record for settings that would have served better."),
        "costs": ("records.commands.costs", "Show the costs of a month, the previous month, the limits and the waste."),
        "agents": ("health.commands", "Show the health of agents, and add agents to the config."),
        "jobs": ("jobs.commands.jobs", "List jobs that have not ended: what runs, waits, is parked or queued."),
        "executions": (
            "records.commands.executions",
            "List executions, the latest first; show one; or export them to a file.",
        ),
        "plans": ("jobs.commands.plans", "List plans and their states."),
        "breakers": ("breakers.commands", "List breakers; force one open, or reset it."),
        "guards": ("breakers.commands", "List the tasks that a guard has stopped, and reset them."),
        "limits": ("limits.commands", "List limits and what is left of them; set, raise or delete them."),
        "budgets": (
            "limits.commands",
            "List spend by day, month and so on, with or without a limit; compare it with the record.",
        ),
        "alerts": ("alerts.commands", "List incidents; acknowledge or resolve them; test a channel."),
        "dlq": ("jobs.commands.dlq", "Dead letters: list, show, replay or dismiss them."),
    },
    "Developers": {
        "setup": (
            "local.commands.setup",
            "Create and update the streams of NATS and the tables of ClickHouse, as the config asks.",
        ),
        "contract": (
            "cli.commands.contract",
            "Write the wire contract: JSON schemas, AsyncAPI, OpenAPI, the config's schema.",
        ),
    },
}
"""The subcommands by their panel in `--help`: the module that offers it, and its summary.

A module has a group or a function of the command's name, or an `app`.
"""


class CommandsOnDemand(typer.core.TyperGroup):
    """The group of all subcommands. A subcommand is only a summary until it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for panel, commands in COMMANDS.items():
            for name, (_, summary) in commands.items():
                self.commands[name] = typer.core.TyperCommand(name, help=summary, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Imports the called subcommand, and resolves it."""
        self.load(args[0])
        interrupts.begin()
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> None:
        """Imports a subcommand; does nothing if none has the name."""
        entry = next((commands[name] for commands in COMMANDS.values() if name in commands), None)
        if entry is None:
            return
        module = import_module(f"breakwater.{entry[0]}")
        wrapper = typer.Typer(rich_markup_mode="markdown")
        candidates = (getattr(module, name, None), getattr(module, "app", None))
        group = next((candidate for candidate in candidates if isinstance(candidate, typer.Typer)), None)
        if group is not None:
            wrapper.add_typer(group, name=name)
        else:
            wrapper.command(name)(getattr(module, name))
        command = typer.main.get_group(wrapper).commands[name]
        command.rich_help_panel = self.commands[name].rich_help_panel  # pyright: ignore[reportAttributeAccessIssue]  # typer's
        self.commands[name] = command


app = typer.Typer(
    name="breakwater",
    cls=CommandsOnDemand,
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def every_command() -> typer.core.TyperGroup:
    """Returns the command with all subcommands imported, for its documentation."""
    group = typer.main.get_group(app)
    for name in list(group.commands):
        group.load(name)  # pyright: ignore[reportAttributeAccessIssue]  # it is a CommandsOnDemand
    return group


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"breakwater {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A self-hosted reliability and governance plane for LLM agent calls."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns its exit code; see `ExitCode`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        return int(app(args=arguments, prog_name="breakwater", standalone_mode=False) or ExitCode.OK)
    except typer.TyperException as error:
        return _show_usage_error(error, as_json=as_json)
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001  `as_cli_error` raises unexpected errors again
        cli_error = errors.as_cli_error(error)
        errors.show(cli_error, as_json=as_json)
        return cli_error.exit_code


def _show_usage_error(error: typer.TyperException, *, as_json: bool) -> int:
    context: typer.Context | None = getattr(error, "ctx", None)
    message = error.format_message().replace("Value error, ", "")  # pydantic's prefix; typer parses options with it
    if not message:  # a group without a command has shown its help
        return error.exit_code
    remedy = f"See `{context.command_path} --help`." if context is not None else ""
    errors.show(CliError("usage", message, remedy, ExitCode(error.exit_code)), as_json=as_json)
    return error.exit_code
