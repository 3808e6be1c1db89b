"""The checks of `breakwater doctor` on NATS: servers, streams, consumers and their lag, and accepted jobs."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import nats.errors
from nats.aio.client import Client

from breakwater.alerts.settings import Alerts, Route
from breakwater.cli.doctor_findings import SETUP, Finding, Findings, answers, clock, measure
from breakwater.config import Config
from breakwater.config.servers import bus_plan
from breakwater.jobs.store.accepted import RememberedJob, lately_accepted, unclaimed_jobs
from breakwater.kernel.commands import connect, formats
from breakwater.kernel.nats import subjects, topology
from breakwater.kernel.nats.core import RESTART, unhealthy_servers
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import ConsumerStatus, StreamStatus, Survey, survey
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.process.settings import Settings
from breakwater.local.plane import PlaneLocation

READER_RETRY_S = 1.0

CHANNEL_PREFIX = "alerter-channel-"

FULL = 0.98
"""The share of a stream's limit from which on it counts as full: the rest is too small for most messages."""

LAG_WARN = 1_000
"""The number of waiting messages above which a consumer is warned of."""

MAX_SENDING_TIME = timedelta(minutes=1)
"""Longest time that sending an alert may take if the channel does not hold it back."""

STALL_S = 3.0
"""Seconds without progress after which a consumer counts as stuck. No service takes so long to store a batch."""

MAX_JOBS = 20_000
"""Maximum number of the last day's jobs that are checked."""

MAX_WAITING = 20_000
"""Maximum number of messages in JOBS that are read to find waiting jobs."""

SETTLING_TIME = timedelta(seconds=30)
"""Jobs that were accepted within this time are not checked, because they may be between two places."""

_MAX_NAMED_JOBS = 5

_FALLS_BEHIND = {
    "worker": ("More jobs arrive than this agent's `concurrency` allows: raise it, or start more workers."),
    "alerter": (
        "It falls behind; its log says why. Only one alerter at a time does this, so more alerters don't help."
    ),
}


async def nats_findings(plane: PlaneLocation, config: Config | None) -> Findings:
    """Checks NATS, its streams and consumers, and how far each consumer is behind."""
    url = plane.admin_nats_url
    async with connect.bus(url) as client:
        _, ms = await measure(client.flush(5))
        version = client.connected_server_version
        server_version = f"server {version.major}.{version.minor}.{version.patch}"
        yield answers("nats", f"{connect.without_password(url)} answers in {ms:.1f} ms ({server_version})", ms)
        if (ahead_s := await _clock_ahead_s(client)) is not None:
            yield clock("nats", ahead_s)
        for server in await unhealthy_servers(client):
            if server.cannot_write:
                yield Finding("nats", "fail", f"{server.server} can't write: {server.error}", RESTART)
            else:
                yield Finding("nats", "warn", f"{server.server} is unhealthy: {server.error}", "See its log.")
        if config is not None:
            async for finding in _topology(client, config):
                yield finding


async def _clock_ahead_s(client: Client) -> float | None:
    """Measures by how many seconds the server's clock is ahead; None if it does not report its time."""
    sent_at = time.time()
    try:
        reply = await client.request("$JS.API.STREAM.INFO.EVENTS", b"", timeout=3)
        server_time = datetime.fromisoformat(json.loads(reply.data)["ts"])
    except (TimeoutError, nats.errors.Error, ValueError, KeyError):
        return None
    return server_time.timestamp() - (sent_at + time.time()) / 2


async def _topology(client: Client, config: Config) -> Findings:
    replicas = Settings().nats_replicas if "BREAKWATER_NATS_REPLICAS" in os.environ else None
    plan = bus_plan(config)
    surveyed = await survey(client, plan, replicas=replicas)
    if any(consumer.readers == 0 and not consumer.in_progress for consumer in surveyed.consumers):
        # A service has no reader for a moment between two requests.
        await asyncio.sleep(READER_RETRY_S)
        surveyed = await survey(client, plan, replicas=replicas)
    for finding in (*_differences(surveyed), *copy_findings(surveyed.streams, servers=_servers(client))):
        yield finding
    visible = [consumer for consumer in surveyed.consumers if consumer.waiting is not None]
    services = [consumer for consumer in visible if not consumer.name.startswith(CHANNEL_PREFIX)]
    stuck = await _stuck(client, services, plan)
    for consumer in services:
        yield _lag(consumer, stuck=consumer.name in stuck)
    for consumer in services:
        blocked = held_finding(consumer, plan.agents)
        if blocked is not None:
            yield blocked
    for finding in await channel_findings(client, config.alerts, visible):
        yield finding


