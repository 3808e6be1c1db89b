"""A server that can't store is one incident, however many processes see it fail."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

from breakwater.alerts.contract import Alert, AlertEvent
from breakwater.alerts.rules.incidents import IncidentRules, Incidents, decide, due
from breakwater.alerts.rules.signals import STORAGE_LAPSE, StorageServer
from breakwater.alerts.settings import Reminders
from breakwater.alerts.storage_watch import REPEAT_EVERY, StorageWatch
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.redis.connection import StateUnavailableError
from tests.tables import each_row

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
RULES = IncidentRules(get_args(AlertEvent), 600, (), Reminders())


class Log:
    """The log of incidents in memory."""

    def __init__(self) -> None:
        self.incidents = Incidents()
        self.changes: list[Alert] = []

    async def decide(self, decision: Any) -> Alert | None:
        alert = decision(self.incidents)
        if alert is not None:
            self.incidents.take(alert)
            self.changes.append(alert)
        return alert

    async def apply(self, signal: Any, rules: IncidentRules) -> None:
        def change(incidents: Incidents) -> Alert | None:
            return decide(signal, incidents.of(signal.key), rules)

        await self.decide(change)

    @property
    def said(self) -> Sequence[str]:
        return [alert.change for alert in self.changes]


class Process:
    """A process with a server that may fail, and its watch."""

    def __init__(self, log: Log, server: StorageServer = "redis", patience_s: float = 0.0) -> None:
        self.outage = Outage(server)
        self.now = NOON
        incidents: Any = (log, RULES)
        self.watch = StorageWatch(
            server, lambda: self.outage, lambda: incidents, lambda: self.now, patience_s=patience_s
        )

    async def look(self, *, after: timedelta = timedelta()) -> None:
        self.now = NOON + after
        await self.watch.look()


def full_disk() -> StateUnavailableError:
    error = StateUnavailableError(
        "Redis does not serve: MISCONF Errors writing to the AOF file: No space left on device"
    )
    error.remedy = "Free disk space."
    return error


async def test_a_full_disk_of_a_running_server_is_one_incident_that_says_what_to_do_and_ends_when_it_stores_again() -> (
    None
):
    log = Log()
    one, other = Process(log), Process(log)
    for process in (one, other, one):
        process.outage.note_failure(full_disk())
        await process.look()
    [alert] = log.changes
    assert (alert.title, alert.severity, alert.status) == ("The plane can't store: Redis", "critical", "firing")
    assert "No space left on device. No call is made until it does." in alert.text
    assert alert.text.endswith("To do: Free disk space.")
    await one.look(after=REPEAT_EVERY)
    await other.look(after=REPEAT_EVERY)
    assert log.said == ["opened", "repeated"]
    one.outage.note_success()
    await one.look(after=timedelta(minutes=6))
    assert log.said == ["opened", "repeated", "resolved"]
    assert log.changes[-1].title == "The plane stores again: Redis"


async def test_the_incident_of_a_process_that_died_ends_by_itself() -> None:
    log = Log()
    process = Process(log)
    process.outage.note_failure(full_disk())
    await process.look()
    assert due(log.changes[-1], NOON + STORAGE_LAPSE - timedelta(seconds=1), RULES) is None
    ended = due(log.changes[-1], NOON + STORAGE_LAPSE, RULES)
    assert ended is not None
    assert ended.status == "resolved"


@each_row(
    ("server", "error", "patience_s", "severity"),
    [
        ("clickhouse", AnalyticsUnavailableError("code 243: no space left"), 0.0, "warning"),  # calls go on
        ("clickhouse", None, 0.0, None),
        ("redis", full_disk(), 30.0, None),  # a restart
        ("redis", BusUnavailableError("NATS does not answer"), 0.0, None),  # has an incident of its own
    ],
)
async def test_an_outage_that_lasts_is_an_incident_and_one_that_does_not_stop_calls_a_warning(
    server: StorageServer, error: Exception | None, patience_s: float, severity: str | None
) -> None:
    log = Log()
    process = Process(log, server, patience_s)
    if error is not None:
        process.outage.note_failure(error)
    await process.look()
    assert [alert.severity for alert in log.changes] == ([] if severity is None else [severity])
