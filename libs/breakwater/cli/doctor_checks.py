"""What `breakwater doctor` looks at. Each check reads only, and says what to do about what it finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from breakwater.cli import connect
from breakwater.cli.doctor_bus import nats_findings
from breakwater.cli.doctor_findings import SETUP, Finding, clock, slow, timed
from breakwater.cli.errors import expected
from breakwater.cli.plane import Plane

if TYPE_CHECKING:
    from breakwater.config import Config

PATIENCE_S = 10.0
CONNECT_PATIENCE_S = 3.0


async def all_findings(plane: Plane, config: Config | None) -> list[Finding]:
    """Everything but the config itself, all parts at the same time; in a fixed order."""
    checks: list[tuple[str, Callable[[], Awaitable[list[Finding]]]]] = [
        ("nats", lambda: nats_findings(plane, config)),
        ("redis", lambda: _redis(plane)),
        ("clickhouse", lambda: _clickhouse(plane)),
        ("api", lambda: api_findings(plane)),
        ("console", lambda: console_findings(plane)),
    ]
    if config is not None:
        checks.append(("provider", lambda: _providers(config)))
    found = await asyncio.gather(*(_guarded(area, check) for area, check in checks))
    return [finding for findings in found for finding in findings]


async def _guarded(area: str, check: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await check()
    except TimeoutError:
        return [Finding(area, "fail", f"no answer within {PATIENCE_S:g} s", "See its log.")]
    except Exception as error:
        known = expected(error)
        if known is None:
            raise
        remedy = known.remedy if "doctor" not in known.remedy else "Is it running? Is the address right?"
        return [Finding(area, "fail", known.message, remedy)]


def secrets(config: Config) -> list[Finding]:
    """Whether the secrets that the config names can be read from here."""
    from breakwater.config import named_secrets, unusable_programs

    named = list(named_secrets(config))
    findings: list[Finding] = []
    for path, secret in named:
        try:
            secret.read()
        except Exception as error:
            known = expected(error)
            if known is None:
                raise
            remedy = (
                "Set it where the service runs; a service that has it in its own environment is not seen from here."
            )
            findings.append(Finding("config", "warn", f"{path}: {known.message}", remedy))
    if named and not findings:
        findings.append(Finding("config", "ok", f"{len(named)} secrets can be read"))
    remedy = "It must be there where the worker runs; what is there alone is not seen from here."
    findings += [Finding("config", "warn", problem.strip(), remedy) for problem in unusable_programs(config)]
    return findings


async def _redis(plane: Plane) -> list[Finding]:
    from zoneinfo import ZoneInfo

    from breakwater.state.breakers import Breakers
    from breakwater.state.budgets import Budgets
    from breakwater.state.inspect import inspect

    url = plane.redis_url
    async with connect.state(url) as redis:
        facts = await inspect(redis)
        alive = await Breakers(redis).alive()
        filled = await Budgets(redis, ZoneInfo("UTC")).filled()
    answers = f"{connect.shown(url)} answers in {facts.ping_ms:.1f} ms (server {facts.version})"
    findings = [
        Finding("redis", slow(facts.ping_ms), answers),
        clock("redis", facts.clock_ahead_s),
        Finding("breakers", "ok", "a breaker service is alive")
        if alive
        else Finding(
            "breakers",
            "warn",
            "no breaker service is alive: failures open no breaker, and the health of agents is out of date",
            "Is the service `breaker` running? See its log; after an outage it makes up for what it missed first.",
        ),
        Finding("budgets", "ok", "the counters are there")
        if filled
        else Finding(
            "budgets",
            "fail",
            "the counters are lost, or not made yet: no call is made under a hard cap",
            "Is the service `budget` running? It rebuilds them; its log says what it waits for.",
        ),
    ]
    if facts.appendonly is None or facts.maxmemory_policy is None:
        remedy = "Make sure of appendonly (or its like) and of noeviction where it is managed."
        findings.append(Finding("redis", "warn", "its settings are hidden", remedy))
        return findings
    findings.append(
        Finding("redis", "ok", "keeps its data over a restart (appendonly yes)")
        if facts.appendonly
        else Finding(
            "redis",
            "warn",
            "loses its data with a restart (appendonly no)",
            "Set `appendonly yes`: breakers and budgets would be refused until they are rebuilt.",
        )
    )
    findings.append(
        Finding("redis", "ok", "never drops a key (noeviction)")
        if facts.maxmemory_policy == "noeviction"
        else Finding(
            "redis",
            "fail",
            f"drops keys when memory gets short (maxmemory-policy {facts.maxmemory_policy})",
            "Set `maxmemory-policy noeviction`: a dropped counter is a budget that can be overrun.",
        )
    )
    return findings


async def _clickhouse(plane: Plane) -> list[Finding]:
    from breakwater.analytics.errors import QueryFailed
    from breakwater.analytics.migrations import MIGRATIONS, missing

    url = plane.clickhouse_url
    async with connect.analytics(url) as analytics:
        await analytics.ping()
        _, ms = await timed(analytics.ping())
        version = (await analytics.query("SELECT version()")).rows[0][0]
        findings = [Finding("clickhouse", slow(ms), f"{connect.shown(url)} answers in {ms:.1f} ms (server {version})")]
        try:
            rows = (await analytics.query("SELECT DISTINCT version FROM schema_migrations")).rows
        except QueryFailed:
            rows = ()
        gone = await missing(analytics) if rows else ()
    applied = {int(row[0]) for row in rows}
    wanted = {migration.version for migration in MIGRATIONS}
    for one in gone:
        findings.append(Finding("clickhouse", "fail", f"{one.what} is missing", SETUP))
    if absent := sorted(wanted - applied):
        listed = ", ".join(str(number) for number in absent)
        findings.append(Finding("clickhouse", "fail", f"migrations {listed} are not applied", SETUP))
    elif newer := sorted(applied - wanted):
        text = f"the schema is newer than this program (migration {newer[-1]})"
        findings.append(Finding("clickhouse", "warn", text, "Use the version of Breakwater that made it."))
    elif not gone:
        findings.append(Finding("clickhouse", "ok", f"the schema is at version {max(wanted)}"))
    return findings


async def api_findings(plane: Plane) -> list[Finding]:
    """Whether the HTTP interface answers, and what the key opens."""
    import aiohttp

    door = plane.door()
    headers = {"Authorization": f"Bearer {door.api_key}"} if door.api_key else {}
    timeout = aiohttp.ClientTimeout(total=CONNECT_PATIENCE_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            async with http.get(f"{door.url}/readyz") as response:
                ready, said = response.status, await response.text()
            async with http.get(f"{door.url}/api/v1/key", headers=headers) as response:
                let_in, key = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        text = f"{door.url} does not answer: {str(error) or type(error).__name__}"
        return [Finding("api", "fail", text, "Is the service `request` running? See its log.")]
    findings = [
        Finding("api", "ok", f"{door.url} is ready")
        if ready == 200
        else Finding("api", "fail", f"{door.url} is not ready ({ready}): {said[:200]}", "See the log of `request`.")
    ]
    if let_in == 200:
        known = json.loads(key)
        findings.append(Finding("api", "ok", f"the API key {known['name']!r} may {', '.join(known['scopes'])}"))
    elif door.api_key is None:
        findings.append(Finding("api", "warn", "no API key was tried", "Set BREAKWATER_API_KEY."))
    elif let_in == 401:
        remedy = "Make one with `breakwater keys create NAME`, and set BREAKWATER_API_KEY."
        findings.append(Finding("api", "fail", "the API key is not accepted", remedy))
    else:
        text = f"what the API key may do is not told ({let_in})"
        findings.append(Finding("api", "warn", text, "Is it the same version of Breakwater? See the log of `request`."))
    return findings


async def console_findings(plane: Plane) -> list[Finding]:
    """Whether the console of a local stack answers; nothing where none is known of."""
    import aiohttp

    url = plane.console_url
    if url is None:
        return []
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CONNECT_PATIENCE_S)) as http,
            http.get(f"{url}/healthz") as response,
        ):
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        text = f"{url} does not answer: {str(error) or type(error).__name__}"
        return [Finding("console", "warn", text, "Is the service `console` running? See its log.")]
    if status == 200:
        return [Finding("console", "ok", f"{url} answers")]
    return [Finding("console", "warn", f"{url} answers {status}", "Is that the console? See its log.")]


async def _providers(config: Config) -> list[Finding]:
    from breakwater.providers.base import HttpSettings

    endpoints = [(name, one.base_url) for name, one in config.providers.items() if isinstance(one, HttpSettings)]
    return list(await asyncio.gather(*(_provider(name, base_url) for name, base_url in endpoints)))


async def _provider(name: str, base_url: str) -> Finding:
    parts = urlsplit(base_url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_PATIENCE_S):
            (_, writer), ms = await timed(asyncio.open_connection(host, port))
    except (OSError, TimeoutError) as error:
        why = f"within {CONNECT_PATIENCE_S:g} s" if isinstance(error, TimeoutError) else str(error)
        text = f"{name}: no connection to {host}:{port}: {why}"
        return Finding("provider", "fail", text, f"Check providers.{name}.base_url, name resolution and the firewall.")
    writer.close()
    return Finding("provider", "ok", f"{name}: {host}:{port} takes connections ({ms:.0f} ms; nothing was called)")
