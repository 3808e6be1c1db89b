"""Changes of limits by people: checked, kept in LIMITS, in force in every process at once, and told of in EVENTS."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from secrets import token_hex
from typing import NamedTuple

import structlog

from breakwater.identity.rules.callers import Caller
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.formats import exact_money
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.state_log import ChangedMeanwhileError
from breakwater.kernel.nats.subjects import LIMIT_SETTINGS, Stream
from breakwater.kernel.process.outage import Outage
from breakwater.limits.contract import BudgetEvent, LimitEvent, LimitRaise, LimitRecord, LimitSettings, Window
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.rules.budget import (
    LimitTable,
    Period,
    budget_event,
    periods_at,
    settings_problems,
)
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.limits.rules.limit import Limit, amount_of, amount_text, limit_of
from breakwater.limits.rules.limit_changes import (
    Author,
    LimitRefusedError,
    check_end,
    check_id,
    check_loosening,
    check_place,
    check_rights,
    delete_limit,
    event_of,
    invalid,
    raise_limit,
    set_limit,
)
from breakwater.limits.rules.scopes import (
    BASE,
    Dimension,
    ScopePart,
    key_from_text,
    key_of,
    parts_of,
    patterns_of,
    scope_of,
)
from breakwater.limits.store.budget_counters import BudgetCounters, StoredRaise
from breakwater.limits.store.budgets import NotFilledError

TOLD_WITHIN = timedelta(seconds=30)
"""So long after a change, whoever made it has told of it, or died."""

REPEATED_FOR = timedelta(minutes=10)
"""A caller who got no response repeats a change within this time. For longer, EVENTS would not know it any more."""


class ToldChange(NamedTuple):
    """A change of a limit, and the event of the budget that it raised, if it raised one."""

    record: LimitRecord
    budget_event: BudgetEvent | None


@dataclass(frozen=True, slots=True)
class LimitEditor:
    """Sets, deletes and raises limits.

    Args:
        cost_tags: the config's.
        known_names: the names of the kinds whose names the config knows.
        log: the limits that the plane keeps.
        limits: returns all limits that hold.
        counters: of what is spent, with the version of the limits.
        publisher: publishes what was changed.
        recorded_spend: returns the sums of a period by the keys of a dimension's scopes, as it is recorded. May raise
            AnalyticsUnavailableError and QueryError.
    """

    cost_tags: Collection[str]
    known_names: Mapping[str, Collection[str]]
    log: LimitLog
    limits: Callable[[], LimitTable]
    counters: BudgetCounters
    publisher: Publisher
    recorded_spend: Callable[[Period, Dimension], Awaitable[Mapping[str, AttemptSums]]]

    def find(self, limit_id: str) -> Limit | None:
        """Returns a limit that holds; None if there is none."""
        of_config = (limit for limit in self.limits().limits if limit.id == limit_id)
        return next(of_config, None) or self.limits().plane_limits.limits.get(limit_id)

    def _parts_of(self, limit_id: str) -> tuple[ScopePart, ...] | None:
        """Returns the parts of a limit's scope, also of one that is not readable here; None if there is no limit."""
        limit = self.find(limit_id)
        return self.limits().plane_limits.unreadable.get(limit_id) if limit is None else limit.parts

    async def check(
        self,
        limit_id: str,
        settings: LimitSettings,
        caller: Caller,
        now: datetime,
        *,
        stop: bool = False,
        key_binding: Collection[ScopePart] = (),
    ) -> Limit:
        """Checks a limit that is to be set, and returns it.

        Args:
            limit_id: its id.
            settings: the limit.
            caller: who sets it.
            now: the time.
            stop: it may be below what is spent.
            key_binding: of a limit on a key that the caller makes: what the key is bound to.

        Raises:
            LimitRefusedError: it can't be set, or not by this caller.
            BusError: what others have set can't be read.
            StateUnavailableError, AnalyticsUnavailableError, QueryError: what is spent can't be read.
        """
        await self.log.catch_up()
        self._check_changeable(limit_id)
        check_id(limit_id)
        for field, problem in settings_problems(settings, self.cost_tags, self.known_names):
            raise invalid(field, problem)
        limit = limit_of(limit_id, settings)
        check_end(settings.until, now)
        self._check_rights(caller, limit, key_binding)
        check_place(limit, self.limits())
        if settings.refuses and not stop:
            await self._check_spend(limit, now)
        return limit

    async def set_limit(
        self,
        limit_id: str,
        settings: LimitSettings,
        caller: Caller,
        reason: str | None,
        now: datetime,
        *,
        stop: bool = False,
        key_binding: Collection[ScopePart] = (),
    ) -> LimitRecord:
        """Makes or changes a limit. Setting it as it is changes nothing.

        The arguments are those of `check`, and a reason.

        Raises:
            LimitRefusedError: as `check`, or somebody else has changed it at this moment.
            BusError, StateUnavailableError: it may not be set; repeat it.
            AnalyticsUnavailableError, QueryError: what is spent can't be read.
        """
        author = Author(token_hex(8), caller.name, reason, now)
        limit = await self.check(limit_id, settings, caller, now, stop=stop, key_binding=key_binding)
        before = self.log.states.get(limit_id)
        is_same = before is not None and before.limit == limit and limit_id in self.limits().plane_limits.limits
        record = None if before is None else before.record
        if is_same and record is not None:
            await self._repeat(limit_id, now)
            return record

        def decide() -> LimitRecord:
            self._check_rights(caller, limit, key_binding)
            check_place(limit, self.limits())
            return set_limit(limit_id, settings, self.log.states.get(limit_id), author)

        return (await self._change(limit_id, decide)).record

    async def delete_limit(
        self,
        limit_id: str,
        caller: Caller,
        reason: str | None,
        now: datetime,
        *,
        key_binding: Collection[ScopePart] = (),
    ) -> LimitRecord:
        """Deletes a limit. Raises as `set_limit`; LimitRefusedError also if there is no such limit."""
        author = Author(token_hex(8), caller.name, reason, now)
        await self.log.catch_up()
        self._check_changeable(limit_id)

        def decide() -> LimitRecord:
            parts = self._parts_of(limit_id)
            before = self.log.states.get(limit_id)
            if parts is None or before is None:
                raise unknown_limit(limit_id)
            check_rights(caller, (*parts, *key_binding))
            return delete_limit(limit_id, before, author)

        if self._parts_of(limit_id) is None:
            await self._repeat(limit_id, now)
            raise unknown_limit(limit_id)
        return (await self._change(limit_id, decide)).record

    async def raise_limit(
        self,
        limit: Limit,
        parts: tuple[ScopePart, ...],
        amount_stated: str,
        until: datetime | None,
        caller: Caller,
        reason: str,
        now: datetime,
    ) -> ToldChange | None:
        """Raises a limit for some time, or ends a raise by its own amount. Returns None if nothing was to do.

        Args:
            limit: the limit.
            parts: the scope that it is raised for, as `raised_scope` returns it.
            amount_stated: the new amount, in the limit's unit.
            until: when the raise ends; None for the end of the present period.
            caller: who raises it.
            reason: why.
            now: the time.

        Raises:
            LimitRefusedError: it can't be raised so, or not by this caller.
            NotFilledError: the counters are being rebuilt.
            BusError, StateUnavailableError: it may not be raised; repeat it.
        """
        check_rights(caller, parts)
        check_rights(caller, limit.parts)
        try:
            amount = amount_of(limit.unit, amount_stated)
        except ValueError as error:
            raise invalid("amount", str(error)) from None
        await self.log.catch_up()
        table = self.limits()
        key = key_of(parts)
        dimension = limit.calendar_dimension
        period = None if dimension is None else periods_at(now, self.counters.zone).of(dimension.window)
        if (counting := table.limit_that_counts(parts, limit.unit, limit.window)) != limit:
            message = f"the limit {limit.id!r} does not count for {scope_of(parts)!r}, and no other limit does"
            if counting is not None:
                message = f"for {scope_of(parts)!r}, the limit {counting.id!r} counts instead; raise that one"
            raise LimitRefusedError(409, "limit_not_effective", message)
        if amount < limit.amount:
            message = f"is below the limit itself ({_in_words(limit, limit.amount)}); a raise is more than that"
            raise LimitRefusedError(422, "below_limit", message, "amount")
        present = table.plane_limits.raise_of(limit, key)
        ends = amount == limit.amount
        if until is None and ends and present is not None:
            until = present.until
        if until is None:
            if period is None or period.resets_at is None:
                raise invalid("until", "is missing: the limit is of no period of a calendar, with which a raise ends")
            until = period.resets_at
        check_end(until, now)
        text = amount_text(limit.unit, amount)
        if period is not None and await self.counters.use([(period, key, limit.unit)]) == [None]:
            raise NotFilledError
        if (present is None and ends) or (present is not None and (present.amount, present.until) == (text, until)):
            await self._repeat(limit.id, now)
            return None
        limit_raise = LimitRaise(
            amount=text,
            configured=amount_text(limit.unit, limit.amount),
            until=until,
            scope=scope_of(parts),
            by=caller.name,
            reason=reason,
            at=now,
        )
        author = Author(token_hex(8), caller.name, reason, now)

        def decide() -> LimitRecord:
            if self.find(limit.id) != limit:
                message = f"the limit {limit.id!r} was changed at this moment; look at it first"
                raise LimitRefusedError(409, "limit_changed", message)
            before = self.log.states.get(limit.id)
            earlier = self.limits().plane_limits.raise_of(limit, key)
            raised_from = limit_raise.configured if earlier is None else earlier.amount
            return raise_limit(limit.id, limit_raise, raised_from, before, author, ends=ends)

        return await self._change(limit.id, decide)

    async def keep_stored_raises(self, now: datetime) -> None:
        """Keeps in LIMITS what an earlier version of the plane stored with the counters, until their periods end.

        Raises BusError, StateUnavailableError; may be repeated.
        """
        for stored in await self.counters.stored_raises(periods_at(now, self.counters.zone).all):
            while not await self._keep(stored, now):
                pass
            await self.counters.forget_stored_raise(stored)

    async def _keep(self, stored: StoredRaise, now: datetime) -> bool:
        """Keeps a stored raise, unless it is kept or ended. Returns False if its limit was changed at this moment."""
        limit_raise = stored.limit_raise
        limit = self.limits().counter(stored.key, stored.period.window).cap
        if limit is None or amount_of("usd", limit_raise.configured) != limit.amount:
            return True
        if self.limits().plane_limits.raise_of(limit, stored.key) is not None:
            return True
        author = Author(token_hex(8), limit_raise.by, limit_raise.reason, now)

        def decide() -> LimitRecord:
            before = self.log.states.get(limit.id)
            return raise_limit(limit.id, limit_raise, limit_raise.configured, before, author, ends=False)

        try:
            await self._change(limit.id, decide)
        except LimitRefusedError as refused:
            if refused.code == "limit_changed":
                return False  # by another process that keeps raises, or by a person
            structlog.get_logger().warning("raise_not_kept", limit=limit.id, scope=limit_raise.scope, why=str(refused))
        return True

    def _check_rights(self, caller: Caller, limit: Limit, key_binding: Collection[ScopePart]) -> None:
        """Raises LimitRefusedError: the caller may not set a limit, or it would loosen one that he may not change."""
        check_rights(caller, (*limit.parts, *key_binding))
        before = self.find(limit.id)
        if before is not None and before.place != limit.place:
            check_rights(caller, before.parts)
        if (unreadable_scope := self.limits().plane_limits.unreadable.get(limit.id)) is not None:
            check_rights(caller, unreadable_scope)
        for pattern in patterns_of(limit.parts):
            # The first pattern is that of the limit itself, which may hold already.
            general = self.limits().limit_like(replace(limit, parts=pattern))
            if general is not None:
                check_loosening(caller, limit, general)

    def _check_changeable(self, limit_id: str) -> None:
        if any(limit.id == limit_id for limit in self.limits().limits):
            message = f"{limit_id!r} is in the config, which the API does not change; it can only be raised here"
            raise LimitRefusedError(409, "limit_from_config", message)

    async def _check_spend(self, limit: Limit, now: datetime) -> None:
        """Raises LimitRefusedError: more is used in the present period than a limit allows."""
        dimension = limit.calendar_dimension
        if dimension is None:
            return
        period = periods_at(now, self.counters.zone).of(dimension.window)
        source = await self.counters.source()
        if source is not None and (dimension in BASE or dimension in source.dimensions.complete):
            used = await self.counters.used(period, limit.key if limit.is_named else None, limit.unit)
        else:
            recorded = await self.recorded_spend(period, dimension)
            used = {key: figures.used(limit.unit) for key, figures in recorded.items()}
        table = self.limits()
        over = {key: amount for key, amount in used.items() if amount > limit.amount and _counts_for(limit, key, table)}
        if over:
            key, amount = max(over.items(), key=lambda item: item[1])
            verb = "spent" if limit.unit == "usd" else "used"
            message = (
                f"{scope_of(parts_of(key))} has {verb} {_in_words(limit, amount)} in {period.name} already, more than "
                f"{_in_words(limit, limit.amount)}: the limit would stop its next call. If that is meant, set `stop`"
            )
            raise LimitRefusedError(422, "below_spent", message, limit.unit)

    async def _change(self, limit_id: str, decide: Callable[[], LimitRecord]) -> ToldChange:
        """Makes a change, tells of it, and puts it into force.

        It is told of first, by NATS, which has just answered: where Redis does not, repeating the request puts into
        force what the caller does not know to be done.
        """
        before = self.log.states.get(limit_id)
        try:
            record = await self.log.change(decide, limit_id)
        except ChangedMeanwhileError:
            message = f"another caller changed the limit {limit_id!r} at this moment; look at it first"
            raise LimitRefusedError(409, "limit_changed", message) from None
        before_record = None if before is None else before.record
        if before_record is not None and record.at - before_record.at < REPEATED_FOR:
            await self._tell(before_record)  # whoever made that change may have died before
        budget_event = await self._tell(record)
        await self._put_into_force()
        return ToldChange(record, budget_event)

    async def keep_told(self, lookup: Lookup) -> None:
        """Tells of changes whose process died before it could: at the start, and soon after a change."""
        outage = Outage("telling of changed limits")
        told_version = version_before = ""
        since: datetime | None = None
        while True:
            version = self.log.version
            if version != told_version:
                until = datetime.now(UTC) - TOLD_WITHIN
                tell = partial(self.tell_untold, lookup, until, since)
                if await outage.run_logged(tell, expected=(BusError, UnavailableError, NotFilledError)):
                    # A change that was too recent was stored after this, even if clocks differ.
                    since = until - TOLD_WITHIN
                    told_version = version if version == version_before else told_version
            version_before = version
            await asyncio.sleep(TOLD_WITHIN.total_seconds())

    async def tell_untold(self, lookup: Lookup, until: datetime, since: datetime | None = None) -> None:
        """Tells of the last changes of limits that EVENTS lacks.

        Args:
            lookup: reads streams.
            until: later changes are left to those who make them.
            since: changes that were stored earlier have been told of; None: as far back as EVENTS reaches.

        Raises:
            BusError, StateUnavailableError, NotFilledError: repeat it.
        """
        if since is None:
            events = await lookup.facts(Stream.EVENTS)
            first = await lookup.next(Stream.EVENTS, ">", max(events.first, 1))
            since = events.created if first is None else first.stored_at
        async with aclosing(lookup.scan(Stream.EVENTS, subjects.ALL_LIMITS, start=since, complete=True)) as messages:
            told = {event.event_id async for message in messages if (event := message.read(LimitEvent)) is not None}
        async with aclosing(lookup.scan(Stream.LIMITS, LIMIT_SETTINGS, start=since, complete=True)) as messages:
            async for message in messages:
                record = message.read(LimitRecord)
                if record is not None and record.at <= until and record.change_id not in told:
                    structlog.get_logger().info("limit_change_told", id=record.id, change=record.change)
                    await self._tell(record)

    async def _tell(self, record: LimitRecord) -> BudgetEvent | None:
        """Publishes a change; of a raised budget also that, for alerts and costs. EVENTS takes each once.

        Returns the latter.

        Raises:
            BusUnavailableError, StateUnavailableError: it may not be published; repeat it.
            NotFilledError: the counters are being rebuilt.
        """
        settings = record.limit or record.before
        limit = self.find(record.id) if settings is None else limit_of(record.id, settings)
        budget_event = None
        if record.raised is not None and limit is not None and limit.budget_dimension is not None:
            budget_event = await self._tell_of_budget(limit, record, record.raised, limit.budget_dimension.window)
        event = event_of(record, "" if limit is None else limit.scope)
        await self.publisher.event(subjects.limit(event.kind), event, id=event.event_id, at=event.at)
        return budget_event

    async def _repeat(self, limit_id: str, now: datetime) -> None:
        """Tells again of a limit's last change, and puts it into force: its caller may not have been told that it is.

        EVENTS takes it once.
        """
        record = await self.log.last_record(limit_id)
        if record is not None and now - record.at <= REPEATED_FOR:
            await self._tell(record)
        await self._put_into_force()

    async def _put_into_force(self) -> None:
        """Lets no call be admitted by a worker that lacks the last change. May be repeated."""
        await self.counters.note_limits(self.log.version)

    async def _tell_of_budget(
        self, limit: Limit, record: LimitRecord, limit_raise: LimitRaise, window: Window
    ) -> BudgetEvent:
        key = limit.key if limit_raise.scope is None else key_from_text(limit_raise.scope)
        period = periods_at(limit_raise.at, self.counters.zone).of(window)
        [use] = await self.counters.use([(period, key, "usd")])
        if use is None:
            raise NotFilledError
        counter = self.limits().counter(key, window)
        event = budget_event(
            counter,
            period,
            f"raised/{record.change_id}",
            kind="raise_ended" if record.change == "raise_ended" else "raised",
            limit=amount_of("usd", limit_raise.amount),
            total=use[0],
            previous=amount_of("usd", record.raised_from or limit_raise.configured),
            configured=amount_of("usd", limit_raise.configured),
            by=limit_raise.by,
            reason=limit_raise.reason,
            resets_at=limit_raise.until,
            at=limit_raise.at,
        )
        subject = subjects.budget(counter.scope, counter.window)
        await self.publisher.event(subject, event, id=event.event_id, at=event.at)
        return event


def unknown_limit(limit_id: str) -> LimitRefusedError:
    """Returns the refusal of an id that no limit has."""
    message = f"there is no limit {limit_id!r}; `breakwater limits` lists them"
    return LimitRefusedError(404, "unknown_limit", message, "limit_id")


def _counts_for(limit: Limit, key: str, table: LimitTable) -> bool:
    """Returns True if a limit that is to be set would count for a scope, and no more particular one does."""
    for pattern in patterns_of(parts_of(key)):
        if pattern == limit.parts:
            return True
        if table.limit_like(replace(limit, parts=pattern)) is not None:
            return False
    return False


def _in_words(limit: Limit, amount: int) -> str:
    return exact_money(amount) if limit.unit == "usd" else f"{amount:,} {limit.unit}"
