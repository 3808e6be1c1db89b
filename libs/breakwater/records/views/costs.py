"""Columns of the costs of a month."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from breakwater.kernel.columns import Cell, Column
from breakwater.kernel.formats import at_least, money
from breakwater.records.contract import CostLine, Costs

BY = {
    "agent": "agent",
    "tenant": "tenant",
    "model": "model",
    "provider": "provider",
    "deployment": "deployment",
    "key": "API key",
    "user": "user",
    "team": "team",
}
"""The groupings of costs, each with its heading."""

FAILED_TOOLTIP = "The part of the spend for calls that did not succeed."
PREVIOUS_TOOLTIP = "And the change of the spend against that month; of the forecast while the month has not ended."
CAPPED = ("agent", "tenant")
"""Groupings whose lines may have limits."""
_UNKNOWN = "unknown", "faint"


def tone(line: CostLine) -> Literal["", "warn", "bad"]:
    """The tone of a line: `bad` if its limit is reached, `warn` if it will be; otherwise empty."""
    if line.cap is None:
        return ""
    if (line.spend or 0) >= line.cap:
        return "bad"
    return "warn" if line.forecast is not None and line.forecast >= line.cap else ""


def cap_text(line: CostLine) -> str:
    """The limit of a line: `$300.00`, or `$5.00 a day` if only days are limited; empty without a limit.

    A limit that an operator raised says so: `$300.00, raised from $50.00`, `$10.00 today, raised from $5.00`.
    """
    return ", ".join(cap_parts(line))


def cap_parts(line: CostLine) -> tuple[str, ...]:
    """The parts of `cap_text`: the limit, and what it was raised from."""
    raised = () if line.raised_from is None else (f"raised from {money(line.raised_from)}",)
    if line.cap is not None:
        return money(line.cap), *raised
    if line.daily_cap is None:
        return ()
    return f"{money(line.daily_cap)} {'today' if raised else 'a day'}", *raised


def columns(costs: Costs) -> Sequence[Column[CostLine]]:
    """The columns of a month's lines; without a forecast if the month is over."""

    def name(line: CostLine) -> str:
        return line.name or ("all" if line is costs.total else "none")

    def spend(line: CostLine) -> Cell:
        return at_least(line.spend, line.calls_of_unknown_cost), "bad" if tone(line) == "bad" else ""

    def forecast(line: CostLine) -> Cell:
        return _UNKNOWN if line.forecast is None else (money(line.forecast), tone(line))

    def next_month(line: CostLine) -> Cell:
        return _UNKNOWN if line.next_month is None else money(line.next_month)

    next_column: Column[CostLine] = Column(
        "next month",
        next_month,
        align_right=True,
        drop=5,
        tooltip="Forecast of the whole month, at the present pace, under the limits of the config.",
    )
    forecast_column: Column[CostLine] = Column(
        "at month's end", forecast, align_right=True, name="forecast", tooltip="Forecast, at the present pace."
    )
    return [
        Column(costs.tag or BY[costs.by], name, name="name"),
        Column("spend", lambda line: line.spend, "usd", spend),
        *([] if costs.total.forecast is None else [forecast_column, next_column]),
        Column("share", None, terminal=False),
        Column("failed calls", lambda line: line.wasted, "usd", name="wasted", tooltip=FAILED_TOOLTIP, drop=2),
        Column(
            costs.previous_month, lambda line: line.previous, "usd", name="previous", tooltip=PREVIOUS_TOOLTIP, drop=1
        ),
        Column("limit", lambda line: line.cap, "usd", cap_text, name="cap", drop=3, page=costs.by in CAPPED),
        Column("calls", lambda line: line.calls, "count", drop=4),
        Column("tokens", lambda line: line.input_tokens + line.output_tokens, "count", terminal=False),
    ]
