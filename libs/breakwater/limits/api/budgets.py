"""`/api/v1/budgets`: the state of budgets, whether their counters agree with the record, and raising a cap."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import get_args

from breakwater.identity.operations import REDIS_UNAVAILABLE, ApiRequest, operation
from breakwater.identity.rules.callers import Caller
from breakwater.kernel.clickhouse.errors import QueryError
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.formats import exact_money
from breakwater.kernel.http.parsing import suggestion
from breakwater.kernel.http.problems import RequestError, unavailable, unknown
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.types import Message, is_identifier, ms_from_time, time_from_ms, usd_from_nano
from breakwater.kernel.validation import FieldError
from breakwater.limits.contract import (
    BudgetEvent,
    BudgetList,
    BudgetQuery,
    BudgetScope,
    BudgetStatus,
    CapRaise,
    EstimateAccuracy,
    RaiseCapRequest,
    Reconciliation,
    UnchangedBudget,
    Window,
)
from breakwater.limits.rules.budget import WINDOWS, Counter, LimitTable, Period, budget_event, periods_at, threshold
from breakwater.limits.rules.ledger import AttemptSums, is_reached
from breakwater.limits.rules.limit import amount_of
from breakwater.limits.rules.limit_changes import LimitRefusedError, check_binding
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
        publisher: publishes raised caps.
        compare: compares the counters with the record. May raise StateUnavailableError, BusError,
            AnalyticsUnavailableError, QueryError, and NotFilledError if the counters are lost.
        now: the clock.
    """

    def __init__(
        self,
        limits: Callable[[], LimitTable],
        counters: BudgetCounters,
        publisher: Publisher,
        compare: Callable[[], Awaitable[Reconciliation]],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._limits = limits
        self._counters = counters
        self._publisher = publisher
        self._compare = compare
        self._now = now
        # If two people raise a cap at the same time, the raise that is recorded last must be the one in effect.
        self._raise_lock = asyncio.Lock()

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
        summary="Raise a cap until its period ends",
        description="Setting exactly the config's cap revokes an earlier raise. If the cap already has this "
        "value, the response is an `UnchangedBudget`.",
        result="The raise, which is now in effect; or, if there was nothing to do, the budget with `unchanged`.",
        errors={
            403: "The caller lacks the scope, or is bound to a team or a user that this is no part of (`forbidden`).",
            404: "There is no such budget (`unknown_budget`).",
            409: "The budget has no cap (`no_cap`), or its limit is raised over `/api/v1/limits` (`limit_raised`).",
            422: "The body is invalid (`invalid_request`), or the cap is below the config's (`below_cap`).",
            503: "Redis or NATS is unavailable (`unavailable`), or the counters are being rebuilt (`not_filled`). Ask "
            "again: repeating the request is safe.",
        },
    )
    async def raise_cap(self, request: ApiRequest[RaiseCapRequest]) -> BudgetEvent | UnchangedBudget:
        """Raises a cap and publishes the raise."""
        try:
            async with self._raise_lock:
                result = await self._raise(request)
        except NotFilledError as error:
            raise _not_filled() from error
        limit = usd_from_nano(request.input.limit_usd)
        changed = isinstance(result, BudgetEvent)
        request.log("cap_raised", budget=request.input.budget, limit=limit, changed=changed)
        return result

    async def _raise(self, request: ApiRequest[RaiseCapRequest]) -> BudgetEvent | UnchangedBudget:
        """Publishes a raise before recording it: a raise that only Redis knew would be lost when Redis is refilled."""
        now = self._now()
        limits = self._limits()
        limit = request.input.limit_usd
        snapshot = await self._counters.read(current(limits, self._counters, now))
        counter = _counter(request.input.budget, limits, snapshot)
        _check_binding(request.caller, counter)
        configured = counter.limit
        if configured is None:
            where = {
                "global": f"budgets.global.{counter.window}_usd",
                "agent": f"agents.{counter.scope_name}.budget.{counter.window}_usd",
                "tenant": f"budgets.tenants.{counter.scope_name}.{counter.window}_usd",
            }.get(counter.scope, "budgets.limits")
            message = f"the budget {counter.name} has no cap to raise"
            detail = FieldError(path="budget", message=f"the config sets one with {where}")
            raise RequestError(409, "no_cap", message, [detail])
        if limit < configured:
            detail = FieldError(path="limit_usd", message="use a higher one, or exactly the config's to revoke a raise")
            message = f"a cap can't be lower than the config's ({exact_money(configured)})"
            raise RequestError(422, "below_cap", message, [detail])
        if (limit_raise := counter.raised) is not None and counter.cap is not None:
            message = (
                f"the limit {counter.cap.id!r} is raised until {limit_raise.until:%Y-%m-%d %H:%M} UTC; change that by "
                "`breakwater limits raise`"
            )
            raise RequestError(409, "limit_raised", message)
        if snapshot.filled is None:
            raise NotFilledError
        period_counters = next(counters for counters in snapshot.periods if counters.period.window == counter.window)
        before = budget_status(counter, period_counters)
        if limit == before.limit:
            return UnchangedBudget.model_validate(before.model_dump())
        ends = limit == configured
        at = time_from_ms(ms_from_time(now))
        event = budget_event(
            counter,
            period_counters.period,
            f"raised/{ms_from_time(now)}/{request.caller.id}",
            kind="raise_ended" if ends else "raised",
            limit=limit,
            total=before.spent,
            previous=before.limit,
            configured=configured,
            by=request.by,
            reason=request.why,
            at=at,
        )
        subject = subjects.budget(counter.scope, counter.window)
        await self._publisher.event(subject, event, id=event.event_id, at=event.at)
        raised = CapRaise(limit=limit, configured=configured, by=request.by, reason=request.why, at=at)
        await self._counters.note_raise(period_counters.period, counter.key, None if ends else raised)
        filled = snapshot.filled
        refilled = await self._counters.source()
        # Repairs of the counters leave raised caps alone; only a refill may have lost this one.
        if refilled is None or (filled.log, filled.zone, filled.upto) != (refilled.log, refilled.zone, refilled.upto):
            # Redis was refilled meanwhile, perhaps from the record before the raise.
            raise NotFilledError
        return event


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
        hint = "each tenant that the config does not list has its own cap: name a tenant"
    else:
        keys = (key,) if is_known else limits.keys()
        known = [limits.counter(known_key, window).name for known_key in keys for window in _windows(limits, known_key)]
        hint = suggestion(budget, known).removeprefix("; ")
    raise unknown("budget", f"there is no budget {budget!r}", "budget", hint)


