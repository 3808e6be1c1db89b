"""From attempts to spend: settles the costs of calls, and announces the thresholds that totals have reached."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import structlog

from breakwater.calls.rules.refusals import for_operators
from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.store.records import read_record
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery, acknowledge, heartbeat
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process.outage import Outages
from breakwater.limits.metrics import BudgetMetrics
from breakwater.limits.rules.budget import (
    LimitTable,
    budget_event,
    periods_at,
    reached_thresholds,
    threshold,
)
from breakwater.limits.rules.ledger import charged_at
from breakwater.limits.rules.scopes import CallNames, Dimensions
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets, NotFilledError, Reservation, Settlement, Totals
from breakwater.services.budget.shadows import LimitShadows


class BudgetHandler:
    """Counts the fleet's spend. Any number of these may run: every settlement is counted once."""

    def __init__(
        self,
        limits: Callable[[], LimitTable],
        budgets: Budgets,
        counters: BudgetCounters,
        publisher: Publisher,
        lookup: Lookup,
        filled: Callable[[bool], Awaitable[str]],
        metrics: BudgetMetrics,
        shadows: LimitShadows | None = None,
    ) -> None:
        """Takes `filled`, which waits until the counters are filled from the log, and returns the log's identity.

        Called with True, `filled` checks again. Without `shadows`, no limit is only tried.
        """
        self._limits = limits
        self._shadows = shadows
        self._budgets = budgets
        self._counters = counters
        self._publisher = publisher
        self._lookup = lookup
        self._filled = filled
        self._metrics = metrics
        self._outages = Outages()

    async def handle(self, batch: Sequence[Delivery[Attempt]]) -> None:
        """Settles a batch of attempts, and acknowledges it."""
        async with heartbeat(batch):
            read = ((delivery.sequence, read_record(delivery, Attempt)) for delivery in batch)
            attempts = [(sequence, attempt) for sequence, attempt in read if attempt is not None]
            called = [Settlement.of(*item) for item in attempts if not item[1].short_circuited]
            settled = await self._outages.retry_while_unavailable(lambda: self.settle(called))
            if (shadows := self._shadows) is not None and shadows.are_used:
                calls = {sequence: attempt for sequence, attempt in attempts if not attempt.short_circuited}
                stored_at = {delivery.sequence: delivery.published_at for delivery in batch}
                await self._outages.retry_while_unavailable(lambda: shadows.tell(calls, stored_at, settled))
            refused = [attempt for _, attempt in attempts if attempt.refused_by is not None]
            await self._outages.retry_while_unavailable(lambda: self._announce_refusals(refused))
        await acknowledge(batch)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Totals]:
        """Counts the cost of calls, once the counters exist. Raises UnavailableError; retry.

        Returns:
            The spend of all their budgets afterwards.
        """
        lost = False
        while True:
            log = await self._filled(lost)
            try:
                return await self._count(settlements, log)
            except NotFilledError:
                lost = True

    async def _count(self, settlements: Sequence[Settlement], log: str) -> list[Totals]:
        settled = await self._budgets.settle(settlements, log)
        self._metrics.count_settled(len(settlements))
        for total in settled:
            await self._announce(total)
        return settled

    async def charge_lapsed(self, log: str) -> None:
        """Charges reservations whose lease has ended and whose call is not in the log.

        Never waits for the counters, as its caller fills them.

        Raises:
            NotFilledError: the counters are not those of this log.
            StateUnavailableError, BusUnavailableError: repeat it.
        """
        charged: set[str] = set()
        while attempt_ids := set(await self._budgets.lapsed_attempts(datetime.now(UTC))) - charged:
            for attempt_id in attempt_ids:
                await self._charge(attempt_id, log)
            charged |= attempt_ids

    async def _charge(self, attempt_id: str, log: str) -> None:
        [reservation] = await self._budgets.reservations([attempt_id])
        if reservation is None:
            await self._budgets.forget_lease(attempt_id)
            return
        if await self._settle_recorded(reservation, log):
            return
        if not reservation.charged:
            structlog.get_logger().warning("reservation_lapsed", attempt_id=attempt_id, agent=reservation.agent)
        await self._budgets.charge_estimate(reservation)

    async def settle_ended(self, log: str) -> None:
        """Ends the reservations of calls that are in the log: Redis had ended them, and has lost that.

        Raises as `charge_lapsed` does.
        """
        for reservation in (await self._counters.read(())).reservations:
            await self._settle_recorded(reservation, log)

    async def _settle_recorded(self, reservation: Reservation, log: str) -> bool:
        """Settles a call if it is in the log; returns False if not."""
        execution_id, _, number = reservation.attempt_id.rpartition(":")
        subject = subjects.attempt(reservation.agent, execution_id, number)
        message = await self._lookup.next(Stream.EVENTS, subject, 1)
        attempt = None if message is None else read_record(message, Attempt)
        if message is None or attempt is None:
            return False
        # Its settlement is on its way through the log, or was counted before the reservation was made.
        await self._count([Settlement.of(message.sequence, attempt)], log)
        return True

    async def _announce_refusals(self, refused: Sequence[Attempt]) -> None:
        """Announces limits that have refused a call as reached, although the spend stays below them. Repeatable."""
        limits = self._limits()
        dimensions = Dimensions(limits.dimensions)
        for attempt in {(attempt.refused_by, attempt.refused_cap): attempt for attempt in refused}.values():
            for counter in limits.counters(CallNames.of(attempt), dimensions):
                if counter.name == attempt.refused_by and attempt.refused_cap is not None:
                    period = periods_at(charged_at(attempt), self._counters.zone).of(counter.window)
                    used = await self._counters.used(period, counter.key)
                    total = Totals(period, counter.key, used[counter.key], attempt.agent)
                    await self._announce(total, refused=attempt)

    async def _announce(self, total: Totals, *, refused: Attempt | None = None) -> None:
        """Publishes the thresholds that a total has reached and that have not been announced in this period.

        A limit that has refused a call is reached, unless it has been raised since.
        An announcement is recorded after it was published: after a crash in between, it is repeated with the same id.
        """
        limits = self._limits()
        counter = limits.counter(total.key, total.period.window)
        limit = limits.amount_in(counter, total.period)
        if limit is None:
            return
        percents = reached_thresholds(
            counter, limit, total.spent, refused=refused is not None and refused.refused_cap == limit
        )
        if not percents:
            return
        thresholds = [threshold(total.key, limit, percent) for percent in percents]
        reserved, announced = await self._counters.announcements(total.period, total.key, thresholds)
        for percent, name, is_announced in zip(percents, thresholds, announced, strict=True):
            if is_announced:
                continue
            kind = counter.kind_at(percent)
            refusal = None if refused is None or kind == "soft_cap" else refused.error
            event = budget_event(
                counter,
                total.period,
                f"{percent}/{limit}",
                total.agent,
                kind=kind,
                threshold_percent=percent,
                limit=limit,
                total=total.spent,
                reserved=reserved,
                refusal=None if refusal is None else for_operators(refusal),
                at=datetime.now(UTC),
            )
            subject = subjects.budget(counter.scope, counter.window)
            await self._publisher.event(subject, event, id=event.event_id, at=event.at)
            self._metrics.count_threshold(event)
            structlog.get_logger().info("budget_threshold", budget=counter.name, percent=percent)
            await self._counters.announce(total.period, name)
