"""The arithmetic of a plane's size, from figures that were measured. Pure.

Each figure says where it is from: a table of docs/performance.md, or the command that measures it. They are of two
slow cores of a shared virtual machine, so that most machines need less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from breakwater.sizing.contract import Bound, PartSize, PlanePart, PlaneSize

CPU_MS: Mapping[PlanePart, float] = {
    "request": 0.74,
    "worker": 1.67,
    "breaker": 0.05,
    "budget": 0.05,
    "alerter": 0.05,
    "sink": 0.09,
    "nats": 0.48,
    "redis": 0.43,
    "clickhouse": 0.08,
}
"""Milliseconds of CPU a job at 16 in flight, the highest of several rounds: `make bench-peers`."""

CHUNK_US: Mapping[PlanePart, float] = {"worker": 28, "request": 22, "nats": 7}
"""Microseconds of CPU a chunk of a streamed answer, which has about one token: `python -m bench.streams`."""

SYNC_MS = 0.75
"""Milliseconds of CPU a job that NATS takes in addition if it syncs each write: `make bench-peers`."""

BASE_MB: Mapping[PlanePart, int] = {
    "request": 105,
    "worker": 105,
    "breaker": 100,
    "budget": 100,
    "alerter": 100,
    "sink": 100,
    "nats": 120,
    "redis": 30,
    "clickhouse": 3_000,
}
"""Megabytes of a process in a container; ClickHouse's is its limit in compose.yaml: docs/deployment.md."""

WAITING_CALL_KB = 50
"""Kilobytes of a worker, and of `request`, for each call that waits: `python -m bench.scale`."""

EVENTS_BYTES = 4_160
RESULTS_BYTES = 2_690
"""Bytes of a job of one call in these streams, without its texts: their sizes before and after 50 jobs over HTTP."""

INDEX_BYTES = 160
"""Bytes of a NATS server's memory for each message, as each has a subject of its own: `python -m bench.index`. 120
while it runs, and a third more for messages of a day, which it indexes twice for two minutes after a start."""

ROW_BYTES = 170
"""Bytes of a job's rows in ClickHouse, without its texts: `python -m bench.storage --columns`."""
TEXTS_SHRINK = 3.3
"""The ratio by which ClickHouse compresses texts: `python -m bench.storage`."""

REDIS_BYTES = 33
REDIS_HOURS = 24
"""Bytes of Redis' memory for each job of the last day: `python -m bench.memory`."""

BYTES_PER_TOKEN = 4
ANSWER_SHARE = 0.25
"""The share of a job's tokens that are its answer."""
MODEL_S = 2.0
"""Seconds that a call takes."""

BUSY = 0.6
"""The share of a core that is planned with. The rest is for bursts, failures and recovery after an outage."""
FULL = 0.7
"""The share of a disk that is planned with: merges and rewritten files need room."""

REPLICATED_FROM = 50.0
"""Jobs a second from which three NATS servers, and two processes of each service, are planned."""

REDIS_MOST = (2_000.0, 6_000.0)
"""Jobs a second at which one core of Redis is busy, at 0.43 and at 0.16 ms a job (at 16 and at 256 in flight)."""
NATS_MEMORY_GB = 32.0
"""The most memory of a NATS server that is planned with."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a plane.

    Attributes:
        jobs_per_s: jobs a second at the busiest time of the day.
        tokens: tokens of a job, prompt and answer.
        retention_days: days for which ClickHouse keeps records.
        streamed: share of jobs whose answer is streamed, 0 to 1.
        events_h: hours for which EVENTS keeps events (`limits.events_max_age_h`).
        results_h: hours for which RESULTS keeps answers (`limits.results_max_age_h`).
        average: average load over a day as a share of `jobs_per_s`.
    """

    jobs_per_s: float
    tokens: int
    retention_days: int
    streamed: float = 0.0
    events_h: float = 72.0
    results_h: float = 24.0
    average: float = 1.0

    @property
    def text_bytes(self) -> int:
        """Bytes of a job's texts."""
        return self.tokens * BYTES_PER_TOKEN

    @property
    def is_replicated(self) -> bool:
        """True if the plane outgrows one machine."""
        return self.jobs_per_s >= REPLICATED_FROM

    def jobs_in(self, hours: float) -> float:
        """Jobs in so many hours."""
        return self.jobs_per_s * self.average * hours * 3_600


def size_of(load: Load, *, cores_per_node: int = 8, memory_gb_per_node: int = 32) -> PlaneSize:
    """Returns the size of a plane for a load."""
    parts = tuple(_part(part, load) for part in CPU_MS)
    cores = sum(part.cores for part in parts)
    memory_gb = sum(part.memory_mb for part in parts) / 1_000
    by_room = max(math.ceil(cores / cores_per_node), math.ceil(memory_gb / memory_gb_per_node))
    return PlaneSize(
        nodes=max(by_room, 3 if load.is_replicated else 1),
        cores_per_node=cores_per_node,
        memory_gb_per_node=memory_gb_per_node,
        cores=round(cores, 1),
        memory_gb=round(memory_gb, 1),
        disk_gb=round(sum(part.disk_gb for part in parts), 1),
        parts=parts,
        bounds=tuple(sorted(_bounds(load), key=lambda bound: bound.jobs_per_s)),
        assumptions=tuple(_assumptions(load)),
    )


