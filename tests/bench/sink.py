"""How fast the sink stores a backlog, and what it costs: rows a second, and CPU an event in every process.

    python -m tests.bench.sink [jobs]

Starts the embedded servers in a temporary directory and the sink, which stores a few events to warm up and is then held
(SIGSTOP) while two events for each job are published: an attempt and its execution, with 1.4 KB of prompt and answer.
The figures are from its release to the last acknowledgement. Nothing is asserted.
"""

import asyncio
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.analytics.samples import attempt, execution, new_database
from tests.server_sources import EmbeddedServers
from tests.services.sink.plane import Plane, of_attempt, of_execution

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


async def measure(jobs: int, directory: Path) -> None:
    servers = EmbeddedServers(lambda: Path(tempfile.mkdtemp(dir=directory)))
    nats_server, clickhouse_server = servers.nats(), servers.clickhouse()
    try:
        async with (
            new_database(clickhouse_server.url) as analytics,
            Plane.provisioned(nats_server, clickhouse_server, analytics) as plane,
        ):
            sink = await plane.sink_process(directory)
            try:
                await plane.publish(events(WARM_UP_JOBS, "warm-up"))
                await plane.until_done()
                sink.send_signal(signal.SIGSTOP)
                everything = list(events(jobs, "job"))
                for first in range(0, len(everything), PUBLISHED_AT_ONCE):
                    await plane.publish(everything[first : first + PUBLISHED_AT_ONCE])
                await report(plane, sink, len(everything))
            finally:
                sink.send_signal(signal.SIGCONT)
                sink.terminate()
                await sink.wait()
    finally:
        servers.stop()


async def report(plane: Plane, sink: Process, count: int) -> None:
    watched = {
        "nats": child("nats-server"),
        "clickhouse": child("breakwater.embedded.clickhouse"),
        "sink": psutil.Process(sink.pid),
    }
    before = {name: cpu_s(process) for name, process in watched.items()}
    began = time.monotonic()
    sink.send_signal(signal.SIGCONT)
    await plane.until_done()
    took = time.monotonic() - began
    spent = {name: cpu_s(process) - before[name] for name, process in watched.items()}
    resident = watched["sink"].memory_info().rss / 2**20
    print(f"{count} events in {took:.2f} s: {count / took:,.0f} a second; sink resident {resident:.0f} MB")
    for name, seconds in spent.items():
        print(f"{name:>12}: {seconds / count * 1e6:7.1f} us of CPU an event")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, Path(temporary)))
