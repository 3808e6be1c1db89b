"""`/api/v1/budgets`: the state of budgets, whether their counters agree with the record, and raising their limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import get_args

from breakwater.identity.operations import REDIS_UNAVAILABLE, ApiRequest, operation
from breakwater.kernel.clickhouse.errors import QueryError
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.http.parsing import suggestion
from breakwater.kernel.http.problems import RequestError, unavailable, unknown
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.types import Message, is_identifier, usd_from_nano
from breakwater.kernel.validation import FieldError
from breakwater.limits.api.limits import BOUND, MEANWHILE, UNSURE, refusals_as_errors
from breakwater.limits.contract import (
    BudgetEvent,
    BudgetList,
    BudgetQuery,
    BudgetScope,
    BudgetStatus,
    EstimateAccuracy,
    RaiseCapRequest,
    Reconciliation,
    UnchangedBudget,
    Window,
)
from breakwater.limits.limit_editor import LimitEditor
from breakwater.limits.rules.budget import WINDOWS, Counter, LimitTable, Period, periods_at, threshold
from breakwater.limits.rules.ledger import AttemptSums, is_reached
from breakwater.limits.rules.scopes import BASE, Dimension, ScopePart, dimension_of, key_from_text, key_of, parts_of
from breakwater.limits.settings import OTHERS
from breakwater.limits.store.budget_counters import BudgetCounters, PeriodCounters, Snapshot
from breakwater.limits.store.budgets import NotFilledError

_SCOPES: tuple[BudgetScope, ...] = get_args(BudgetScope)


class BudgetRoutes:
    """The budgets of the fleet, for people.

    Args:
        limits: returns the current limits.
        counters: the counters in Redis.
        editor: of limits, which raises them.
        compare: compares the counters with the record. May raise StateUnavailableError, BusError,
            AnalyticsUnavailableError, QueryError, and NotFilledError if the counters are lost.
        now: the clock.
    """

    def __init__(
        self,
        limits: Callable[[], LimitTable],
        counters: BudgetCounters,
        editor: LimitEditor,
        compare: Callable[[], Awaitable[Reconciliation]],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._limits = limits
        self._counters = counters
        self._editor = editor
        self._compare = compare
        self._now = now

    @operation(
        "GET",
        "/api/v1/budgets",
        tag="budgets",
        summary="The state of every budget",
        description="Those of the current periods, for the plane, all agents and tenants in the config, and all "
        "others that called a model. With names, only those that such a call counts against.",
        result="The plane's, then those of agents, then tenants.",
        errors={404: "The agent is not known (`unknown_agent`).", 503: REDIS_UNAVAILABLE},
    )
    async def list_budgets(self, request: ApiRequest[BudgetQuery]) -> BudgetList:
        """Lists all budgets, or those that a call of the agent for the tenant counts against."""
        query = request.input
        agent = query.agent
        limits = self._limits()
        snapshot = await self._counters.read(current(limits, self._counters, self._now()))
        keys = known_keys(limits, snapshot)
        if agent is not None and f"agent:{agent}" not in keys:
            message = f"no agent {agent!r} is known{suggestion(agent, limits.agents)}"
            raise RequestError(404, "unknown_agent", message, [FieldError(path="agent", message=message)])
        named = {kind: name for kind in _NAMES if (name := getattr(query, kind)) is not None}
        if named:
            keys = _keys_of_call({"global": "", **named}, limits.dimensions)
        if query.scope is not None:
            keys = (key_from_text(query.scope),)
        budgets = statuses(limits, snapshot, keys)
        used_from = query.used_from
        matching = [budget for budget in budgets if used_from is None or _is_used(budget, used_from)]
        names = [budget.budget for budget in matching]
        begin = names.index(query.after) + 1 if query.after in names else 0
        page = matching[begin : begin + query.limit]
        return BudgetList(
            filled=snapshot.filled is not None,
            capped=sum(bool(budget.limit) for budget in budgets),
            budgets=tuple(page),
            continue_after=page[-1].budget if begin + len(page) < len(matching) else None,
        )

    @operation(
        "GET",
        "/api/v1/budgets/reconciliation",
        tag="budgets",
        summary="Compare the counters in Redis with the record",
        description="Reads the counters in Redis, and adds up all attempts in ClickHouse and the event log, as of the "
        "same moment. The budget service repairs differences by itself.",
        result="Both figures for every budget.",
        errors={
            503: "Redis, NATS or ClickHouse is unavailable (`unavailable`), or the counters are being rebuilt "
            "(`not_filled`)."
        },
    )
    async def reconcile_budgets(self, _: ApiRequest[Message]) -> Reconciliation:
        """Compares the counters in Redis with the record."""
        try:
            return await self._compare()
        except NotFilledError as error:
            raise _not_filled() from error
        except (UnavailableError, BusError, QueryError) as error:
            raise unavailable("unavailable", f"the budgets can't be compared now: {error}") from error

    @operation(
        "POST",
        "/api/v1/budgets/raise",
        tag="budgets",
        summary="Raise the limit of a budget until its period ends",
        description="As `POST /api/v1/limits/{limit_id}/raise`, by the budget's name. The amount of the limit itself "
        "ends an earlier raise. If the limit already has this amount, the response is an `UnchangedBudget`.",
        result="The raise, which is now in effect; or, if there was nothing to do, the budget with `unchanged`.",
        errors={
            403: BOUND,
            404: "There is no such budget (`unknown_budget`).",
            409: f"The budget has no limit (`no_limit`), or {MEANWHILE}.",
            422: "The body is invalid (`invalid_request`), or the amount is below the limit itself (`below_limit`).",
            503: f"{UNSURE} Or the counters are being rebuilt (`not_filled`).",
        },
    )
    async def raise_cap(self, request: ApiRequest[RaiseCapRequest]) -> BudgetEvent | UnchangedBudget:
        """Raises the limit of a budget."""
        now = self._now()
        stated = request.input
        snapshot = await self._counters.read(current(self._limits(), self._counters, now))
        counter = _counter(stated.budget, self._limits(), snapshot)
        if counter.cap is None:
            where = {
                "global": f"budgets.global.{counter.window}_usd",
                "agent": f"agents.{counter.scope_name}.budget.{counter.window}_usd",
                "tenant": f"budgets.tenants.{counter.scope_name}.{counter.window}_usd",
            }.get(counter.scope, "budgets.limits")
            message = f"the budget {counter.name} has no limit to raise"
            detail = FieldError(path="budget", message=f"the config sets one with {where}, `breakwater limits set` too")
            raise RequestError(409, "no_limit", message, [detail])
        amount = usd_from_nano(stated.limit_usd)
        with refusals_as_errors({"amount": "limit_usd"}):
            raised = await self._editor.raise_limit(
                counter.cap, counter.parts, amount, None, request.caller, request.why, now
            )
        request.log("cap_raised", budget=stated.budget, limit=amount, changed=raised is not None)
        if raised is None:
            [status] = statuses(self._limits(), snapshot, [counter.key], counter.window)
            return UnchangedBudget.model_validate(status.model_dump())
        assert raised.budget_event is not None
        return raised.budget_event


_NAMES = ("agent", "tenant", "key", "user", "team")


def _keys_of_call(names: Mapping[str, str], dimensions: Iterable[Dimension]) -> tuple[str, ...]:
    """Returns the keys of the scopes in which a call of these names counts, in the order of their kinds."""
    kinds = dict.fromkeys(dimension.kinds for dimension in (*BASE, *sorted(dimensions)))
    return tuple(
        key_of(ScopePart(kind, names[kind]) for kind in combination)
        for combination in kinds
        if names.keys() >= set(combination)
    )


def _is_used(budget: BudgetStatus, percent: int) -> bool:
    return bool(budget.limit) and (budget.spent + budget.reserved) * 100 >= (budget.limit or 0) * percent


def _counter(budget: str, limits: LimitTable, snapshot: Snapshot) -> Counter:
    """Returns the counter of a budget by its name. Raises RequestError: there is no such budget."""
    text, _, window = budget.rpartition("/")
    key = key_from_text(text)
    names = [part.name for part in parts_of(key)]
    has_cap = any(limits.counter(key, known_window).limit is not None for known_window in _windows(limits, key))
    has_own_cap = has_cap and OTHERS not in names and all(map(is_identifier, names))
    is_known = has_own_cap or key in known_keys(limits, snapshot)
    if is_known:
        for known_window in _windows(limits, key):
            if known_window == window:
                return limits.counter(key, known_window)
    if key == f"tenant:{OTHERS}":
        hint = "each tenant that the config does not list has its own limit: name a tenant"
    else:
        keys = (key,) if is_known else limits.keys()
        names = [limits.counter(known_key, window).name for known_key in keys for window in _windows(limits, known_key)]
        hint = suggestion(budget, names).removeprefix("; ")
    raise unknown("budget", f"there is no budget {budget!r}", "budget", hint)


def _not_filled() -> RequestError:
    message = "the counters are being rebuilt from the record; until then hard limits refuse calls. Retry in a moment"
    return unavailable("not_filled", message)


def _windows(limits: LimitTable, key: str) -> list[Window]:
    """Returns the windows in which a scope is counted."""
    counted = limits.dimensions.union(BASE)
    return [window for window in WINDOWS if dimension_of(key, window) in counted]


def current(limits: LimitTable, counters: BudgetCounters, now: datetime) -> tuple[Period, ...]:
    """Returns the current periods of the windows that are counted: the day, the month, and others that limits need."""
    windows = {dimension.window for dimension in limits.dimensions.union(BASE)}
    return tuple(period for period in periods_at(now, counters.zone).all if period.window in windows)


def known_keys(limits: LimitTable, snapshot: Snapshot) -> tuple[str, ...]:
    """Returns the scopes that the config names, that Redis has counters of, or whose budget is raised."""
    counted = {
        key for period_counters in snapshot.periods for key in (*period_counters.figures, *period_counters.reserved)
    }
    counted |= {
        key
        for key in limits.plane_limits.raised_keys
        if any(limits.counter(key, window).raised for window in _windows(limits, key))
    }
    # The sort is stable, so the scopes of the config come first, in its order.
    return tuple(sorted(limits.keys(counted), key=lambda key: _SCOPES.index(limits.counter(key, "monthly").scope)))


def statuses(
    limits: LimitTable, snapshot: Snapshot, keys: Iterable[str], only: Window | None = None
) -> tuple[BudgetStatus, ...]:
    """Returns the budgets of some scopes in the periods of a snapshot, or of one window."""
    return tuple(
        budget_status(limits.counter(key, period_counters.period.window), period_counters)
        for key in keys
        for period_counters in snapshot.periods
        if period_counters.period.window in ((only,) if only else _windows(limits, key))
    )


def budget_status(counter: Counter, period_counters: PeriodCounters) -> BudgetStatus:
    """Returns a budget as the contract has it."""
    figures = period_counters.figures.get(counter.key, AttemptSums())
    reserved = period_counters.reserved.get(counter.key, 0)
    limit = counter.effective
    enforcement = counter.enforcement
    reached = False
    if limit is not None:
        refused = enforcement == "hard" and threshold(counter.key, limit, 100) in period_counters.announced
        reached = is_reached(limit, figures, reserved, refused=refused)
    estimate = EstimateAccuracy(
        calls=figures.gauged,
        reserved=figures.foreseen,
        cost=figures.measured,
        percent=round(100 * figures.measured / figures.foreseen, 1) if figures.foreseen else None,
        exceeded=figures.exceeded,
    )
    return BudgetStatus(
        budget=counter.name,
        scope=counter.scope,
        agent=counter.agent,
        tenant=counter.tenant,
        name=counter.other_name,
        within=counter.within,
        window=counter.window,
        period=period_counters.period.name,
        enforcement=enforcement,
        limit=limit,
        raised=counter.raised,
        spent=figures.spent,
        reserved=reserved,
        remaining=None if limit is None else max(0, limit - figures.spent - reserved),
        reached=reached,
        calls=figures.calls,
        calls_of_unknown_cost=figures.unpriced,
        resets_at=period_counters.period.resets_at,
        estimate=estimate if figures.gauged else None,
    )