def _differences(surveyed: Survey) -> list[Finding]:
    """Lists streams and consumers that differ from what the config requires, and streams that are nearly full."""
    findings: list[Finding] = []
    streams_and_consumers = (*surveyed.streams, *surveyed.consumers)
    for entry in streams_and_consumers:
        name = f"{'stream' if isinstance(entry, StreamStatus) else 'consumer'} {entry.name}"
        if entry.verdict == "missing":
            findings.append(Finding("nats", "fail", f"{name} is missing", SETUP))
        elif entry.different == ("max_bytes",):
            remedy = f"{SETUP} If that does not help, NATS lacks storage: free some, or lower `limits`."
            findings.append(Finding("nats", "warn", f"{name} has a different size limit from the config", remedy))
        elif entry.verdict == "differs":
            findings.append(
                Finding("nats", "warn", f"{name} differs from the config: {', '.join(entry.different)}", SETUP)
            )
    if hidden := sum(entry.verdict == "hidden" for entry in streams_and_consumers):
        remedy = "Set BREAKWATER_NATS_URL to an address with the user `setup`."
        findings.append(Finding("nats", "warn", f"this user may not see {hidden} streams and consumers", remedy))
    findings += [finding for entry in surveyed.streams if (finding := full_finding(entry)) is not None]
    if all(entry.verdict == "right" for entry in streams_and_consumers):
        count = f"{len(surveyed.streams)} streams and {len(surveyed.consumers)} consumers are"
        findings.append(Finding("nats", "ok", f"{count} as the config requires"))
    return findings


def _servers(client: Client) -> int:
    """The servers of the cluster that a client has heard of."""
    return len({*client.servers, *client.discovered_servers})


def copy_findings(streams: Sequence[StreamStatus], *, servers: int) -> list[Finding]:
    """Makes findings for streams without enough copies to survive the loss of a server, on a cluster of several."""
    findings: list[Finding] = []
    if late := {stream.name: stream.late_copies for stream in streams if stream.late_copies}:
        nodes = sorted({node for nodes in late.values() for node in nodes})
        text = f"copies of {', '.join(late)} are behind or away on {', '.join(nodes)}"
        remedy = "Another loss may stop these streams. See the log of that server; `nats server report jetstream`."
        findings.append(Finding("nats", "warn", text, remedy))
    single = [stream.name for stream in streams if stream.verdict in {"right", "differs"} and stream.copies == 1]
    if single and servers > 1:
        text = f"{', '.join(single)} have one copy on a cluster of {servers} servers"
        remedy = "With BREAKWATER_NATS_REPLICAS=3, run `breakwater setup`: else the loss of a server loses jobs."
        findings.append(Finding("nats", "warn", text, remedy))
    elif servers > 1 and not late:
        copies = min((stream.copies for stream in streams), default=0)
        findings.append(Finding("nats", "ok", f"each stream has {copies} copies, and all of them agree"))
    return findings


def full_finding(stream: StreamStatus) -> Finding | None:
    """Makes a finding for a stream that is nearly full; None if it has room."""
    if stream.max_bytes is None or stream.bytes < topology.NEARLY_FULL * stream.max_bytes:
        return None
    share = min(stream.bytes / stream.max_bytes, 1)
    consequence = topology.WHEN_FULL[Stream(stream.name)]
    text = f"stream {stream.name} is {share:.0%} full ({stream.bytes / 2**20:,.0f} MiB): {consequence}"
    remedy = "Raise its limit in `limits` of the config (NATS needs the disk for it), and run `breakwater setup`."
    stops = share >= FULL and stream.name not in topology.DROPS_OLDEST
    return Finding("nats", "fail" if stops else "warn", text, remedy)


