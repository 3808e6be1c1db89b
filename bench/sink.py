"""How fast the sink stores a backlog, what it costs, and how fast clickhouse-connect alone inserts the same rows.

    python -m bench.sink [jobs]

Starts the embedded servers in a temporary directory and the sink, which stores a few events to warm up and is then held
(SIGSTOP) while two events for each job are published: an attempt and its execution, with 1.4 KB of prompt and answer.
The figures are from its release to the last acknowledgement.

Then clickhouse-connect inserts the same rows, which were made before, into the tables of another database of the same
server: in inserts of the same size, one after the other, with nothing to read, to check or to acknowledge. Nothing is
asserted.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import uvloop
from clickhouse_connect.driver import create_async_client

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.table import Table
from breakwater.records.rows import StoredRow
from breakwater.services.sink import records
from breakwater.services.sink.app import BATCH_SIZE
from tests.helpers import FIRST
from tests.records.samples import NOON, attempt, execution, new_database
from tests.server_sources import EmbeddedServers, RunningServer, embedded_servers
from tests.services.sink.plane import Plane, SinkProcess, of_attempt, of_execution

PUBLISHED_AT_ONCE = 2_000
WARM_UP_JOBS = 100


def events(jobs: int, name: str) -> Iterator[tuple[str, bytes]]:
    for number in range(jobs):
        tried = attempt(f"{name}-{number}")
        yield of_attempt(tried)
        prompt = [{"role": "user", "content": "word " * 120}]
        yield of_execution(execution(f"{name}-{number}", attempts=(tried,), messages=prompt, output="word " * 160))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def child(part_of_command: str) -> psutil.Process:
    return next(
        process
        for process in psutil.Process().children(recursive=True)
        if any(part_of_command in word for word in process.cmdline())
    )


async def measure(jobs: int, servers: EmbeddedServers, directory: Path) -> None:
    nats_server, clickhouse_server = servers.nats(), servers.clickhouse()
    everything = list(events(jobs, "job"))
    async with (
        new_database(clickhouse_server.url) as analytics,
        Plane.provisioned(nats_server, clickhouse_server, analytics) as plane,
    ):
        sink = plane.sink_process(directory)
        try:
            await plane.publish(events(WARM_UP_JOBS, "warm-up"))
            await plane.until_done()
            os.kill(sink.pid, signal.SIGSTOP)
            for first in range(0, len(everything), PUBLISHED_AT_ONCE):
                await plane.publish(everything[first : first + PUBLISHED_AT_ONCE])
            by_sink = await report(plane, sink, len(everything))
        finally:
            os.kill(sink.pid, signal.SIGCONT)
            await sink.stop()
    async with new_database(clickhouse_server.url) as analytics:
        alone = await insert_alone(clickhouse_server, analytics, batches(everything))
    print(f"{len(everything)} rows by clickhouse-connect alone: {alone:,.0f} a second")
    print(f"the sink is at {by_sink / alone:.0%} of it")


async def report(plane: Plane, sink: SinkProcess, count: int) -> float:
    """Prints what the sink does; gives its events a second."""
    watched = {
        "nats": child("nats-server"),
        "clickhouse": child("breakwater.local.clickhouse"),
        "sink": psutil.Process(sink.pid),
    }
    before = {name: cpu_s(process) for name, process in watched.items()}
    began = time.monotonic()
    os.kill(sink.pid, signal.SIGCONT)
    await plane.until_done()
    took = time.monotonic() - began
    spent = {name: cpu_s(process) - before[name] for name, process in watched.items()}
    resident = watched["sink"].memory_info().rss / 2**20
    print(f"{count} events by the sink: {count / took:,.0f} a second; resident {resident:.0f} MB")
    for name, seconds in spent.items():
        print(f"{name:>12}: {seconds / count * 1e6:7.1f} us of CPU an event")
    return count / took


def batches(everything: Sequence[tuple[str, bytes]]) -> list[tuple[Table, list[StoredRow]]]:
    """The inserts that the sink makes of these messages, in the order in which it makes them."""
    made: list[tuple[Table, list[StoredRow]]] = []
    for first in range(0, len(everything), BATCH_SIZE):
        by_table: dict[str, tuple[Table, list[StoredRow]]] = {}
        for sequence, (subject, data) in enumerate(everything[first : first + BATCH_SIZE], first + 1):
            table, row = records.read(subject, data, FIRST, sequence, NOON)
            by_table.setdefault(table.name, (table, []))[1].append(row)
        made += by_table.values()
    return made


async def insert_alone(
    server: RunningServer, analytics: Analytics, inserts: Sequence[tuple[Table, Sequence[StoredRow]]]
) -> float:
    """Inserts with the driver's own means; gives rows a second."""
    at = urlsplit(server.url)
    client = await create_async_client(
        host=at.hostname, port=at.port, username=at.username, password=at.password, database=analytics.database
    )
    try:
        began = time.monotonic()
        for table, rows in inserts:
            await client.insert(
                table.name,
                rows,
                column_names=list(table.columns),
                column_type_names=list(table.columns.values()),
                settings={"async_insert": 0, "wait_end_of_query": 1},
            )
        return sum(len(rows) for _, rows in inserts) / (time.monotonic() - began)
    finally:
        await client.close()


if __name__ == "__main__":
    with embedded_servers() as (servers, directory):
        uvloop.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, servers, directory))
