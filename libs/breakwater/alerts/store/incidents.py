"""Incidents, read from ALERTS and decided on once in the whole fleet.

ALERTS is a log with one writer at a time: each alert names the last sequence that its writer knew, and the stream takes
it only if there is no later one. A refused writer reads what it missed and decides again. So no decision is made on a
stale incident, however many alerters and operators decide in parallel, and whichever response was lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing

import structlog
from pydantic import ValidationError

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.incidents import IncidentRules, Incidents, decide
from breakwater.alerts.rules.signals import Signal, ends_several
from breakwater.alerts.settings import Alerts
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.errors import AlreadyDecidedError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules

MAX_BACKOFF_S = 0.05
REPLICA_LAG_S = 2.0
REPLICA_PAUSE_S = 0.05

IncidentDecision = Callable[["Incidents"], "Alert | None"]
"""Gives the alert that changes an incident, given all of them; None for no change. It may be called repeatedly."""


class IncidentLog:
    """The incidents of ALERTS: follows the stream, and publishes decisions."""

    def __init__(self, connection: ClientGetter, publisher: Publisher, redactor: Redactor) -> None:
        self._publisher = publisher
        self.redactor = redactor
        self._lookup = Lookup(connection)
        self._lock = asyncio.Lock()
        self._stream: str | None = None
        self._sequence = 0
        self._deleted = 0
        self._sure = False
        self.incidents = Incidents()

    async def catch_up(self) -> Incidents:
        """Reads the alerts published since the last time, by any writer.

        Raises:
            BusUnavailableError: NATS does not answer.
        """
        async with self._lock:
            await self._read()
        return self.incidents

    async def decide(self, decision: IncidentDecision) -> Alert | None:
        """Decides, and publishes the decision; decides again if others have published something meanwhile.

        Raises:
            BusUnavailableError: it may have been published or not; to decide again does no harm.
            PublishRefusedError: the stream does not take it.
        """
        async with self._lock:
            fresh = not self._sure
            if fresh:
                await self._read()
            refusals = 0
            while True:
                alert = decision(self.incidents)
                if alert is None:
                    if fresh:
                        return None
                    # Perhaps only because the alerts of others are not known here.
                    await self._read()
                    fresh = True
                    continue
                alert = self.redact(alert)
                try:
                    stored = await self._publisher.event(
                        subjects.alert(alert.event), alert, id=alert.alert_id, at=alert.at, after=self._sequence
                    )
                except AlreadyDecidedError:
                    refusals += 1
                    if refusals > 1:
                        await asyncio.sleep(random.uniform(0, MAX_BACKOFF_S))  # noqa: S311  no secret
                    await self._read()
                    fresh = True
                    continue
                except BaseException:
                    # It may have been stored: the next decision reads the stream first.
                    self._sure = False
                    raise
                self._sequence = stored.sequence
                self.incidents.take(alert)
                return alert

    async def apply(self, signal: Signal, rules: IncidentRules) -> tuple[Alert, ...]:
        """Publishes what a signal changes in the incidents that it is about. Raises as `decide` does."""
        incidents = await self.catch_up() if ends_several(signal) else self.incidents
        changes = [await self.decide(_on(key, signal, rules)) for key in incidents.keys_of(signal)]
        return tuple(alert for alert in changes if alert is not None)

    async def _read(self) -> None:
        facts = await self._lookup.facts(Stream.ALERTS)
        is_another = facts.identity != self._stream or facts.last < self._sequence
        if is_another or facts.deleted > self._deleted or facts.first > facts.last:
            # Another stream than the one that was read: recreated, or restored from a backup. Or alerts of jobs that
            # were erased, perhaps all: what was read must not be said again.
            self.incidents = Incidents()
            self._sequence = 0
            self._stream = facts.identity
        self._deleted = facts.deleted
        left_s = REPLICA_LAG_S
        while self._sequence < facts.last and facts.first <= facts.last:
            start = max(self._sequence + 1, facts.first)
            async with aclosing(self._lookup.scan(Stream.ALERTS, "bw.alerts.>", start=start)) as stored:
                async for message in stored:
                    self._take(message.data, message.sequence)
                    self._sequence = message.sequence
            if self._sequence < facts.last:
                # A replica that is behind was asked; or the last message was deleted, and never comes.
                if left_s <= 0:
                    break
                left_s -= REPLICA_PAUSE_S
                await asyncio.sleep(REPLICA_PAUSE_S)
        # Where the last ones have expired there is nothing to read, and the stream's count goes on from them.
        self._sequence = max(self._sequence, facts.last)
        self._sure = True

    def _take(self, data: bytes, sequence: int) -> None:
        try:
            self.incidents.take(Alert.model_validate_json(data))
        except ValidationError:
            structlog.get_logger().error("alert_unreadable", sequence=sequence)

    def redact(self, alert: Alert) -> Alert:
        """Returns an alert as it may be stored and sent."""
        payload = self.redactor.json(dict(alert.payload))
        return alert.model_copy(
            update={
                "title": self.redactor.text(alert.title),
                "text": self.redactor.text(alert.text),
                "reason": None if alert.reason is None else self.redactor.text(alert.reason),
                "payload": payload if isinstance(payload, Mapping) else {},
            }
        )


def open_log(
    connection: ClientGetter, publisher: Publisher, alerts: Alerts, redaction: RedactionRules
) -> tuple[IncidentLog, IncidentRules]:
    """Returns a log of incidents, and the rules of the config.

    A service that seldom reports something opens it only then, as it keeps all incidents in memory.
    """
    return IncidentLog(connection, publisher, Redactor.compile(redaction)), IncidentRules.of(alerts)


def _on(key: str, signal: Signal, rules: IncidentRules) -> IncidentDecision:
    return lambda incidents: decide(signal, incidents.of(key), rules)
