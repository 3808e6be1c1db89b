"""Limits that are tried: they are told of all calls, and refuse none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from zoneinfo import ZoneInfo

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process.outage import Outages
from breakwater.kernel.redis.documents import Documents
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import BudgetEvent
from breakwater.limits.rules.budget import Counter, LimitTable, periods_at
from breakwater.limits.rules.ledger import charged_at
from breakwater.limits.rules.scopes import CallNames, Dimensions
from breakwater.limits.store.budgets import Totals
from breakwater.replay.rules.shadow_limits import REPORT_EVERY_MS, PaidCall, ShadowLimit, count, reported


class LimitShadows:
    """The shadows of limits."""

    def __init__(
        self, limits: Callable[[], LimitTable], shadows: Documents[ShadowLimit], publisher: Publisher, zone: ZoneInfo
    ) -> None:
        self._limits = limits
        self._shadows = shadows
        self._publisher = publisher
        self._zone = zone
        self._outages = Outages()
        self._unreported: set[str] = set()
        """The names of the shadows with refusals that no event has said yet."""
        self._has_unreported = asyncio.Event()
        self._changes = asyncio.Lock()
        """Holds what is told apart from what is reported."""

    @property
    def are_used(self) -> bool:
        """True if any limit is tried."""
        return bool(self._limits().limits)

    async def tell(
        self, attempts: Mapping[int, Attempt], stored_at: Mapping[int, datetime], settled: Sequence[Totals]
    ) -> None:
        """Tells the shadows of calls, and publishes what follows.

        Args:
            attempts: the calls, by the sequences of their events.
            stored_at: when the log stored these.
            settled: the spend of the budgets that the calls count in, these included.

        Raises:
            StateUnavailableError, BusUnavailableError: it may be repeated.
        """
        limits = self._limits()
        dimensions = Dimensions(limits.dimensions)
        counters: dict[str, Counter] = {}
        calls: dict[str, list[PaidCall]] = {}
        for sequence, attempt in attempts.items():
            at_ms = ms_from_time(stored_at[sequence])
            worst_case = (attempt.cost if attempt.reserved is None else attempt.reserved) or 0
            periods = periods_at(charged_at(attempt), self._zone)
            for counter in limits.counters(CallNames.of(attempt), dimensions):
                if counter.cap is not None and counter.cap.holds_at(at_ms):
                    period = periods.of(counter.window)
                    call = PaidCall(sequence, at_ms, attempt.agent, period, worst_case, attempt.cost or 0)
                    calls.setdefault(counter.name, []).append(call)
                    counters[counter.name] = counter

        def decide(name: str, shadow: ShadowLimit) -> ShadowLimit:
            counter = counters[name]
            totals = {total.period.name: total.spent for total in settled if total.key == counter.key}
            return count(counter, shadow, calls[name], totals)

        await self._change(calls, decide)

    async def run(self) -> None:
        """Reports what no further call has had reported for a minute; what is left at the end, then."""
        try:
            while True:
                await self._has_unreported.wait()
                await asyncio.sleep(REPORT_EVERY_MS / 1000)
                await self._outages.retry_while_unavailable(self._report)
        finally:
            with suppress(UnavailableError):  # then the next call reports it
                await self._report()

    async def _report(self) -> None:
        await self._change(tuple(self._unreported), lambda _, shadow: reported(shadow))

    async def _change(self, names: Collection[str], decide: Callable[[str, ShadowLimit], ShadowLimit]) -> None:
        async with self._changes:
            shadows = await self._shadows.change(names, decide)
            self._unreported.update(shadows)
            await self._shadows.publish(shadows, self._publish)
            self._unreported.difference_update(name for name, shadow in shadows.items() if shadow.pending is None)
            if self._unreported:
                self._has_unreported.set()
            else:
                self._has_unreported.clear()

    def _publish(self, event: BudgetEvent) -> Awaitable[object]:
        subject = subjects.shadow_budget(event.scope, event.window)
        return self._publisher.event(subject, event, id=event.event_id, at=event.at)
