"""The doctor's checks of everything but NATS."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import aiohttp

from breakwater.analytics.errors import QueryFailed
from breakwater.analytics.log_comparison import last_comparison
from breakwater.analytics.migrations import MIGRATIONS, missing
from breakwater.bus.lookup import Lookup
from breakwater.cli import connect, formats
from breakwater.cli.doctor_findings import (
    CONNECT_TIMEOUT_S,
    SETUP,
    Finding,
    Findings,
    check,
    clock,
    judged,
    slow,
    timed,
)
from breakwater.cli.plane import PlaneLocation
from breakwater.client import ApiError, ApiKeyRefused
from breakwater.config import Config, cipher_of, named_secrets, unusable_programs
from breakwater.contracts.subjects import Stream
from breakwater.encryption import key_of_document
from breakwater.errors import ConfigError
from breakwater.providers.base import HttpSettings
from breakwater.state.breakers import Breakers
from breakwater.state.budgets import Budgets
from breakwater.state.inspect import inspect
from breakwater.state.workers import Workers

COMPARED_WITHIN = timedelta(minutes=10)
LOST_SHOWN = timedelta(days=1)
"""How long it is warned of rows that ClickHouse had lost."""


def secret_findings(config: Config, *, running: bool = False) -> list[Finding]:
    """Whether the secrets that the config names can be read from here.

    Args:
        config: what names them.
        running: whether a plane runs with it on this machine: it has read them, in whatever shell it was started.
    """
    if running:
        return []
    findings: list[Finding] = []
    named = list(named_secrets(config))
    unreadable: list[str] = []
    for path, secret in named:
        try:
            secret.read()
        except ConfigError as error:
            unreadable.append(f"{path}: {error}")
    remedy = "Set it where the service runs; a service that has it in its own environment is not seen from here."
    findings += [Finding("config", "warn", problem, remedy) for problem in unreadable]
    try:
        if not any("encryption.keys" in problem for problem in unreadable):
            cipher_of(config)
    except ConfigError as error:  # they can be read, and are no keys
        findings.append(Finding("config", "fail", str(error), "Services end at once with it: see docs/security.md."))
    if named and not findings:
        findings.append(Finding("config", "ok", f"{len(named)} secrets can be read"))
    remedy = "It must be there where the worker runs; what is there alone is not seen from here."
    return findings + [Finding("config", "warn", one.strip(), remedy) for one in unusable_programs(config)]


@check
async def encryption_findings(plane: PlaneLocation, config: Config | None) -> Findings:
    """Whether the keys are there that what is stored needs: the executions in ClickHouse, and the newest result."""
    try:
        cipher = plane.cipher()
    except ConfigError:
        return  # said with the config's secrets
    if config is None:
        return
    known, private, missed = cipher.key_ids, ", ".join(config.private_agents), False
    stored = await _encrypted(plane)
    for key, what in sorted(stored.items()):
        if key not in known:
            missed = True
            text = (
                f"{what} are encrypted with key {key}, which encryption.keys does not have: their texts can't be read"
            )
            remedy = (
                "Put that key back, behind the first one, or as BREAKWATER_PLANE_KEY where it was the plane's own; "
                "`breakwater encryption keys` lists those that are there."
            )
            yield Finding("encryption", "fail", text, remedy)
    if private and not known:
        lost = "results and dead letters are stored without texts, as the plane has no key: answers are lost"
        remedy = (
            "Set BREAKWATER_PLANE_KEY for the worker and request, to 32 random characters or more; a service that has "
            "it in its own environment is not seen from here."
        )
        yield Finding("encryption", "warn", f"{private}: {lost}", remedy)
    elif not missed and (cipher.on or stored or private):
        state = "off"
        if cipher.on:
            state = f"on: new texts are encrypted with key {known[0]}"
        elif private:
            state = f"off, but for texts of {private}, which are encrypted with the plane's own key {known[-1]}"
        yield Finding("encryption", "ok", f"{state}, and all stored can be read")


async def _encrypted(plane: PlaneLocation) -> dict[str, str]:
    """The keys that what is stored was encrypted with, and what that is."""
    by_key = "SELECT encryption_key, count() FROM executions WHERE encryption_key IS NOT NULL GROUP BY encryption_key"
    async with connect.analytics(plane.clickhouse_url) as analytics:
        try:
            stored = {str(key): f"{count:,} executions" for key, count in (await analytics.query(by_key)).rows}
        except QueryFailed:
            stored = {}  # migrations are not applied, which is said elsewhere
    async with connect.bus(plane.admin_nats_url) as client:
        newest = await Lookup(lambda: client).last(Stream.RESULTS, "bw.results.>")
    if newest is not None and (key := key_of_document(newest.data)) is not None:
        stored.setdefault(key, "the newest result")
    return stored


@check
async def redis_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Redis itself, and what it must hold: the heartbeat of the breaker service, the counters of the budgets."""
    url = plane.redis_url
    async with connect.state(url) as redis:
        facts = await inspect(redis)
        alive = await Breakers(redis).alive()
        filled = await Budgets(redis, ZoneInfo("UTC")).filled()
        workers = await Workers(redis).running()
    answers = f"{connect.shown(url)} answers in {facts.ping_ms:.1f} ms ({facts.version})"
    yield Finding("redis", slow(facts.ping_ms), answers)
    yield clock("redis", facts.clock_ahead_s)
    yield judged(
        "redis",
        not facts.vulnerabilities,
        f"{facts.version} has none of the holes that are checked for",
        f"{facts.version} has known holes: {', '.join(facts.vulnerabilities)}",
        "Upgrade to the newest release of its branch, or to Valkey 9. A distribution may have fixed them without"
        " changing the version.",
        verdict="warn",
    )
    yield judged(
        "breakers",
        alive,
        "a breaker service is alive",
        "no breaker service is alive: failures open no breaker, and the health of agents is out of date",
        "Is the service `breaker` running? See its log; after an outage it makes up for what it missed first.",
        verdict="warn",
    )
    yield judged(
        "budgets",
        filled,
        "the counters are there",
        "the counters are lost, or not made yet: no call is made under a hard cap",
        "Is the service `budget` running? It rebuilds them; its log says what it waits for.",
    )
    if workers:
        taken_over = "others take its jobs over within 5 s"
        if len(workers) == 1:
            taken_over = "it takes its jobs over within 5 s of its restart"
        unheard = sum(not heard_on for heard_on in workers.values())
        yield judged(
            "workers",
            not unheard,
            f"{formats.counted(len(workers), 'worker')}; if one dies, {taken_over}",
            f"NATS does not show others {unheard} of {len(workers)} workers: if one of them dies, workers on other"
            " machines miss it after 20 to 25 s only",
            "Let the NATS user `worker` publish and subscribe to `bw.workers.*`, and restart the workers.",
            verdict="warn",
        )
    if facts.appendonly is None or facts.maxmemory_policy is None:
        remedy = "Make sure of appendonly (or its like) and of noeviction where it is managed."
        yield Finding("redis", "warn", "its settings are hidden", remedy)
        return
    yield judged(
        "redis",
        facts.appendonly,
        "keeps its data over a restart (appendonly yes)",
        "loses its data with a restart (appendonly no)",
        "Set `appendonly yes`: breakers and budgets would be refused until they are rebuilt.",
        verdict="warn",
    )
    yield judged(
        "redis",
        facts.maxmemory_policy == "noeviction",
        "never drops a key (noeviction)",
        f"drops keys when memory gets short (maxmemory-policy {facts.maxmemory_policy})",
        "Set `maxmemory-policy noeviction`: a dropped counter is a budget that can be overrun.",
    )


