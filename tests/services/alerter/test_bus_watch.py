"""NATS can't store: people are told without it."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import pytest

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.store.channels import AlerterBus
from breakwater.alerts.store.incidents import open_log
from breakwater.kernel.nats.leader_lease import LeaderLease, LeaseTimes
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import ALERTER_LEADER, Stream
from breakwater.kernel.process import background
from breakwater.services.alerter.bus_watch import MAX_TRIES, BusWatch
from breakwater.services.alerter.clock import SYSTEM_CLOCK
from breakwater.services.alerter.incident_recorder import IncidentRecorder
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.alerter.kit import Bus, bus_of, config_of
from tests.services.alerter.test_notifier import Recorder, SendError

TIMES = LeaseTimes(lease_s=2.0, renew_s=0.1, stop_s=0.5, watch_s=0.1)
HOOK = {"webhook": {"url": "http://127.0.0.1:1/", "secret": {"env": "HOOK_SECRET"}}}
CONFIG = config_of(channels={"ops": HOOK})


def parts_of(bus: Bus) -> tuple[LeaderLease, IncidentRecorder]:
    publisher = Publisher(lambda: bus.client, "alerter")
    log, _ = open_log(lambda: bus.client, publisher, CONFIG.alerts, CONFIG.redaction)
    lookup = AlerterBus(lambda: bus.client, publisher).lookup
    lease = LeaderLease(lookup, publisher, Stream.ALERTER, ALERTER_LEADER, "one", times=TIMES)
    return lease, IncidentRecorder(log, IncidentRules.of(CONFIG.alerts))


async def work() -> None:
    await asyncio.Event().wait()


async def is_lost(lease: LeaderLease) -> bool:
    return lease.storing.lasting


async def test_people_are_told_of_a_full_disk_of_nats_while_it_stores_nothing_and_the_incident_is_recorded_with_its_end(
    own_nats_server: RunningServer,
) -> None:
    channel = Recorder(SendError("busy"))
    async with bus_of(own_nats_server.url, CONFIG) as bus:
        lease, incidents = parts_of(bus)
        watch = BusWatch(lease, SYSTEM_CLOCK.now, patience_s=0.0)

        async def look() -> None:
            await watch.look(CONFIG.alerts, [channel], incidents)

        async def is_led() -> bool:
            return lease.led_last

        holding = asyncio.create_task(lease.run(work))
        await until(is_led, "the lease")
        await look()
        assert channel.tried == []
        # The kernel refuses what a full disk does.
        resource.prlimit(own_nats_server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        await until(lambda: is_lost(lease), "NATS stores nothing")
        await look()
        await look()
        await look()
        assert len(channel.tried) == 2, "once, as the first try failed"
        [message] = channel.sent
        assert isinstance(message, Alert)
        assert (message.title, message.severity) == ("The plane can't store: NATS", "critical")
        assert "To do: free disk space on its server, and then restart it" in message.text
        await own_nats_server.restart_async()

        async def is_back() -> bool:
            return bus.client.is_connected and not lease.storing.lasting

        await until(is_back, "NATS stores again")
        await look()
        alerts = await bus.alerts()
        assert [(alert.change, alert.incident_id) for alert in alerts] == [
            ("opened", message.incident_id),
            ("resolved", message.incident_id),
        ]
        assert alerts[0].alert_id == message.alert_id, "a receiver knows it by its id"
        await background.stop(holding)


@pytest.mark.parametrize(("led_last", "tries"), [(True, MAX_TRIES), (False, 0)])
async def test_the_alerter_that_led_last_tries_a_few_times_and_no_other_one_does(led_last: bool, tries: int) -> None:
    channel = Recorder()
    channel.always = SendError("gone")
    client: Any = None
    lease, incidents = parts_of(Bus("", client))
    lease.led_last = led_last
    lease.storing.note_failure("no space left on device")
    watch = BusWatch(lease, SYSTEM_CLOCK.now, patience_s=0.0)
    for _ in range(MAX_TRIES + 2):
        await watch.look(CONFIG.alerts, [channel], incidents)
    assert len(channel.tried) == tries
