"""What the budgets cost a job: one script to hold its worst case, and its share of a batch that is settled.

    python -m bench.budgets [rounds]

Starts the embedded Redis in a temporary directory. With every budget under a hard cap, it reserves for one call after
the other, charges each as its worker does, then settles them in batches of 100, and settles the same batches once
more, as after a redelivery: without further limits, with three and ten that the call meets, with ten where the calls
are of 50 keys and users, and with limits on the requests, tokens and concurrent calls of its agent and its model.
These take turns, 200 calls each, and the least of all rounds counts, as others use the machine too. `client` is
processor time of this process, `Redis` that of its main thread. Nothing is asserted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import uvloop

from bench.counting import CountingRedis
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.limits.rules.limit import Limit
from breakwater.limits.rules.scopes import CallNames, Dimensions, key_of, parse_scope
from breakwater.limits.settings import Caps
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets, Reserved, Settlement, UsedTokens
from tests.limits.limit_tables import limit, limit_table
from tests.server_sources import embedded_servers

ZONE = ZoneInfo("Europe/Berlin")
LOG = "log"
CALLS, BATCH = 200, 100
HELD, COST = 20_000_000, 12_000_000
WARM_UP = 50
NAMES = CallNames("writer", "acme", "m", "local", "bot", "ann", "red", (("project", "web"),))
SCOPES = (
    "key:*", "user:*", "team:*", "model:*", "provider:*", "tag:project=web", "user:* within team:*",
    "key:* within model:*", "user:* within model:*", "team:* within model:*",
)  # fmt: skip


RATES = tuple(
    Limit("rate", parse_scope(scope), unit, window, 10**10, "wait")
    for scope in ("agent:writer", "model:m")
    for unit, window in (("requests", "minute"), ("tokens", "minute"), ("concurrent", None))
)

CASES: Mapping[str, tuple[int, int, Sequence[Limit]]] = {
    "none": (0, 1, ()),
    "3 limits": (3, 1, ()),
    "10 limits": (10, 1, ()),
    "10 limits of 50": (10, 50, ()),
    "rates": (0, 1, RATES),
}
"""The number of further limits, that of the keys and users whose calls they are, and the limits on rates."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one kind of work: for each job in microseconds; round trips and scripts for each time that Redis is asked."""

    asked: int
    round_trips: float
    scripts: float
    elapsed: float
    client: float
    redis: float

    def least(self, other: Cost) -> Cost:
        """Of two measurements of the same work."""
        times = (min(pair) for pair in zip(self.times, other.times, strict=True))
        return Cost(self.asked, self.round_trips, self.scripts, *times)

    @property
    def times(self) -> tuple[float, float, float]:
        return self.elapsed, self.client, self.redis


