"""What it costs to ask whether a call may be made, with everything on that can hold it back.

    python -m bench.admission [calls]

Starts the embedded Redis in a temporary directory and asks, one call after the other, for a job with a task guard, a
breaker, a daily and a monthly hard cap of its agent and of all agents, rate limits of agent and model, and a retry
budget; its checkpoint of 2 KB is saved in the same round trip. What was granted is given back in between, which is not
measured. `in Redis` is what Redis itself counts for the scripts of one admission, in a pass of its own. Nothing is
asserted.

Measured on two cores of a Xeon at 2.5 GHz, with other work beside it:

                             round trips   p50 ms   p99 ms  in Redis ms
    a PING, to compare                 1    0.250    0.326        0.000
    granted                            1    0.804    1.678        0.460
    refused: rate limit                2    1.406    2.234        0.331
    refused: budget                    2    1.360    2.554        0.335
    refused: open breaker              2    2.254    2.658        0.724
    refused: stopped task              2    1.463    2.836        0.654

Before hiredis packed the hundred arguments, a granted one took 0.976 ms in the same quarter of an hour.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import uvloop

from bench.counting import CountingRedis
from breakwater.breakers.rules.breaker import Breaker, BreakerKey
from breakwater.breakers.store import Saving
from breakwater.calls.assignment import Checkpoint
from breakwater.calls.gate import Refused
from breakwater.calls.rules.repairs import Correction, Repairs
from breakwater.config import Config, LiveConfig, parse_config
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats.broker import connection_of, make_broker
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.rules.guard import Trip
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.tasks import TripRecord
from breakwater.services.worker.admission import admit, gates_of
from breakwater.services.worker.context import WorkerContext, context_for
from breakwater.services.worker.next_call import admission_for
from tests.server_sources import embedded_servers
from tests.services.worker.assignments import assignment_of

CONFIG = """
providers: {sim: {kind: openai, base_url: "http://127.0.0.1:1/v1"}}
models:
  sim/m:
    price: {input_usd_per_mtok: 1, output_usd_per_mtok: 4}
    rate_limit: {requests_per_minute: 1000000, tokens_per_minute: 10000000000, concurrent_calls: 1000}
  spread:
    price: {input_usd_per_mtok: 1, output_usd_per_mtok: 4}
    rate_limit: {requests_per_minute: 1000000, tokens_per_minute: 10000000000, concurrent_calls: 1000}
    affinity: session
    deployments: [NAMES]
budgets: {global: {daily_usd: 1000000, monthly_usd: 1000000, enforcement: hard}}
agents:
  writer:
    model: sim/m
    breaker: {consecutive_failures: 3, same_error: 5, errors: 10, failure_rate: 0.5}
    guard: {max_iterations: 1000000, max_tokens: 1000000000}
    budget: {daily_usd: 1000000, monthly_usd: 1000000, enforcement: hard}
    rate_limit: {requests_per_minute: 1000000, tokens_per_minute: 10000000000, concurrent_calls: 1000}
  spread:
    model: spread
    breaker: {consecutive_failures: 3, same_error: 5, errors: 10, failure_rate: 0.5}
    guard: {max_iterations: 1000000, max_tokens: 1000000000}
    budget: {daily_usd: 1000000, monthly_usd: 1000000, enforcement: hard}
    rate_limit: {requests_per_minute: 1000000, tokens_per_minute: 10000000000, concurrent_calls: 1000}
  poor: {model: sim/m, guard: {max_iterations: 1000000}, budget: {daily_usd: 0.000001, enforcement: hard}}
  throttled: {model: sim/m, guard: {max_iterations: 1000000}, rate_limit: {requests_per_minute: 100, on_exceeded: fail}}
""".replace("NAMES", ", ".join(f"{{provider: sim, name: d{number}}}" for number in range(8)))
REPAIRS = Repairs(corrections=(Correction(answer="x" * 2_000),))
TASK = "the task"
WARM_UP = 300


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one admission: round trips at most, ms by the worker's clock, and ms within Redis (median)."""

    round_trips: int
    p50: float
    p99: float
    in_redis: float


def context_of(redis: Redis, config: Config) -> WorkerContext:
    """A worker's context that never connects to NATS: nothing is published here."""
    connection = connection_of(make_broker("nats://127.0.0.1:1", "bench"))
    return context_for(
        config,
        LiveConfig(config).limits,
        redis=redis,
        publisher=Publisher(connection, "bench"),
        lookup=Lookup(connection),
        providers={},
    )


def figures(round_trips: int, took: Sequence[float], in_redis: Sequence[float]) -> Figures:
    """From seconds."""
    ordered = sorted(took)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return Figures(round_trips, p50 * 1e3, p99 * 1e3, statistics.median(in_redis) * 1e3)


