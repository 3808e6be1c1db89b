"""Memory of a NATS server for each message of EVENTS and RESULTS, and what its restart takes.

    python -m bench.index [--jobs 200000] [--per-s 100] [--parts 1] [--limit-mb MB] [--window-s S]

Stores an attempt, a record and a result for each job, of the plane's sizes and each on a subject of its own, faster
than a plane would: `--per-s` is the pace that their ids tell. The server has two indexes: of all subjects, and of those
in each file of its store, until that was not used for two minutes. Both are measured, then the first alone. Then the
server is killed and starts again, and is stopped and starts again.

`live` is what Go's heap holds after a collection, and `resident` the process, each in bytes a message above those of
the empty server; `most` is the highest resident size so far. `--limit-mb` is the server's `GOMEMLIMIT`,
and `--window-s` the duplicate window of both streams, whose messages the server reads at each start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nats
import psutil
from nats.js import JetStreamContext

from breakwater.kernel.ids import ENTROPY_BYTES, id_at
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.nats.topology import Plan
from breakwater.local.ports import free_port
from breakwater.local.process import spawn
from breakwater.local.servers import nats_spec
from breakwater.sizing.rules import EVENTS_BYTES, RESULTS_BYTES

AGENT = "support-triage"
MESSAGES_PER_JOB = 3
BATCH = 1_000
HEADER_BYTES = 150
"""Bytes of a stored message beside its payload, about."""
UNUSED_S = 135.0
"""Seconds after which the server has dropped the index of each file, with those until it looks."""


class Server:
    """A NATS server that tells what it holds."""

    def __init__(self, data: Path, limit_mb: int | None) -> None:
        port, self._profiles = free_port(), free_port()
        spec = nats_spec(data, port, {})
        config = data / "nats.conf"
        config.write_text(f"{config.read_text()}\nprof_port: {self._profiles}\n")
        limit = {} if limit_mb is None else {"GOMEMLIMIT": f"{limit_mb}MiB"}
        self._spec = replace(spec, env={**spec.env, **limit})
        self.url = f"nats://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes]
        self._messages = 1
        self._empty = (0.0, 0.0)

    async def start(self) -> float:
        """Starts the server; returns seconds until it was ready."""
        begun = time.monotonic()
        self._process = spawn(self._spec)
        while not await self._spec.ready():
            assert self._process.poll() is None, "the server ended"
            await asyncio.sleep(0.05)
        return time.monotonic() - begun

    def end(self, *, kill: bool) -> None:
        """Ends the server, in order or by a crash."""
        self._process.kill() if kill else self._process.terminate()
        self._process.wait()

    def note_empty(self, messages: int) -> None:
        """Takes what the server has now for what it has without messages, of which there will be so many."""
        self._messages, self._empty = messages, (self._live(), self._status("VmRSS"))

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU since the start."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def _status(self, name: str) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) * 1024

    def _live(self) -> float:
        url = f"http://127.0.0.1:{self._profiles}/debug/pprof/heap?debug=1&gc=1"
        with urllib.request.urlopen(url) as profile:
            return float(re.findall(rb"# HeapAlloc = (\d+)", profile.read())[0])

    def report(self, moment: str) -> None:
        """Prints a line of the table."""
        most, resident, live = self._status("VmHWM"), self._status("VmRSS"), self._live()
        rest = [(resident, self._empty[1]), (most, self._empty[1])]
        figures = [round((size - empty) / self._messages) for size, empty in ((live, self._empty[0]), *rest)]
        print(f"| {moment} | " + " | ".join(map(str, figures)) + f" | {self.cpu_s:.1f} |", flush=True)


def messages(jobs: int, per_s: float) -> Iterator[tuple[str, int]]:
    """Subjects and sizes of what jobs leave, in order."""
    chance = random.Random(1)
    begun_ms = time.time() * 1_000
    for number in range(jobs):
        execution_id = id_at(round(begun_ms + number / per_s * 1_000), chance.randbytes(ENTROPY_BYTES))
        yield subjects.attempt(AGENT, execution_id, 1), EVENTS_BYTES // 2
        yield subjects.result(execution_id), RESULTS_BYTES
        yield subjects.execution(AGENT, execution_id), EVENTS_BYTES // 2


async def set_window(url: str, window_s: float) -> None:
    """Changes the duplicate window of both streams."""
    client = await nats.connect(url)
    jetstream = client.jetstream()
    for stream in (Stream.EVENTS, Stream.RESULTS):
        config = (await jetstream.stream_info(stream.value)).config
        await jetstream.update_stream(config.evolve(duplicate_window=window_s))
    await client.close()


async def store(url: str, jobs: int, per_s: float, parts: int) -> None:
    """Publishes the messages in so many parts; waits for the server's acknowledgement once a batch."""
    client = await nats.connect(url)
    jetstream = client.jetstream(timeout=60)
    noise = os.urandom(max(EVENTS_BYTES, RESULTS_BYTES))
    headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0"}
    part = MESSAGES_PER_JOB * jobs // parts
    for number, (subject, size) in enumerate(messages(jobs, per_s)):
        if number and number % part == 0:
            await asyncio.sleep(UNUSED_S)
        payload = noise[: size - HEADER_BYTES]
        if number % BATCH:
            await client.publish(subject, payload, headers=headers)
        else:
            await jetstream.publish(subject, payload, headers=headers)
    await client.flush(60)
    async with asyncio.timeout(60):
        while await _stored(jetstream) < MESSAGES_PER_JOB * jobs:
            await asyncio.sleep(0.1)
    await client.close()


async def _stored(jetstream: JetStreamContext) -> int:
    streams = [await jetstream.stream_info(stream.value) for stream in (Stream.EVENTS, Stream.RESULTS)]
    return sum(stream.state.messages for stream in streams)


async def measure(options: argparse.Namespace, data: Path) -> None:
    """Prints the table."""
    server = Server(data, options.limit_mb)
    await server.start()
    try:
        await provision(server.url, Plan({AGENT: 10}))
        if options.window_s is not None:
            await set_window(server.url, options.window_s)
        server.note_empty(MESSAGES_PER_JOB * options.jobs)
        print("| | live | resident | most | CPU s |\n|---|---|---|---|---|")
        await store(server.url, options.jobs, options.per_s, options.parts)
        server.report("stored")
        await asyncio.sleep(UNUSED_S)
        server.report("unused for two minutes")
        for action, kill in (("killed", True), ("stopped", False)):
            begun = time.monotonic()
            server.end(kill=kill)
            ended_s, ready_s = time.monotonic() - begun, await server.start()
            server.report(f"{action}, {ended_s:.1f} s, ready after {ready_s:.1f} s")
    finally:
        server.end(kill=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200_000, help="(default 200000)")
    parser.add_argument("--per-s", type=float, default=100.0, help="(default 100)")
    parser.add_argument("--parts", type=int, default=1, help="pauses of two minutes between so many parts (default 1)")
    parser.add_argument("--limit-mb", type=int)
    parser.add_argument("--window-s", type=float)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(parser.parse_args(), Path(directory)))


if __name__ == "__main__":
    main()
