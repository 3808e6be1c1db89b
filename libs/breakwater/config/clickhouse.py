"""How ClickHouse keeps what happened."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from breakwater.contracts.types import Message

LEAST_FOR_BUDGETS = 62
"""Days. Counters that were lost are made again from ClickHouse: of the month that has begun, and of one that is just
over, as its last calls are still settled. Two of the longest months."""


def _long_enough(days: int) -> int:
    if days < LEAST_FOR_BUDGETS:
        raise ValueError(
            f"must be at least {LEAST_FOR_BUDGETS} days, and not {days}: when Redis loses its counters, the budgets of "
            "this month and of the one before are counted again from these rows"
        )
    return days


# Of longer times, the last day that a table can tell is beyond what ClickHouse's times hold.
Days = Annotated[int, Field(ge=1, le=10_000)]
DaysForBudgets = Annotated[
    int, AfterValidator(_long_enough), Field(le=10_000, json_schema_extra={"minimum": LEAST_FOR_BUDGETS})
]


class RetentionDays(Message):
    """For how many days each table keeps its rows."""

    executions: Days = 400
    attempts: DaysForBudgets = 400
    breaker_transitions: Days = 400
    guard_events: Days = 400
    budget_events: DaysForBudgets = 400
    alerts: Days = 400


class ClickHouse(Message):
    """The database of what happened. `breakwater setup` makes it so."""

    retention_days: RetentionDays = Field(
        default=RetentionDays(), description="For how many days each table keeps its rows."
    )
    cluster: str | None = Field(
        default=None,
        pattern=r"^[\w.{}-]+$",
        max_length=128,
        description="The replicated cluster that all tables are made on, as `remote_servers` of its servers names it.",
    )
