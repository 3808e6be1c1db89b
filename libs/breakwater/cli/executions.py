"""`breakwater executions`: how jobs ended, from ClickHouse."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from breakwater.cli import connect, execution_page, execution_tree, formats, output
from breakwater.cli.connect import run
from breakwater.cli.errors import CliError, wrong_usage
from breakwater.cli.executions_export import Status, export
from breakwater.cli.groups import ListsOrShows
from breakwater.cli.plane import DataOption, JsonOption, Plane

if TYPE_CHECKING:
    from breakwater.analytics.queries import ExecutionLine
    from breakwater.contracts.execution import Execution

# Apart from the list, as most lists have none; the ids have an index.
_DRY_RUNS = "SELECT execution_id FROM executions FINAL WHERE dry_run AND execution_id IN {ids:Array(String)}"


app = typer.Typer(
    cls=ListsOrShows,
    help="List executions, the latest first; show one; or export them to a file.",
)


@app.command("list")
def executions(
    execution_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Show this one, with its attempts.")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Of this agent only.")] = None,
    status: Annotated[Status | None, typer.Option("--status", help="That ended so.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="AGO", help="That ended since: 10m, 2h, 7d, a time.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")] = 20,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the tree of executions that ID belongs to, with its costs.")
    ] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List executions, the latest first; or show one, with every attempt it took, or with its tree.

    An execution is the record of a job, and has the job's id. It appears about a second after the job was decided.
    A job that names a `parent_execution_id` stands below that execution in its tree.

    `breakwater executions export` writes all that you choose to a file: see its `--help`. An execution whose id is
    `export` or `list` is shown by `breakwater executions -- export`.

    For example:

        breakwater executions --status dead_lettered --since 1h

        breakwater executions order-4711

        breakwater executions order-4711 --tree

        breakwater executions list --agent content-writer --json | jq '.[].total_cost'
    """
    if tree and execution_id is None:
        raise wrong_usage("--tree needs the id of an execution", "Try `breakwater executions ID --tree`.")
    url = Plane(data).clickhouse_url
    if execution_id is not None:
        _print_tree(url, execution_id, as_json) if tree else _print_one(url, execution_id, as_json)
        return
    begin = formats.since(since, datetime.now(UTC)) if since is not None else None
    lines, dry = run(_list(url, agent, status, begin, limit))
    if as_json:
        output.json_document([_line_json(line) | {"dry_run": line.execution_id in dry} for line in lines])
    else:
        _show_list(lines, dry)


app.command("export")(export)


def _print_one(url: str, execution_id: str, as_json: bool) -> None:
    found = run(_find(url, execution_id))
    if found is None:
        raise _unknown(execution_id)
    output.json_document(found) if as_json else execution_page.show(found)


def _print_tree(url: str, execution_id: str, as_json: bool) -> None:
    found = run(execution_tree.find(url, execution_id))
    if found is None:
        raise _unknown(execution_id)
    output.json_document(execution_tree.document(found)) if as_json else execution_tree.show(found)


def _unknown(execution_id: str) -> CliError:
    return CliError(
        "unknown_execution",
        f"there is no execution {execution_id!r}",
        "A job appears here about a second after it was decided; `breakwater tail` shows what is going on.",
    )


async def _find(url: str, execution_id: str) -> Execution | None:
    from breakwater.analytics.queries import find_execution

    async with connect.analytics(url) as analytics:
        return await find_execution(analytics, execution_id)


async def _list(
    url: str, agent: str | None, status: Status | None, since: datetime | None, limit: int
) -> tuple[tuple[ExecutionLine, ...], frozenset[str]]:
    """The executions, and the ids of those that were dry runs."""
    from breakwater.analytics.queries import list_executions

    async with connect.analytics(url) as analytics:
        lines = await list_executions(
            analytics, agent=agent, status=None if status is None else status.value, since=since, limit=limit
        )
        dry = await analytics.query(_DRY_RUNS, {"ids": [line.execution_id for line in lines]})
    return lines, frozenset(row[0] for row in dry.rows)


def _show_list(lines: tuple[ExecutionLine, ...], dry: frozenset[str]) -> None:
    now = datetime.now(UTC)
    output.table(
        [
            output.Column("ended", drop=3),
            output.Column("id"),
            output.Column("agent"),
            output.Column("status"),
            output.Column("model", drop=2),
            output.Column("attempts", right=True, drop=5),
            output.Column("cost", right=True, drop=1),
            output.Column("took", right=True, drop=4),
            output.Column("reason", drop=6),
        ],
        [
            (
                (formats.clock(line.completed_at, now), "dim"),
                line.execution_id,
                line.agent,
                output.state(line.status),
                line.chosen_model or "",
                str(line.attempts_count),
                formats.money(line.total_cost),
                formats.duration(line.duration_ms),
                execution_page.shortened(": ".join(_remarks(line, dry))),
            )
            for line in lines
        ],
        empty="no executions",
    )


def _remarks(line: ExecutionLine, dry: frozenset[str]) -> list[str]:
    said = ("dry run" if line.execution_id in dry else None, line.reason, line.error_message)
    return [part for part in said if part]


def _line_json(line: ExecutionLine) -> dict[str, Any]:
    from dataclasses import asdict

    from breakwater.contracts.types import usd_from_nano

    cost = line.total_cost
    return asdict(line) | {"total_cost": None if cost is None else usd_from_nano(cost)}
