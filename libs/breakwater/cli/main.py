"""The command `breakwater`. Commands import what they need when they run, so that `--help` comes at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from breakwater.cli import (
    agents,
    alerts,
    breakers,
    budgets,
    cancel,
    config_check,
    contract,
    costs,
    dlq,
    doctor,
    encryption,
    errors,
    executions,
    guards,
    init,
    keys,
    logs,
    plans,
    query,
    setup,
    simulate,
    submit,
    tail,
    up,
)
from breakwater.cli.demo import command as demo
from breakwater.cli.errors import EXIT_CODES, CliError, ExitCode

app = typer.Typer(
    name="breakwater",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(rich_help_panel="Run")(init.init)
app.command(rich_help_panel="Run")(up.up)
app.command(rich_help_panel="Run")(demo.demo)
app.add_typer(simulate.app, name="simulate", rich_help_panel="Run")
app.command(rich_help_panel="Work")(submit.submit)
app.command(rich_help_panel="Work")(cancel.cancel)
app.command(rich_help_panel="Look")(tail.tail)
app.command(rich_help_panel="Look")(logs.logs)
app.add_typer(agents.app, name="agents", rich_help_panel="Look")
app.add_typer(executions.app, name="executions", rich_help_panel="Look")
app.add_typer(plans.app, name="plans", rich_help_panel="Look")
app.command(rich_help_panel="Look")(query.query)
app.add_typer(breakers.app, name="breakers", rich_help_panel="Look")
app.add_typer(guards.app, name="guards", rich_help_panel="Look")
app.add_typer(budgets.app, name="budgets", rich_help_panel="Look")
app.command(rich_help_panel="Look")(costs.costs)
app.add_typer(alerts.app, name="alerts", rich_help_panel="Look")
app.add_typer(dlq.app, name="dlq", rich_help_panel="Look")
app.command(rich_help_panel="Run")(doctor.doctor)
app.command(rich_help_panel="Run")(setup.setup)
app.command(rich_help_panel="Run")(contract.contract)
app.add_typer(config_check.app, name="config", rich_help_panel="Run")
app.add_typer(keys.app, name="keys", rich_help_panel="Run")
app.add_typer(encryption.app, name="encryption", rich_help_panel="Run")


def _show_version(shown: bool) -> None:
    if shown:
        from importlib.metadata import version

        typer.echo(f"breakwater {version('breakwater')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A self-hosted reliability and governance plane for LLM agent calls."""


_PLAIN = {"number": "a number", "integer": "a whole number"}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        The exit code; see `ExitCode`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        return int(app(args=arguments, prog_name="breakwater", standalone_mode=False) or ExitCode.OK)
    except typer.TyperException as error:
        return _wrong_call(error, as_json=as_json)
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001  `expected` raises a bug again
        known = errors.expected(error)
        errors.show(known, as_json=as_json)
        return known.exit_code


def _in_words(message: str) -> str:
    """The message without pydantic's wording for programmers; typer parses options with pydantic."""
    message = message.replace("Value error, ", "")
    return re.sub(
        r"Input should be (a valid |)(.+?)(?:, unable to parse .*)?$",
        lambda found: f"should be {_PLAIN.get(found[2], ('a ' if found[1] else '') + found[2])}",
        message,
    )


def _wrong_call(error: typer.TyperException, *, as_json: bool) -> int:
    context: typer.Context | None = getattr(error, "ctx", None)
    message = error.format_message()
    if not message:  # a group without a command has shown its help
        return error.exit_code
    message = _in_words(message)
    remedy = f"See `{context.command_path} --help`." if context is not None else ""
    errors.show(CliError("usage", message, remedy, ExitCode(error.exit_code)), as_json=as_json)
    return error.exit_code
