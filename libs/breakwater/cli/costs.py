"""`breakwater costs`: what the calls of a month cost, by whom and for what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from breakwater.cli import formats, output
from breakwater.cli.api import Api, api_command
from breakwater.cli.errors import wrong_usage
from breakwater.cli.output import Column

if TYPE_CHECKING:
    from breakwater.contracts.budgets import CostLine, Costs

BY = ("agent", "tenant", "model", "provider", "key")


@api_command
def costs(
    api: Api,
    by: Annotated[
        str,
        typer.Option("--by", metavar="WHAT", help="agent, tenant, model, provider, key, or tag:NAME of `cost_tags`."),
    ] = "agent",
    month: Annotated[
        str | None, typer.Option("--month", metavar="YYYY-MM", help="In the budgets' time zone; by default this month.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="The most lines.")] = 50,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all lines as CSV, in exact amounts.")] = False,
) -> None:
    """Show what the calls of a month cost, beside the month before, the caps and what failed calls cost.

    `at month's end` is a forecast at the present pace. A `+` after the spend stands for calls of unknown cost. A key is
    the API key that submitted the job; jobs from NATS have none.

    For example:

        breakwater costs

        breakwater costs --by tenant --month 2026-10

        breakwater costs --by tag:team --csv > costs.csv

        breakwater costs --json | jq -r .total.spend
    """
    from breakwater.contracts.budgets import Costs

    query = {"month": month, **_grouping(by)}
    if as_csv:
        if api.as_json:
            raise wrong_usage("--csv and --json exclude each other", "Leave one of them out.")
        output.write(api.text("costs.csv", **query), end="")
        return
    api.answer(api.get(Costs, "costs", **query, limit=limit), _show)


def _grouping(by: str) -> dict[str, str]:
    if by in BY:
        return {"by": by}
    kind, _, tag = by.partition(":")
    if kind == "tag" and tag:
        return {"by": "tag", "tag": tag}
    raise wrong_usage(f"--by {by!r}: costs can't be grouped by this", f"Use {', '.join(BY)} or tag:NAME.")


def _show(costs: Costs) -> None:
    title = costs.tag or ("API key" if costs.by == "key" else costs.by)
    over = costs.total.forecast is None
    columns: list[Column[CostLine]] = [
        Column(title, lambda line: line.name or ("all" if line is costs.total else "none")),
        Column("spend", _spend, right=True),
        Column("failed calls", lambda line: formats.money(line.wasted), right=True, drop=2),
        Column(costs.previous_month, lambda line: formats.money(line.previous), right=True, drop=1),
        Column("cap", lambda line: formats.money(line.cap) if line.cap is not None else "", right=True, drop=3),
        Column("calls", lambda line: f"{line.calls:,}", right=True, drop=4),
    ]
    if not over:
        forecast: Column[CostLine] = Column("at month's end", _forecast, right=True)
        columns.insert(2, forecast)
    output.table(
        columns, (*costs.lines, costs.total) if costs.lines else (), empty=f"nothing was spent in {costs.month}"
    )
    if costs.others is not None:
        output.note(f"(the others spent {formats.money(costs.others.spend)}; see --limit)")
    output.note(f"{costs.month} in {costs.timezone}")


def _spend(line: CostLine) -> output.Cell:
    text = formats.money(line.spend) + ("+" if line.calls_of_unknown_cost else "")
    return (text, "red" if line.cap is not None and (line.spend or 0) >= line.cap else "")


def _forecast(line: CostLine) -> output.Cell:
    if line.forecast is None:
        return ""
    return (formats.money(line.forecast), "yellow" if line.cap is not None and line.forecast >= line.cap else "")
