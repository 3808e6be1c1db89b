"""The doctor's look at NATS: does it answer, is everything there, does anybody fall behind."""

from __future__ import annotations

import asyncio
import json
import os
import time
from datetime import datetime
from typing import TYPE_CHECKING

from breakwater.cli import connect
from breakwater.cli.doctor_findings import SETUP, Finding, clock, slow, timed
from breakwater.cli.plane import Plane

if TYPE_CHECKING:
    from nats.aio.client import Client

    from breakwater.bus.survey import ConsumerFound
    from breakwater.config import Config

LAG_WARN = 1_000
READER_RETRY_S = 1.0


async def nats_findings(plane: Plane, config: Config | None) -> list[Finding]:
    """NATS itself, the streams and consumers, and how far each consumer is behind."""
    url = plane.admin_nats_url
    async with connect.bus(url) as client:
        _, ms = await timed(client.flush(5))
        findings = [
            Finding("nats", slow(ms), f"{connect.shown(url)} answers in {ms:.1f} ms (server {_version(client)})")
        ]
        ahead_s = await _clock_ahead_s(client)
        if ahead_s is not None:
            findings.append(clock("nats", ahead_s))
        if config is not None:
            findings += await _topology(client, config)
    return findings


def _version(client: Client) -> str:
    version = client.connected_server_version
    return f"{version.major}.{version.minor}.{version.patch}"


async def _clock_ahead_s(client: Client) -> float | None:
    """How far the server's clock is ahead; None where it does not say."""
    import nats.errors

    begun = time.time()
    try:
        answer = await client.request("$JS.API.STREAM.INFO.EVENTS", b"", timeout=3)
        stamp: str | None = json.loads(answer.data).get("ts")
    except (TimeoutError, nats.errors.Error, ValueError):
        return None
    if stamp is None:
        return None
    # Nanoseconds, which datetime does not read.
    moment = datetime.fromisoformat(f"{stamp.rstrip('Z').partition('.')[0]}+00:00").timestamp()
    fraction = float(f"0.{stamp.rstrip('Z').partition('.')[2] or 0}")
    return moment + fraction - (begun + time.time()) / 2


async def _topology(client: Client, config: Config) -> list[Finding]:
    from breakwater.bus.survey import survey
    from breakwater.cli.setup import bus_plan
    from breakwater.settings import Settings

    replicas = Settings().nats_replicas if "BREAKWATER_NATS_REPLICAS" in os.environ else None
    plan = bus_plan(config)
    found = await survey(client, plan, replicas=replicas)
    if any(one.readers == 0 and not one.in_work for one in found.consumers):
        # Between two requests of a service there may be none for a moment.
        await asyncio.sleep(READER_RETRY_S)
        found = await survey(client, plan, replicas=replicas)
    findings: list[Finding] = []
    wrong = False
    for one in (*found.streams, *found.consumers):
        what = f"stream {one.name}" if not hasattr(one, "readers") else f"consumer {one.name}"
        if one.verdict == "missing":
            findings.append(Finding("nats", "fail", f"{what} is missing", SETUP))
        elif one.verdict == "differs":
            findings.append(Finding("nats", "warn", f"{what} has another {', '.join(one.different)}", SETUP))
        wrong = wrong or one.verdict != "right"
    hidden = sum(one.verdict == "hidden" for one in (*found.streams, *found.consumers))
    if hidden:
        remedy = "Set BREAKWATER_NATS_URL to an address with the user `setup`."
        findings.append(Finding("nats", "warn", f"this user may not see {hidden} streams and consumers", remedy))
    if not wrong:
        count = f"{len(found.streams)} streams and {len(found.consumers)} consumers are"
        findings.append(Finding("nats", "ok", f"{count} as the config asks"))
    findings += [_lag(one) for one in found.consumers if one.waiting is not None]
    return findings


def _lag(consumer: ConsumerFound) -> Finding:
    waiting, in_work = consumer.waiting or 0, consumer.in_work or 0
    text = f"{consumer.name}: {waiting:,} waiting, {in_work:,} in work"
    service = consumer.name.partition("-")[0]
    if consumer.readers == 0 and not in_work:
        return Finding("lag", "warn", f"{text}, and nobody reads", f"Is the service `{service}` running? See its log.")
    if waiting > LAG_WARN:
        remedy = (
            "More jobs come than this agent may work on at once: raise its `concurrency`, or start more workers."
            if service == "worker"
            else f"It falls behind: start one more `{service}`, or see in its log what holds it up."
        )
        return Finding("lag", "warn", text, remedy)
    return Finding("lag", "ok", text)
