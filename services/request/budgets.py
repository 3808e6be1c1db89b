"""`/api/v1/budgets`: how they stand, whether their counters agree with the record, and raising a cap by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from breakwater.analytics.errors import AnalyticsUnavailable, QueryFailed
from breakwater.budget_status import budget_status, current, known_keys, statuses
from breakwater.bus.errors import BusError
from breakwater.bus.publisher import Publisher
from breakwater.contracts import subjects
from breakwater.contracts.api import BudgetList, BudgetStatus, RaiseCapRequest, UnchangedBudget
from breakwater.contracts.events import BudgetEvent, CapRaise, Reconciliation
from breakwater.contracts.types import is_identifier, ms_from_time, time_from_ms, usd_from_nano
from breakwater.contracts.validation import FieldError
from breakwater.policy.alert_texts import money_text
from breakwater.policy.budget import OTHERS, CapTable, Counter
from breakwater.policy.periods import WINDOWS
from breakwater.policy.redact import Redactor
from breakwater.state.budget_counters import BudgetCounters, Filled, PeriodCounters, Snapshot
from breakwater.state.budgets import NotFilled
from breakwater.state.connection import StateUnavailable
from services.request.by_hand import Asked, asked, not_done, not_read
from services.request.parsing import suggestion
from services.request.problems import Problem, unavailable

_JSON = "application/json"


class BudgetRoutes:
    """The budgets of the fleet, for people.

    Args:
        caps: the config's, as they are now.
        counters: the counters in Redis.
        publisher: for what people raise.
        redactor: for their reasons.
        compare: sets the counters beside the record. May raise StateUnavailable, BusError, AnalyticsUnavailable,
            QueryFailed, and NotFilled where the counters are lost.
        now: the clock.
    """

    def __init__(
        self,
        caps: Callable[[], CapTable],
        counters: BudgetCounters,
        publisher: Publisher,
        redactor: Redactor,
        compare: Callable[[], Awaitable[Reconciliation]],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._caps = caps
        self._counters = counters
        self._publisher = publisher
        self._redactor = redactor
        self._compare = compare
        self._now = now
        # Of two who raise a cap at once, the last on record is to be the one whose cap holds.
        self._one_by_one = asyncio.Lock()

    async def show(self, request: Request) -> Response:
        """GET: 200 with all of them, or with those that a call of `?agent=` for `?tenant=` is held against."""
        agent, tenant = _name(request, "agent"), _name(request, "tenant")
        caps = self._caps()
        try:
            snapshot = await self._counters.snapshot(current(self._counters, self._now()))
        except StateUnavailable as error:
            raise not_read(error) from error
        keys = known_keys(caps, snapshot)
        if agent is not None and f"agent:{agent}" not in keys:
            message = f"no agent {agent!r} is known{suggestion(agent, caps.agents)}"
            raise Problem(404, "unknown_agent", message, [FieldError(path="agent", message=message)])
        if agent is not None or tenant is not None:
            asked_for = {"agent": agent, "tenant": tenant}.items()
            keys = ("global", *(f"{scope}:{name}" for scope, name in asked_for if name is not None))
        listed = BudgetList(filled=snapshot.filled is not None, budgets=statuses(caps, snapshot, keys))
        return Response(listed.json_bytes(), media_type=_JSON)

    async def reconciliation(self, _: Request) -> Response:
        """GET: 200 with what Redis counted and what is on record, whether they agree or not."""
        try:
            reconciliation = await self._compare()
        except NotFilled as error:
            raise _not_filled() from error
        except (StateUnavailable, BusError, AnalyticsUnavailable, QueryFailed) as error:
            raise unavailable("unavailable", f"the budgets can't be compared now: {error}") from error
        return Response(reconciliation.json_bytes(), media_type=_JSON)

    async def raise_cap(self, request: Request) -> Response:
        """POST: 200 once it is published and holds, or where the cap is that already."""
        who = await asked(request, RaiseCapRequest, self._redactor)
        try:
            async with self._one_by_one:
                told = await self._raise(who)
        except NotFilled as error:
            raise _not_filled() from error
        except (BusError, StateUnavailable) as error:
            raise not_done(error) from error
        limit, changed = usd_from_nano(who.form.limit_usd), isinstance(told, BudgetEvent)
        who.log("cap_raised_by_hand", budget=who.form.budget, limit=limit, changed=changed)
        return Response(told.json_bytes(), media_type=_JSON)

    async def _raise(self, who: Asked[RaiseCapRequest]) -> BudgetEvent | UnchangedBudget:
        """Publishes first, and notes it then: a raise that only Redis knew would end when Redis is filled anew."""
        now, caps, limit = self._now(), self._caps(), who.form.limit_usd
        snapshot = await self._counters.snapshot(current(self._counters, now))
        counter = _counter(who.form.budget, caps, snapshot)
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
        event = _event(counter, period_counters, before, who, now, ends=limit == configured)
        subject = subjects.budget(counter.scope, counter.window)
        await self._publisher.event(subject, event, id=event.event_id, at=event.at)
        raised = CapRaise(limit=limit, configured=configured, by=who.by, reason=who.why, at=event.at)
        await self._counters.note_raise(period_counters.period, counter.key, None if limit == configured else raised)
        if not _same(snapshot.filled, await self._counters.filled()):
            # Filled meanwhile, perhaps from what was on record before the raise.
            raise NotFilled
        return event


def _name(request: Request, parameter: str) -> str | None:
    name = request.query_params.get(parameter)
    if name is not None and not is_identifier(name):
        message = "must have 1 to 128 characters, none of them a control character"
        raise Problem(422, "invalid_query", f"{parameter}: {message}", [FieldError(path=parameter, message=message)])
    return name


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
    who: Asked[RaiseCapRequest],
    now: datetime,
    *,
    ends: bool,
) -> BudgetEvent:
    return BudgetEvent(
        event_id=f"{counter.name}/{period_counters.period.name}/raised/{ms_from_time(now)}/{who.key_id}",
        kind="raise_ended" if ends else "raised",
        scope=counter.scope,
        agent=counter.agent,
        tenant=counter.tenant,
        window=counter.window,
        period=period_counters.period.name,
        limit=who.form.limit_usd,
        total=before.spent,
        previous=before.limit,
        configured=counter.limit,
        enforcement=counter.caps.enforcement,
        by=who.by,
        reason=who.why,
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
