"""Budgets and costs in the HTTP API."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from breakwater.contracts.events import CapRaise, Enforcement, Scope, Window
from breakwater.contracts.http import OperatorRequest, ReasonText
from breakwater.contracts.types import NO_CONTROLS, Count, Event, Identifier, Message, Money, Timestamp, UsdAmount


class BudgetQuery(Message):
    """Selects the budgets that apply to a call of this agent for this tenant."""

    agent: Identifier | None = Field(default=None, description="The agent of the call.")
    tenant: Identifier | None = Field(default=None, description="The tenant of the call.")


class RaiseCapRequest(OperatorRequest):
    """A cap to raise, its new value, and the reason."""

    budget: Annotated[str, StringConstraints(min_length=1, max_length=160, pattern=NO_CONTROLS)] = Field(
        description="Its name: `global/daily`, `agent:<name>/monthly`, `tenant:<name>/daily`.",
        examples=["global/daily"],
    )
    limit_usd: UsdAmount = Field(
        description="The new cap. Setting exactly the config's cap revokes an earlier raise.", examples=["50.00"]
    )
    reason: Annotated[ReasonText, Field(min_length=1)] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  # is frozen
        description="For the record, as it is about money; redacted."
    )


class EstimateAccuracy(Event):
    """The worst case reserved for calls against their actual cost, over calls that succeeded."""

    calls: Count
    reserved: Money = Field(description="Reserved for them.")
    cost: Money = Field(description="Their cost.")
    percent: float | None = Field(
        description="`cost` in percent of `reserved`: 25 means that four times the cost is reserved."
    )
    exceeded: Count = Field(
        description="Calls that cost more than was reserved for them. A hard cap relies on there being none."
    )


class BudgetStatus(Event):
    """A budget as it is now."""

    budget: str = Field(description="Its name: `global/daily`, `agent:<name>/monthly`, `tenant:<name>/daily`.")
    scope: Scope
    agent: Identifier | None = None
    tenant: Identifier | None = None
    window: Window
    period: str = Field(description="`2026-11-21` or `2026-11`, in the budget's time zone.")
    enforcement: Enforcement
    limit: Money | None = Field(default=None, description="The cap in effect; null if there is none.")
    raised: CapRaise | None = Field(default=None, description="The raise of the cap for this period.")
    spent: Money
    reserved: Money = Field(description="Reserved for calls in flight.")
    remaining: Money | None = Field(default=None, description="The room for further calls; null without a cap.")
    reached: bool = Field(
        default=False,
        description="True if the cap is reached: by what is spent and reserved; or a hard one has refused a call, and "
        "what is left is less than a call reserves on average.",
    )
    calls: Count
    calls_of_unknown_cost: Count
    resets_at: Timestamp
    estimate: EstimateAccuracy | None = Field(default=None, description="None before the first call.")


class BudgetList(Event):
    """The budgets of the current day and month."""

    filled: bool = Field(
        description="True if the counters are complete. While they are rebuilt from the record, the figures mean "
        "nothing, and no call passes a hard cap."
    )
    budgets: tuple[BudgetStatus, ...]


class UnchangedBudget(BudgetStatus):
    """The cap is that already, and nothing was published: the budget as it is."""

    unchanged: Literal[True] = True


CostsBy = Literal["agent", "tenant", "model", "provider", "key", "tag"]


class CostsQuery(Message):
    """A month, and by what its costs are grouped."""

    month: Annotated[str, StringConstraints(pattern=r"^20[0-9]{2}-(0[1-9]|1[0-2])$")] | None = Field(
        default=None, description="Such as `2026-11`, in the time zone of the budgets; by default the current one."
    )
    by: CostsBy = Field(
        default="agent", description="`key`: the name of the API key that submitted the job. `tag`: see `tag`."
    )
    tag: str | None = Field(
        default=None,
        max_length=64,
        description="With `by=tag`: which tag, one of `cost_tags` in the config, or of an earlier one.",
    )

    @model_validator(mode="after")
    def _tag_where_it_is_meant(self) -> Self:
        if self.by == "tag" and not self.tag:
            raise ValueError("tag: is missing; by=tag needs the name of one")
        if self.by != "tag" and self.tag:
            raise ValueError("tag: is for by=tag only")
        return self


class CostsListQuery(CostsQuery):
    """The same, and how many lines."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1_000, description="The most lines; those of the highest spend come first, and `others` has the rest."
    )


class CostLine(Event):
    """Costs of the calls of one agent, tenant, … An amount is null if no part of it is known."""

    name: str | None = Field(description="Null for calls that have none: no tenant, no key, no such tag.")
    spend: Money | None = Field(description="A lower bound where there are `calls_of_unknown_cost`.")
    wasted: Money | None = Field(description="The part of `spend` for calls that failed.")
    estimated: Money = Field(description="The part of `spend` that is estimated, as no usage was reported.")
    previous: Money | None = Field(description="Spend of the whole month before.")
    cap: Money | None = Field(
        description="Of agents, tenants and the total: the monthly cap of the config as it is now, or what it was "
        "raised to in that month. Null if there is none."
    )
    forecast: Money | None = Field(
        description="Spend at the month's end, at the present pace. Null for a month that is over or has just begun."
    )
    calls: Count
    failed_calls: Count
    calls_of_unknown_cost: Count
    input_tokens: Count = Field(description="As far as they were reported; so for the other tokens.")
    output_tokens: Count
    cached_tokens: Count = Field(description="The part of the input tokens that came from the provider's cache.")


class Costs(Event):
    """Costs of the calls of a month. A call counts in the month in which its budgets charge it."""

    month: str = Field(examples=["2026-11"])
    previous_month: str = Field(examples=["2026-10"])
    timezone: str = Field(description="Of the budgets.")
    starts_at: Timestamp
    ends_at: Timestamp = Field(description="The first moment that is no longer part of the month.")
    by: CostsBy
    tag: str | None = Field(default=None, description="With `by=tag`: which.")
    total: CostLine
    lines: tuple[CostLine, ...] = Field(description="Those of the highest spend first.")
    others: CostLine | None = Field(default=None, description="The sum of the lines beyond `limit`.")
    cost_tags: tuple[str, ...] = Field(default=(), description="The tags that the config keeps now.")
