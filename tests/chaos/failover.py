"""The primary of Redis is killed again and again under load, each time with writes that its replica lacks."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis

from breakwater.kernel.types import nano_from_usd
from tests.chaos.plane import AGENTS, Chaos, chaos_plane
from tests.flow.kit import model
from tests.sentinel import PASSWORD, watched_servers
from tests.server_sources import Servers

CALL_S = 0.5
LOST_S = 0.9
"""Up to so long before its primary is killed, the replica receives nothing."""
LOAD_S = 3.0
"""The load between two kills, when all is well again."""
TENANTS = 2
CALL_NANO = 42_000
"""What a call costs; it reserves twice as much."""

HEADER = (
    "| kills | calls that the replicas lacked | jobs | records | calls | called twice | lost | failed | refused "
    "| caps passed | spend that differs | reserved | no call without a cap: p50, max | under a cap: p50, max |\n|"
    + "---|"
    * 14
)


@dataclass(frozen=True, slots=True)
class FailoverOutcome:
    """What is left of a run. Money in nano-dollars; waits in seconds."""

    kills: int
    lacked: Sequence[int]
    """The calls that each new primary lacked, begun or ended."""
    jobs: int
    records: int
    calls: int
    unknown_calls: int
    called_twice: int
    lost: int
    failed: int
    refused: int
    over_caps: dict[str, tuple[int, int]]
    """The tenants that spent more than their cap: what they spent, and the cap."""
    sums: dict[str, int]
    reserved: int
    stuck: tuple[str, ...]
    free_waits: Sequence[float]
    capped_waits: Sequence[float]

    def row(self) -> str:
        """The line of the table."""
        figures = [
            *(
                self.kills,
                f"{sum(self.lacked)}",
                self.jobs,
                self.records,
                self.calls,
                self.called_twice,
                self.lost,
                self.failed,
            ),
            *(self.refused, len(self.over_caps), len(set(self.sums.values())) - 1, self.reserved),
        ]
        return f"| {' | '.join(map(str, figures))} | {_spread(self.free_waits)} | {_spread(self.capped_waits)} |"

    def faults_found(self) -> list[str]:
        """What is not as it must be."""
        found = {
            "jobs without a record": self.jobs - self.records,
            "calls without an attempt": self.unknown_calls,
            "jobs called twice": self.called_twice,
            "lost attempts": self.lost,
            "jobs that failed": self.failed,
            f"caps passed: {self.over_caps}": len(self.over_caps),
            f"sums that differ: {self.sums}": len(set(self.sums.values())) - 1,
            "nano-dollars reserved": self.reserved,
            f"consumers that are stuck: {self.stuck}": len(self.stuck),
        }
        return [f"{count} {what}" for what, count in found.items() if count]


def _spread(waits: Sequence[float]) -> str:
    ordered = sorted(waits)
    return f"{ordered[math.ceil(len(ordered) / 2) - 1]:.1f} s, {ordered[-1]:.1f} s" if ordered else "none"


async def run_failovers(
    directory: Path, source: Servers, kills: int, per_s: float, seed: int, *, down_after_ms: int = 5_000
) -> FailoverOutcome:
    """Kills the primary so many times, while jobs are submitted.

    A third of the jobs has no cap; the others are of tenants whose caps are spent again and again: each kill has
    tenants of its own, which are half spent then.
    """
    chosen = random.Random(seed)
    most = 2 * TENANTS * (kills + 1)
    tenants = {f"t{number}": {"monthly_usd": 1_000} for number in range(most)}
    caps = {name: CALL_NANO * chosen.randrange(20, 60) for name in tenants}
    budgets = {
        "tenants": {name: {"monthly_usd": f"{cap / 1e9:.9f}", "enforcement": "hard"} for name, cap in caps.items()}
    }
    agents = {"writer": {**{k: v for k, v in AGENTS["writer"].items() if k != "budget"}, "max_tokens": 40}}
    async with (
        watched_servers(directory / "redis", down_after_ms=down_after_ms) as watched,
        chaos_plane(
            *(directory, source),
            nodes=1,
            disks={},
            clocks={},
            models={"sim/m": model(latency_ms=CALL_S * 1000)},
            agents=agents,
            watched=watched,
            budgets=budgets,
        ) as chaos,
    ):
        ended = asyncio.Event()
        phase = [0]
        load = asyncio.create_task(_submit(chaos, per_s, phase, ended, chosen))
        killed: list[tuple[float, float]] = []
        lacked: list[int] = []
        for number in range(kills):
            await watched.replicated()
            phase[0] = number
            await asyncio.sleep(LOAD_S)
            port = await watched.primary()
            [replica] = [one for one in watched.servers if one != port]
            replica_pid = watched.servers[replica].pid
            lag_s = chosen.uniform(0, LOST_S)
            os.kill(replica_pid, signal.SIGSTOP)
            async with aioredis.Redis(port=port, password=PASSWORD) as client:
                await client.client_kill_filter(_type="replica")
            await asyncio.sleep(lag_s)
            before = await _counted(port)
            watched.servers[port].kill()
            at = time.time()
            os.kill(replica_pid, signal.SIGCONT)
            lacked.append(before - await _counted(replica))
            while await watched.primary() == port:
                await asyncio.sleep(0.1)
            killed.append((at, time.time()))
            await asyncio.sleep(10)
            await watched.servers[port].restart_async()
        await asyncio.sleep(LOAD_S)
        ended.set()
        await load
        for job in chaos.accepted:
            await chaos.plane.result(job, timeout_s=300)
        return await _outcome(chaos, lacked, caps, killed)


async def _counted(port: int) -> int:
    """The calls that a server has counted, those under way included."""
    async with aioredis.Redis(port=port, password=PASSWORD, decode_responses=True) as client:
        keys = [str(key) async for key in client.scan_iter("bw:limits:monthly:*") if "copy" not in str(key)]
        counted = sum([int(await client.hget(key, "calls:global") or 0) for key in keys])
        return counted + await client.hlen("bw:limits:reservations")


async def _submit(chaos: Chaos, per_s: float, phase: list[int], ended: asyncio.Event, chosen: random.Random) -> None:
    number = 0
    async with asyncio.TaskGroup() as group:
        while not ended.is_set():
            first = 2 * TENANTS * phase[0]
            tenant = None if number % 3 == 0 else f"t{chosen.randrange(first, first + 2 * TENANTS)}"
            group.create_task(_submit_one(chaos, f"j{number}", tenant))
            number += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 1 / per_s)


async def _submit_one(chaos: Chaos, job_id: str, tenant: str | None) -> None:
    job = {"agent": "writer", "job_id": job_id, "prompt": "x" * 300, **({"tenant": tenant} if tenant else {})}
    while not await chaos.publish(job):
        await asyncio.sleep(0.5)
    chaos.accepted[job_id] = time.monotonic()


async def _outcome(
    chaos: Chaos, lacked: Sequence[int], caps: dict[str, int], killed: Sequence[tuple[float, float]]
) -> FailoverOutcome:
    jobs = len(chaos.accepted)
    record = await chaos.settled_record("bw.executions.writer.*", at_least=jobs)
    made = [attempt for attempt in record.attempts if not attempt["short_circuited"]]
    attempt_ids = {attempt["attempt_id"] for attempt in made}
    spent: dict[str, int] = defaultdict(int)
    for attempt in made:
        if attempt["tenant"] is not None:
            spent[attempt["tenant"]] += nano_from_usd(attempt["cost"])
    reasons = Counter(execution["reason"] for execution in record.executions if execution["status"] != "succeeded")
    calls = chaos.plane.sim.ledger.calls
    return FailoverOutcome(
        kills=len(killed),
        lacked=lacked,
        jobs=jobs,
        records=len({execution["execution_id"] for execution in record.executions}),
        calls=len(calls),
        unknown_calls=sum(call.client_request_id not in attempt_ids for call in calls),
        called_twice=sum(count > 1 for count in Counter(attempt["execution_id"] for attempt in made).values()),
        lost=sum(attempt["outcome"] == "worker_lost" for attempt in made),
        failed=sum(reasons.values()) - reasons["budget_exceeded"],
        refused=reasons["budget_exceeded"],
        over_caps={name: (spent[name], cap) for name, cap in caps.items() if spent[name] > cap},
        sums=dict(record.sums),
        reserved=record.reserved,
        stuck=record.stuck,
        free_waits=_pauses(made, killed, capped=False),
        capped_waits=_pauses(made, killed, capped=True),
    )


def _pauses(
    made: Sequence[dict[str, Any]] | Any, killed: Sequence[tuple[float, float]], *, capped: bool
) -> list[float]:
    """The time from each kill to the first call that began after the failover."""
    begun = sorted(
        datetime.fromisoformat(attempt["started_at"]).timestamp()
        for attempt in made
        if (attempt["tenant"] is not None) == capped
    )
    return [next((one for one in begun if one > back - 1), math.inf) - at for at, back in killed]
