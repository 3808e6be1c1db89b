"""Requests for the record as a whole, statements and exports; the figures of agents, and costs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from breakwater.jobs.contract.execution import Status
from breakwater.kernel.http.contract import Moment
from breakwater.kernel.types import Count, Event, Identifier, Message, Money, Timestamp

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


CostsBy = Literal["agent", "tenant", "model", "provider", "deployment", "key", "user", "team", "tag"]


class CostsQuery(Message):
    """A month and the grouping of its costs."""

    month: Annotated[str, StringConstraints(pattern=r"^20[0-9]{2}-(0[1-9]|1[0-2])$")] | None = Field(
        default=None, description="Month such as `2026-11`, in the budgets' time zone; default: the current month."
    )
    by: CostsBy = Field(
        default="agent", description="`key`: the name of the API key that submitted the job. `tag`: see `tag`."
    )
    tag: str | None = Field(
        default=None,
        max_length=64,
        description="Tag to group by with `by=tag`: one of `cost_tags` in the config, or of an earlier config.",
    )

    @model_validator(mode="after")
    def _tag_where_it_is_meant(self) -> Self:
        if self.by == "tag" and not self.tag:
            raise ValueError("tag: is missing; by=tag needs the name of a tag")
        if self.by != "tag" and self.tag:
            raise ValueError("tag: is only allowed with by=tag")
        return self


class CostsListQuery(CostsQuery):
    """A month, the grouping of its costs, and the number of lines."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1_000, description="Maximum number of rows, highest spend first; `others` sums up the rest."
    )


class CostLine(Event):
    """Costs of the calls of one agent, tenant, … An amount is null if no part of it is known."""

    name: str | None = Field(description="Null for calls without one: no tenant, no key, or no such tag.")
    spend: Money | None = Field(description="A lower bound if there are `calls_of_unknown_cost`.")
    wasted: Money | None = Field(description="Part of `spend` that paid for failed calls.")
    estimated: Money = Field(description="Part of `spend` that is estimated because no usage was reported.")
    previous: Money | None = Field(description="Spend of the entire previous month.")
    cap: Money | None = Field(
        description="Monthly limit for agents, tenants and the total: the config's current one, or the one "
        "it was raised to in that month. Null without a limit."
    )
    daily_cap: Money | None = Field(
        default=None,
        description="Daily limit of the same: the config's current one or, in the present month, the one it was raised "
        "to for today.",
    )
    raised_from: Money | None = Field(
        default=None,
        description="The config's limit, if it was raised: of `cap`, or of `daily_cap` if there is no monthly limit.",
    )
    forecast: Money | None = Field(
        description="Forecast for the end of the month at the current rate. Null for a month that is "
        "over or has just begun."
    )
    next_month: Money | None = Field(
        default=None,
        description="Forecast for the whole next month at the same rate; at most the config's limit, if that refuses "
        "calls. Null as `forecast` is.",
    )
    calls: Count
    failed_calls: Count
    calls_of_unknown_cost: Count
    input_tokens: Count = Field(description="Tokens that providers reported, as for the other kinds of tokens.")
    output_tokens: Count
    cached_tokens: Count = Field(description="Input tokens that the provider read from its cache.")


class Costs(Event):
    """Costs of the calls of a month. A call counts in the month in which its budgets charge it."""

    month: str = Field(examples=["2026-11"])
    previous_month: str = Field(examples=["2026-10"])
    timezone: str = Field(description="Time zone of the budgets.")
    starts_at: Timestamp
    ends_at: Timestamp = Field(description="End of the month (exclusive).")
    by: CostsBy
    tag: str | None = Field(default=None, description="The tag, with `by=tag`.")
    total: CostLine
    lines: tuple[CostLine, ...] = Field(description="Highest spend first.")
    others: CostLine | None = Field(default=None, description="Sum of the rows beyond `limit`.")
    cost_tags: tuple[str, ...] = Field(default=(), description="Tags in the current config.")
