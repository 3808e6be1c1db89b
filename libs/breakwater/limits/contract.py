"""Limits and budgets on the bus, in the HTTP API and in the config."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema, model_validator

from breakwater.identity.contract import CreateKeyRequest, ListedKey, NewKey
from breakwater.kernel.http.contract import Moment, OperatorRequest, ReasonText
from breakwater.kernel.nats.contract import StateRecord, kept_s
from breakwater.kernel.types import (
    NO_CONTROLS,
    Count,
    Event,
    Identifier,
    Message,
    Money,
    Timestamp,
    UsdAmount,
    of_any_version,
)

LimitUnit = Literal["usd", "tokens", "requests", "concurrent"]

SettableWindow = Literal["minute", "hour", "day", "week", "month", "quarter", "total"]

LimitWindow = Literal[SettableWindow, "rolling day"]
"""The windows of minutes and hours slide, and so does a `rolling day`; the longer ones are those of a calendar."""

LimitAction = Literal["count", "alert", "refuse", "wait", "cheaper_model"]
"""The effect on a call beyond the amount: none, people are told, the job ends, it waits, or its next model is tried."""

LimitScope = Annotated[str, StringConstraints(min_length=1, max_length=400, pattern=NO_CONTROLS)]


class LimitTerms(Message):
    """A limit without its scope, such as one that is set on a new API key."""

    usd: UsdAmount | None = Field(
        default=None, description="Spend allowed in each period. Set this or one of the next three."
    )
    tokens: int | None = Field(
        default=None, ge=1, le=10_000_000_000, description="Input and output tokens allowed in each period."
    )
    requests: int | None = Field(default=None, ge=1, le=10_000_000, description="Calls allowed in each period.")
    concurrent: int | None = Field(
        default=None, ge=1, le=100_000, description="Calls in flight at the same time; without `per`."
    )
    per: SettableWindow | None = None
    action: LimitAction = Field(
        default="refuse",
        description="Beyond it: nothing; alert at the thresholds; also refuse calls that could exceed it, and end the "
        "job, let it wait, or try the next model of its chain.",
    )
    thresholds: tuple[Annotated[int, Field(ge=1, le=100)], ...] = Field(
        default=(50, 80, 100),
        description="Percentages that raise an alert. A limit that refuses raises one at 100, too, and one that only "
        "counts raises none.",
    )
    until: Moment | None = Field(default=None, description="When the limit ends; null for never.")

    @model_validator(mode="after")
    def _one_amount_in_a_window(self) -> Self:
        amounts = (self.usd, self.tokens, self.requests, self.concurrent)
        if sum(amount is not None for amount in amounts) != 1:
            raise ValueError("set exactly one of usd, tokens, requests and concurrent")
        if self.concurrent is None and self.per is None:
            raise ValueError("per: is missing; it is minute, hour, day, week, month, quarter or total")
        if self.concurrent is not None and self.per is not None:
            raise ValueError("per: calls in flight at the same time are limited at each moment; leave it out")
        return self

    @property
    def unit(self) -> LimitUnit:
        """The unit in which it counts."""
        if self.usd is not None:
            return "usd"
        if self.tokens is not None:
            return "tokens"
        return "requests" if self.requests is not None else "concurrent"

    @property
    def amount(self) -> int:
        """The amount that it allows: nano-dollars, tokens, requests, or calls at the same time."""
        amounts = (self.usd, self.tokens, self.requests, self.concurrent)
        return next(amount for amount in amounts if amount is not None)

    @property
    def refuses(self) -> bool:
        """Returns True if it refuses calls, at least those that can't wait."""
        return self.action in ("refuse", "cheaper_model", "wait")

    @property
    def alerts_at(self) -> tuple[int, ...]:
        """The percentages that raise an alert, in order."""
        if self.action == "count":
            return ()
        return tuple(sorted({*self.thresholds, *((100,) if self.refuses else ())}))


