"""Four processes that reserve, settle, release and are killed, against one Redis: no overrun, no leak, exact sums.

They are forks of one that has imported this module. What they settle stands in a log first, here a list in Redis: as
with the real one, what was reported before a process died is settled by others, and every event may be settled again
and again.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING, Any, cast
from zoneinfo import ZoneInfo

import pytest

from breakwater.kernel.process.background import stop
from breakwater.kernel.redis.connection import Redis, ScriptCommand
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import Window
from breakwater.limits.rules.budget import Counter
from breakwater.limits.rules.ledger import AttemptSums, ledger
from breakwater.limits.rules.scopes import CallNames
from breakwater.limits.settings import Caps
from breakwater.limits.store.budget_counters import BudgetCounters, Snapshot
from breakwater.limits.store.budgets import Budgets, PeriodChanged, Reserved, Settlement
from tests.limits.limit_tables import limit_table

if TYPE_CHECKING:  # the processes start faster without
    from tests.servers import RunningServer

WINDOWS: tuple[Window, Window] = ("daily", "monthly")
ZONE = ZoneInfo("UTC")
LOG, EVENTS, TALLY, OVERRUNS = "log", "test:events", "test:tally", "test:overruns"
PROCESSES, CALLS_AT_ONCE, KILLS = 4, 6, 6
LEASE_MS = 300
TOTAL, OF_AGENT = 5_000, 2_700
MOST = 60
"""Nano-dollars that a call may cost."""


def caps(daily: int, monthly: int) -> Caps:
    return Caps.model_construct(daily_usd=daily, monthly_usd=monthly, enforcement="hard")


CAPS = limit_table(
    caps(TOTAL, 2 * TOTAL),
    {"a": caps(2 * OF_AGENT, OF_AGENT), "b": caps(OF_AGENT, 2 * OF_AGENT)},
    {"*": caps(TOTAL, TOTAL)},
)


class OverrunError(Exception):
    """A cap does not hold."""


class Worker:
    """One process."""

    def __init__(self, redis: Redis, name: str) -> None:
        self._redis = redis
        self._budgets = Budgets(redis, ZONE)
        self._name = name
        self._random = random.Random(name)
        self._number = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._calls() for _ in range(CALLS_AT_ONCE)))

    async def _calls(self) -> None:
        while True:
            await self._call()

    async def _call(self) -> None:
        self._number += 1
        attempt_id, amount = f"{self._name}-{self._number}:1", self._random.randint(0, MOST)
        agent, tenant = self._random.choice("aab"), self._random.choice([None, "t", "u"])
        names = CallNames(agent, tenant)
        counters = CAPS.counters(names)

        async def reserve() -> datetime | None:
            now = datetime.now(UTC)
            command = self._budgets.reserve_command(attempt_id, names, amount, counters, now=now, lease_ms=LEASE_MS)
            answer = self._budgets.read_reservation(await self._watched(command, counters), counters, amount, now=now)
            if isinstance(answer, PeriodChanged):
                return await reserve()
            return answer.at if isinstance(answer, Reserved) else None

        at = await self._sent(reserve)
        await self._tell("refused" if at is None else "granted")
        if at is None:
            return
        match self._random.choice(["settle"] * 6 + ["release"] * 2 + ["release, asked late", "die"]):
            case "settle":
                cost = self._random.choice([0, amount // 8, amount // 8, amount])
                event = {"id": attempt_id, "agent": agent, "tenant": tenant, "cost": cost, "at": ms_from_time(at)}
                sequence = await cast(Any, self._redis.client.rpush(EVENTS, json.dumps(event)))
                await self._sent(lambda: self._budgets.settle([settlement(sequence, event)], LOG))
                if self._random.random() < 0.1:
                    await reserve()  # sent long ago, it arrives only now
            case "release" | "release, asked late" as end:
                await self._sent(lambda: self._redis.run([self._budgets.release_command(attempt_id, at)]))
                await self._tell("released")
                if end == "release, asked late":
                    await reserve()
            case _:
                await self._tell("left alone")

    async def _sent(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Asks up to three times, as if answers were lost, and gives the last answer; sometimes all at once."""
        times = self._random.randint(1, 3)
        if self._random.random() < 0.3:
            return (await asyncio.gather(*(ask() for _ in range(times))))[-1]
        return [await ask() for _ in range(times)][-1]

    async def _watched(self, command: ScriptCommand, counters: tuple[Counter, ...]) -> list[Any]:
        """Runs the script, and looks in the same transaction whether all caps hold."""
        places = dict(zip(WINDOWS, command.keys[-2:], strict=True))
        async with self._redis.client.pipeline(transaction=True) as pipe:
            pipe.eval(command.script.text, len(command.keys), *command.keys, *command.arguments)
            for counter in counters:
                pipe.hmget(places[counter.window], [f"spent:{counter.key}", f"reserved:{counter.key}"])
            answer, *found = await pipe.execute()
        for counter, figures in zip(counters, found, strict=True):
            spent, reserved = (int(figure or 0) for figure in figures)
            if spent + reserved > (counter.hard_limit or 0) or spent < 0 or reserved < 0:
                overrun = f"{counter.name}: {spent} + {reserved} > {counter.hard_limit}"
                await cast(Any, self._redis.client.rpush(OVERRUNS, overrun))
                raise OverrunError(overrun)
        await self._tell("looked")
        return answer

    async def _tell(self, what: str) -> None:
        await cast(Any, self._redis.client.hincrby(TALLY, what, 1))