class Bench:
    """One fleet, whose caps have room for all."""

    def __init__(self, redis: CountingRedis, limits: int, users: int, rates: Sequence[Limit]) -> None:
        caps = Caps.model_construct(daily_usd=2**53, monthly_usd=2**53, enforcement="hard")
        further = [limit(key_of(parse_scope(scope)), "monthly", 2**53) for scope in SCOPES[:limits]]
        self._redis = redis
        self._budgets = Budgets(redis, ZONE)
        self._caps = limit_table(caps, {"writer": caps}, {"*": caps}, (*further, *rates))
        self._dimensions = self._budgets.dimensions = Dimensions(self._caps.dimensions)
        self._names = [replace(NAMES, key=f"bot-{number}", user=f"ann-{number}") for number in range(users)]
        self._settlements: list[Settlement] = []

    async def prepare(self) -> None:
        counters = BudgetCounters(self._redis, ZONE)
        await self._redis.client.flushall()
        periods = counters.periods(datetime.now(UTC), self._dimensions)
        await counters.fill(None, LOG, 0, periods, {}, {}, dimensions=self._dimensions)
        for number in range(WARM_UP):
            await self._reserve(number)
        await self._settle(self._settlements)
        self._settlements.clear()

    async def reserving(self) -> Cost:
        async def work() -> None:
            for number in range(WARM_UP, WARM_UP + CALLS):
                await self._reserve(number)

        return await self._measured(work, asked=CALLS)

    async def settling(self) -> Cost:
        batches = [self._settlements[start : start + BATCH] for start in range(0, CALLS, BATCH)]

        async def work() -> None:
            for batch in batches:
                await self._settle(batch)

        return await self._measured(work, asked=len(batches))

    async def _reserve(self, number: int) -> None:
        now, attempt_id = datetime.now(UTC), f"job-{number}:1"
        names = self._names[number % len(self._names)]
        counters = self._caps.counters(names, self._dimensions)
        rates = self._caps.rate_limits(names)
        command = self._budgets.reserve_command(
            *(attempt_id, names, HELD, counters),
            now=now,
            lease_ms=60_000,
            tokens=5_000,
            rates=rates,
            is_incomplete=self._caps.is_incomplete(names, self._dimensions),
        )
        [raw] = await self._redis.run([command])
        answer = self._budgets.read_reservation(raw, counters, HELD, now=now, rates=rates)
        assert isinstance(answer, Reserved)
        figures = AttemptSums(spent=COST, calls=1, gauged=1, foreseen=HELD, measured=COST)
        self._settlements.append(Settlement(attempt_id, number + 1, names, figures, answer.at))

    async def charging(self) -> Cost:
        async def work() -> None:
            for settlement in self._settlements:
                await self._charge(settlement)

        return await self._measured(work, asked=CALLS)

    async def _charge(self, settlement: Settlement) -> None:
        rates = self._caps.rate_limits(settlement.names)
        used = settlement.figures.spent, UsedTokens(1_000, 1_000)
        command = self._budgets.release_command(
            settlement.attempt_id, settlement.charged_at, used[0], tokens=used[1], rates=rates
        )
        await self._redis.run([command])

    async def _settle(self, batch: Sequence[Settlement]) -> None:
        await self._budgets.settle(batch, LOG)

    async def _measured(self, work: Callable[[], Awaitable[None]], asked: int) -> Cost:
        scripts, spent = await self._scripts()
        trips, began, cpu = self._redis.round_trips, time.perf_counter(), time.process_time()
        await work()
        elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
        trips = self._redis.round_trips - trips
        scripts_after, spent_after = await self._scripts()
        return Cost(
            asked=asked,
            round_trips=trips / asked,
            scripts=(scripts_after - scripts) / asked,
            elapsed=elapsed / CALLS * 1e6,
            client=cpu / CALLS * 1e6,
            redis=(spent_after - spent) / CALLS,
        )

    async def _scripts(self) -> tuple[int, float]:
        """How many scripts Redis has run so far, and the microseconds of processor time that it has used."""
        stats = await self._redis.client.info("commandstats")
        used = await self._redis.client.info("cpu")
        seconds = used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"]
        return int(stats.get("cmdstat_evalsha", {}).get("calls", 0)), seconds * 1e6


async def measure(url: str, rounds: int) -> dict[tuple[str, str], Cost]:
    redis = CountingRedis(url)
    costs: dict[tuple[str, str], Cost] = {}
    try:
        for _ in range(rounds):
            for case, (limits, users, rates) in CASES.items():
                bench = Bench(redis, limits, users, rates)
                await bench.prepare()
                works = {
                    "reserve": bench.reserving,
                    "charge": bench.charging,
                    "settle": bench.settling,
                    "settle again": bench.settling,
                }
                for work, run in works.items():
                    cost = await run()
                    costs[case, work] = cost.least(costs.get((case, work), cost))
    finally:
        await redis.close()
    return costs


def main() -> None:
    """Prints the figures."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with embedded_servers() as (servers, _):
        measured = uvloop.run(measure(servers.redis().url, rounds))
    print(f"{'':30} {'each time':^21}   {'us per job':^24}")
    print(f"{'':30} {'round trips':>11} {'scripts':>9}   {'elapsed':>8} {'client':>7} {'Redis':>7}")
    for (case, work), cost in measured.items():
        asked = f"{cost.round_trips:>11.0f} {cost.scripts:>9.0f}"
        print(f"{work + ', ' + case:30} {asked}   {cost.elapsed:>8.0f} {cost.client:>7.0f} {cost.redis:>7.0f}")
    for case in CASES:
        jobs = [measured[case, work] for work in ("reserve", "charge", "settle")]
        client, in_redis = sum(cost.client for cost in jobs), sum(cost.redis for cost in jobs)
        print(f"{case:30} {'':30} {client:>7.0f} {in_redis:>7.0f}  {client + in_redis:.0f} in all")


if __name__ == "__main__":
    main()