class LimitSettings(LimitTerms):
    """A limit of any scope, such as an API key, a user or a team. The config and the API write it in the same way."""

    scope: LimitScope = Field(
        description="`plane`, or `agent`, `model`, `deployment`, `provider`, `tenant`, `key`, `user` or `team` "
        "with a name or `*` for each, such as `key:acme-bot`; `tag:<name>=<value>` for one of `cost_tags`; or two of "
        "them: "
        "`user:* within team:research`.",
        examples=["key:acme-bot", "user:*", "tag:project=web", "user:* within team:research"],
    )


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_AMOUNT = r"^\d{1,16}(\.\d{1,9})?$"

LimitAmount = Annotated[str, Field(pattern=_AMOUNT, examples=["20.000000000", "400000"])]
"""An amount in the unit of its limit: USD, tokens, requests, or calls at the same time."""

StatedAmount = Annotated[
    str,
    BeforeValidator(_as_text),
    StringConstraints(pattern=_AMOUNT),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": _AMOUNT}]}),
]
"""The same as people write it: `40`, `"40"` or `"40.00"`."""


class SetLimitRequest(LimitSettings, OperatorRequest):
    """A limit, and the reason for it."""

    stop: bool = Field(
        default=False,
        description="True to accept an amount that is spent already: the next call is refused. False for an error.",
    )


class DeleteLimitRequest(OperatorRequest):
    """The end of a limit, now."""


class RaiseLimitRequest(OperatorRequest):
    """A larger amount of a limit for some time, and the reason."""

    amount: StatedAmount = Field(
        description="In the limit's unit. The amount of the limit itself ends an earlier raise.", examples=["40.00"]
    )
    until: Moment | None = Field(default=None, description="When the raise ends; by default, with the present period.")
    scope: LimitScope | None = Field(
        default=None, description="Of a limit on each name by itself (`*`): whose it is, such as `key:acme-bot`."
    )
    reason: Annotated[ReasonText, Field(min_length=1)] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  # is frozen
        description="Reason, required because it is about money; stored redacted."
    )


LIMITS_PER_PAGE = 1_000

ScopeKind = Literal[
    "plane", "agent", "model", "deployment", "provider", "tenant", "key", "user", "team", "tag", "task", "job"
]


class LimitQuery(Message):
    """A page of limits."""

    scope: LimitScope | None = Field(
        default=None, description="Those of this scope, or of this part of one: `team:research`, `user:*`."
    )
    kind: ScopeKind | None = Field(default=None, description="Those on scopes of this kind, or within one.")
    after: Identifier | None = Field(default=None, description="Continue after the limit with this id.")
    limit: Annotated[int, Field(ge=1, le=LIMITS_PER_PAGE, description="The most to list.")] = 100


class LimitUseQuery(Message):
    """Selects whose use of a limit is shown."""

    scope: LimitScope | None = Field(
        default=None, description="Of a limit on each name by itself (`*`): whose, such as `key:acme-bot`."
    )


class LimitRaise(Event):
    """A larger amount of a limit for some time. It ends earlier if the amount of the limit is changed."""

    amount: LimitAmount
    configured: LimitAmount = Field(description="Amount of the limit at that time.")
    until: Timestamp
    scope: str | None = Field(
        default=None,
        description="Whose it is: the limit's scope or, of one on each name by itself (`*`), that of a name.",
    )
    by: str
    reason: str
    at: Timestamp


class WaitingCall(Event):
    """A call that waits for a rate."""

    key: str | None = Field(description="Name of the API key that submitted its job.")
    tenant: str | None
    since: Timestamp = Field(description="When it began to wait.")


