"""`breakwater guards`: the tasks that a guard has stopped, and letting one go on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from breakwater.cli import by_hand, formats, output
from breakwater.cli.connect import run
from breakwater.cli.groups import ListsByItself
from breakwater.cli.plane import ApiKeyOption, DataOption, JsonOption, Plane, UrlOption

_HELP = """See which tasks a guard has stopped, and let one go on. Without a command it lists them.

For example:

    breakwater guards

    breakwater guards reset nightly-review-17 --reason "the loop is mended"
"""

app = typer.Typer(cls=ListsByItself, help=_HELP)


@app.command(name="list")
def list_(
    url: UrlOption = None, api_key: ApiKeyOption = None, data: DataOption = None, as_json: JsonOption = False
) -> None:
    """List the stopped tasks, the latest first, each with the rule that stopped it. `--json` begins with the earliest.

    For example:

        breakwater guards list

        breakwater guards list --json | jq -r '.stopped[].task_id'
    """
    from breakwater.cli import api
    from breakwater.contracts.api import StoppedTask

    document = run(api.get(Plane(data).door(url, api_key), "guards"))
    stopped = api.read(list[StoppedTask], api.read(dict[str, Any], document).get("stopped"))
    if as_json:
        output.json_document(document)
        return
    now = datetime.now(UTC)
    output.table(
        [
            output.Column("task"),
            output.Column("tenant", drop=1),
            output.Column("agent"),
            output.Column("rule"),
            output.Column("since", drop=2),
            output.Column("execution", drop=3),
            output.Column("reason", below=True),
        ],
        [
            (
                task.task_id,
                task.tenant or "",
                task.agent,
                (task.rule, "red"),
                formats.clock(task.since, now),
                task.execution_id or "",
                task.reason,
            )
            for task in sorted(stopped, key=lambda task: task.since, reverse=True)
        ],
        empty="no task is stopped",
    )


@app.command()
def reset(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Its task id, as `breakwater guards` shows it.")],
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose task; tenants do not share tasks of one id.")
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the event.")
    ] = None,
    url: UrlOption = None,
    api_key: ApiKeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a stopped task go on. What it has used is counted from zero again.

    For example:

        breakwater guards reset nightly-review-17 --reason "the loop is mended"

        breakwater guards reset nightly-review-17 --tenant acme --json
    """
    from breakwater.cli import api
    from breakwater.contracts.events import GuardEvent

    document = by_hand.act(
        Plane(data).door(url, api_key),
        "guards/reset",
        {"task_id": task, "tenant": tenant, "reason": reason},
        see="breakwater guards",
        unknown="`breakwater guards` lists the stopped tasks; a tenant's task needs --tenant.",
    )
    told = api.read(GuardEvent, document)
    if as_json:
        output.json_document(document)
        return
    whose = f" of {told.tenant}" if told.tenant else ""
    output.write(f"{told.task_id}{whose} may go on: {told.reason}")
    output.note(
        f"it had used {formats.counted(told.iterations, 'iteration')}, {formats.counted(told.tokens, 'token')} and "
        f"{formats.money(told.cost)}; that is counted from zero again"
    )
