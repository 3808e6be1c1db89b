"""`breakwater costs`: shows the costs of a month by agent, tenant, model, provider, key, user, team or tag."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from breakwater.client.commands import Api, api_command
from breakwater.kernel.commands import output
from breakwater.kernel.commands.errors import usage_error
from breakwater.kernel.formats import money
from breakwater.records.contract import Costs
from breakwater.records.views.costs import BY, columns


@api_command
def costs(
    api: Api,
    by: Annotated[
        str,
        typer.Option("--by", metavar="WHAT", help=f"{', '.join(BY)}, or tag:NAME of `cost_tags`."),
    ] = "agent",
    month: Annotated[
        str | None,
        typer.Option("--month", metavar="YYYY-MM", help="Month, in the budgets' time zone. [default: this month]"),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="Maximum number of rows.")] = 50,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV, with exact amounts.")] = False,
) -> None:
    """Show the costs of a month, with the previous month, the limits and the cost of failed calls.

    `at month's end` is a forecast at the current rate, and `next month` one of that whole month. A `+` after the spend
    marks calls of unknown cost. A key is the API key that submitted the job; jobs from NATS have none.

    For example:

        breakwater costs

        breakwater costs --by tenant --month 2026-10

        breakwater costs --by user

        breakwater costs --by tag:project --csv > costs.csv

        breakwater costs --json | jq -r .total.spend
    """
    query = {"month": month, **_grouping(by)}
    if as_csv:
        if api.as_json:
            raise usage_error("--csv and --json exclude each other", "Use only one of them.")
        output.write(api.text("costs.csv", **query), end="")
        return
    api.show_result(api.get(Costs, "costs", **query, limit=limit), _show)


def _grouping(by: str) -> dict[str, str]:
    if by in BY:
        return {"by": by}
    kind, _, tag = by.partition(":")
    if kind == "tag" and tag:
        return {"by": "tag", "tag": tag}
    raise usage_error(f"--by {by!r}: costs can't be grouped by this", f"Use {', '.join(BY)} or tag:NAME.")


def _show(costs: Costs) -> None:
    output.table(
        columns(costs), (*costs.lines, costs.total) if costs.lines else (), empty=f"nothing was spent in {costs.month}"
    )
    if costs.others is not None:
        output.note(f"(others: {money(costs.others.spend)}; see --limit)")
    if costs.total.forecast is None and costs.lines and costs.ends_at > datetime.now(UTC):
        output.note("the forecasts are unknown: it is too early in the month, or nothing was spent")
    output.note(f"{costs.month} in {costs.timezone}")
