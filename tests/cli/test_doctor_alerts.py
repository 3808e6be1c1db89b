"""The doctor distinguishes a channel that holds alerts back on purpose from one whose receiver is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from breakwater.alerts.settings import Alerts
from breakwater.cli import doctor_nats
from breakwater.cli.doctor_findings import Finding
from breakwater.cli.doctor_nats import channel_findings, held_back_for
from breakwater.kernel.nats.provision import provision, survey
from breakwater.kernel.nats.topology import Plan, alert_consumer
from tests.helpers import until
from tests.servers import RunningServer

SLACK = {"slack": {"webhook_url": {"env": "SLACK"}}}
ALERTS = Alerts.model_validate({"quiet_s": 0, "channels": {"ops": {**SLACK, "rate_limit": "off"}}})
PLAN = Plan(agents={"writer": 1}, alert_channels=("ops",))


@pytest_asyncio.fixture
async def client(own_nats_server: RunningServer) -> AsyncGenerator[Client]:
    await provision(own_nats_server.url, PLAN)
    connection = await nats.connect(own_nats_server.url)
    yield connection
    await connection.close()


async def look(client: Client) -> Finding:
    [finding] = await channel_findings(client, ALERTS, (await survey(client, PLAN)).consumers)
    return finding


async def hold(client: Client, alerts: int) -> None:
    """Takes alerts and does not acknowledge them, as a channel that sends them later."""
    for _ in range(alerts):
        await client.jetstream().publish("bw.alerts.breaker_open", b"{}")
    subscription = await client.jetstream().pull_subscribe_bind(alert_consumer("ops"), "ALERTS")
    assert len(await subscription.fetch(alerts, timeout=60)) == alerts


async def test_a_channel_that_nobody_serves_is_found(client: Client) -> None:
    found = await look(client)
    assert (found.verdict, found.text) == (
        "warn",
        "alerter-channel-ops: 0 waiting, 0 delayed or being sent, and no service reads them",
    )
    assert "`alerter` running" in found.remedy


async def test_a_channel_that_waits_for_alerts_is_well(client: Client) -> None:
    subscription = await client.jetstream().pull_subscribe_bind(alert_consumer("ops"), "ALERTS")
    waiting = asyncio.create_task(subscription.fetch(1, timeout=60))

    async def well() -> bool:
        return (await look(client)).verdict == "ok"

    await until(well, timeout_s=60)
    waiting.cancel()


async def test_what_is_held_back_for_a_while_is_meant_and_for_longer_is_not(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold(client, 3)
    found = await look(client)
    assert (found.verdict, found.text) == ("ok", "alerter-channel-ops: 0 waiting, 3 delayed or being sent")
    monkeypatch.setattr(doctor_nats, "MAX_SENDING_TIME", timedelta())
    found = await look(client)
    assert found.verdict == "warn"
    assert "3 delayed or being sent, the oldest for " in found.text
    assert "breakwater alerts test ops" in found.remedy


def test_a_recovery_a_limit_and_a_night_may_hold_alerts_back() -> None:
    night = {"quiet_hours": {"start": "22:00", "end": "07:00"}}
    channels = {"limited": SLACK, "night": {**SLACK, **night}, "plain": {**SLACK, "rate_limit": "off"}}
    alerts = Alerts.model_validate({"channels": channels})
    assert {name: held_back_for(route, 600).total_seconds() for name, route in alerts.channels.items()} == {
        "limited": 600 + 300,
        "night": 86_400,
        "plain": 600,
    }