def settlement(sequence: int, event: dict[str, Any]) -> Settlement:
    figures, at = AttemptSums(spent=event["cost"], calls=1), time_from_ms(event["at"])
    return Settlement(event["id"], sequence, CallNames(event["agent"], event["tenant"]), figures, at)


def process(url: str, name: str) -> None:
    """What each process does, until it is killed or the tests have ended."""

    async def work() -> None:
        tests = multiprocessing.parent_process()
        assert tests is not None
        working = asyncio.ensure_future(Worker(Redis(url), name).run())
        asyncio.get_running_loop().add_reader(tests.sentinel, working.cancel)
        await working

    asyncio.run(work())


STARTER = multiprocessing.get_context("forkserver")


class Fleet:
    """The processes, and a budget service: it sweeps all the while."""

    def __init__(self, redis: Redis, url: str) -> None:
        self._redis = redis
        self._url = url
        self._budgets = Budgets(redis, ZONE)
        self._random = random.Random(7)
        self._events: list[dict[str, Any]] = []
        self._running: list[ForkServerProcess] = []
        self._started = 0

    def start(self) -> None:
        self._started += 1
        STARTER.set_forkserver_preload([__name__])
        started = STARTER.Process(target=process, args=(self._url, f"w{self._started}"), daemon=True)
        started.start()
        self._running.append(started)

    def kill(self) -> None:
        killed = self._running.pop(self._random.randrange(len(self._running)))
        assert killed.is_alive(), "it has ended by itself"
        killed.kill()
        killed.join()

    def end(self) -> None:
        for running in self._running:
            running.kill()
        for running in self._running:
            running.join()

    async def until_looked(self, times: int) -> None:
        """Waits until the processes have asked so many times more."""
        before = (await self.tally()).get("looked", 0)
        async with asyncio.timeout(120):
            while (await self.tally()).get("looked", 0) < before + times:
                assert await self.overruns() == []
                await asyncio.sleep(0.005)

    async def tally(self) -> dict[str, int]:
        return {what: int(times) for what, times in (await cast(Any, self._redis.client.hgetall(TALLY))).items()}

    async def overruns(self) -> list[str]:
        return await cast(Any, self._redis.client.lrange(OVERRUNS, 0, -1))

    async def events(self) -> list[dict[str, Any]]:
        known = len(self._events)
        lines = await cast(Any, self._redis.client.lrange(EVENTS, known, -1))
        self._events[known:] = [json.loads(line) for line in lines]  # in the place of what the other sweeper read
        return self._events

    async def sweep(self) -> None:
        """Charges what has lapsed, as the budget service does."""
        for attempt_id in await self._budgets.lapsed_attempts(datetime.now(UTC)):
            [held] = await self._budgets.reservations([attempt_id])
            reported = {event["id"]: place for place, event in enumerate(await self.events(), 1)}
            if held is None:
                await self._budgets.forget_lease(attempt_id)
            elif (sequence := reported.get(attempt_id)) is not None:
                await self._budgets.settle([settlement(sequence, self._events[sequence - 1])], LOG)
            else:
                await self._budgets.charge_estimate(held)

    async def sweep_on(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(0.02)

    async def settle_all_again(self) -> None:
        events = list(enumerate(await self.events(), 1))
        self._random.shuffle(events)
        for start in range(0, len(events), 100):
            await self._budgets.settle([settlement(*event) for event in events[start : start + 100]], LOG)

    async def snapshot(self) -> Snapshot:
        all_counters = BudgetCounters(self._redis, ZONE)
        return await all_counters.snapshot(all_counters.periods(datetime.now(UTC)))


@pytest.mark.long
async def test_processes_that_are_killed_at_any_moment_overrun_no_cap_and_leave_nothing_held(
    redis: Redis, redis_server: RunningServer
) -> None:
    from tests.records.test_messages import attempt  # the processes start faster without

    all_counters = BudgetCounters(redis, ZONE)
    assert await all_counters.fill(None, LOG, 0, all_counters.periods(datetime.now(UTC)), {}, {})
    fleet = Fleet(redis, redis_server.url)
    sweepers = [asyncio.create_task(fleet.sweep_on()) for _ in range(2)]
    try:
        for _ in range(PROCESSES):
            fleet.start()
        for _ in range(KILLS):
            await fleet.until_looked(random.randint(60, 160))
            fleet.kill()
            fleet.start()
        await fleet.until_looked(200)
    finally:
        fleet.end()
        await stop(*sweepers)

    async with asyncio.timeout(60):
        while not all(held.charged for held in (await fleet.snapshot()).reservations):
            await fleet.sweep()
    await fleet.settle_all_again()

    assert await fleet.overruns() == []
    tally = await fleet.tally()
    assert min(tally[what] for what in ("granted", "refused", "released", "left alone")) > 5, tally
    snapshot = await fleet.snapshot()
    assert not any(snapshot.reserved.values())
    charged = snapshot.held_amounts(charged=True)
    assert charged
    attempts = [
        attempt(agent=event["agent"], tenant=event["tenant"], cost=event["cost"], started_at=time_from_ms(event["at"]))
        for event in await fleet.events()
    ]
    record = ledger(attempts, ZONE)
    for place in {*record, *snapshot.figures, *charged}:
        expected = record.get(place, AttemptSums()) + AttemptSums(spent=charged.get(place, 0))
        assert snapshot.figures.get(place, AttemptSums()) == expected, place
