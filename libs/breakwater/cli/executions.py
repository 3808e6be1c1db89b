"""`breakwater executions`: how jobs ended, from ClickHouse."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from breakwater.cli import connect, formats, output
from breakwater.cli.connect import run
from breakwater.cli.errors import CliError
from breakwater.cli.plane import DataOption, JsonOption, Plane

if TYPE_CHECKING:
    from breakwater.analytics.queries import ExecutionLine
    from breakwater.contracts.execution import Attempt, Execution

_ERROR_WIDTH = 60

# Apart from the list, as most lists have none; the ids have an index.
_DRY_RUNS = "SELECT execution_id FROM executions FINAL WHERE dry_run AND execution_id IN {ids:Array(String)}"


class Status(StrEnum):
    """How an execution can end."""

    SUCCEEDED = "succeeded"
    DEAD_LETTERED = "dead_lettered"
    CANCELLED = "cancelled"


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
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """List executions, the latest first; or show one, with every attempt it took.

    An execution is the record of a job, and has the job's id. It appears about a second after the job was decided.

    For example:

        breakwater executions --status dead_lettered --since 1h

        breakwater executions order-4711

        breakwater executions --agent content-writer --json | jq '.[].total_cost'
    """
    url = Plane(data).clickhouse_url
    if execution_id is not None:
        found = run(_find(url, execution_id))
        if found is None:
            raise CliError(
                "unknown_execution",
                f"there is no execution {execution_id!r}",
                "A job appears here about a second after it was decided; `breakwater tail` shows what is going on.",
            )
        if as_json:
            output.json_document(found)
        else:
            _show(found)
        return
    begin = formats.since(since, datetime.now(UTC)) if since is not None else None
    lines, dry = run(_list(url, agent, status, begin, limit))
    if as_json:
        output.json_document([_line_json(line) | {"dry_run": line.execution_id in dry} for line in lines])
    else:
        _show_list(lines, dry)


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
                _shortened(": ".join(_remarks(line, dry))),
            )
            for line in lines
        ],
        empty="no executions",
    )


def _show(execution: Execution) -> None:
    now = datetime.now(UTC)
    error = execution.error
    facts: list[tuple[str, output.Cell]] = [
        ("agent", execution.agent),
        ("status", output.state(execution.status)),
        ("reason", execution.reason or ""),
        ("error", "" if error is None else f"{error.class_}: {error.message}"),
        ("model", execution.chosen_model or ""),
        ("models to try", " > ".join(execution.fallback_chain)),
        ("tokens", f"{execution.input_tokens:,} in, {execution.output_tokens:,} out" if execution.total_tokens else ""),
        ("cost", _cost(execution)),
        ("queued", formats.clock(execution.queued_at, now)),
        ("took", formats.duration(execution.duration_ms)),
        ("tenant", execution.tenant or ""),
        ("task", execution.task_id or ""),
        ("dry run", "yes" if execution.dry_run else ""),
        ("answer", execution.output if isinstance(execution.output, str) else ""),
    ]
    output.styled((execution.execution_id, "bold"))
    for name, value in facts:
        if value:
            output.styled((f"  {name:<14}", "dim"), value)
    if execution.attempts:
        output.write("")
        output.table(
            [
                output.Column("#", right=True),
                output.Column("model"),
                output.Column("why", drop=4),
                output.Column("outcome"),
                output.Column("took", right=True, drop=2),
                output.Column("waited", right=True, drop=5),
                output.Column("cost", right=True, drop=1),
                output.Column("error", drop=3),
            ],
            [_attempt(attempt) for attempt in execution.attempts],
        )


def _attempt(attempt: Attempt) -> tuple[output.Cell, ...]:
    error = attempt.error
    status = f" {error.status_code}" if error is not None and error.status_code else ""
    return (
        str(attempt.number),
        attempt.model,
        attempt.cause,
        output.state(attempt.outcome),
        formats.duration(attempt.duration_ms),
        formats.duration(attempt.backoff_ms) if attempt.backoff_ms else "",
        "" if attempt.short_circuited else formats.money(attempt.cost),
        "" if error is None else _shortened(f"{error.kind}{status}: {error.message}"),
    )


def _cost(execution: Execution) -> str:
    if execution.total_cost is None:
        return "unknown"
    basis = "" if execution.cost_basis == "billed" else f" ({execution.cost_basis})"
    wasted = f", of it {formats.money(execution.wasted_cost)} wasted" if execution.wasted_cost else ""
    return f"{formats.money(execution.total_cost)}{basis}{wasted}"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _ERROR_WIDTH else line[: _ERROR_WIDTH - 1] + "…"


def _remarks(line: ExecutionLine, dry: frozenset[str]) -> list[str]:
    said = ("dry run" if line.execution_id in dry else None, line.reason, line.error_message)
    return [part for part in said if part]


def _line_json(line: ExecutionLine) -> dict[str, Any]:
    from dataclasses import asdict

    from breakwater.contracts.types import usd_from_nano

    cost = line.total_cost
    return asdict(line) | {"total_cost": None if cost is None else usd_from_nano(cost)}
