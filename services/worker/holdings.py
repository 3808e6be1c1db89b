"""What the calls under way of one worker hold in the budgets, for when Redis loses it.

Nothing else remembers that: the log learns of a call when it has ended. So each worker looks every second whether the
counters are there, and holds anew what it held; the budget service rebuilds them only after a few seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from breakwater.outage import Outage
from breakwater.policy.budget import CapTable
from breakwater.state.budgets import Budgets
from breakwater.state.connection import Redis, ScriptCall, StateUnavailable

LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Holding:
    """A reservation of a call under way; `amount` in nano-dollars."""

    attempt_id: str
    agent: str
    tenant: str | None
    amount: int
    at: datetime
    until: datetime


class Holdings:
    """What one worker holds."""

    def __init__(
        self, redis: Redis, budgets: Budgets, caps: Callable[[], CapTable], now: Callable[[], datetime]
    ) -> None:
        self._redis = redis
        self._budgets = budgets
        self._caps = caps
        self._now = now
        self._held: dict[str, Holding] = {}
        self._missed: set[str] = set()
        self._lost = Outage("budget counters")

    @contextmanager
    def during(self, holding: Holding) -> Generator[None]:
        """Remembers a reservation until its call has ended and stands in the log."""
        self._held[holding.attempt_id] = holding
        try:
            yield
        finally:
            del self._held[holding.attempt_id]

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            try:
                await self.look()
            except StateUnavailable:
                self._lost.failed("Redis does not answer")
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Holds anew what Redis has lost. Raises StateUnavailable: look again.

        Where only some is missing, Redis has come back with what it knew a while before, or the call has ended and is
        settled just now: that is seen twice before it is held anew.
        """
        if await self._budgets.filled():
            self._lost.worked()
            ids = list(self._held)
            found = await self._budgets.reservations(ids)
            missing = {attempt_id for attempt_id, one in zip(ids, found, strict=True) if one is None}
            wanted, self._missed = missing & self._missed, missing
        else:
            if self._caps().any_hard:
                self._lost.failed("they are lost, or not made yet; until they are no call is made under a hard cap")
            wanted = set(self._held)
        if calls := [self._call(self._held[attempt_id]) for attempt_id in wanted if attempt_id in self._held]:
            await self._redis.run(calls)

    def _call(self, held: Holding) -> ScriptCall:
        now = self._now()
        lease = max(timedelta(seconds=1), held.until - now)
        return self._budgets.reserve_call(
            held.attempt_id,
            held.agent,
            held.tenant,
            held.amount,
            self._caps().counters(held.agent, held.tenant),
            now=now,
            lease_ms=round(lease.total_seconds() * 1000),
            at=held.at,
        )
