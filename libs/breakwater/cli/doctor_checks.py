"""What `breakwater doctor` finds, and its checks of everything but NATS. Each only reads, and says what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import urlsplit

from breakwater.cli import connect, formats
from breakwater.cli.plane import PlaneLocation
from breakwater.errors import ConfigError

if TYPE_CHECKING:
    from breakwater.config import Config

CONNECT_TIMEOUT_S = 3.0
Verdict = Literal["ok", "warn", "fail"]
T = TypeVar("T")

SLOW_MS = 250.0
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0
COMPARED_WITHIN = timedelta(minutes=10)
LOST_SHOWN = timedelta(days=1)
"""How long it is warned of rows that ClickHouse had lost."""

SETUP = "Run `breakwater setup` (or `breakwater up`, which does it)."
_CLOCK = "Let both machines keep their time with NTP: budgets and cool-downs are counted by these clocks."


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    area: str
    verdict: Verdict
    text: str
    remedy: str = ""


async def timed(work: Awaitable[T]) -> tuple[T, float]:
    """A result, and the milliseconds that it took."""
    begun = time.perf_counter()
    result = await work
    return result, (time.perf_counter() - begun) * 1000


def judged(area: str, ok: bool, good: str, bad: str, remedy: str, *, verdict: Verdict = "fail") -> Finding:
    """A finding of what is either right, or wrong with a remedy."""
    return Finding(area, "ok", good) if ok else Finding(area, verdict, bad, remedy)


def slow(ms: float) -> Verdict:
    """How an answer's time is judged."""
    return "warn" if ms > SLOW_MS else "ok"


