"""The checks of `breakwater doctor`, except those of NATS."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import aiohttp
from pydantic import TypeAdapter, ValidationError

from breakwater.breakers.store import Breakers
from breakwater.calls.providers.settings import HttpSettings
from breakwater.cli.doctor_findings import (
    CONNECT_TIMEOUT_S,
    SETUP,
    Finding,
    Findings,
    answers,
    assess,
    clock,
    measure,
)
from breakwater.client import ApiError, ApiKeyRefusedError
from breakwater.config import Config, cipher_of, missing_parts, named_secrets
from breakwater.identity.settings import OpenId
from breakwater.jobs.store.workers import Workers
from breakwater.kernel.clickhouse.errors import QueryError
from breakwater.kernel.commands import connect, formats
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.redis.inspect import inspect
from breakwater.kernel.redis.sentinel import SentinelFacts
from breakwater.kernel.security.addresses import ANYWHERE, IpNetwork
from breakwater.kernel.security.encryption import key_of_document
from breakwater.kernel.security.guarded_http import AddressRefusedError, guarded_session
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.limits.store.budgets import Budgets
from breakwater.local.plane import PlaneLocation
from breakwater.records.log_comparison import last_comparison
from breakwater.records.migrations import MIGRATIONS, missing
from breakwater.records.texts import unfinished_changes

ANSWER_TIMEOUT_S = 5.0
"""Longest silence of ClickHouse in seconds. It is shorter than a check's timeout, so that findings name ClickHouse."""

MAX_COMPARISON_LAG = timedelta(minutes=10)
LOSS_WARNING_PERIOD = timedelta(days=1)
"""The time for which rows that ClickHouse had lost are reported as a warning."""


def secret_findings(config: Config) -> list[Finding]:
    """Warns of secrets and programs of the config that can't be read or run on this machine."""
    remedy = "Set it where the service runs. `doctor` does not see the environments of other machines."
    findings: list[Finding] = []
    secrets = list(named_secrets(config))
    for path, secret in secrets:
        try:
            secret.read()
        except ConfigError as error:
            findings.append(Finding("config", "warn", f"{path}: {error}", remedy))
    try:
        if not any("encryption.keys" in finding.text for finding in findings):
            cipher_of(config)
    except ConfigError as error:  # the secrets can be read, but are not valid keys
        findings.append(Finding("config", "fail", str(error), "Services do not start with it: see docs/security.md."))
    if secrets and not findings:
        findings.append(Finding("config", "ok", f"{len(secrets)} secrets can be read"))
    remedy = "It must exist where the worker runs. `doctor` does not see other machines."
    return findings + [Finding("config", "warn", problem.strip(), remedy) for problem in missing_parts(config)]


def sentinel_finding(watched: SentinelFacts) -> Finding:
    """Makes the finding on the failover of Redis: whether a replica would take the primary's place now."""
    text = (
        f"the primary is {watched.primary}, with {watched.replicas} replicas; "
        f"{watched.sentinels} of {watched.all_sentinels} Sentinels answer"
    )
    if watched.replicas and watched.problem is None and watched.sentinels > watched.all_sentinels / 2 >= 1:
        return Finding("redis", "ok", text)
    if not watched.replicas:
        text += "; no replica could take its place"
    elif watched.problem is not None:
        text += f"; {watched.problem}"
    remedy = "Run a replica and three Sentinels on machines of their own: see docs/reliability.md#failover."
    return Finding("redis", "warn", text, remedy)