class ListedLimit(Event):
    """A limit, and what of it is used now."""

    id: str = Field(description="Of a limit in the config, its setting: `agents.writer.budget.daily_usd`.")
    source: Literal["config", "api"] = Field(description="A limit of the config can only be raised here.")
    scope: str
    unit: LimitUnit
    amount: LimitAmount = Field(description="The amount in effect, as it was raised.")
    usd: Money | None = Field(default=None, description="The limit itself, in its unit; as for the next three.")
    tokens: Count | None = None
    requests: Count | None = None
    concurrent: Count | None = None
    per: LimitWindow | None = Field(default=None, description="Null for calls at the same time.")
    action: LimitAction
    thresholds: tuple[int, ...] = Field(default=(), description="Percentages that raise an alert.")
    until: Timestamp | None = Field(default=None, description="When it ends; null for never.")
    used: LimitAmount | None = Field(
        default=None,
        description="In the present period. Null if it is not known here, or if the limit is on each name by itself "
        "(`*`): ask for one limit with `scope`.",
    )
    reserved: LimitAmount | None = Field(
        default=None,
        description="Reserved by calls in flight; null as `used` is, and of a limit on a rate, which has it in `used`.",
    )
    remaining: LimitAmount | None = Field(default=None, description="Left for further calls; null as `used` is.")
    waiting: Count | None = Field(
        default=None, description="Number of calls that wait for it; null for a limit that is no rate."
    )
    waiting_calls: tuple[WaitingCall, ...] = Field(
        default=(), description="The first of them, in their order. Only of a limit that is shown alone."
    )
    resets_at: Timestamp | None = Field(default=None, description="End of the present period of a calendar.")
    refused: Count | None = Field(default=None, description="Of a tried limit: calls that it would have refused.")
    raised: LimitRaise | None = Field(default=None, description="The raise that is in effect.")
    shadowed_by: str | None = Field(
        default=None,
        description="The setting of a limit in the config on the same scope, unit and window, which counts instead.",
    )
    by: str | None = Field(default=None, description="Who changed it last; null in the config, as below.")
    reason: str | None = Field(default=None, description="Why, redacted.")
    at: Timestamp | None = Field(default=None, description="When.")


class LimitList(Event):
    """Limits: those of the config in its order, then the others by their ids."""

    limits: tuple[ListedLimit, ...]
    tried: tuple[ListedLimit, ...] = Field(default=(), description="Those that are only tried; on the first page.")
    continue_after: str | None = Field(default=None, description="Pass this as `after` to continue. Null at the end.")


LimitChange = Literal["created", "changed", "deleted", "raised", "raise_ended"]


_StoredLimit = Annotated[LimitSettings, of_any_version(LimitSettings, binding=True)]
_PastLimit = Annotated[LimitSettings, of_any_version(LimitSettings, binding=False)]


class LimitRecord(StateRecord):
    """The state of a limit since its last change, as LIMITS has it, with who made the change and why."""

    id: str
    change_id: str = Field(description="Unique for the change.")
    limit: _StoredLimit | None = Field(description="Null: it was deleted, or it is in the config.")
    before: _PastLimit | None = Field(default=None, description="The limit before the change.")
    raises: tuple[LimitRaise, ...] = ()
    raised: LimitRaise | None = Field(default=None, description="The raise that the change made or ended.")
    raised_from: LimitAmount | None = Field(default=None, description="The amount in effect before that.")
    change: LimitChange

    @property
    def state_id(self) -> str:
        """Its id."""
        return self.id

    @property
    def kept_s(self) -> int | None:
        """The seconds for which LIMITS keeps the record; None for as long as there is no later one."""
        ends = [limit_raise.until for limit_raise in self.raises]
        if self.limit is not None:
            return None if self.limit.until is None else kept_s(self.at, max((self.limit.until, *ends)))
        return kept_s(self.at, max((self.at, *ends)))


