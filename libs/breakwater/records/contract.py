"""Requests for the record as a whole, statements and exports; and the figures of agents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from breakwater.jobs.contract.execution import Status
from breakwater.kernel.http.contract import Moment
from breakwater.kernel.types import Count, Event, Identifier, Message, Money

MAX_STATEMENT = 200_000
LONGEST_S = 600.0
"""Limit of ClickHouse's user `reader` for a statement that asks for so much."""


class QueryRequest(Message):
    """A statement that only reads."""

    statement: Annotated[str, StringConstraints(min_length=1, max_length=MAX_STATEMENT)] = Field(
        description="One statement of ClickHouse's SQL, without FORMAT."
    )
    limit: int | None = Field(default=None, ge=1, description="Maximum number of rows; by default all.")
    timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_S, description="Time limit of the statement.")


ExportedRecords = Literal["executions", "attempts"]
ExportFormat = Literal["parquet", "jsonl"]

EXPORTED_ROWS = "Breakwater-Rows"
"""The header with the number of exported rows."""


class ExportQuery(Message):
    """A selection of records to export."""

    format: ExportFormat = Field(description="Parquet, or one line of JSON per record.")
    records: ExportedRecords = Field(default="executions", description="Kind of records.")
    since: Moment | None = Field(
        default=None, description="Earliest end, of attempts earliest begin (inclusive): a time in RFC 3339."
    )
    until: Moment | None = Field(default=None, description="And latest (exclusive); default: now.")
    agent: Identifier | None = Field(default=None, description="Filter by agent.")
    status: Status | None = Field(default=None, description="Filter executions by status.")


class FiguresQuery(Message):
    """A selection of figures."""

    since: Moment = Field(description="Earliest end of executions and begin of attempts: a time in RFC 3339.")


class AgentFigures(Event):
    """The figures of an agent since a time, without dry runs."""

    agent: Identifier
    executions: Count
    succeeded: Count
    success_rate: float | None = Field(description="From 0 to 1; null without executions.")
    p50_ms: Count | None = Field(description="Median duration; null, as `p95_ms`, without executions.")
    p95_ms: Count | None
    attempts: Count = Field(description="Refused admissions included.")
    retries: Count
    fallbacks: Count
    short_circuits: Count = Field(description="Refused admissions.")
    unknown_costs: Count = Field(description="Calls of unknown cost; with any, `spend` is a lower bound.")
    spend: Money | None
    wasted: Money | None = Field(description="Cost of calls that did not succeed.")
    answered: Count = Field(description="Executions that a model answered.")
    fell_back: Count = Field(description="Those that another model than the requested one answered.")
    fallback_share: float | None = Field(description="Of `answered`, from 0 to 1; null without any.")
    fallback_cost_factor: float | None = Field(description="The next two as a quotient; null if unknown.")
    fallback_cost: Money = Field(description="Cost of the latter, where `requested_model_cost` is known.")
    requested_model_cost: Money = Field(description="What the same answers would have cost on the requested model.")


class AgentFiguresList(Event):
    """The figures of all agents that ran since a time, and what they have spent today."""

    agents: tuple[AgentFigures, ...] | None = Field(description="Null without ClickHouse.")
    spent_today: dict[Identifier, Money] | None = Field(
        description="By agent, of those that have spent any, in the budgets' time zone. Null without Redis."
    )
    missing: tuple[str, ...] = Field(description="Why a part is null.")