async def redis_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Checks Redis and its contents: the breaker service's heartbeat, the budgets' counters, the workers."""
    url = plane.redis_url
    async with connect.state(url) as redis:
        facts = await inspect(redis)
        if facts.is_cluster:
            unsupported = (
                f"{connect.without_password(url)} runs as a Redis Cluster (cluster_enabled 1), which is not supported"
            )
            yield Finding(
                "redis", "fail", unsupported, "Use one server with `cluster-enabled no`, with replicas if you like."
            )
            return
        alive = await Breakers(redis).alive()
        filled = await Budgets(redis, ZoneInfo("UTC")).has_counters()
        workers = await Workers(redis).running()
        watched = await redis.sentinel_facts()
    yield answers(
        "redis", f"{connect.without_password(url)} answers in {facts.ping_ms:.1f} ms ({facts.version})", facts.ping_ms
    )
    yield clock("redis", facts.clock_ahead_s)
    if watched is not None:
        yield sentinel_finding(watched)
    yield assess(
        "redis",
        f"{facts.version} has no known vulnerability",
        f"{facts.version} has known vulnerabilities: {', '.join(facts.vulnerabilities)}",
        "Upgrade to the newest release of its branch, or to Valkey 9. A distribution may have fixed them without"
        " changing the version.",
        ok=not facts.vulnerabilities,
    )
    yield assess(
        "breakers",
        "a breaker service is running",
        "no breaker service is running: failures open no breaker, and the health of agents is out of date",
        "Is the service `breaker` running? See its log. After an outage it first catches up.",
        ok=alive,
    )
    yield assess(
        "budgets",
        "the counters are complete",
        "the counters are lost, or not built yet: no call is made under a hard limit",
        "Is the service `budget` running? It rebuilds them; its log says what it waits for.",
        ok=filled,
        verdict="fail",
    )
    if workers:
        unannounced = sum(not heard_on for heard_on in workers.values())
        takeover = "others take its jobs over within 5 s"
        if len(workers) == 1:
            takeover = "it takes its jobs over within 5 s of its restart"
        yield assess(
            "workers",
            f"{formats.quantity(len(workers), 'worker')}; if one dies, {takeover}",
            (
                f"{unannounced} of {len(workers)} workers are not announced on NATS: if one of them dies, workers on "
                "other machines notice only after 20 to 25 s"
            ),
            "Allow the NATS user `worker` to publish and subscribe to `bw.workers.*`, and restart the workers.",
            ok=not unannounced,
        )
    if facts.appendonly is None or facts.maxmemory_policy is None:
        remedy = "Check that your managed Redis has appendonly (or an equivalent) and noeviction."
        yield Finding("redis", "warn", "its settings are hidden", remedy)
        return
    yield assess(
        "redis",
        "keeps its data across restarts (appendonly yes)",
        "loses its data at a restart (appendonly no)",
        "Set `appendonly yes`: breakers and budgets would be refused until they are rebuilt.",
        ok=facts.appendonly,
    )
    yield assess(
        "redis",
        "never evicts keys (noeviction)",
        f"evicts keys when memory is low (maxmemory-policy {facts.maxmemory_policy})",
        "Set `maxmemory-policy noeviction`: an evicted counter is a limit that can be exceeded.",
        ok=facts.maxmemory_policy == "noeviction",
        verdict="fail",
    )


async def clickhouse_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Checks that ClickHouse answers, and that its tables are those of this version."""
    url = plane.clickhouse_url
    async with connect.analytics(url, answer_timeout_s=ANSWER_TIMEOUT_S) as analytics:
        await analytics.ping()
        _, ms = await measure(analytics.ping())
        version = (await analytics.query("SELECT version()")).rows[0][0]
        yield answers("clickhouse", f"{connect.without_password(url)} answers in {ms:.1f} ms (server {version})", ms)
        try:
            rows = (await analytics.query("SELECT DISTINCT version FROM schema_migrations")).rows
        except QueryError:
            rows = ()
        missing_parts = await missing(analytics) if rows else ()
    async with connect.analytics(plane.admin_clickhouse_url, answer_timeout_s=ANSWER_TIMEOUT_S) as analytics:
        try:
            changes = await unfinished_changes(analytics)
        except QueryError:
            changes = []  # the password is not on this machine, and `reader` may not ask
    for change in changes:
        remedy = "It empties texts (`text_days`, `erase`). Mend its reason; what `KILL MUTATION` ends is begun again."
        yield Finding("clickhouse", "warn", change, remedy)
    applied = {int(row[0]) for row in rows}
    required = {migration.version for migration in MIGRATIONS}
    for missing_part in missing_parts:
        yield Finding("clickhouse", "fail", f"{missing_part.description} is missing", SETUP)
    if pending := sorted(required - applied):
        yield Finding("clickhouse", "fail", f"migrations {', '.join(map(str, pending))} are not applied", SETUP)
    elif (newest := max(applied)) > max(required):
        text = f"the schema is newer than this program (migration {newest})"
        yield Finding("clickhouse", "warn", text, "Use the version of Breakwater that created it.")
    elif not missing_parts:
        yield Finding("clickhouse", "ok", f"the schema is at version {max(required)}")


