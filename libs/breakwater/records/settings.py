"""The section `clickhouse` of the config."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from breakwater.kernel.types import Identifier, Message

MIN_DAYS_FOR_BUDGETS = 100
"""The days of attempts that budgets need. Lost counters are rebuilt from ClickHouse, for this quarter and for the
previous month, whose last calls may still be in flight."""


def _long_enough(days: int) -> int:
    if days < MIN_DAYS_FOR_BUDGETS:
        raise ValueError(
            f"must be at least {MIN_DAYS_FOR_BUDGETS} days, not {days}: if Redis loses its counters, the budgets of "
            "this quarter are rebuilt from these rows"
        )
    return days


# With more days, the expiry of a row would be later than ClickHouse's times can represent.
Days = Annotated[int, Field(ge=1, le=10_000)]

DaysForBudgets = Annotated[
    int, AfterValidator(_long_enough), Field(le=10_000, json_schema_extra={"minimum": MIN_DAYS_FOR_BUDGETS})
]


class RetentionDays(Message):
    """Number of days that each table keeps its rows."""

    executions: Days = 400
    attempts: DaysForBudgets = 400
    breaker_transitions: Days = 400
    guard_events: Days = 400
    budget_events: DaysForBudgets = 400
    plan_changes: Days = 400
    limit_events: Days = 400
    alerts: Days = 400
    audit: Days = 400


class TextDays(Message):
    """Number of days for which jobs keep their prompts, answers, metadata and error messages.

    Of the numbers that apply to a job, the lowest counts. Rows stay, with times, tokens and costs.
    """

    all: Days | None = Field(default=None, description="For all jobs; by default as long as their rows.")
    agents: dict[Identifier, Days] = Field(default_factory=dict, description="By agent.")
    tenants: dict[Identifier, Days] = Field(default_factory=dict, description="By tenant.")


class ClickHouse(Message):
    """The ClickHouse database. `breakwater setup` applies these settings."""

    retention_days: RetentionDays = Field(
        default=RetentionDays(), description="Number of days that each table keeps its rows."
    )
    text_days: TextDays = Field(
        default=TextDays(),
        description="Number of days for which the texts of jobs are kept, if not as long as their rows.",
    )
    cluster: str | None = Field(
        default=None,
        pattern=r"^[\w.{}-]+$",
        max_length=128,
        description="Name of the replicated cluster for all tables, as in the servers' `remote_servers`.",
    )
