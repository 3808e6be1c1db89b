"""CPU of every process of a running stack for one job, and how long a job takes.

    breakwater up --config examples/breakwater.yaml --simulate --data /tmp/bench     # in one terminal
    python -m bench.plane /tmp/bench --jobs 3000 --in-flight 64 --idle-s 30    # in another, on a quiet machine

Jobs are published to NATS for one agent, as `request` does, and counted when their results come; the simulated provider
answers in about 120 ms. CPU is user and system time. The provider's own share is left out of the sums. The plane is
idle before the load, and settles for three seconds after it: what lags behind the answers belongs to the jobs.

Then NATS traces what it is sent and what it sends for 200 jobs more (`--traced-jobs`), and the messages are counted by
subject, whether a stream stores them or not. The trace goes to the plane's log of NATS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import psutil
import redis
from nats.js import JetStreamContext

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.permissions import inbox_prefix
from breakwater.kernel.nats.subjects import Header

SERVERS = {
    "nats-server": "nats", "valkey-server": "redis", "local.clickhouse": "clickhouse",
    "local.provider": "simulated provider", "floor.py work": "worker", "floor.py ask": "asker",
}  # fmt: skip
PROVIDER = "simulated provider"


def role_of(process: psutil.Process) -> str:
    """What a process of the plane does: forked services have a name of their own, and the fork server's arguments."""
    if process.name().startswith("bw-"):
        return process.name().removeprefix("bw-")
    command = " ".join(process.cmdline())
    return next((role for part, role in SERVERS.items() if part in command), "others")