@check
async def clickhouse_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """ClickHouse itself, and whether its tables are those of this version."""
    url = plane.clickhouse_url
    async with connect.analytics(url) as analytics:
        await analytics.ping()
        _, ms = await timed(analytics.ping())
        version = (await analytics.query("SELECT version()")).rows[0][0]
        yield Finding("clickhouse", slow(ms), f"{connect.shown(url)} answers in {ms:.1f} ms (server {version})")
        try:
            rows = (await analytics.query("SELECT DISTINCT version FROM schema_migrations")).rows
        except QueryFailed:
            rows = ()
        absent = await missing(analytics) if rows else ()
    applied = {int(row[0]) for row in rows}
    wanted = {migration.version for migration in MIGRATIONS}
    for one in absent:
        yield Finding("clickhouse", "fail", f"{one.what} is missing", SETUP)
    if pending := sorted(wanted - applied):
        yield Finding("clickhouse", "fail", f"migrations {', '.join(map(str, pending))} are not applied", SETUP)
    elif (newest := max(applied)) > max(wanted):
        text = f"the schema is newer than this program (migration {newest})"
        yield Finding("clickhouse", "warn", text, "Use the version of Breakwater that made it.")
    elif not absent:
        yield Finding("clickhouse", "ok", f"the schema is at version {max(wanted)}")


@check
async def record_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """How far ClickHouse was compared with EVENTS, and what it had lost."""
    async with connect.bus(plane.admin_nats_url) as client, connect.analytics(plane.clickhouse_url) as analytics:
        lookup = Lookup(lambda: client)
        try:
            done = await last_comparison(analytics, await lookup.identity(Stream.EVENTS))
        except QueryFailed:
            return  # migrations are not applied, which is said elsewhere
        following = await lookup.next(Stream.EVENTS, ">", done.upto + 1)
    now = datetime.now(UTC)
    when = "never" if done.at is None else f"at {formats.clock(done.at, now)}, up to event {done.upto:,}"
    compared = f"EVENTS and ClickHouse, last compared: {when}"
    if following is not None and now - following.stored_at > COMPARED_WITHIN:
        text = f"{compared}; the next event is of {formats.clock(following.stored_at, now)}"
        remedy = "Is the service `sink` running? It compares them every minute; its log says what it waits for."
        yield Finding("record", "warn", text, remedy)
    elif done.lost_at is None:
        yield Finding("record", "ok", f"{compared}; no event was lacking")
    else:
        at = formats.clock(done.lost_at, now)
        text = f"{compared}; events were lacking last at {at}, {done.lost:,} in all, and stored again"
        remedy = "Did ClickHouse lose its disk or its power, or did somebody delete rows? They are back; see its log."
        yield Finding("record", "warn" if now - done.lost_at < LOST_SHOWN else "ok", text, remedy)