def clock(area: str, ahead_s: float) -> Finding:
    """How a server's clock is judged that is so far ahead of this machine's, or behind it where negative."""
    off_s = abs(ahead_s)
    if off_s < CLOCK_WARN_S:
        return Finding(area, "ok", f"its clock is ours (within {max(off_s, 0.001):.3f} s)")
    text = f"its clock is {formats.duration(off_s * 1000)} {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    return Finding(area, "fail" if off_s > CLOCK_FAIL_S else "warn", text, _CLOCK)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict over all."""
    verdicts = {finding.verdict for finding in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"


def secret_findings(config: Config, *, running: bool = False) -> list[Finding]:
    """Whether the secrets that the config names can be read from here.

    Args:
        config: what names them.
        running: whether a plane runs with it on this machine: it has read them, in whatever shell it was started.
    """
    from breakwater.config import named_secrets, unusable_programs

    if running:
        return []
    named = list(named_secrets(config))
    findings: list[Finding] = []
    for path, secret in named:
        try:
            secret.read()
        except ConfigError as error:
            remedy = (
                "Set it where the service runs; a service that has it in its own environment is not seen from here."
            )
            findings.append(Finding("config", "warn", f"{path}: {error}", remedy))
    findings += _key_findings(config, readable=not any("encryption.keys" in one.text for one in findings))
    if named and not findings:
        findings.append(Finding("config", "ok", f"{len(named)} secrets can be read"))
    remedy = "It must be there where the worker runs; what is there alone is not seen from here."
    findings += [Finding("config", "warn", problem.strip(), remedy) for problem in unusable_programs(config)]
    return findings


def _key_findings(config: Config, *, readable: bool) -> list[Finding]:
    """Whether the keys that texts are encrypted with are keys."""
    from breakwater.config import cipher_of

    try:
        if readable:
            cipher_of(config)
    except ConfigError as error:
        return [Finding("config", "fail", str(error), "Services end at once with it: see docs/security.md.")]
    return []


async def encryption_findings(plane: PlaneLocation, config: Config) -> list[Finding]:
    """Whether the keys are there that what is stored needs: the executions in ClickHouse, and the newest result."""
    from breakwater.analytics.errors import QueryFailed
    from breakwater.bus.lookup import Lookup
    from breakwater.contracts.subjects import Stream
    from breakwater.encryption import key_of_document

    try:
        cipher = plane.cipher()
        known = cipher.key_ids
    except ConfigError:
        return []  # said with the config's secrets
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
    missing = [
        Finding(
            "encryption",
            "fail",
            f"{what} are encrypted with key {key}, which encryption.keys does not have: their texts can't be read",
            "Put that key back, behind the first one, or as BREAKWATER_PLANE_KEY where it was the plane's own; "
            "`breakwater encryption keys` lists those that are there.",
        )
        for key, what in sorted(stored.items())
        if key not in known
    ]
    private = ", ".join(config.private_agents)
    if private and not known:
        text = (
            f"{private}: results and dead letters are stored without texts, as the plane has no key: answers are lost"
        )
        remedy = (
            "Set BREAKWATER_PLANE_KEY for the worker and request, to 32 random characters or more; a service that has "
            "it in its own environment is not seen from here."
        )
        missing.append(Finding("encryption", "warn", text, remedy))
    if missing or not (cipher.on or stored or private):
        return missing
    state = (
        f"on: new texts are encrypted with key {known[0]}"
        if cipher.on
        else f"off, but for texts of {private}, which are encrypted with the plane's own key {known[-1]}"
        if private
        else "off"
    )
    return [Finding("encryption", "ok", f"{state}, and all stored can be read")]


async def redis_findings(plane: PlaneLocation) -> list[Finding]:
    """Redis itself, and what it must hold: the heartbeat of the breaker service, the counters of the budgets."""
    from zoneinfo import ZoneInfo

    from breakwater.state.breakers import Breakers
    from breakwater.state.budgets import Budgets
    from breakwater.state.inspect import inspect
    from breakwater.state.workers import Workers

    url = plane.redis_url
    async with connect.state(url) as redis:
        facts = await inspect(redis)
        alive = await Breakers(redis).alive()
        filled = await Budgets(redis, ZoneInfo("UTC")).filled()
        workers = await Workers(redis).running()
    answers = f"{connect.shown(url)} answers in {facts.ping_ms:.1f} ms ({facts.version})"
    findings = [
        Finding("redis", slow(facts.ping_ms), answers),
        clock("redis", facts.clock_ahead_s),
        judged(
            "redis",
            not facts.vulnerabilities,
            f"{facts.version} has none of the holes that are checked for",
            f"{facts.version} has known holes: {', '.join(facts.vulnerabilities)}",
            "Upgrade to the newest release of its branch, or to Valkey 9. A distribution may have fixed them without"
            " changing the version.",
            verdict="warn",
        ),
        judged(
            "breakers",
            alive,
            "a breaker service is alive",
            "no breaker service is alive: failures open no breaker, and the health of agents is out of date",
            "Is the service `breaker` running? See its log; after an outage it makes up for what it missed first.",
            verdict="warn",
        ),
        judged(
            "budgets",
            filled,
            "the counters are there",
            "the counters are lost, or not made yet: no call is made under a hard cap",
            "Is the service `budget` running? It rebuilds them; its log says what it waits for.",
        ),
    ]
    if workers:
        unheard = sum(not heard_on for heard_on in workers.values())
        findings.append(
            judged(
                "workers",
                not unheard,
                f"{formats.counted(len(workers), 'worker')}; if one dies, "
                f"{'others take' if len(workers) > 1 else 'it takes'} its jobs over within 5 s"
                f"{'' if len(workers) > 1 else ' of its restart'}",
                f"NATS does not show others {unheard} of {len(workers)} workers: if one of them dies, workers on other"
                " machines miss it after 20 to 25 s only",
                "Let the NATS user `worker` publish and subscribe to `bw.workers.*`, and restart the workers.",
                verdict="warn",
            )
        )
    if facts.appendonly is None or facts.maxmemory_policy is None:
        remedy = "Make sure of appendonly (or its like) and of noeviction where it is managed."
        return [*findings, Finding("redis", "warn", "its settings are hidden", remedy)]
    return [
        *findings,
        judged(
            "redis",
            facts.appendonly,
            "keeps its data over a restart (appendonly yes)",
            "loses its data with a restart (appendonly no)",
            "Set `appendonly yes`: breakers and budgets would be refused until they are rebuilt.",
            verdict="warn",
        ),
        judged(
            "redis",
            facts.maxmemory_policy == "noeviction",
            "never drops a key (noeviction)",
            f"drops keys when memory gets short (maxmemory-policy {facts.maxmemory_policy})",
            "Set `maxmemory-policy noeviction`: a dropped counter is a budget that can be overrun.",
        ),
    ]


async def clickhouse_findings(plane: PlaneLocation) -> list[Finding]:
    """ClickHouse itself, and whether its tables are those of this version."""
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
        absent = await missing(analytics) if rows else ()
    applied = {int(row[0]) for row in rows}
    wanted = {migration.version for migration in MIGRATIONS}
    for one in absent:
        findings.append(Finding("clickhouse", "fail", f"{one.what} is missing", SETUP))
    if pending := sorted(wanted - applied):
        listed = ", ".join(str(number) for number in pending)
        findings.append(Finding("clickhouse", "fail", f"migrations {listed} are not applied", SETUP))
    elif (newest := max(applied)) > max(wanted):
        text = f"the schema is newer than this program (migration {newest})"
        findings.append(Finding("clickhouse", "warn", text, "Use the version of Breakwater that made it."))
    elif not absent:
        findings.append(Finding("clickhouse", "ok", f"the schema is at version {max(wanted)}"))
    return findings


async def record_findings(plane: PlaneLocation) -> list[Finding]:
    """How far ClickHouse was compared with EVENTS, and what it had lost."""
    from breakwater.analytics.errors import QueryFailed
    from breakwater.analytics.log_comparison import last_comparison
    from breakwater.bus.lookup import Lookup
    from breakwater.contracts.subjects import Stream

    async with connect.bus(plane.admin_nats_url) as client, connect.analytics(plane.clickhouse_url) as analytics:
        lookup = Lookup(lambda: client)
        try:
            done = await last_comparison(analytics, await lookup.identity(Stream.EVENTS))
        except QueryFailed:
            return []  # migrations are not applied, which is said elsewhere
        following = await lookup.next(Stream.EVENTS, ">", done.upto + 1)
    now = datetime.now(UTC)
    when = "never" if done.at is None else f"at {formats.clock(done.at, now)}, up to event {done.upto:,}"
    compared = f"EVENTS and ClickHouse, last compared: {when}"
    if following is not None and now - following.stored_at > COMPARED_WITHIN:
        remedy = "Is the service `sink` running? It compares them every minute; its log says what it waits for."
        text = f"{compared}; the next event is of {formats.clock(following.stored_at, now)}"
        return [Finding("record", "warn", text, remedy)]
    if done.lost_at is None:
        return [Finding("record", "ok", f"{compared}; no event was lacking")]
    filled = f"events were lacking last at {formats.clock(done.lost_at, now)}, {done.lost:,} in all, and stored again"
    remedy = "Did ClickHouse lose its disk or its power, or did somebody delete rows? They are back; see its log."
    verdict: Verdict = "warn" if now - done.lost_at < LOST_SHOWN else "ok"
    return [Finding("record", verdict, f"{compared}; {filled}", remedy)]


async def api_findings(plane: PlaneLocation) -> list[Finding]:
    """Whether the HTTP API answers, and what the key opens."""
    from breakwater.api_client import ApiError, ApiKeyRefused

    async with plane.api_client() as api:
        try:
            ready, text = await _get(f"{api.url}/readyz")
        except OSError as error:
            text = f"{api.url} does not answer: {error}"
            return [Finding("api", "fail", text, "Is the service `request` running? See its log.")]
        not_ready = f"{api.url} is not ready ({ready}): {text[:200]}"
        findings = [judged("api", ready == 200, f"{api.url} is ready", not_ready, "See the log of `request`.")]
        try:
            key = await api.get("key", timeout_s=CONNECT_TIMEOUT_S)
        except ApiKeyRefused:
            remedy = "Make one with `breakwater keys create NAME`, and set BREAKWATER_API_KEY."
            findings.append(
                Finding("api", "fail", "the API key is not accepted", remedy)
                if api.api_key
                else Finding("api", "warn", "no API key was tried", "Set BREAKWATER_API_KEY.")
            )
        except ApiError as error:
            text = f"what the API key may do is not known ({error.status})"
            remedy = "Is it the same version of Breakwater? See the log of `request`."
            findings.append(Finding("api", "warn", text, remedy))
        else:
            findings.append(Finding("api", "ok", f"the API key {key['name']!r} may {', '.join(key['scopes'])}"))
    return findings


async def config_findings(plane: PlaneLocation, config: Config | None) -> list[Finding]:
    """Whether every service works under the config; nothing where none can be asked.

    Args:
        plane: the running one.
        config: as its file says; None where that is wrong, of which there is another finding.
    """
    shown = await _configs_shown(await plane.metrics_urls(), plane.metrics_headers)
    findings: list[Finding] = []
    if refusing := sorted(f"{name} (version {one.version})" for name, one in shown.items() if one.refused):
        text = f"the config file can't be used, and the last good one stays in force in {', '.join(refusing)}"
        remedy = "Their logs say what is wrong (`config_not_taken_over`). Correct the file, apply it, and send SIGHUP."
        findings.append(Finding("config", "warn", text, remedy))
    applied = plane.config_in_force() or config
    if applied is None:
        return findings
    version = applied.version
    behind = sorted(f"{name} ({one.version})" for name, one in shown.items() if one.version != version)
    if config is None or config.version != version:
        why = "is wrong" if config is None else f"is version {config.version} and not applied"
        text = f"version {version} stays in force, as the file {why}"
        findings.append(Finding("config", "warn", text, "See what `breakwater up` says of it."))
    if shown:
        good = f"version {version} is in force in each of {len(shown)} processes"
        bad = f"version {version} is not in force in {', '.join(behind)}"
        remedy = "Send SIGHUP to them; their logs say if they do not take it over (`config_not_taken_over`)."
        findings.append(judged("config", not behind, good, bad, remedy, verdict="warn"))
    return findings


@dataclass(frozen=True, slots=True)
class _ConfigShown:
    """What a process shows of its config."""

    version: str
    refused: bool
    """Whether its file, as it last read it, can't be used."""


async def _configs_shown(urls: Mapping[str, str], headers: Mapping[str, str]) -> dict[str, _ConfigShown]:
    """What each process shows; those that show nothing are left out, as others look after those."""
    found: dict[str, _ConfigShown] = {}
    for name, url in urls.items():
        try:
            _, text = await _get(url, headers)
        except OSError:
            continue
        if version := re.search(r'^breakwater_config_info{version="(\w+)"}', text, re.MULTILINE):
            refused = re.search(r"^breakwater_config_refused 1", text, re.MULTILINE)
            found[name] = _ConfigShown(version[1], refused is not None)
    return found


async def console_findings(plane: PlaneLocation) -> list[Finding]:
    """Whether the console of a local stack answers; nothing where none is known."""
    url = plane.console_url
    if url is None:
        return []
    try:
        status, _ = await _get(f"{url}/healthz")
    except OSError as error:
        return [
            Finding(
                "console", "warn", f"{url} does not answer: {error}", "Is the service `console` running? See its log."
            )
        ]
    return [
        judged(
            "console",
            status == 200,
            f"{url} answers",
            f"{url} answers {status}",
            "Is that the console? See its log.",
            verdict="warn",
        )
    ]


async def _get(url: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The status and the body at a URL. Raises ConnectionError: no response came."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(url, headers=headers) as response:
            return response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


async def provider_findings(config: Config) -> list[Finding]:
    """Whether each provider takes connections. Calls nothing."""
    import asyncio

    from breakwater.providers.base import HttpSettings

    endpoints = [(name, one.base_url) for name, one in config.providers.items() if isinstance(one, HttpSettings)]
    return list(await asyncio.gather(*(_provider(name, base_url) for name, base_url in endpoints)))


async def _provider(name: str, base_url: str) -> Finding:
    import asyncio

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
