"""Preparation of the servers for a config: streams and consumers of NATS, tables of ClickHouse, the note in Redis."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.rules.signals import config_applied
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.config import Config, changes, parse_config, require_reloadable
from breakwater.config.store import Configs
from breakwater.kernel.clickhouse.client import connect as analytics_at
from breakwater.kernel.clickhouse.table import Layout
from breakwater.kernel.commands import connect
from breakwater.kernel.commands.errors import CliError, ExitCode
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.process.settings import Settings
from breakwater.records.migrations import migrate, script
from breakwater.redaction.rules.redact import Redactor


async def announce(nats_url: str, before: Config, after: Config, by: str) -> None:
    """Notifies people of a change of the config, by an incident. Raises CliError, BusError."""
    alerts = after.alerts
    rules = IncidentRules.of(alerts)
    applied = config_applied(after.version, before.version, by, changes(before, after), datetime.now(UTC))
    async with connect.bus(nats_url) as client:
        log = IncidentLog(lambda: client, Publisher(lambda: client, "setup"), Redactor.compile(after.redaction))
        await log.apply(applied, rules)


@dataclass(frozen=True, slots=True)
class PreparedConfig:
    """The result of preparing the servers for a config, which services may now read."""

    version: str
    before: str | None
    """The version that was applied before; None for the first one."""
    changes: tuple[str, ...]
    """The changes of the config, a line each."""
    server_changes: tuple[str, ...]
    """The changes on the servers, a line each."""


async def apply_to_servers(
    settings: Settings, config: Config, by: str, *, at_start: bool = False
) -> tuple[PreparedConfig, Config | None]:
    """Prepares the servers for a config, records it as applied, and notifies people.

    Args:
        settings: the addresses of the servers.
        config: the config.
        by: the name for the audit log.
        at_start: True if services start with it, so that all may differ from the one before.

    Returns:
        The result, and the config that was applied before; None for the first one.

    Raises:
        ConfigError: if a running plane can't change to the config.
        CliError, BusError, AnalyticsError, StateUnavailableError: if a server does not answer, or refuses.
    """
    async with connect.state(settings.redis_url.get_secret_value()) as redis:
        configs = Configs(redis)
        text = await configs.last_applied()
        last_config: Config | None = None
        if text is not None:
            try:
                last_config = parse_config(text, source="the config that was applied last")
            except ConfigError:  # an earlier version may have had other settings
                if not at_start:
                    raise
        if last_config is not None and not at_start:
            require_reloadable(last_config, config)
        server_changes = await prepare(settings, config)
        if last_config is not None and last_config.version != config.version:
            if last_config.programs != config.programs:
                server_changes += ("programs have changed: `breakwater config nats-users` prints the users of NATS",)
            await announce(settings.nats_url.get_secret_value(), last_config, config, by)
        await configs.mark_applied(config.text)
    config_changes = () if last_config is None else changes(last_config, config)
    before = None if last_config is None else last_config.version
    return PreparedConfig(config.version, before, config_changes, server_changes), last_config


async def prepare(settings: Settings, config: Config) -> tuple[str, ...]:
    """Creates and updates what this version and this config need on NATS and ClickHouse.

    Returns:
        A line for each change; none if everything was up to date.

    Raises:
        CliError: if a server does not answer, or its address is invalid.
        BusError: if NATS refuses a change.
        AnalyticsError: if ClickHouse refuses a change, or does not answer.
    """
    return (*await prepare_nats(settings, config), *await prepare_clickhouse(settings, config))


async def prepare_nats(settings: Settings, config: Config) -> tuple[str, ...]:
    """Does the part of `prepare` on NATS."""
    nats_url = settings.nats_url.get_secret_value()
    return await connect.prepare_streams(nats_url, bus_plan(config), replicas=settings.nats_replicas)


async def prepare_clickhouse(settings: Settings, config: Config) -> tuple[str, ...]:
    """Does the part of `prepare` on ClickHouse."""
    async with connect.analytics(settings.clickhouse_url.get_secret_value()) as analytics:
        return await migrate(analytics, layout(config))


def statements(clickhouse_url: str, config: Config) -> tuple[str, ...]:
    """The SQL statements that `prepare` may run on ClickHouse. Raises CliError if the address is invalid."""
    try:
        database = analytics_at(clickhouse_url).database
    except ValueError as error:
        raise CliError("clickhouse_url", str(error), exit_code=ExitCode.USAGE) from None
    return tuple(script(database, layout(config)))


def layout(config: Config) -> Layout:
    """The settings of the config that shape ClickHouse's tables."""
    return Layout(config.clickhouse.cluster, config.clickhouse.retention_days.model_dump())


def bus_plan(config: Config) -> Plan:
    """The settings of the config that shape streams and consumers."""
    return Plan(
        agents={name: agent.concurrency for name, agent in config.agents.items()},
        alert_channels=tuple(config.alerts.channels),
        events_max_age_h=config.limits.events_max_age_h,
        results_max_age_h=config.limits.results_max_age_h,
        jobs_max_per_agent=config.limits.jobs_max_per_agent,
        max_bytes={
            Stream.JOBS: config.limits.jobs_max_bytes,
            Stream.EVENTS: config.limits.events_max_bytes,
            Stream.RESULTS: config.limits.results_max_bytes,
            Stream.RESPONSES: config.limits.responses_max_bytes,
            Stream.ALERTS: config.limits.alerts_max_bytes,
            Stream.DLQ: config.limits.dead_letters_max_bytes,
            Stream.BODIES: config.limits.bodies_max_bytes,
        },
    )