async def _stuck(client: Client, consumers: Sequence[ConsumerStatus], plan: topology.Plan) -> set[str]:
    """Surveys twice. Returns the names of consumers whose service has messages in progress and finished none.

    Consumers of workers are not checked, because a model's call may take longer than the doctor.
    """
    candidates = {
        consumer.name for consumer in consumers if consumer.in_progress and not consumer.name.startswith("worker-")
    }
    if not candidates:
        return set()
    earlier = {consumer.name: consumer for consumer in (await survey(client, plan)).consumers}
    await asyncio.sleep(STALL_S)
    return {
        consumer.name
        for consumer in (await survey(client, plan)).consumers
        if consumer.name in candidates
        and consumer.acknowledged is not None
        and consumer.acknowledged == earlier[consumer.name].acknowledged
        and 0 < (earlier[consumer.name].in_progress or 0) <= (consumer.in_progress or 0)
    }


def _lag(consumer: ConsumerStatus, *, stuck: bool) -> Finding:
    # The consumer of parked jobs keeps them in progress until their time has come.
    state = "parked" if consumer.name == topology.PARKED_CONSUMER else "in progress"
    text = f"{consumer.name}: {consumer.waiting or 0:,} waiting, {consumer.in_progress or 0:,} {state}"
    service = consumer.name.partition("-")[0]
    unread = _unread(consumer, text, service)
    if unread is not None:
        return unread
    if stuck:
        text += f", and none got done within {STALL_S:g} s"
        remedy = f"See the log of `{service}` for the cause; it continues by itself once that is fixed."
        # Late alerts are only a warning, because nothing is lost.
        return Finding("lag", "warn" if service == "alerter" else "fail", text, remedy)
    if (consumer.waiting or 0) > LAG_WARN:
        remedy = _FALLS_BEHIND.get(service, f"It falls behind: start another `{service}`, or check its log.")
        return Finding("lag", "warn", text, remedy)
    return Finding("lag", "ok", text)


def _unread(consumer: ConsumerStatus, text: str, service: str) -> Finding | None:
    if consumer.readers != 0 or consumer.in_progress:
        return None
    return Finding(
        "lag", "warn", f"{text}, and no service reads them", f"Is the service `{service}` running? See its log."
    )


def held_finding(consumer: ConsumerStatus, agents: Mapping[str, int]) -> Finding | None:
    """Makes a finding for an agent whose slots are all held by redelivered jobs; None for any other."""
    for agent, slots in agents.items():
        if consumer.name == topology.worker_consumer(agent) and (consumer.again or 0) >= slots:
            problem = f"all {slots:,} slots of agent {agent!r} are held by jobs that were delivered before"
            remedy = "See `job_handling_failed` and `unavailable` in the log of `worker`."
            return Finding("lag", "warn", f"{consumer.name}: {problem}", remedy)
    return None


async def channel_findings(client: Client, alerts: Alerts, consumers: Sequence[ConsumerStatus]) -> list[Finding]:
    """Checks the progress of each channel, which may hold alerts back on purpose. Raises BusUnavailableError."""
    by_name = {topology.alert_consumer(name): name for name in alerts.channels}
    return [
        await _channel(client, consumer, name, held_back_for(alerts.channels[name], alerts.quiet_s))
        for consumer in consumers
        if (name := by_name.get(consumer.name)) is not None
    ]


def held_back_for(route: Route, quiet_s: float) -> timedelta:
    """The longest time for which a channel may hold an alert back, for quiet periods, rate limits and quiet hours."""
    limit_s = 0.0 if route.rate_limit is None else route.rate_limit.within_s
    night = timedelta() if route.quiet_hours is None else timedelta(days=1)
    return max(timedelta(seconds=quiet_s + limit_s), night)