async def record_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Checks how far ClickHouse has been compared with EVENTS, and whether events were missing."""
    async with (
        connect.bus(plane.admin_nats_url) as client,
        connect.analytics(plane.clickhouse_url, answer_timeout_s=ANSWER_TIMEOUT_S) as analytics,
    ):
        lookup = Lookup(lambda: client)
        try:
            comparison = await last_comparison(analytics, (await lookup.facts(Stream.EVENTS)).identity)
        except QueryError:
            return  # `clickhouse_findings` reports missing migrations
        next_event = await lookup.next(Stream.EVENTS, ">", comparison.upto + 1)
    now = datetime.now(UTC)
    last_compared = (
        "never" if comparison.at is None else f"at {formats.clock(comparison.at, now)}, up to event {comparison.upto:,}"
    )
    compared = f"EVENTS and ClickHouse, last compared: {last_compared}"
    if next_event is not None and now - next_event.stored_at > MAX_COMPARISON_LAG:
        text = f"{compared}; the next event is of {formats.clock(next_event.stored_at, now)}"
        remedy = "Is the service `sink` running? It compares them every minute; its log says what it waits for."
        yield Finding("record", "warn", text, remedy)
    elif comparison.lost_at is None:
        yield Finding("record", "ok", f"{compared}; no event was missing")
    else:
        at = formats.clock(comparison.lost_at, now)
        text = f"{compared}; events were last missing at {at}, {comparison.lost:,} in total, and were stored again"
        remedy = "Did ClickHouse lose its disk or power, or were rows deleted? They are restored; see its log."
        yield Finding("record", "warn" if now - comparison.lost_at < LOSS_WARNING_PERIOD else "ok", text, remedy)


async def encryption_findings(plane: PlaneLocation, config: Config | None) -> Findings:
    """Checks that the keys of stored texts are available: of executions in ClickHouse, and of the newest result."""
    try:
        cipher = plane.cipher()
    except ConfigError:
        return  # `secret_findings` reports secrets that can't be read
    if config is None:
        return
    key_ids = cipher.key_ids
    private_agents = ", ".join(config.private_agents)
    lacks_key = False
    records_by_key = await _records_by_key(plane)
    for key, records in sorted(records_by_key.items()):
        if key not in key_ids:
            lacks_key = True
            unreadable = "which is not in encryption.keys: their texts can't be read"
            remedy = (
                "Restore that key, after the first one, or as BREAKWATER_PLANE_KEY if it was the "
                "plane's own; `breakwater encryption keys` lists the current ones."
            )
            yield Finding("encryption", "fail", f"{records} are encrypted with key {key}, {unreadable}", remedy)
    if private_agents and not key_ids:
        lost = "results and dead letters are stored without texts, as the plane has no key: answers are lost"
        remedy = (
            "Set BREAKWATER_PLANE_KEY for the worker and request, to at least 32 random "
            "characters. `doctor` does not see the environments of other machines."
        )
        yield Finding("encryption", "warn", f"{private_agents}: {lost}", remedy)
    elif not lacks_key and (cipher.on or records_by_key or private_agents):
        state = "off"
        if cipher.on:
            state = f"on: new texts are encrypted with key {key_ids[0]}"
        elif private_agents:
            own_key = key_ids[-1]
            state = f"off, but for texts of {private_agents}, which are encrypted with the plane's own key {own_key}"
        yield Finding("encryption", "ok", f"{state}, and all stored can be read")


async def _records_by_key(plane: PlaneLocation) -> dict[str, str]:
    """Describes the stored records that each key encrypts, by the key's id."""
    sql = "SELECT encryption_key, count() FROM executions WHERE encryption_key IS NOT NULL GROUP BY encryption_key"
    async with connect.analytics(plane.clickhouse_url, answer_timeout_s=ANSWER_TIMEOUT_S) as analytics:
        try:
            records = {str(key): f"{count:,} executions" for key, count in (await analytics.query(sql)).rows}
        except QueryError:
            records = {}  # `clickhouse_findings` reports missing migrations
    async with connect.bus(plane.admin_nats_url) as client:
        newest = await Lookup(lambda: client).last(Stream.RESULTS, "bw.results.>")
    if newest is not None and (key := key_of_document(newest.data)) is not None:
        records.setdefault(key, "the newest result")
    return records