def cpu_ms(supervisor: int) -> Counter[str]:
    """CPU of a plane's processes so far, by role, the supervisor itself among the others."""
    used: Counter[str] = Counter()
    plane = psutil.Process(supervisor)
    for process in (plane, *plane.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # such as one of Redis that has just written its log anew
            times = process.cpu_times()
            used[role_of(process)] += (times.user + times.system) * 1000
    return used


def redis_commands(url: str) -> int:
    """How many commands Redis has run so far, by its own count."""
    with redis.Redis.from_url(url) as client:
        return int(client.info("stats")["total_commands_processed"])  # pyright: ignore[reportIndexIssue, reportUnknownArgumentType]


def print_shares(used: Counter[str], by: float, unit: str) -> None:
    """A line for each role, the largest first, and the sum of all but the provider."""
    shares = {role: ms / by for role, ms in used.most_common()}
    for role, share in shares.items():
        print(f"{role:20} {share:7.3f} {unit}")
    print(f"{'sum, but provider':20} {sum(shares.values()) - shares.get(PROVIDER, 0.0):7.3f} {unit}")


_TRACED = re.compile(r"\[TRC\].* (<<-|->>) \[H?(?:PUB|MSG) (\S+) ")
_KINDS = (
    (re.compile(r"\$JS\.ACK\.(?:[^.]+\.[^.]+\.)?([A-Z]+)\.([a-z-]+)\..*"), r"$JS.ACK.\1.\2"),
    (re.compile(r"(\$JS\.API\.CONSUMER\.MSG\.NEXT\.[A-Z]+\.)worker-.*"), r"\1worker-*"),
    (re.compile(r"(\$JS\.ACK\.[A-Z]+\.)worker-.*"), r"\1worker-*"),
    (re.compile(r"(_INBOX[^.]*)\..*"), r"\1.>"),
    (re.compile(r"(bw\.[a-z-]+)\..*"), r"\1.>"),
)


def kind_of(subject: str) -> str:
    """A subject without what is different for each job."""
    for pattern, kind in _KINDS:
        subject = pattern.sub(kind, subject)
    return subject


@contextmanager
def traced(data: Path) -> Generator[Counter[tuple[str, str]]]:
    """Has NATS trace its messages; at the end they are counted, by `in` or `out` and the kind of subject."""
    config, log, found = data / "nats.conf", data / "logs" / "nats.log", Counter[tuple[str, str]]()
    text, pid = config.read_text(), int((data / "nats" / "nats-server.pid").read_text())
    config.write_text(f"{text}\ntrace: true\nmax_traced_msg_len: 1\n")
    os.kill(pid, signal.SIGHUP)
    time.sleep(1)
    begin = log.stat().st_size
    try:
        yield found
    finally:
        config.write_text(text)
        os.kill(pid, signal.SIGHUP)
    time.sleep(1)
    with log.open(errors="replace") as lines:
        lines.seek(begin)
        for line in lines:
            if (message := _TRACED.search(line)) is not None:
                found["in" if message[1] == "<<-" else "out", kind_of(message[2])] += 1


async def publish_job(jetstream: JetStreamContext, agent: str, job_id: str, **fields: object) -> None:
    """Publishes a small job, with further fields, and waits until NATS has stored it."""
    job = {"agent": agent, "job_id": job_id, "prompt": "How do I return a parcel?"} | fields
    headers = {Header.UNIQUE_ID.value: "1"}
    await jetstream.publish(subjects.job(agent), json.dumps(job).encode(), timeout=30, headers=headers)


def url_of_request(data: Path) -> str:
    """The URL of a plane's NATS for the user `request`, who alone may promise that an id is new."""
    address = json.loads((data / "endpoints.json").read_text())["nats_url"].rpartition("@")[2]
    password = (data / "secrets" / "nats-request").read_text().strip()
    return f"nats://request:{password}@{address}"


async def load(
    url: str, agent: str, jobs: int, in_flight: int, fields_of: Callable[[int], dict[str, Any]] = lambda _: {}
) -> list[float]:
    """Runs jobs over NATS as `request` does.

    Args:
        url: of NATS, for the user `request` if it has users.
        agent: of all jobs.
        jobs: their number.
        in_flight: jobs that run at a time, at most.
        fields_of: further fields of a job, by its number from 0.

    Returns:
        Seconds from publishing to result of each job, sorted.
    """
    client = await nats.connect(url, inbox_prefix=inbox_prefix("request"))
    jetstream = client.jetstream()
    waiting: dict[str, asyncio.Future[None]] = {}

    async def on_result(message: Any) -> None:
        if (future := waiting.pop(message.subject, None)) is not None:
            future.set_result(None)

    await client.subscribe("bw.results.*", cb=on_result)
    slots, took = asyncio.Semaphore(in_flight), list[float]()

    async def run(number: int) -> None:
        async with slots:
            job_id = uuid.uuid4().hex
            future = waiting[subjects.result(job_id)] = asyncio.get_running_loop().create_future()
            begun = time.perf_counter()
            await publish_job(jetstream, agent, job_id, **fields_of(number))
            await future
            took.append(time.perf_counter() - begun)

    await asyncio.gather(*(run(number) for number in range(jobs)))
    await client.close()
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--agent", default="support-triage")
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long it is idle before the load (default 10)")
    parser.add_argument("--traced-jobs", type=int, default=200, help="whose messages are counted (default 200)")
    options = parser.parse_args()
    endpoints = json.loads((options.data / "endpoints.json").read_text())
    plane = endpoints["pid"]
    before = cpu_ms(plane)
    time.sleep(options.idle_s)
    print_shares(cpu_ms(plane) - before, options.idle_s, "ms of CPU a second, idle")
    before, commands, begun = cpu_ms(plane), redis_commands(endpoints["redis_url"]), time.perf_counter()
    took = asyncio.run(load(url_of_request(options.data), options.agent, options.jobs, options.in_flight))
    elapsed = time.perf_counter() - begun
    time.sleep(3)
    print_shares(cpu_ms(plane) - before, options.jobs, "ms of CPU a job")
    commands = redis_commands(endpoints["redis_url"]) - commands
    print(f"{commands / options.jobs:.1f} Redis commands a job, those within scripts included")
    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
    print(f"{options.jobs / elapsed:.0f} jobs/s at {options.in_flight} in flight; p50 {p50:.3f} s, p99 {p99:.3f} s")
    if options.traced_jobs:
        with traced(options.data) as messages:
            asyncio.run(load(url_of_request(options.data), options.agent, options.traced_jobs, options.in_flight))
            time.sleep(3)
        for direction in ("in", "out"):
            counts = {kind: count for (way, kind), count in messages.most_common() if way == direction}
            for kind, count in counts.items():
                print(f"{direction:4} {kind:50} {count / options.traced_jobs:6.2f} messages a job")
            print(f"{direction:4} {'all':50} {sum(counts.values()) / options.traced_jobs:6.2f} messages a job")


if __name__ == "__main__":
    main()
