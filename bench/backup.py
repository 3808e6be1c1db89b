"""The time and size of a backup, and the time of its restore, on records as a busy plane makes them.

    python -m bench.backup [jobs]

Publishes the events of that many jobs (100,000) to a NATS of its own, has the sink store them in ClickHouse, makes an
encrypted backup in a temporary folder, and restores it into another NATS and another database. Prints sizes, seconds
and the memory of this process. Fails if the restored costs differ.
"""

import argparse
import asyncio
import resource
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from bench.storage import Month
from breakwater.backup.storage import Folder
from breakwater.kernel.nats.subjects import Stream
from tests.backup.kit import bring_back, ledgers, make
from tests.helpers import nats_client
from tests.records.samples import new_database
from tests.server_sources import embedded_servers
from tests.services.sink.plane import Plane, of_attempt, of_execution

BATCH = 500


def messages(jobs: int) -> Iterator[tuple[str, bytes]]:
    """The events of jobs: their attempts and ends."""
    for execution in Month().executions(jobs):
        yield from map(of_attempt, execution.attempts)
        yield of_execution(execution)


@contextmanager
def timed(action: str) -> Generator[None]:
    begun = time.monotonic()
    cpu_before = time.process_time()
    yield
    print(
        f"{action}: {time.monotonic() - begun:.1f} s, {time.process_time() - cpu_before:.1f} s of CPU in this process"
    )


async def publish(plane: Plane, jobs: int) -> int:
    """Publishes the events in batches; returns their number."""
    batch: list[tuple[str, bytes]] = []
    count = 0
    for message in messages(jobs):
        batch.append(message)
        if len(batch) == BATCH:
            await plane.publish(batch)
            count += len(batch)
            batch.clear()
    await plane.publish(batch)
    return count + len(batch)


async def measure(jobs: int) -> None:
    with embedded_servers() as (servers, folder):
        clickhouse = servers.clickhouse()
        first, second = servers.nats(), servers.nats()
        async with (
            new_database(clickhouse.url, brand_new=True) as analytics,
            Plane.provisioned(first, clickhouse, analytics) as plane,
        ):
            events = await publish(plane, jobs)
            async with plane.sink():
                while (await plane.consumer()).ack_floor.stream_seq < events:
                    await asyncio.sleep(1)
            state = (await plane.jetstream.stream_info(Stream.EVENTS.value)).state
            print(f"{jobs:,} jobs, {events:,} events of {state.bytes / 1e6:,.0f} MB in NATS")
            storage = Folder(folder / "backup")
            with timed("create"):
                manifest = await make(plane, storage)
            tables = sum(file.bytes for file in manifest.files if file.name.startswith("tables/"))
            each = f"{manifest.bytes / jobs:,.0f} bytes a job"
            print(f"  {manifest.bytes / 1e6:,.1f} MB, {tables / 1e6:,.1f} of them records, {each}")
            before = await ledgers(analytics)
        async with nats_client(second.url) as client, new_database(clickhouse.url, brand_new=True) as analytics:
            with timed("restore, with its check"):
                await bring_back(client, analytics, storage)
            assert await ledgers(analytics) == before, "the restored costs differ"
    print(f"memory of this process at most: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="?", type=int, default=100_000)
    asyncio.run(measure(parser.parse_args().jobs))


if __name__ == "__main__":
    main()