class Bench:
    """Asks again and again."""

    def __init__(self, redis: CountingRedis, calls: int) -> None:
        self._redis = redis
        self._worker = context_of(redis, parse_config(CONFIG))
        self._gates = gates_of(self._worker)
        self._calls = calls
        self._number = 0

    async def admissions(self, agent_name: str, expected: str) -> Figures:
        """Of calls that are all answered with `expected`: a reason, or `admitted`."""
        for _ in range(WARM_UP):
            await self._ask(agent_name)
        asked = [await self._ask(agent_name) for _ in range(self._calls)]
        assert {reason for _, _, reason, _ in asked} == {expected}
        in_redis = [(await self._ask(agent_name, look_into_redis=True))[3] for _ in range(self._calls // 10)]
        round_trips = max(trips for _, trips, _, _ in asked)
        return figures(round_trips, [elapsed for elapsed, _, _, _ in asked], in_redis)

    async def _ask(self, agent_name: str, *, look_into_redis: bool = False) -> tuple[float, int, str, float]:
        """Seconds, round trips, why it was refused or `admitted`, and seconds within Redis if asked for."""
        worker = self._worker
        self._number += 1
        job_id = f"job-{self._number}"
        job = {"agent": agent_name, "job_id": job_id, "prompt": "How do I return a parcel?", "task_id": TASK}
        assignment = assignment_of(worker, job)
        claim = assignment.claim
        now = worker.now()
        checkpoint = Checkpoint(dispatched_at=now, deadline=now, repairs=REPAIRS)
        targets = worker.targets.all_of(agent_name, assignment.chain[0])
        await worker.executions.claim(claim)
        trips, spent = self._redis.round_trips, await self._spent() if look_into_redis else 0.0
        choosing = time.perf_counter()
        target = targets[0]
        if len(targets) > 1:
            policy = worker.targets.policy_of(agent_name, assignment.chain[0])
            target = worker.balancer.order_for(assignment, checkpoint, targets, policy, 5_000)[0]
            worker.balancer.note_call(assignment, target, 5_000, policy)
        chosen = time.perf_counter() - choosing
        admission = admission_for(worker, assignment, checkpoint, target, 30.0)
        began = time.perf_counter() - chosen
        verdict = await admit(worker, admission, self._gates)
        elapsed = time.perf_counter() - began
        trips, spent = self._redis.round_trips - trips, await self._spent() - spent if look_into_redis else 0.0
        if verdict is None and agent_name != "throttled":
            await self._redis.run([call for gate in admission.gates if (call := gate.release()) is not None])
        await worker.executions.finish(claim)
        return (
            elapsed,
            trips,
            "admitted" if verdict is None else verdict.reason if isinstance(verdict, Refused) else "waits",
            spent,
        )

    async def _spent(self) -> float:
        """Seconds that Redis has spent on scripts so far."""
        stats = await self._redis.client.info("commandstats")
        return float(stats.get("cmdstat_evalsha", {}).get("usec", 0)) / 1e6

    async def ping(self) -> Figures:
        """A round trip that does nothing."""
        took: list[float] = []
        for _ in range(self._calls):
            began = time.perf_counter()
            await self._redis.ping()
            took.append(time.perf_counter() - began)
        return figures(1, took, [0.0])

    async def open_breaker(self) -> None:
        key = BreakerKey("writer", "sim/m")
        [before] = await self._worker.breakers.load([key])
        is_open = replace(before.breaker, state="open", version=1, open_until_ms=before.now_ms + 3_600_000)
        await self._worker.breakers.save([Saving(key, before, is_open, None)])

    async def close_breaker(self) -> None:
        key = BreakerKey("writer", "sim/m")
        [before] = await self._worker.breakers.load([key])
        await self._worker.breakers.save([Saving(key, before, Breaker(version=2), None)])

    async def stop_task(self) -> None:
        trip = Trip("max_iterations", "10 iterations (limit: 10)")
        await self._worker.guards.tasks.restore(
            TaskKey(None, TASK), TripRecord(trip, "writer", "job", 1, published=True)
        )


async def measure(url: str, calls: int) -> dict[str, Figures]:
    redis = CountingRedis(url)
    try:
        bench = Bench(redis, calls)
        counters = BudgetCounters(redis, ZoneInfo("UTC"))
        await counters.fill(None, "bench", 0, counters.periods(datetime.now(UTC)), {}, {})
        found = {"a PING, to compare": await bench.ping()}
        found["granted"] = await bench.admissions("writer", "admitted")
        found["granted, of 8 deployments"] = await bench.admissions("spread", "admitted")
        found["refused: rate limit"] = await bench.admissions("throttled", "rate_limited")
        found["refused: budget"] = await bench.admissions("poor", "budget_exceeded")
        await bench.open_breaker()
        found["refused: open breaker"] = await bench.admissions("writer", "breaker_open")
        await bench.close_breaker()
        await bench.stop_task()
        found["refused: stopped task"] = await bench.admissions("writer", "guard_tripped")
    finally:
        await redis.close()
    return found


def main() -> None:
    """Prints the figures."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    with embedded_servers() as (servers, _):
        measured = uvloop.run(measure(servers.redis().url, calls))
    print(f"{'':25} {'round trips':>11} {'p50 ms':>8} {'p99 ms':>8} {'in Redis ms':>12}")
    for what, found in measured.items():
        print(f"{what:25} {found.round_trips:>11} {found.p50:>8.3f} {found.p99:>8.3f} {found.in_redis:>12.3f}")


if __name__ == "__main__":
    main()