@check
async def api_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Whether the HTTP API answers, and what the key opens."""
    async with plane.api_client() as api:
        try:
            ready, text = await _get(f"{api.url}/readyz")
        except OSError as error:
            remedy = "Is the service `request` running? See its log."
            yield Finding("api", "fail", f"{api.url} does not answer: {error}", remedy)
            return
        not_ready = f"{api.url} is not ready ({ready}): {text[:200]}"
        yield judged("api", ready == 200, f"{api.url} is ready", not_ready, "See the log of `request`.")
        try:
            key = await api.get("key", timeout_s=CONNECT_TIMEOUT_S)
        except ApiKeyRefused:
            if api.api_key:
                remedy = "Make one with `breakwater keys create NAME`, and set BREAKWATER_API_KEY."
                yield Finding("api", "fail", "the API key is not accepted", remedy)
            else:
                yield Finding("api", "warn", "no API key was tried", "Set BREAKWATER_API_KEY.")
        except ApiError as error:
            remedy = "Is it the same version of Breakwater? See the log of `request`."
            yield Finding("api", "warn", f"what the API key may do is not known ({error.status})", remedy)
        else:
            yield Finding("api", "ok", f"the API key {key['name']!r} may {', '.join(key['scopes'])}")


@check
async def config_findings(plane: PlaneLocation, config: Config | None) -> Findings:
    """Whether every service works under the config; nothing where none can be asked.

    Args:
        plane: the running one.
        config: as its file says; None where that is wrong, of which there is another finding.
    """
    in_use, refusing = await _configs_in_use(await plane.metrics_urls(), plane.metrics_headers)
    if refusing:
        names = ", ".join(f"{name} (version {in_use[name]})" for name in sorted(refusing))
        text = f"the config file can't be used, and the last good one stays in force in {names}"
        remedy = "Their logs say what is wrong (`config_not_taken_over`). Correct the file, apply it, and send SIGHUP."
        yield Finding("config", "warn", text, remedy)
    applied = plane.config_in_force() or config
    if applied is None:
        return
    version = applied.version
    if config is None or config.version != version:
        why = "is wrong" if config is None else f"is version {config.version} and not applied"
        text = f"version {version} stays in force, as the file {why}"
        yield Finding("config", "warn", text, "See what `breakwater up` says of it.")
    if in_use:
        behind = ", ".join(sorted(f"{name} ({used})" for name, used in in_use.items() if used != version))
        good = f"version {version} is in force in each of {len(in_use)} processes"
        bad = f"version {version} is not in force in {behind}"
        remedy = "Send SIGHUP to them; their logs say if they do not take it over (`config_not_taken_over`)."
        yield judged("config", not behind, good, bad, remedy, verdict="warn")


async def _configs_in_use(urls: Mapping[str, str], headers: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """The version in each process that shows one, and the processes whose file, as last read, can't be used."""
    versions: dict[str, str] = {}
    refusing: set[str] = set()
    for name, url in urls.items():
        try:
            _, text = await _get(url, headers)
        except OSError:
            continue  # other checks look after those
        if version := re.search(r'^breakwater_config_info{version="(\w+)"}', text, re.MULTILINE):
            versions[name] = version[1]
            refusing |= {name} if re.search(r"^breakwater_config_refused 1", text, re.MULTILINE) else set()
    return versions, refusing


@check
async def console_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Whether the console of a local stack answers; nothing where none is known."""
    if (url := plane.console_url) is None:
        return
    try:
        status, _ = await _get(f"{url}/healthz")
    except OSError as error:
        remedy = "Is the service `console` running? See its log."
        yield Finding("console", "warn", f"{url} does not answer: {error}", remedy)
        return
    remedy = "Is that the console? See its log."
    yield judged("console", status == 200, f"{url} answers", f"{url} answers {status}", remedy, verdict="warn")


async def _get(url: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The status and the body at a URL. Raises ConnectionError: no response came."""
    timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(url, headers=headers) as response:
            return response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


@check
async def provider_findings(_plane: PlaneLocation, config: Config | None) -> Findings:
    """Whether each provider takes connections. Calls nothing."""
    providers = {} if config is None else config.providers
    over_http = [(name, one.base_url) for name, one in providers.items() if isinstance(one, HttpSettings)]
    for finding in await asyncio.gather(*(_provider(*one) for one in over_http)):
        yield finding


async def _provider(name: str, base_url: str) -> Finding:
    parts = urlsplit(base_url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            (_, writer), ms = await timed(asyncio.open_connection(host, port))
    except (OSError, TimeoutError) as error:
        why = f"within {CONNECT_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else str(error)
        text = f"{name}: no connection to {host}:{port}: {why}"
        return Finding("provider", "fail", text, f"Check providers.{name}.base_url, name resolution and the firewall.")
    writer.close()
    return Finding("provider", "ok", f"{name}: {host}:{port} takes connections ({ms:.0f} ms; nothing was called)")