async def api_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Checks the HTTP API, and the rights of the API key."""
    async with plane.api_client() as api:
        try:
            ready, text = await _get(f"{api.url}/readyz")
        except OSError as error:
            remedy = "Is the service `request` running? See its log."
            yield Finding("api", "fail", f"{api.url} does not respond: {error}", remedy)
            return
        not_ready = f"{api.url} is not ready ({ready}): {text[:200]}"
        yield assess(
            "api", f"{api.url} is ready", not_ready, "See the log of `request`.", ok=ready == 200, verdict="fail"
        )
        try:
            key = await api.get("key", timeout_s=CONNECT_TIMEOUT_S)
        except ApiKeyRefusedError:
            if api.api_key:
                remedy = "Create one with `breakwater keys create NAME`, and set BREAKWATER_API_KEY."
                yield Finding("api", "fail", "the API key is not accepted", remedy)
            else:
                yield Finding("api", "warn", "no API key was tried", "Set BREAKWATER_API_KEY.")
        except ApiError as error:
            remedy = "Is it the same version of Breakwater? See the log of `request`."
            yield Finding("api", "warn", f"the rights of the API key are unknown ({error.status})", remedy)
        else:
            yield Finding("api", "ok", f"the API key {key['name']!r} may {', '.join(key['scopes'])}")


async def console_findings(plane: PlaneLocation, _config: Config | None = None) -> Findings:
    """Checks the console of a local stack, if one is running."""
    if (url := plane.console_url) is None:
        return
    try:
        status, _ = await _get(f"{url}/healthz")
    except OSError as error:
        remedy = "Is the service `console` running? See its log."
        yield Finding("console", "warn", f"{url} does not respond: {error}", remedy)
        return
    remedy = "Is that the console? See its log."
    yield assess("console", f"{url} answers", f"{url} responds {status}", remedy, ok=status == 200)


async def config_findings(plane: PlaneLocation, config: Config | None) -> Findings:
    """Checks which config version each process runs under, if any can be asked.

    Args:
        plane: the running plane.
        config: the config in the file; None if it is invalid, which another finding reports.
    """
    versions, refusing = await _configs_in_use(await plane.metrics_urls(), plane.metrics_headers)
    if refusing:
        names = ", ".join(f"{name} (version {versions[name]})" for name in sorted(refusing))
        text = f"the config file is invalid; the last good one stays effective in {names}"
        remedy = "Their logs name the error (`config_not_taken_over`). Fix the file, apply it, and send SIGHUP."
        yield Finding("config", "warn", text, remedy)
    applied = plane.effective_config() or config
    if applied is None:
        return
    version = applied.version
    if config is None or config.version != version:
        reason = "is wrong" if config is None else f"is version {config.version} and not applied"
        text = f"version {version} stays effective, as the file {reason}"
        yield Finding("config", "warn", text, "The output of `breakwater up` says why.")
    if versions:
        behind = ", ".join(sorted(f"{name} ({used})" for name, used in versions.items() if used != version))
        good = f"version {version} is effective in each of {len(versions)} processes"
        bad = f"version {version} is not effective in {behind}"
        remedy = "Send SIGHUP to them; their logs say why they keep the old one (`config_not_taken_over`)."
        yield assess("config", good, bad, remedy, ok=not behind)


async def _configs_in_use(urls: Mapping[str, str], headers: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Reads the processes' metrics. Returns the config version of each, and the processes that refuse the file."""
    versions: dict[str, str] = {}
    refusing: set[str] = set()
    for name, url in urls.items():
        try:
            _, text = await _get(url, headers)
        except OSError:
            continue  # other checks report services that don't respond
        if version := re.search(r'^breakwater_config_info{version="(\w+)"}', text, re.MULTILINE):
            versions[name] = version[1]
            refusing |= {name} if re.search(r"^breakwater_config_refused 1", text, re.MULTILINE) else set()
    return versions, refusing


