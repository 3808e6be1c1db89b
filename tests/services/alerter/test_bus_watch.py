"""NATS can't store: people are told without it."""

from __future__ import annotations

import resource
from functools import partial
from typing import Any

import pytest

from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.store.channels import AlerterBus
from breakwater.alerts.store.incidents import open_log
from breakwater.kernel.nats.leader_lease import LeaderLease, LeaseTimes
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import ALERTER_LEADER, Stream
from breakwater.services.alerter import app as alerter_app
from breakwater.services.alerter import bus_watch
from breakwater.services.alerter.bus_watch import MAX_TRIES, BusWatch
from breakwater.services.alerter.clock import SYSTEM_CLOCK
from breakwater.services.alerter.incident_recorder import IncidentRecorder
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.alerter.kit import Answer, Bus, Receiver, alerter, bus_of, config_of
from tests.services.alerter.test_notifier import Recorder, SendError

TIMES = LeaseTimes(lease_s=2.0, renew_s=0.1, stop_s=0.5, watch_s=0.1)
HOOK = {"webhook": {"url": "http://127.0.0.1:1/", "secret": {"env": "HOOK_SECRET"}}}
CONFIG = config_of(channels={"ops": HOOK})


LEASE = Stream.ALERTER, ALERTER_LEADER


def publisher_on(bus: Bus) -> Publisher:
    return Publisher(lambda: bus.client, "alerter")


def parts_of(bus: Bus) -> tuple[LeaderLease, IncidentRecorder]:
    publisher = publisher_on(bus)
    log, _ = open_log(lambda: bus.client, publisher, CONFIG.alerts, CONFIG.redaction)
    lookup = AlerterBus(lambda: bus.client, publisher).lookup
    lease = LeaderLease(lookup, publisher, *LEASE, "one", times=TIMES)
    return lease, IncidentRecorder(log, IncidentRules.of(CONFIG.alerts))


@pytest.mark.long(about_s=6)
async def test_people_are_told_of_a_full_disk_of_nats_while_it_stores_nothing_and_the_incident_is_recorded_with_its_end(
    own_nats_server: RunningServer, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerter_app, "LEASE_TIMES", TIMES)
    monkeypatch.setattr(alerter_app, "BusWatch", partial(BusWatch, patience_s=0.0))
    monkeypatch.setattr(bus_watch, "LOOK_EVERY_S", 0.1)
    await receiver.start()
    receiver.answers.append(Answer(503))
    hook = {"url": receiver.url, "secret": {"env": "HOOK_SECRET"}}
    config = config_of(channels={"ops": {"webhook": hook}}, allow_networks=["127.0.0.0/8"])
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):

        async def is_led() -> bool:
            return await AlerterBus(lambda: bus.client, publisher_on(bus)).lookup.last(*LEASE) is not None

        await until(is_led, "the lease")
        # The kernel refuses what a full disk does.
        resource.prlimit(own_nats_server.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        await until(lambda: len(receiver.seen) >= 2, "the message, whose first try failed")
        message = receiver.seen[-1].verified()["data"]
        assert (message["title"], message["severity"]) == ("The plane can't store: NATS", "critical")
        assert message["text"].startswith("NATS did not acknowledge bw.alerter.leader in time. No job is accepted")
        assert "To do: free disk space on its server, and then restart it" in message["text"]
        await own_nats_server.restart_async()
        await bus.reported("resolved")
        assert len(receiver.seen) == 2, "once"
        alerts = await bus.alerts()
        assert [alert.change for alert in alerts] == ["opened", "resolved"]
        assert alerts[0].alert_id == message["alert_id"], "a receiver knows it by its id"


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
