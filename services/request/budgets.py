"""`/api/v1/budgets`: the state of budgets, whether their counters agree with the record, and raising a cap."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import get_args

from breakwater.analytics.errors import QueryFailed
from breakwater.bus.errors import BusError
from breakwater.bus.publisher import Publisher
from breakwater.contracts import subjects
from breakwater.contracts.budgets import (
    BudgetList,
    BudgetQuery,
    BudgetStatus,
    EstimateAccuracy,
    RaiseCapRequest,
    UnchangedBudget,
)
from breakwater.contracts.events import BudgetEvent, CapRaise, Reconciliation, Scope
from breakwater.contracts.types import Message, is_identifier, ms_from_time, time_from_ms, usd_from_nano
from breakwater.contracts.validation import FieldError
from breakwater.errors import Unavailable
from breakwater.policy.budget import OTHERS, WINDOWS, CapTable, Counter, Period, periods_at, threshold
from breakwater.policy.formats import money_text
from breakwater.policy.ledger import AttemptSums, is_reached
from breakwater.state.budget_counters import BudgetCounters, Filled, Notes, PeriodCounters, Snapshot
from breakwater.state.budgets import NotFilled
from services.request.parsing import suggestion
from services.request.problems import Problem, unavailable
from services.request.routing import ApiRequest

_SCOPES: tuple[Scope, ...] = get_args(Scope)


class BudgetRoutes:
    """The budgets of the fleet, for people.

    Args:
        caps: the config's, as they are now.
        counters: the counters in Redis.
        publisher: for raised caps.
        compare: sets the counters beside the record. May raise StateUnavailable, BusError, AnalyticsUnavailable,
            QueryFailed, and NotFilled where the counters are lost.
        now: the clock.
    """

    def __init__(
        self,
        caps: Callable[[], CapTable],
        counters: BudgetCounters,
        publisher: Publisher,
        compare: Callable[[], Awaitable[Reconciliation]],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._caps = caps
        self._counters = counters
        self._publisher = publisher
        self._compare = compare
        self._now = now
        # Of two who raise a cap at once, the last on record is to be the one whose cap holds.
        self._one_by_one = asyncio.Lock()

    async def show(self, asked: ApiRequest[BudgetQuery]) -> BudgetList:
        """All of them, or those that a call of the agent, for the tenant, is held against."""
        agent, tenant = asked.form.agent, asked.form.tenant
        caps = self._caps()
        snapshot = await self._counters.snapshot(current(self._counters, self._now()))
        keys = known_keys(caps, snapshot)
        if agent is not None and f"agent:{agent}" not in keys:
            message = f"no agent {agent!r} is known{suggestion(agent, caps.agents)}"
            raise Problem(404, "unknown_agent", message, [FieldError(path="agent", message=message)])
        if agent is not None or tenant is not None:
            named = {"agent": agent, "tenant": tenant}.items()
            keys = ("global", *(f"{scope}:{name}" for scope, name in named if name is not None))
        return BudgetList(filled=snapshot.filled is not None, budgets=statuses(caps, snapshot, keys))

    async def reconciliation(self, _: ApiRequest[Message]) -> Reconciliation:
        """The counters in Redis and the record, whether they agree or not."""
        try:
            return await self._compare()
        except NotFilled as error:
            raise _not_filled() from error
        except (Unavailable, BusError, QueryFailed) as error:
            raise unavailable("unavailable", f"the budgets can't be compared now: {error}") from error

    async def raise_cap(self, asked: ApiRequest[RaiseCapRequest]) -> BudgetEvent | UnchangedBudget:
        """Raises a cap, and publishes that."""
        try:
            async with self._one_by_one:
                result = await self._raise(asked)
        except NotFilled as error:
            raise _not_filled() from error
        limit, changed = usd_from_nano(asked.form.limit_usd), isinstance(result, BudgetEvent)
        asked.log("cap_raised", budget=asked.form.budget, limit=limit, changed=changed)
        return result

    async def _raise(self, asked: ApiRequest[RaiseCapRequest]) -> BudgetEvent | UnchangedBudget:
        """Publishes first, and records it then: a raise that only Redis knew would end when Redis is filled again."""
        now, caps, limit = self._now(), self._caps(), asked.form.limit_usd
        snapshot = await self._counters.snapshot(current(self._counters, now))
        counter = _counter(asked.form.budget, caps, snapshot)
        configured = counter.limit
        if configured is None:
            raise _no_cap(counter)
        if limit < configured:
            raise _below(configured)
        if snapshot.filled is None:
            raise NotFilled
        period_counters = snapshot.periods[WINDOWS.index(counter.window)]
        before = budget_status(counter, period_counters)
        if limit == before.limit:
            return UnchangedBudget.model_validate(before.model_dump())
        event = _event(counter, period_counters, before, asked, now, ends=limit == configured)
        subject = subjects.budget(counter.scope, counter.window)
        await self._publisher.event(subject, event, id=event.event_id, at=event.at)
        raised = CapRaise(limit=limit, configured=configured, by=asked.by, reason=asked.why, at=event.at)
        await self._counters.note_raise(period_counters.period, counter.key, None if limit == configured else raised)
        if not _same(snapshot.filled, await self._counters.filled()):
            # Filled meanwhile, perhaps from what was on record before the raise.
            raise NotFilled
        return event


def _counter(budget: str, caps: CapTable, snapshot: Snapshot) -> Counter:
    """The budget of a name. Raises Problem: there is none."""
    key, _, window = budget.rpartition("/")
    scope, _, name = key.partition(":")
    anybody = scope == "tenant" and OTHERS in caps.tenants and name != OTHERS and is_identifier(name)
    known = anybody or key in known_keys(caps, snapshot)
    if known:
        for one in WINDOWS:
            if one == window:
                return caps.counter(key, one)
    if key == f"tenant:{OTHERS}":
        hint = "every tenant that the config does not name has a cap of its own: name one of them"
    else:
        meant = (key,) if known else caps.keys()
        hint = suggestion(budget, [f"{one}/{window}" for one in meant for window in WINDOWS]).removeprefix("; ")
    message = f"there is no budget {budget!r}; {hint}"
    raise Problem(404, "unknown_budget", message, [FieldError(path="budget", message=hint)])


def _event(
    counter: Counter,
    period_counters: PeriodCounters,
    before: BudgetStatus,
    asked: ApiRequest[RaiseCapRequest],
    now: datetime,
    *,
    ends: bool,
) -> BudgetEvent:
    return BudgetEvent(
        event_id=f"{counter.name}/{period_counters.period.name}/raised/{ms_from_time(now)}/{asked.caller.id}",
        kind="raise_ended" if ends else "raised",
        scope=counter.scope,
        agent=counter.agent,
        tenant=counter.tenant,
        window=counter.window,
        period=period_counters.period.name,
        limit=asked.form.limit_usd,
        total=before.spent,
        previous=before.limit,
        configured=counter.limit,
        enforcement=counter.caps.enforcement,
        by=asked.by,
        reason=asked.why,
        resets_at=before.resets_at,
        at=time_from_ms(ms_from_time(now)),
    )


def _same(before: Filled, after: Filled | None) -> bool:
    # Repairs add and take away; they leave raised caps alone.
    return after is not None and (before.log, before.zone, before.upto) == (after.log, after.zone, after.upto)


def _no_cap(counter: Counter) -> Problem:
    where = "budgets.global" if counter.of is None else f"budgets.tenants.{counter.of}"
    if counter.scope == "agent":
        where = f"agents.{counter.of}.budget"
    message = f"the budget {counter.name} has no cap that could be raised"
    detail = FieldError(path="budget", message=f"the config sets one with {where}.{counter.window}_usd")
    return Problem(409, "no_cap", message, [detail])


def _below(configured: int) -> Problem:
    detail = FieldError(path="limit_usd", message="give more; or exactly that, which takes a raise back")
    return Problem(422, "below_cap", f"a cap can't be below what the config says ({money_text(configured)})", [detail])


def _not_filled() -> Problem:
    message = "the counters are being rebuilt from the record, and until then hard caps refuse calls; ask again"
    return unavailable("not_filled", message)


async def budget_statuses(caps: CapTable, counters: BudgetCounters, now: datetime) -> tuple[BudgetStatus, ...]:
    """Every budget of the current day and month: those that the config names, and those that anything is counted of.

    Args:
        caps: the config's.
        counters: in Redis.
        now: which day and month it is.

    Returns:
        Global first, then agents, then tenants; the daily budget of each before its monthly one.

    Raises:
        StateUnavailable: Redis does not answer.
    """
    snapshot = await counters.snapshot(current(counters, now))
    return statuses(caps, snapshot, known_keys(caps, snapshot))


def current(counters: BudgetCounters, now: datetime) -> tuple[Period, Period]:
    """The day and the month whose counters budgets are held against."""
    periods = periods_at(now, counters.zone)
    return periods.day, periods.month


def known_keys(caps: CapTable, snapshot: Snapshot) -> tuple[str, ...]:
    """The scopes that the config names or that something stands of in Redis: global, agents, tenants."""
    counted = {
        key
        for period_counters in snapshot.periods
        for key in (*period_counters.figures, *period_counters.reserved, *period_counters.notes.raises)
    }
    # The sort is stable: the config's own come first, in its order.
    return tuple(sorted(caps.keys(counted), key=lambda key: _SCOPES.index(caps.counters_of(key)[0].scope)))


def statuses(caps: CapTable, snapshot: Snapshot, keys: Iterable[str]) -> tuple[BudgetStatus, ...]:
    """The budgets of some scopes in the periods of a snapshot."""
    return tuple(
        budget_status(caps.counter(key, period_counters.period.window), period_counters)
        for key in keys
        for period_counters in snapshot.periods
    )


def budget_status(counter: Counter, period_counters: PeriodCounters) -> BudgetStatus:
    """A budget in the contract's words."""
    figures = period_counters.figures.get(counter.key, AttemptSums())
    held, raised = period_counters.reserved.get(counter.key, 0), period_counters.notes.raises.get(counter.key)
    limit = period_counters.limit(counter)
    if limit == counter.limit:
        raised = None  # the config's cap has changed since, or there is none any more
    return BudgetStatus(
        budget=counter.name,
        scope=counter.scope,
        agent=counter.agent,
        tenant=counter.tenant,
        window=counter.window,
        period=period_counters.period.name,
        enforcement=counter.caps.enforcement,
        limit=limit,
        raised=raised,
        spent=figures.spent,
        reserved=held,
        remaining=None if limit is None else max(0, limit - figures.spent - held),
        reached=limit is not None
        and is_reached(limit, figures, held, refused=_has_refused(counter, limit, period_counters.notes)),
        calls=figures.calls,
        calls_of_unknown_cost=figures.unpriced,
        resets_at=time_from_ms(period_counters.period.end_ms),
        estimate=_accuracy(figures),
    )


def _has_refused(counter: Counter, limit: int, notes: Notes) -> bool:
    return counter.caps.enforcement == "hard" and threshold(counter.key, limit, 100) in notes.announced


def _accuracy(figures: AttemptSums) -> EstimateAccuracy | None:
    if not figures.gauged:
        return None
    return EstimateAccuracy(
        calls=figures.gauged,
        reserved=figures.foreseen,
        cost=figures.measured,
        percent=round(100 * figures.measured / figures.foreseen, 1) if figures.foreseen else None,
        exceeded=figures.exceeded,
    )