class LimitEvent(Event):
    """A person made, changed, deleted or raised a limit, or ended a raise."""

    event_id: str = Field(description="Unique for the change.")
    kind: LimitChange
    limit_id: str
    scope: str = Field(description="Of the limit; of a raise, whose.")
    before: _PastLimit | None = Field(default=None, description="The limit before; null if there was none.")
    after: _PastLimit | None = Field(default=None, description="The limit since; null if it was deleted.")
    raised: LimitRaise | None = Field(default=None, description="The raise that was made or ended.")
    by: str
    reason: str | None
    at: Timestamp


MAX_LIMITS_OF_NEW_KEY = 20


class LimitedKeyRequest(CreateKeyRequest):
    """A new API key with its limits. Its maker can give it only rights that he has himself."""

    limits: tuple[LimitTerms, ...] = Field(
        default=(), max_length=MAX_LIMITS_OF_NEW_KEY, description="Limits on the key, which is made with all or none."
    )


class LimitOfKey(Event):
    """A limit on an API key alone."""

    id: str = Field(description="The limit's, which `GET /api/v1/limits/{limit_id}` shows with its use.")
    unit: LimitUnit
    amount: LimitAmount
    per: LimitWindow | None = Field(description="Null for calls at the same time.")
    action: LimitAction


class _WithLimits(Event):
    limits: tuple[LimitOfKey, ...] = Field(
        default=(), description="Limits on the key alone. Those on each key, or on its user or team, apply as well."
    )


class LimitedKey(ListedKey, _WithLimits):
    """An API key with its limits, without its secret."""


class NewLimitedKey(NewKey, _WithLimits):
    """A key with a new secret, and its limits."""


class LimitedKeyList(Event):
    """API keys, the oldest first: those of the file, then the plane's own."""

    keys: tuple[LimitedKey, ...]
    continue_after: str | None = Field(default=None, description="Pass this as `after` to continue. Null at the end.")


BUDGETS_PER_PAGE = 1_000


class BudgetQuery(Message):
    """A page of budgets; with names, of those that such a call counts against, as far as the names tell."""

    agent: Identifier | None = Field(default=None, description="Agent of the call.")
    tenant: Identifier | None = Field(default=None, description="Tenant of the call.")
    key: Identifier | None = Field(default=None, description="Name of the API key of the call.")
    user: Identifier | None = Field(default=None, description="User of the call.")
    team: Identifier | None = Field(default=None, description="Team of the call.")
    scope: LimitScope | None = Field(default=None, description="Filter by scope: `plane`, `key:acme-bot`.")
    used_from: Annotated[int, Field(ge=1, le=100)] | None = Field(
        default=None, description="Filter by use: at least this percentage of the limit is spent or reserved."
    )
    after: Annotated[str, StringConstraints(max_length=500)] | None = Field(
        default=None, description="Continue after the budget with this name."
    )
    limit: Annotated[int, Field(ge=1, le=BUDGETS_PER_PAGE, description="The most to list.")] = BUDGETS_PER_PAGE


class RaiseCapRequest(OperatorRequest):
    """A limit to raise, its new value, and the reason."""

    budget: Annotated[str, StringConstraints(min_length=1, max_length=160, pattern=NO_CONTROLS)] = Field(
        description="Budget name: `global/daily`, `agent:<name>/monthly`, `user:<name> within team:<name>/weekly`.",
        examples=["global/daily"],
    )
    limit_usd: UsdAmount = Field(
        description="The new limit. Setting the config's own limit revokes an earlier raise.", examples=["50.00"]
    )
    reason: Annotated[ReasonText, Field(min_length=1)] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  # is frozen
        description="Reason, required because it is about money; stored redacted."
    )


class EstimateAccuracy(Event):
    """The worst case reserved for calls against their actual cost, over calls that succeeded."""

    calls: Count
    reserved: Money = Field(description="Reserved for these calls.")
    cost: Money = Field(description="Actual cost of these calls.")
    percent: float | None = Field(
        description="`cost` as a percentage of `reserved`: 25 means that four times the cost is reserved."
    )
    exceeded: Count = Field(
        description="Calls that cost more than was reserved. A hard limit relies on there being none."
    )


