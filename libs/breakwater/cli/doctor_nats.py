"""The doctor's checks of NATS: does it answer, is everything there, what falls behind, has an accepted job vanished."""

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

from breakwater.alerts.rules.alert_rules import Route
from breakwater.cli.doctor_findings import SETUP, Finding, Findings, answers, clock, timed
from breakwater.config import Alerts, Config
from breakwater.jobs.store.accepted import RememberedJob, lately_accepted, unclaimed
from breakwater.kernel.commands import connect, formats
from breakwater.kernel.nats import subjects, topology
from breakwater.kernel.nats.core import RESTART, unhealthy_servers
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import ConsumerFound, StreamFound, Survey, survey
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.process.settings import Settings
from breakwater.local.commands.setup import bus_plan
from breakwater.local.plane import PlaneLocation

READER_RETRY_S = 1.0

CHANNELS = "alerter-channel-"

FULL = 0.98
"""Share of a stream's limit: the last few bytes are too few for most messages."""

LAG_WARN = 1_000
"""Number of waiting messages that is worth a word."""

SENDING = timedelta(minutes=1)
"""Longest time that a message may take when nothing holds it back."""

STALL_S = 3.0
"""Longer than any service gathers a batch, with as long again to store it."""

MAX_JOBS = 20_000
"""Number of jobs of the last day that are looked at."""

MAX_WAITING = 20_000
"""Number of messages of JOBS that are read to find what waits there."""

SETTLING = timedelta(seconds=30)
"""A job may be on its way from one place to the next."""

_NAMED = 5

_FALLS_BEHIND = {
    "worker": ("More jobs arrive than this agent's `concurrency` allows: raise it, or start more workers."),
    "alerter": (
        "It falls behind; its log says why. Only one alerter at a time does this, so more alerters don't help."
    ),
}


async def nats_findings(plane: PlaneLocation, config: Config | None) -> Findings:
    """NATS itself, the streams and consumers, and how far each consumer is behind."""
    url = plane.admin_nats_url
    async with connect.bus(url) as client:
        _, ms = await timed(client.flush(5))
        version = client.connected_server_version
        server = f"server {version.major}.{version.minor}.{version.patch}"
        yield answers("nats", f"{connect.without_password(url)} answers in {ms:.1f} ms ({server})", ms)
        if (ahead_s := await _clock_ahead_s(client)) is not None:
            yield clock("nats", ahead_s)
        for one in await unhealthy_servers(client):
            if one.cannot_write:
                yield Finding("nats", "fail", f"{one.server} can't write: {one.error}", RESTART)
            else:
                yield Finding("nats", "warn", f"{one.server} is unhealthy: {one.error}", "See its log.")
        if config is not None:
            async for finding in _topology(client, config):
                yield finding


async def _clock_ahead_s(client: Client) -> float | None:
    """Seconds by which the server's clock is ahead; None where it does not say."""
    begun = time.time()
    try:
        answer = await client.request("$JS.API.STREAM.INFO.EVENTS", b"", timeout=3)
        at = datetime.fromisoformat(json.loads(answer.data)["ts"])
    except (TimeoutError, nats.errors.Error, ValueError, KeyError):
        return None
    return at.timestamp() - (begun + time.time()) / 2


async def _topology(client: Client, config: Config) -> Findings:
    replicas = Settings().nats_replicas if "BREAKWATER_NATS_REPLICAS" in os.environ else None
    plan = bus_plan(config)
    found = await survey(client, plan, replicas=replicas)
    if any(one.readers == 0 and not one.in_progress for one in found.consumers):
        # Between two requests of a service there may be none for a moment.
        await asyncio.sleep(READER_RETRY_S)
        found = await survey(client, plan, replicas=replicas)
    for finding in _differences(found):
        yield finding
    seen = [one for one in found.consumers if one.waiting is not None]
    services = [one for one in seen if not one.name.startswith(CHANNELS)]
    stuck = await _stuck(client, services, plan)
    for one in services:
        yield _lag(one, stuck=one.name in stuck)
    for one in services:
        if (held := held_finding(one, plan.agents)) is not None:
            yield held
    for finding in await channel_findings(client, config.alerts, seen):
        yield finding