async def _get(url: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Gets a URL. Returns the status and the body. Raises ConnectionError if no response came."""
    timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(url, headers=headers) as response:
            return response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


async def provider_findings(_plane: PlaneLocation, config: Config | None) -> Findings:
    """Checks that each provider's address accepts connections. Makes no call."""
    providers = {} if config is None else config.providers
    checks = [
        _provider(name, settings.base_url) for name, settings in providers.items() if isinstance(settings, HttpSettings)
    ]
    for finding in await asyncio.gather(*checks):
        yield finding


async def _provider(name: str, base_url: str) -> Finding:
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            (_, writer), ms = await measure(asyncio.open_connection(host, port))
    except (OSError, TimeoutError) as error:
        reason = f"within {CONNECT_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else str(error)
        text = f"{name}: no connection to {host}:{port}: {reason}"
        return Finding("provider", "fail", text, f"Check providers.{name}.base_url, name resolution and the firewall.")
    writer.close()
    return Finding("provider", "ok", f"{name}: {host}:{port} accepts connections ({ms:.0f} ms; no call was made)")


FAILING_SHARE = 0.8
"""The share of failed calls from which on a provider counts as failing."""
LEAST_CALLS = 3
"""The least number of failed calls for the verdict `fail`; fewer are a warning."""
LATEST_CALLS = 10
"""The number of latest calls that decide whether one model of a working provider fails."""

_OUTCOMES = """
SELECT provider, outcome = 'success' AS succeeded, error_kind, error_class, error_status_code, count() AS calls
FROM attempts FINAL
WHERE started_at >= now() - INTERVAL 1 HOUR AND NOT short_circuited AND outcome != 'cancelled'
GROUP BY ALL ORDER BY provider, calls DESC
"""
_FAILING_MODELS = f"""
SELECT provider, model, count(), argMax((error_kind, error_class, error_status_code), started_at)
FROM (
    SELECT provider, model, outcome, started_at, error_kind, error_class, error_status_code FROM attempts FINAL
    WHERE started_at >= now() - INTERVAL 1 HOUR AND NOT short_circuited AND outcome != 'cancelled'
    ORDER BY started_at DESC LIMIT {LATEST_CALLS} BY provider, model
)
GROUP BY provider, model HAVING count() >= {LEAST_CALLS} AND countIf(outcome = 'success') = 0 ORDER BY provider, model
"""  # noqa: S608  constants


async def call_findings(plane: PlaneLocation, config: Config | None) -> Findings:
    """Checks the outcomes of the last hour's calls, by provider."""
    async with connect.analytics(plane.clickhouse_url, answer_timeout_s=ANSWER_TIMEOUT_S) as analytics:
        try:
            outcome_rows = (await analytics.query(_OUTCOMES)).rows
            failing_models = (await analytics.query(_FAILING_MODELS)).rows
        except QueryError:
            return  # `clickhouse_findings` reports missing migrations
    keys = {} if config is None else dict(named_secrets(config))
    for provider, rows in groupby(outcome_rows, itemgetter(0)):
        key = keys.get(f"providers.{provider}.api_key")
        outcomes = [_Outcome(*row) for row in rows]
        failures = [outcome for outcome in outcomes if not outcome.succeeded]
        calls = sum(outcome.calls for outcome in outcomes)
        failed = sum(outcome.calls for outcome in failures)
        if failed < calls * FAILING_SHARE:
            yield Finding(
                "calls", "ok", f"{provider}: {calls - failed:,} of {calls:,} calls of the last hour succeeded"
            )
            for of_provider, model, count, (kind, class_name, status) in failing_models:
                if of_provider == provider:
                    failure = _failure_name(class_name, status)
                    text = f"{provider}: the last {count} calls of {model} failed, the latest with {failure}"
                    yield Finding("calls", "fail", text, _remedy(provider, kind, status, key))
            continue
        most_frequent = failures[0]
        text = (
            f"{provider}: {failed:,} of {formats.quantity(calls, 'call')} of the last hour failed, "
            f"most with {_failure_name(most_frequent.error_class, most_frequent.status)}"
        )
        verdict = "fail" if failed == calls >= LEAST_CALLS else "warn"
        yield Finding("calls", verdict, text, _remedy(provider, most_frequent.error_kind, most_frequent.status, key))


class _Outcome(NamedTuple):
    """A row of `_OUTCOMES`: how many of a provider's calls ended in one way."""

    provider: str
    succeeded: bool
    error_kind: str | None
    error_class: str
    status: int | None
    calls: int


def _failure_name(class_name: str, status: int | None) -> str:
    return class_name if status is None else f"{class_name} ({status})"


def _remedy(provider: str, kind: str | None, status: int | None, key: SecretRef | None) -> str:
    """The remedy for a failure of a provider's calls. `key` is the source of the provider's API key."""
    match kind, status:
        case _, 401 | 403:
            source = key and (key.env or key.file or key.command)
            setting = f"providers.{provider}.api_key" + (f" ({source})" if source else "")
            unless_in_file = ""
            if key is not None and key.env is not None:
                unless_in_file = " if it is in the file of `up --env-file`; otherwise restart the workers"
            reread = f"The next refused call reads it again{unless_in_file}."
            return f"The provider refuses the key: correct {setting}. {reread}"
        case _, 404:
            return f"Check the models' names and providers.{provider}.base_url."
        case "quota", _:
            return "The account's quota is used up: see its billing page at the provider."
        case "rate_limit", _:
            return "Lower `rate_limit` or `concurrency` of the agents, or ask the provider for a higher limit."
        case "server" | "timeout" | "network", _:
            return f"See the provider's status page; check providers.{provider}.base_url and the network."
        case _:
            return "`breakwater executions --status dead_lettered` lists failed jobs; one job's page shows its errors."


_KEY_PARTS = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
"""The fields that each type of public key needs."""


async def openid_findings(_plane: PlaneLocation, config: Config | None) -> Findings:
    """Checks the OpenID provider, if the config names one, from this machine."""
    if config is not None and config.console.openid is not None:
        yield await _openid(config.console.openid)


async def identity_findings(_plane: PlaneLocation, config: Config | None) -> Findings:
    """Checks from this machine whether the keys of JSON Web Tokens can be read, if the config accepts any."""
    if config is None or (tokens := config.identity.jwt) is None:
        return
    try:
        document, ms = await measure(_json_at(tokens.jwks_url, ANYWHERE))
        keys = _signing_keys(document.get("keys"))
    except ValueError as error:
        remedy = (
            "Check identity.jwt.jwks_url, name resolution and the firewall: `request` must reach it. API keys work."
        )
        yield Finding("identity", "fail", f"{tokens.jwks_url}: {error}", remedy)
    else:
        text = f"{tokens.jwks_url} responds in {ms:.0f} ms, with {keys} keys"
        yield answers("identity", text, ms, "The first token after a start, and one each hour, waits for it.")


async def _openid(openid: OpenId) -> Finding:
    url = openid.issuer.rstrip("/") + "/.well-known/openid-configuration"
    try:
        document, ms = await measure(_json_at(url, _networks_for(url, openid)))
    except ValueError as error:
        remedy = (
            "Check console.openid.issuer, name resolution and the firewall: `request` must reach it. API keys work."
        )
        return Finding("openid", "fail", f"{url}: {error}", remedy)
    stated_issuer = document.get("issuer")
    if stated_issuer != openid.issuer:
        text = f"{url} belongs to the issuer {stated_issuer!r}, but console.openid.issuer is {openid.issuer!r}"
        remedy = "Write the issuer exactly as the provider states it, with or without a trailing slash."
        return Finding("openid", "fail", text, remedy)
    endpoints = ("authorization_endpoint", "token_endpoint", "jwks_uri")
    if missing_fields := [name for name in endpoints if not isinstance(document.get(name), str)]:
        remedy = "Is that an OpenID Connect provider, and is the path correct?"
        return Finding("openid", "fail", f"{url} does not state {', '.join(missing_fields)}", remedy)
    try:
        url_of_keys = document["jwks_uri"]
        keys = _signing_keys((await _json_at(url_of_keys, _networks_for(url_of_keys, openid))).get("keys"))
    except ValueError as error:
        remedy = (
            "Without the provider's keys, people can't sign in. If it is at a private address, allow its network "
            "with console.openid.allow_networks."
        )
        return Finding("openid", "fail", f"{document['jwks_uri']}: {error}", remedy)
    logout = "" if document.get("backchannel_logout_supported") else "; it does not end sessions here (back-channel)"
    text = f"{openid.issuer} responds in {ms:.0f} ms and is valid, with {keys} keys{logout}"
    return answers("openid", text, ms, "Signing in takes several such requests.")


def _networks_for(url: str, openid: OpenId) -> Sequence[IpNetwork]:
    is_issuers_host = urlsplit(url).hostname == urlsplit(openid.issuer).hostname
    return ANYWHERE if is_issuers_host else openid.allow_networks


async def _json_at(url: str, allowed: Sequence[IpNetwork]) -> dict[str, Any]:
    """Reads a JSON object from an issuer. Raises ValueError, which says why, if that fails."""
    try:
        async with guarded_session(allowed, CONNECT_TIMEOUT_S) as http, http.get(url) as response:
            status = response.status
            body = await response.read()
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, AddressRefusedError)
        raise ValueError("it is at an address that is not public" if refused else str(error)) from error
    except TimeoutError:
        raise ValueError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    if status != 200:
        raise ValueError(f"HTTP {status}")
    try:
        return TypeAdapter(dict[str, Any]).validate_json(body)
    except ValidationError:
        raise ValueError("no JSON object") from None


def _signing_keys(key_set: object) -> int:
    """Counts the keys of a key set that may sign ID tokens. Raises ValueError if there are none."""
    keys = cast(list[Any], key_set) if isinstance(key_set, list) else []
    signing = [key for key in keys if isinstance(key, dict) and key.get("use", "sig") == "sig"]
    count = 0
    for key in cast(list[dict[str, Any]], signing):
        parts = _KEY_PARTS.get(str(key.get("kty")), ())
        count += bool(parts) and all(isinstance(key.get(part), str) for part in parts)
    if not count:
        raise ValueError("it has no key for signing tokens")
    return count