async def _channel(client: Client, consumer: ConsumerStatus, name: str, allowed: timedelta) -> Finding:
    waiting = consumer.waiting or 0
    in_progress = consumer.in_progress or 0
    text = f"{consumer.name}: {waiting:,} waiting, {in_progress:,} delayed or being sent"
    log = "The log of `alerter` shows the receiver's responses"
    unread = _unread(consumer, text, "alerter")
    if unread is not None:
        return unread
    oldest_at = await _oldest(client, consumer.name) if in_progress else None
    age = timedelta() if oldest_at is None else datetime.now(UTC) - oldest_at
    if age > allowed + MAX_SENDING_TIME:
        text += f", the oldest for {formats.duration(age.total_seconds() * 1000)}"
        return Finding("lag", "warn", text, f"{log}; `breakwater alerts test {name}` sends it a test message.")
    if waiting > LAG_WARN:
        return Finding("lag", "warn", text, f"{log}, or raise the channel's `rate_limit`.")
    return Finding("lag", "ok", text)


async def _oldest(client: Client, durable: str) -> datetime | None:
    """The time at which the oldest alert that a channel has not finished was stored; None if there is none."""
    lookup = Lookup(lambda: client)
    acknowledged = (await lookup.progress(Stream.ALERTS, durable)).acknowledged
    oldest = await lookup.next(Stream.ALERTS, "bw.alerts.>", acknowledged + 1)
    return None if oldest is None else oldest.stored_at


async def job_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Checks that each job accepted over HTTP within a day is decided, in progress or waiting."""
    async with connect.bus(plane.admin_nats_url) as client, connect.state(plane.redis_url) as redis:
        jobs, omitted_count = await lately_accepted(redis, datetime.now(UTC) - SETTLING_TIME, MAX_JOBS)
        count = f"{len(jobs):,}"
        if omitted_count:
            count += f" (of {len(jobs) + omitted_count:,}, chosen at random)"
        # Looks twice, because a job may move on during the first look.
        lost = jobs
        for _ in range(2):
            lost = await unclaimed_jobs(redis, await _undecided_jobs(client, lost))
            if lost:
                waiting = await _waiting(client)
                if waiting is None:
                    text = f"more than {MAX_WAITING:,} jobs are waiting, too many to check for missing ones"
                    yield Finding("jobs", "warn", text, "Run this again when fewer are waiting.")
                    return
                lost = [job for job in lost if job.execution_id not in waiting]
    if not lost:
        yield Finding("jobs", "ok", f"all {count} accepted jobs have ended, are in progress, or are waiting")
        return
    names = ", ".join(job.execution_id for job in lost[:_MAX_NAMED_JOBS])
    names += ", …" if len(lost) > _MAX_NAMED_JOBS else ""
    text = f"{len(lost):,} of {count} accepted jobs are missing: they have no result, and are not waiting: {names}"
    yield Finding("jobs", "fail", text, "Was a stream deleted or purged? Submit them again, with the same job ids.")


async def _undecided_jobs(client: Client, jobs: list[RememberedJob]) -> list[RememberedJob]:
    """Filters jobs: those that have neither a record nor a result."""
    by_record = {subjects.execution(job.agent, job.execution_id): job for job in jobs}
    async for stored in Lookup(lambda: client).last_on(Stream.EVENTS, list(by_record)):
        by_record.pop(stored.subject, None)
    by_result = {subjects.result(job.execution_id): job for job in by_record.values()}
    async for stored in Lookup(lambda: client).last_on(Stream.RESULTS, list(by_result)):
        by_result.pop(stored.subject, None)
    return list(by_result.values())


async def _waiting(client: Client) -> set[str] | None:
    """The ids of the jobs in JOBS and PARKED, as `request` writes them; None if there are too many."""
    waiting: set[str] = set()
    for stream, subject in ((Stream.JOBS, "bw.jobs.*"), (Stream.PARKED, "bw.parked.>")):
        # Jobs of programs on NATS have another subject; NATS itself accepted them.
        async with aclosing(Lookup(lambda: client).scan(stream, subject)) as stored:
            async for message in stored:
                if len(waiting) == MAX_WAITING:
                    return None
                token = message.headers.get(Header.EXECUTION_ID.value)
                token = token or message.headers.get(Header.MSG_ID.value, "").rpartition("/")[2]
                waiting.add(subjects.decode_token(token))
    return waiting
