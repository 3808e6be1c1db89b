"""`breakwater setup`: creates and updates streams, consumers and ClickHouse's tables, as an administrator."""

from __future__ import annotations

from typing import Annotated

import nats.errors
import typer
from pydantic import SecretStr

from breakwater.config import Config
from breakwater.kernel.clickhouse.client import connect as analytics_at
from breakwater.kernel.clickhouse.table import Layout
from breakwater.kernel.commands import connect, output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.errors import CliError, ExitCode, unreachable
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.process.settings import Settings
from breakwater.local.plane import ConfigOption, DataOption, JsonOption, PlaneLocation
from breakwater.records.migrations import migrate, script


def setup(
    config: ConfigOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
    print_sql: Annotated[
        bool,
        typer.Option(
            "--print-sql", help="Change nothing; print the SQL for ClickHouse, so that you can run it yourself."
        ),
    ] = False,
) -> None:
    """Create and update the streams and consumers on NATS, and the tables of ClickHouse, as the config asks.

    Changes only what differs, so it can be run at any time: after an upgrade, after an agent was added. It removes
    nothing: streams and jobs of agents that were removed from the config stay. `breakwater up` does all this too.

    For example:

        breakwater setup

        BREAKWATER_NATS_REPLICAS=3 breakwater setup --config deploy/breakwater.yaml

        breakwater setup --print-sql > clickhouse.sql
    """
    plane = PlaneLocation(data)
    if print_sql:
        output.write("\n".join(statements(plane.clickhouse_url, plane.config(config))))
        return
    addresses = {"nats_url": SecretStr(plane.admin_nats_url), "clickhouse_url": SecretStr(plane.admin_clickhouse_url)}
    changes = run(prepare(Settings().model_copy(update=addresses), plane.config(config)))
    if as_json:
        output.json_document({"ok": True, "done": changes})
    else:
        output.write("\n".join(changes) or "everything is up to date; nothing was changed")


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
    async with connect.bus(nats_url):
        pass  # reports a wrong address or password immediately; `provision` would retry for two minutes
    try:
        return await provision(nats_url, bus_plan(config), replicas=settings.nats_replicas)
    except (OSError, TimeoutError, nats.errors.Error) as error:
        raise unreachable(
            f"JetStream does not answer at {connect.without_password(nats_url)}: {str(error) or type(error).__name__}",
            "Is JetStream enabled, and may this user create streams?",
        ) from error


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