def _check_binding(caller: Caller, counter: Counter) -> None:
    """Raises RequestError: 403, the caller is bound to a user, a team or tags, and the cap is not on a part of that."""
    try:
        check_binding(caller, counter.parts)
        if counter.cap is not None:
            check_binding(caller, counter.cap.parts)
    except LimitRefusedError as refused:
        raise RequestError(refused.status, refused.code, str(refused)) from None


def _not_filled() -> RequestError:
    message = "the counters are being rebuilt from the record; until then hard caps refuse calls. Retry in a moment"
    return unavailable("not_filled", message)


def _windows(limits: LimitTable, key: str) -> list[Window]:
    """Returns the windows in which a scope is counted."""
    counted = limits.dimensions.union(BASE)
    return [window for window in WINDOWS if dimension_of(key, window) in counted]


def current(limits: LimitTable, counters: BudgetCounters, now: datetime) -> tuple[Period, ...]:
    """Returns the current periods of the windows that are counted: the day, the month, and others that caps need."""
    windows = {dimension.window for dimension in limits.dimensions.union(BASE)}
    return tuple(period for period in periods_at(now, counters.zone).all if period.window in windows)


def known_keys(limits: LimitTable, snapshot: Snapshot) -> tuple[str, ...]:
    """Returns the scopes that the config names or that Redis has counters of: global, agents, tenants."""
    counted = {
        key
        for period_counters in snapshot.periods
        for key in (*period_counters.figures, *period_counters.reserved, *period_counters.notes.raises)
    }
    # The sort is stable, so the scopes of the config come first, in its order.
    return tuple(sorted(limits.keys(counted), key=lambda key: _SCOPES.index(limits.counter(key, "monthly").scope)))


def statuses(limits: LimitTable, snapshot: Snapshot, keys: Iterable[str]) -> tuple[BudgetStatus, ...]:
    """Returns the budgets of some scopes in the periods of a snapshot."""
    return tuple(
        budget_status(limits.counter(key, period_counters.period.window), period_counters)
        for key in keys
        for period_counters in snapshot.periods
        if period_counters.period.window in _windows(limits, key)
    )


def budget_status(counter: Counter, period_counters: PeriodCounters) -> BudgetStatus:
    """Returns a budget as the contract has it."""
    figures = period_counters.figures.get(counter.key, AttemptSums())
    reserved = period_counters.reserved.get(counter.key, 0)
    notes = period_counters.notes
    limit = period_counters.limit(counter)
    enforcement = counter.enforcement
    reached = False
    if limit is not None:
        refused = enforcement == "hard" and threshold(counter.key, limit, 100) in notes.announced
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
        # After the config has changed the cap, a raise of the earlier cap no longer counts.
        raised=None if limit == counter.limit else _raise_of(counter) or notes.raises.get(counter.key),
        spent=figures.spent,
        reserved=reserved,
        remaining=None if limit is None else max(0, limit - figures.spent - reserved),
        reached=reached,
        calls=figures.calls,
        calls_of_unknown_cost=figures.unpriced,
        resets_at=time_from_ms(period_counters.period.end_ms),
        estimate=estimate if figures.gauged else None,
    )


def _raise_of(counter: Counter) -> CapRaise | None:
    limit_raise = counter.raised
    if limit_raise is None:
        return None
    return CapRaise(
        limit=amount_of("usd", limit_raise.amount),
        configured=amount_of("usd", limit_raise.configured),
        by=limit_raise.by,
        reason=limit_raise.reason,
        at=limit_raise.at,
    )