class BudgetStatus(Event):
    """The present state of a budget."""

    budget: str = Field(
        description="Budget name: `global/daily`, `agent:<name>/monthly`, `user:<name> within team:<name>/weekly`."
    )
    scope: BudgetScope
    agent: Identifier | None = None
    tenant: Identifier | None = None
    name: str | None = Field(default=None, description="Name of any other scope, such as the key's.")
    within: str | None = Field(default=None, description="The scope within which it counts, such as `team:research`.")
    window: Window
    period: str = Field(
        description="`2026-11-21`, `2026-W47`, `2026-11`, `2026-Q4` or `total`, in the budget's time zone."
    )
    enforcement: Enforcement
    limit: Money | None = Field(default=None, description="The limit in effect; null if there is none.")
    raised: LimitRaise | None = Field(default=None, description="The raise that is in effect.")
    spent: Money
    reserved: Money = Field(description="Reserved by calls in flight.")
    remaining: Money | None = Field(default=None, description="Left for further calls; null without a limit.")
    reached: bool = Field(
        default=False,
        description="True if spend and reservations reach the limit, or if a hard limit has refused a call "
        "and less is left than a call reserves on average.",
    )
    calls: Count
    calls_of_unknown_cost: Count
    resets_at: Timestamp | None = Field(default=None, description="Null for a total, which never resets.")
    estimate: EstimateAccuracy | None = Field(default=None, description="Null before the first call.")


class BudgetList(Event):
    """The budgets of the current periods."""

    filled: bool = Field(
        description="True if the counters are complete. While they are rebuilt from the record, the "
        "figures are meaningless, and hard limits refuse all calls."
    )
    capped: Count = Field(default=0, description="Number of those with a limit above zero, whatever their use.")
    budgets: tuple[BudgetStatus, ...]
    continue_after: str | None = Field(default=None, description="Pass this as `after` to continue. Null at the end.")


class UnchangedBudget(BudgetStatus):
    """The present budget: it already has this limit, so nothing was published."""

    unchanged: Literal[True] = True


GuardRule = Literal[
    "max_iterations", "max_tokens", "max_cost", "consecutive_failures", "same_error", "confidence_drift"
]


BudgetScope = Literal["global", "agent", "tenant", "model", "provider", "deployment", "key", "user", "team", "tag"]


Window = Literal["daily", "weekly", "monthly", "quarterly", "total"]


Enforcement = Literal["none", "soft", "hard"]


class GuardEvent(Event):
    """A task used 80 % of a limit (`soft_cap`), its guard stopped it (`tripped`), or an operator reset it (`reset`)."""

    event_id: str = Field(description="Unique for the trip or the reset.")
    kind: Literal["soft_cap", "tripped", "reset"]
    agent: Identifier = Field(description="Agent of the job that tripped the guard; `*` in a reset.")
    tenant: Identifier | None = None
    task_id: Identifier = Field(description="Task, as its caller named it.")
    task_key: Identifier = Field(description="The same task as the plane knows it.")
    execution_id: Identifier | None = Field(default=None, description="Job that tripped the guard.")
    rule: GuardRule | None = None
    reason: str = Field(description="Reason in words, with the limit; for operators only.")
    by: str | None = Field(default=None, description="Who reset it.")
    iterations: Count
    tokens: Count
    cost: Money
    consecutive_failures: Count
    total_failures: Count
    unique_errors: Count
    at: Timestamp