def _differences(found: Survey) -> list[Finding]:
    """The server's streams and consumers that are not as the config asks."""
    findings: list[Finding] = []
    every = (*found.streams, *found.consumers)
    for one in every:
        what = f"{'stream' if isinstance(one, StreamFound) else 'consumer'} {one.name}"
        if one.verdict == "missing":
            findings.append(Finding("nats", "fail", f"{what} is missing", SETUP))
        elif one.different == ("max_bytes",):
            remedy = f"{SETUP} If that does not help, NATS lacks storage: free some, or lower `limits`."
            findings.append(Finding("nats", "warn", f"{what} has a different size limit from the config", remedy))
        elif one.verdict == "differs":
            findings.append(
                Finding("nats", "warn", f"{what} differs from the config: {', '.join(one.different)}", SETUP)
            )
    if hidden := sum(one.verdict == "hidden" for one in every):
        remedy = "Set BREAKWATER_NATS_URL to an address with the user `setup`."
        findings.append(Finding("nats", "warn", f"this user may not see {hidden} streams and consumers", remedy))
    findings += [full for one in found.streams if (full := full_finding(one)) is not None]
    if all(one.verdict == "right" for one in every):
        count = f"{len(found.streams)} streams and {len(found.consumers)} consumers are"
        findings.append(Finding("nats", "ok", f"{count} as the config requires"))
    return findings


def full_finding(stream: StreamFound) -> Finding | None:
    """A finding of a stream that is nearly full; None where it has room."""
    if stream.max_bytes is None or stream.bytes < topology.NEARLY_FULL * stream.max_bytes:
        return None
    share = min(stream.bytes / stream.max_bytes, 1)
    means = topology.WHEN_FULL[Stream(stream.name)]
    text = f"stream {stream.name} is {share:.0%} full ({stream.bytes / 2**20:,.0f} MiB): {means}"
    remedy = "Raise its limit in `limits` of the config (NATS needs the disk for it), and run `breakwater setup`."
    stops = share >= FULL and stream.name not in topology.DROPS_OLDEST
    return Finding("nats", "fail" if stops else "warn", text, remedy)


async def _stuck(client: Client, consumers: Sequence[ConsumerFound], plan: topology.Plan) -> set[str]:
    """The consumers whose service takes messages and finishes none between two looks.

    Without the workers': a call of a model takes longer than a doctor may, and is no fault.
    """
    at_work = {one.name for one in consumers if one.in_progress and not one.name.startswith("worker-")}
    if not at_work:
        return set()
    before = {one.name: one for one in (await survey(client, plan)).consumers}
    await asyncio.sleep(STALL_S)
    return {
        one.name
        for one in (await survey(client, plan)).consumers
        if one.name in at_work
        and one.done is not None
        and one.done == before[one.name].done
        and 0 < (before[one.name].in_progress or 0) <= (one.in_progress or 0)
    }


def _lag(consumer: ConsumerFound, *, stuck: bool) -> Finding:
    # The consumer of parked jobs holds them while they sleep.
    state = "parked" if consumer.name == topology.PARKED_CONSUMER else "in progress"
    text = f"{consumer.name}: {consumer.waiting or 0:,} waiting, {consumer.in_progress or 0:,} {state}"
    service = consumer.name.partition("-")[0]
    if (unread := _unread(consumer, text, service)) is not None:
        return unread
    if stuck:
        text += f", and none got done within {STALL_S:g} s"
        remedy = f"See the log of `{service}` for the cause; it continues by itself once that is fixed."
        # Alerts that come late lose nothing.
        return Finding("lag", "warn" if service == "alerter" else "fail", text, remedy)
    if (consumer.waiting or 0) > LAG_WARN:
        remedy = _FALLS_BEHIND.get(service, f"It falls behind: start another `{service}`, or check its log.")
        return Finding("lag", "warn", text, remedy)
    return Finding("lag", "ok", text)


def _unread(consumer: ConsumerFound, text: str, service: str) -> Finding | None:
    if consumer.readers != 0 or consumer.in_progress:
        return None
    return Finding(
        "lag", "warn", f"{text}, and no service reads them", f"Is the service `{service}` running? See its log."
    )


def held_finding(consumer: ConsumerFound, agents: Mapping[str, int]) -> Finding | None:
    """A finding of an agent all of whose slots are held by jobs that were delivered before; else None."""
    for agent, slots in agents.items():
        if consumer.name == topology.worker_consumer(agent) and (consumer.again or 0) >= slots:
            held = f"all {slots:,} slots of agent {agent!r} are held by jobs that were delivered before"
            remedy = "See `job_handling_failed` and `unavailable` in the log of `worker`."
            return Finding("lag", "warn", f"{consumer.name}: {held}", remedy)
    return None