def cpu_ms(part: PlanePart, load: Load) -> float:
    """Milliseconds of CPU a job of a part; of NATS, of each of its servers."""
    chunks = load.streamed * load.tokens * ANSWER_SHARE
    sync = SYNC_MS if part == "nats" and load.is_replicated else 0.0
    return CPU_MS[part] + chunks * CHUNK_US.get(part, 0.0) / 1_000 + sync


def _part(part: PlanePart, load: Load) -> PartSize:
    each_ms = cpu_ms(part, load)
    servers = 3 if part == "nats" and load.is_replicated else 1
    cores = load.jobs_per_s * each_ms / 1_000 / BUSY * servers
    processes = servers
    if part not in ("nats", "redis", "clickhouse"):
        processes = max(math.ceil(cores), 2 if load.is_replicated else 1)
    memory_mb = processes * BASE_MB[part] + _memory_mb(part, load) * servers
    disk_gb = _disk_bytes(part, load) * servers / FULL / 1e9
    return PartSize(
        part=part,
        processes=processes,
        cores=round(cores, 2),
        memory_mb=math.ceil(memory_mb),
        disk_gb=round(disk_gb, 1),
        why=_why(part, load, each_ms),
    )


def _memory_mb(part: PlanePart, load: Load) -> float:
    """Megabytes beside those that a process has from its start; of NATS, of each server."""
    match part:
        case "request" | "worker":
            return load.jobs_per_s * MODEL_S * WAITING_CALL_KB / 1_000
        case "nats":
            return _nats_index_bytes(load) / 1e6
        case "redis":
            return load.jobs_in(REDIS_HOURS) * REDIS_BYTES / 1e6
        case _:
            return 0.0


def _nats_index_bytes(load: Load) -> float:
    # An attempt and an execution in EVENTS, a result in RESULTS.
    return (2 * load.jobs_in(load.events_h) + load.jobs_in(load.results_h)) * INDEX_BYTES


def _disk_bytes(part: PlanePart, load: Load) -> float:
    answer = load.text_bytes * ANSWER_SHARE
    match part:
        case "nats":
            events = load.jobs_in(load.events_h) * (EVENTS_BYTES + load.text_bytes)
            return events + load.jobs_in(load.results_h) * (RESULTS_BYTES + answer)
        case "redis":
            return 3 * _memory_mb("redis", load) * 1e6  # its append-only file, and the one that replaces it
        case "clickhouse":
            return load.jobs_in(24 * load.retention_days) * (ROW_BYTES + load.text_bytes / TEXTS_SHRINK)
        case _:
            return 0.0


def _why(part: PlanePart, load: Load, each_ms: float) -> str:
    text = f"{each_ms:.2f} ms of CPU a job"
    match part:
        case "request" | "worker":
            return f"{text}; {WAITING_CALL_KB} KB for each of {load.jobs_per_s * MODEL_S:,.0f} calls in flight"
        case "nats":
            return f"{text} on each server; {INDEX_BYTES} bytes of memory a message for {load.events_h:g} h"
        case "redis":
            return f"{text}, on one core; {REDIS_BYTES} bytes a job for {REDIS_HOURS} h"
        case "clickhouse":
            row = ROW_BYTES + load.text_bytes / TEXTS_SHRINK
            return f"{text}; {row:,.0f} bytes a job for {load.retention_days} days"
        case _:
            return text


def _bounds(load: Load) -> Iterator[Bound]:
    lowest, highest = REDIS_MOST
    yield Bound(
        jobs_per_s=lowest,
        reached=load.jobs_per_s > lowest,
        part="Redis: one core",
        remedy=f"a faster core, and up to {highest:,.0f} with hundreds of jobs in flight; then several planes, each "
        "with its own agents",
    )
    per_job = _nats_index_bytes(load) / load.jobs_per_s
    most = NATS_MEMORY_GB * 1e9 / per_job
    hours = load.events_h * most / load.jobs_per_s
    yield Bound(
        jobs_per_s=round(most, 1),
        reached=load.jobs_per_s > most,
        part=f"NATS: {NATS_MEMORY_GB:g} GB of memory for the index of its messages",
        remedy=f"limits.events_max_age_h of at most {hours:.1f} for this load, with limits.results_max_age_h in "
        "proportion; it is also how long job ids are idempotent",
    )
    nats = BUSY * 1_000 / cpu_ms("nats", load) * 2
    yield Bound(
        jobs_per_s=round(nats, 1),
        reached=load.jobs_per_s > nats,
        part="NATS: two cores of the server that leads EVENTS and JOBS",
        remedy="faster cores; then several planes",
    )


def _assumptions(load: Load) -> Iterator[str]:
    yield f"{BUSY:.0%} of a core and {FULL:.0%} of a disk are used; the rest is headroom"
    yield (
        f"one call of {MODEL_S:g} s a job; {BYTES_PER_TOKEN} bytes a token, {ANSWER_SHARE:.0%} of them in the answer; "
        "figures are of slow cores"
    )
    if load.is_replicated:
        yield "three NATS servers that sync each write, each with the CPU of one alone: a cluster was not measured"
    if load.average < 1:
        yield f"the average load is {load.average:.0%} of the highest"
    yield "records, events and results keep their texts, unencrypted; retries, tools and alerts add to it"