class BudgetEvent(Event):
    """A budget reached a threshold, a person raised its limit or revoked the raise, or its counter was repaired.

    Published once for each threshold, scope and period. That of a hard limit at 100 % is a `hard_cap`; all others are
    `soft_cap`, because they refuse nothing.
    """

    event_id: str = Field(description="Unique for the crossing, raise or repair.")
    kind: Literal["soft_cap", "hard_cap", "raised", "raise_ended", "repaired"]
    scope: BudgetScope
    agent: Identifier | None = Field(
        default=None,
        description="Agent of the budget for scope `agent`, otherwise of the call that reached the threshold.",
    )
    tenant: Identifier | None = Field(default=None, description="Tenant of the budget for scope `tenant`.")
    name: str | None = Field(
        default=None, description="Name of any other scope: the model, provider, key, user or team, or `project=web`."
    )
    within: str | None = Field(default=None, description="The scope within which it counts, such as `team:research`.")
    window: Window
    period: str = Field(
        description="`2026-11-21`, `2026-W47`, `2026-11`, `2026-Q4` or `total`, in the budget's time zone."
    )
    threshold_percent: Count | None = Field(default=None, description="For `soft_cap` and `hard_cap`.")
    limit: Money | None = Field(default=None, description="The limit; null only if a budget without one is repaired.")
    total: Money = Field(description="Spent in the period until `at`.")
    reserved: Money | None = Field(
        default=None, description="Reserved by calls in flight at that time. For `soft_cap` and `hard_cap`."
    )
    refusal: str | None = Field(
        default=None, description="Of a limit that refused a call: why, with the figures, and what to do."
    )
    previous: Money | None = Field(
        default=None, description="The limit before the raise, or `total` before the repair."
    )
    configured: Money | None = Field(
        default=None, description="For a raise, the config's limit. If the config's limit changes, the raise ends."
    )
    enforcement: Enforcement
    by: str | None = Field(default=None, description="Who raised the limit, or revoked a raise.")
    reason: str | None = Field(default=None, description="Reason for the raise, or what was repaired.")
    resets_at: Timestamp | None = Field(default=None, description="End of the period, and of a raise.")
    shadow: bool = Field(default=False, description="True if the limit is only tried, and refuses nothing.")
    refused: Count | None = Field(
        default=None, description="Calls that it would have refused in the period until `at`."
    )
    at: Timestamp


class BudgetReconciliation(Event):
    """One budget in one period: its counter in Redis, and the record of attempts."""

    budget: str
    period: str
    counted: Money = Field(description="Counter in Redis.")
    recorded: Money = Field(description="Recorded: the sum of `stored` and `logged`.")
    stored: Money = Field(description="Part that was read from ClickHouse.")
    logged: Money = Field(description="Part that was read from EVENTS.")
    unrecorded: Money = Field(description="Estimated cost of calls whose worker died and that are not recorded yet.")
    difference: Money = Field(
        description="`counted` minus `unrecorded` and `recorded`: the amount that a repair subtracts."
    )
    counted_calls: Count
    recorded_calls: Count


class Reconciliation(Event):
    """The budgets' counters and the record of attempts, as of one moment."""

    equal: bool
    budgets: tuple[BudgetReconciliation, ...]
    reserved: Money = Field(description="Reserved by calls in flight, according to the counters of all agents.")
    held: Money = Field(description="The same according to the calls' leases.")
    at: Timestamp


class GuardRequest(OperatorRequest):
    """A task, and the reason for the action."""

    task_id: Identifier = Field(description="Its `task_key`, or its `task_id` if no other stopped task has that.")
    tenant: Identifier | None = Field(
        default=None, description="Tenant of the task; omit it for a task without a tenant."
    )


class StoppedTask(Event):
    """A task that its guard stopped."""

    task_id: Identifier = Field(description="Task, as its caller named it.")
    task_key: Identifier = Field(description="The same task as the plane knows it.")
    tenant: Identifier | None = None
    agent: Identifier
    execution_id: Identifier | None = None
    rule: GuardRule
    reason: str
    since: Timestamp


class StoppedTasks(Event):
    """The last 1,000 tasks that their guard has stopped, in the order in which they were stopped."""

    stopped: tuple[StoppedTask, ...]