async def channel_findings(client: Client, alerts: Alerts, consumers: Sequence[ConsumerFound]) -> list[Finding]:
    """The progress of each channel. Holding alerts back on purpose is no finding. Raises BusUnavailableError."""
    by_name = {topology.alert_consumer(name): name for name in alerts.channels}
    return [
        await _channel(client, one, name, held_back_for(alerts.channels[name], alerts.quiet_s))
        for one in consumers
        if (name := by_name.get(one.name)) is not None
    ]


def held_back_for(route: Route, quiet_s: float) -> timedelta:
    """Longest time a channel may hold an alert back: for a recovery to last, a limit to pass, the night to end."""
    limit_s = 0.0 if route.rate_limit is None else route.rate_limit.within_s
    night = timedelta() if route.quiet_hours is None else timedelta(days=1)
    return max(timedelta(seconds=quiet_s + limit_s), night)


async def _channel(client: Client, consumer: ConsumerFound, name: str, allowed: timedelta) -> Finding:
    waiting, held = consumer.waiting or 0, consumer.in_progress or 0
    text = f"{consumer.name}: {waiting:,} waiting, {held:,} delayed or being sent"
    log = "The log of `alerter` shows the receiver's responses"
    if (unread := _unread(consumer, text, "alerter")) is not None:
        return unread
    since = await _oldest(client, consumer.name) if held else None
    if since is not None and (age := datetime.now(UTC) - since) > allowed + SENDING:
        text += f", the oldest for {formats.duration(age.total_seconds() * 1000)}"
        return Finding("lag", "warn", text, f"{log}; `breakwater alerts test {name}` sends it a test message.")
    if waiting > LAG_WARN:
        return Finding("lag", "warn", text, f"{log}, or raise the channel's `rate_limit`.")
    return Finding("lag", "ok", text)


async def _oldest(client: Client, durable: str) -> datetime | None:
    """The time at which the oldest alert was stored that a channel has not finished."""
    lookup = Lookup(lambda: client)
    done = (await lookup.progress(Stream.ALERTS, durable)).acknowledged
    found = await lookup.next(Stream.ALERTS, "bw.alerts.>", done + 1)
    return None if found is None else found.stored_at


async def job_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Jobs accepted over HTTP within a day: each is decided, in progress, or waits."""
    async with connect.bus(plane.admin_nats_url) as client, connect.state(plane.redis_url) as redis:
        jobs, left_out = await lately_accepted(redis, datetime.now(UTC) - SETTLING, MAX_JOBS)
        count = f"{len(jobs):,}" if not left_out else f"{len(jobs):,} (of {len(jobs) + left_out:,}, chosen at random)"
        # Twice, as a job moves on while it is looked for: what is nowhere both times has vanished.
        lost = jobs
        for _ in range(2):
            lost = await unclaimed(redis, await _undecided(client, lost))
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
    names = ", ".join(job.execution_id for job in lost[:_NAMED]) + (", …" if len(lost) > _NAMED else "")
    text = f"{len(lost):,} of {count} accepted jobs are missing: they have no result, and are not waiting: {names}"
    yield Finding("jobs", "fail", text, "Was a stream deleted or purged? Submit them again, with the same job ids.")


async def _undecided(client: Client, jobs: list[RememberedJob]) -> list[RememberedJob]:
    """The jobs that have neither a record nor a result."""
    by_record = {subjects.execution(job.agent, job.execution_id): job for job in jobs}
    async for found in Lookup(lambda: client).last_on(Stream.EVENTS, list(by_record)):
        by_record.pop(found.subject, None)
    by_result = {subjects.result(job.execution_id): job for job in by_record.values()}
    async for found in Lookup(lambda: client).last_on(Stream.RESULTS, list(by_result)):
        by_result.pop(found.subject, None)
    return list(by_result.values())


async def _waiting(client: Client) -> set[str] | None:
    """The id of each job in JOBS and PARKED, as `request` writes it; None where there are too many."""
    waiting: set[str] = set()
    for stream, subject in ((Stream.JOBS, "bw.jobs.*"), (Stream.PARKED, "bw.parked.>")):
        # Those of programs on NATS have another subject, and were accepted there.
        async with aclosing(Lookup(lambda: client).scan(stream, subject)) as stored:
            async for found in stored:
                if len(waiting) == MAX_WAITING:
                    return None
                token = found.headers.get(Header.EXECUTION_ID.value)
                token = token or found.headers.get(Header.MSG_ID.value, "").rpartition("/")[2]
                waiting.add(subjects.decode_token(token))
    return waiting
