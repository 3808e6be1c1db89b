"""From attempts to spend: settle what calls cost, and tell which thresholds the totals have passed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

import structlog
from pydantic import ValidationError

from breakwater.bus.delivery import Delivery, heartbeat
from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher
from breakwater.config import Config
from breakwater.contracts import subjects
from breakwater.contracts.events import BudgetEvent
from breakwater.contracts.execution import Attempt
from breakwater.contracts.subjects import Stream
from breakwater.patience import Patience
from breakwater.policy.budget import Caps, Counter, counters, reached
from breakwater.state.budgets import Budgets, Settlement, Totals

SWEEP_EVERY_S = 15.0


class BudgetHandler:
    """Keeps the books of the fleet. Any number of these may run: every settlement is counted once."""

    def __init__(self, config: Config, budgets: Budgets, publisher: Publisher, lookup: Lookup) -> None:
        self._config = config
        self._budgets = budgets
        self._publisher = publisher
        self._lookup = lookup
        self._log: str | None = None
        self._patience = Patience()

    async def handle(self, batch: list[Delivery]) -> None:
        """Settles a batch of attempts, and acknowledges it."""
        async with heartbeat(batch):
            attempts = [(delivery.sequence, found) for delivery in batch if (found := _read(delivery)) is not None]
            called = [_settlement(*item) for item in attempts if not item[1].short_circuited]
            await self._patience.both(lambda: self._settle(called))
            refused = [attempt for _, attempt in attempts if attempt.refused_by is not None]
            await self._patience.both(lambda: self._tell_refusals(refused))
        for delivery in batch:
            await delivery.ack()

    async def sweep(self) -> None:
        """Charges reservations whose lease has ended and of which the log tells nothing, for as long as it runs."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            await self._patience.both(self._charge_lapsed)

    async def _settle(self, settlements: Sequence[Settlement]) -> None:
        """Raises StateUnavailable, BusUnavailable; may be repeated."""
        if self._log is None:
            self._log = await self._lookup.identity(Stream.EVENTS)
        latest: dict[tuple[str, str, str], Totals] = {}
        for totals in await self._budgets.settle(settlements, self._log):
            for total in totals:
                latest[total.window, total.period, total.key] = total
        for total in latest.values():
            await self._tell(total)

    async def _tell_refusals(self, refused: Sequence[Attempt]) -> None:
        """A cap that refuses a call has been reached, though the spend itself stays below it. May be repeated."""
        for attempt in {attempt.refused_by: attempt for attempt in refused}.values():
            for total in await self._budgets.totals(attempt.agent, attempt.started_at):
                if f"{total.key}/{total.window}" == attempt.refused_by:
                    await self._tell(total, refused=True)

    async def _tell(self, total: Totals, *, refused: bool = False) -> None:
        """Publishes the thresholds that a total has reached and that have not been told in this period.

        What has been told is noted after it was published: a crash in between tells it again, under the same id.
        """
        counter = self._counter(total)
        percents = reached(counter, total.spent, refused=refused)
        if not percents or counter.limit is None:
            return
        # A cap that is changed in mid-period has thresholds of its own.
        name = f"{total.key}@{counter.limit}"
        told = await self._budgets.announced(total.window, total.period, name)
        for percent in percents:
            if percent <= told:
                continue
            event = _crossing(counter, total, percent, counter.limit)
            subject = subjects.budget(counter.scope, counter.window)
            await self._publisher.event(subject, event, id=event.event_id, at=event.at)
            structlog.get_logger().info("budget_threshold", key=total.key, window=total.window, percent=percent)
            await self._budgets.announce(total.window, total.period, name, percent)

    def _counter(self, total: Totals) -> Counter:
        name = total.key.partition(":")[2]
        settings = self._config.agents.get(name)
        caps = settings.budget if settings is not None else Caps(enforcement="none")
        found = counters(name, caps, self._config.budgets.total)
        return next(counter for counter in found if (counter.key, counter.window) == (total.key, total.window))

    async def _charge_lapsed(self) -> None:
        """Raises StateUnavailable, BusUnavailable; may be repeated."""
        for attempt_id in await self._budgets.lapsed(datetime.now(UTC)):
            [reservation] = await self._budgets.reservations([attempt_id])
            if reservation is None:
                await self._budgets.forget_lease(attempt_id)
                continue
            execution_id, _, number = attempt_id.rpartition(":")
            subject = subjects.attempt(reservation.agent, execution_id, number)
            found = await self._lookup.last(Stream.EVENTS, subject)
            if found is not None:
                # Its settlement is on its way through the log, or was counted before the reservation was made.
                await self._settle([_settlement(found.sequence, Attempt.model_validate_json(found.data))])
                continue
            structlog.get_logger().warning("reservation_lapsed", attempt_id=attempt_id, agent=reservation.agent)
            await self._budgets.charge_estimate(reservation)


def _read(delivery: Delivery) -> Attempt | None:
    try:
        return Attempt.model_validate_json(delivery.data)
    except ValidationError as error:
        # The sink keeps a letter of it; without a readable cost there is nothing to settle, and its lease will lapse.
        structlog.get_logger().warning("attempt_unreadable", sequence=delivery.sequence, problems=error.error_count())
        return None


def _settlement(sequence: int, attempt: Attempt) -> Settlement:
    return Settlement(attempt.attempt_id, sequence, attempt.agent, attempt.cost, attempt.started_at)


def _crossing(counter: Counter, total: Totals, percent: int, limit: int) -> BudgetEvent:
    return BudgetEvent(
        event_id=f"{total.key}/{total.window}/{total.period}/{percent}/{limit}",
        kind="hard_cap" if percent == 100 else "soft_cap",
        scope=counter.scope,
        agent=counter.agent,
        window=total.window,
        period=total.period,
        threshold_percent=percent,
        limit=limit,
        total=total.spent,
        enforcement=counter.enforcement,
        at=datetime.now(UTC),
    )
