"""Memory that Redis takes for an accepted job: while it waits, while it is run, and after its end.

python -m bench.accepted [JOBS]
"""

from __future__ import annotations

import asyncio
import sys
import time

from breakwater.jobs.store import executions
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.jobs.store.executions import Claim, Executions
from breakwater.kernel.ids import id_at
from breakwater.kernel.redis.connection import Redis
from tests.server_sources import embedded_servers

AT_ONCE = 500


async def used(redis: Redis) -> int:
    """Bytes of data, by the server."""
    return (await redis.client.info("memory"))["used_memory_dataset"]


async def measure(url: str, jobs: int) -> None:
    """Prints the bytes of a job in each of its states."""
    redis, now = Redis(url), time.time()
    accepted, claims = AcceptedJobs(redis), Executions(redis)
    ids = [id_at(int(now * 1000), number.to_bytes(10, "big")) for number in range(jobs)]
    await claims.claim(Claim.new("warm"), accepted_s=now)
    before = await used(redis)
    for begin in range(0, jobs, AT_ONCE):
        for job_id in ids[begin : begin + AT_ONCE]:
            accepted.mark(job_id, "writer", tenant="acme", owner="key-1", digest="0" * 32)
        await accepted.close()
    print(f"{'waits':10} {(await used(redis) - before) / jobs:6.0f} bytes a job")
    held = [Claim.new(job_id, "worker") for job_id in ids]
    for begin in range(0, jobs, AT_ONCE):
        part = held[begin : begin + AT_ONCE]
        await asyncio.gather(*(claims.claim(one, tenant="acme", owner="key-1", accepted_s=now) for one in part))
    print(f"{'runs':10} {(await used(redis) - before) / jobs:6.0f} bytes a job")
    executions.LINGER_MS = 1_000  # a minute in production
    for begin in range(0, jobs, AT_ONCE):
        await asyncio.gather(*(claims.finish(one) for one in held[begin : begin + AT_ONCE]))
    while await redis.client.dbsize() > 1:
        await asyncio.sleep(0.5)
    print(f"{'has ended':10} {(await used(redis) - before) / jobs:6.0f} bytes a job")
    await redis.close()


def main() -> None:
    """Starts a Redis, and measures."""
    with embedded_servers() as (servers, _):
        asyncio.run(measure(servers.redis().url, int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))


if __name__ == "__main__":
    main()
