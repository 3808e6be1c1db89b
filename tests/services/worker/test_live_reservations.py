"""What the calls under way hold comes back when Redis has lost it: all of it, or some."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from breakwater.kernel.redis.connection import Redis
from breakwater.limits.gate.budget import LiveReservations
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.limits.rules.scopes import CallNames
from breakwater.limits.settings import Caps
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import RESERVATIONS, Budgets, LiveReservation, Reservation, Reserved, Settlement
from tests.limits.limit_tables import limit_table

ZONE = ZoneInfo("UTC")
LOG = "log"
NAMES = CallNames("a", "t")
CAPS = limit_table(None, {"a": Caps.model_construct(daily_usd=10, enforcement="hard")})


def now() -> datetime:
    return datetime.now(UTC)


class Worker:
    """A worker with calls under way, and the Redis that it holds them in."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.budgets, self.all_counters = redis, Budgets(redis, ZONE), BudgetCounters(redis, ZONE)
        self.live: dict[str, LiveReservation] = {}
        self.live_reservations = LiveReservations(self.live, redis, self.budgets, lambda: CAPS, now)

    async def fill(self) -> None:
        assert await self.all_counters.fill(None, LOG, 0, self.all_counters.periods(now()), {}, {})

    async def reserve(self, attempt_id: str, amount: int) -> LiveReservation:
        counters, asked_at = CAPS.counters(NAMES), now()
        command = self.budgets.reserve_command(attempt_id, NAMES, amount, counters, now=asked_at, lease_ms=60_000)
        [answer] = await self.redis.run([command])
        granted = self.budgets.read_reservation(answer, counters, amount, now=asked_at)
        assert isinstance(granted, Reserved)
        return LiveReservation(attempt_id, NAMES, amount, granted.at, granted.at + timedelta(minutes=1))

    async def settle(self, call: LiveReservation, cost: int) -> None:
        event = Settlement(call.attempt_id, 1, NAMES, AttemptSums(spent=cost, calls=1), call.at)
        await self.budgets.settle([event], LOG)

    async def held(self) -> list[Reservation]:
        return list((await self.all_counters.snapshot(self.all_counters.periods(now()))).reservations)

    async def reserved(self) -> set[int]:
        """What the counters of all periods and scopes say is held; zero is left out."""
        snapshot = await self.all_counters.snapshot(self.all_counters.periods(now()))
        assert {place: amount for place, amount in snapshot.reserved.items() if amount} == snapshot.held_amounts(
            charged=False
        )
        return set(snapshot.reserved.values()) - {0}

    async def forget(self, call: LiveReservation) -> None:
        """Redis comes back with what it knew before the reservation."""
        release = self.budgets.release_command(call.attempt_id, call.at)
        await self.redis.run([release])
        assert not await self.redis.client.hexists(RESERVATIONS, call.attempt_id)


@contextmanager
def during(worker: Worker, *calls: LiveReservation) -> Generator[None]:
    """While these calls are under way."""
    worker.live.update({call.attempt_id: call for call in calls})
    yield
    for call in calls:
        del worker.live[call.attempt_id]


async def test_when_all_is_lost_it_is_held_again_at_the_next_look_where_it_was(redis: Redis) -> None:
    worker = Worker(redis)
    # Reserved yesterday: it counts there, whatever the time is now, and whatever there is room for by now.
    calls = [
        LiveReservation(f"j{number}:1", NAMES, 7, at := now().replace(microsecond=0) - timedelta(days=1), at)
        for number in range(3)
    ]
    with during(worker, *calls):
        await worker.live_reservations.check()
    found = {one.attempt_id: (one.amount, one.at, one.agent, one.tenant, one.charged) for one in await worker.held()}
    assert found == {call.attempt_id: (7, call.at, "a", "t", False) for call in calls}
    day = (now() - timedelta(days=1)).date().isoformat()
    assert {name for one in await worker.held() for name, _ in one.places} == {day, day[:7]}
    assert await worker.reserved() == {21}
    assert await worker.budgets.lapsed_attempts(now()) == []


async def test_what_redis_has_lost_alone_is_held_again_when_it_is_missing_twice(redis: Redis) -> None:
    worker = Worker(redis)
    await worker.fill()
    kept, lost = await worker.reserve("j:1", 3), await worker.reserve("k:1", 7)
    with during(worker, kept, lost):
        await worker.live_reservations.check()
        await worker.forget(lost)
        await worker.live_reservations.check()
        assert await worker.reserved() == {3}
        await worker.live_reservations.check()
        assert await worker.reserved() == {10}
        assert {(one.attempt_id, one.amount, one.at) for one in await worker.held()} == {
            ("j:1", 3, kept.at),
            ("k:1", 7, lost.at),
        }
        await worker.live_reservations.check()
        assert await worker.reserved() == {10}


async def test_a_call_that_is_settled_and_then_ends_is_not_held_again(redis: Redis) -> None:
    worker = Worker(redis)
    await worker.fill()
    call = await worker.reserve("j:1", 7)
    with during(worker, call):
        await worker.settle(call, 4)
        await worker.live_reservations.check()
    for _ in range(3):
        await worker.live_reservations.check()
    assert await worker.held() == []
    assert await worker.reserved() == set()


async def test_what_was_missing_once_and_is_there_again_counts_as_never_missed(redis: Redis) -> None:
    worker = Worker(redis)
    await worker.fill()
    call = await worker.reserve("j:1", 7)
    with during(worker, call):
        await worker.forget(call)
        await worker.live_reservations.check()
        again = await worker.reserve("j:1", 7)
        await worker.live_reservations.check()
        await worker.forget(again)
        await worker.live_reservations.check()
        assert await worker.held() == []
        await worker.live_reservations.check()
        assert [one.attempt_id for one in await worker.held()] == ["j:1"]


async def test_what_nobody_holds_is_looked_for_by_nobody(redis: Redis) -> None:
    worker = Worker(redis)
    await worker.live_reservations.check()
    await worker.fill()
    await worker.live_reservations.check()
    assert await worker.held() == []


async def test_a_call_whose_time_is_over_is_held_for_a_moment_longer(redis: Redis) -> None:
    worker = Worker(redis)
    late = replace(LiveReservation("j:1", NAMES, 7, now(), now()), until=now() - timedelta(minutes=5))
    with during(worker, late):
        await worker.live_reservations.check()
    assert await worker.budgets.lapsed_attempts(now()) == []
    assert await worker.budgets.lapsed_attempts(now() + timedelta(seconds=2)) == ["j:1"]
