"""From events to incidents: the signals of each event are recorded on ALERTS, once in the whole fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import structlog
from pydantic import ValidationError

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.deployments import continued_by_breaker, is_explained, may_be_explained
from breakwater.alerts.rules.grouping import SignalGroups
from breakwater.alerts.rules.incidents import due, due_at
from breakwater.alerts.rules.job_ends import JobEnds
from breakwater.alerts.rules.signals import Firing, Signal, of_dead_letter, signals_of
from breakwater.alerts.settings import Alerts
from breakwater.breakers.contract import BreakerTransition
from breakwater.jobs.contract.execution import Execution
from breakwater.jobs.store.records import read_record
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.delivery import Delivery, acknowledge, dead_letter, heartbeat, report_in_progress
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.pull import BUSY, Pull
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.nats.topology import ALERTER_EVENTS
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.limits.contract import BudgetEvent, GuardEvent
from breakwater.services.alerter.clock import Clock
from breakwater.services.alerter.incident_recorder import IncidentRecorder

RETRY_S = 1.0
SWEEP_S = 1.0
CATCH_UP_EVERY = 5
"""Sweeps until it reads the records of other alerters again. A decision that is based on older ones is refused."""

IDLE_S = 2.0
BEAT_S = 6.0
GATHER_S = 0.25
"""The time for which events gather at the server. An incident waits longer for others."""

BUSY_GATHER_S = 1.0
"""The same while events keep coming."""

EVENTS_WAIT_S = 120.0
"""The longest time for which failures of jobs that are due wait for events that are stored, and may explain them.
An alerter that was away reads both at once, and events one by one."""

FETCHED = 500
MAX_GROUPED = 2_000

_EVENTS: Mapping[str, type[BreakerTransition | GuardEvent | BudgetEvent]] = {
    "breakers": BreakerTransition,
    "guards": GuardEvent,
    "budgets": BudgetEvent,
}
"""The types of events on the subjects that the consumer filters, by their second token."""


class Decisions:
    """Records breaker, guard and budget events, one after the other in the order of EVENTS."""

    def __init__(self, incidents: IncidentRecorder, publisher: Publisher, now: Callable[[], datetime]) -> None:
        self.incidents = incidents
        self._publisher = publisher
        self._now = now
        self._outage = Outage("recording incidents")

    async def handle(self, delivery: Delivery) -> None:
        """Records the signals of an event, and then acknowledges it; the next event waits until then."""
        async with heartbeat((delivery,)):
            # Retried here and not redelivered: later events wait.
            await self._outage.retry_until_available(lambda: self._record(delivery), on=BusError, retry_s=RETRY_S)
            await delivery.ack_sync()

    async def _record(self, delivery: Delivery) -> None:
        try:
            event = _EVENTS[delivery.subject.split(".")[1]].model_validate_json(delivery.data)
        except ValidationError as error:
            # Without the values that were found: they may be anything, and this text is logged.
            problems = error.errors(include_input=False, include_url=False, include_context=False)
            text = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems
            )
            await dead_letter(self._publisher, delivery, reason="unreadable", error=text, agent=None, at=self._now())
            place = {"stream": delivery.stream, "sequence": delivery.sequence, "subject": delivery.subject}
            structlog.get_logger().error("unreadable_message", **place, error=text)
        else:
            for signal in signals_of(event):
                await self.incidents.record(signal)
                for end in continued_by_breaker(signal, self.incidents.known.explaining()):
                    await self.incidents.record(end)


@dataclass(slots=True)
class _UnrecordedEvent:
    """An event, until all of its signals are recorded."""

    delivery: Delivery
    unrecorded_signals: int


class Grouping:
    """Records the signals of events that come with every job, in groups.

    An event is acknowledged once all of its signals are recorded. Where this process dies between the two, the next
    leader gets the event again, and counts it twice.
    """

    def __init__(self, incidents: IncidentRecorder, pull: Pull, lookup: Lookup, clock: Clock) -> None:
        self._incidents = incidents
        self._pull = pull
        self._lookup = lookup
        self._clock = clock
        self._groups = SignalGroups[_UnrecordedEvent]()
        self._awaited: dict[str, int] = {}
        """The last message of EVENTS when a group was due, by its key, while events before it are not recorded."""
        self._held: dict[int, _UnrecordedEvent] = {}
        self._beaten = time.monotonic()
        self._busy = False
        self._has_unread = True
        self._outage = Outage("recording incidents")

    def may_continue(self, key: str) -> bool:
        """Returns True if an event may continue an incident that is not recorded yet."""
        return self._has_unread or self._groups.of(key) is not None

    async def run(self, signals: Callable[[Delivery], Sequence[Signal]]) -> None:
        """Fetches events, and records their signals, until cancelled.

        Args:
            signals: gives the signals of an event. Raises ValidationError if it can't be read.
        """

        async def step() -> None:
            # While anything waits, it is checked every second for being due.
            wait_s = SWEEP_S if self._groups else background.aligned_delay(IDLE_S)
            try:
                deliveries = await self._pull.fetch(FETCHED, wait_s, BUSY_GATHER_S if self._busy else GATHER_S)
            except BusError:
                self._has_unread = False  # nobody knows, and incidents have to end
                raise
            self._busy = len(deliveries) >= BUSY
            await self._group(deliveries, signals)
            self._has_unread = bool(deliveries) and deliveries[-1].waiting >= FETCHED
            await self._record_due()
            if time.monotonic() - self._beaten >= BEAT_S:  # the server's ack wait runs in real time
                self._beaten = time.monotonic()
                await report_in_progress([event.delivery for event in self._held.values()])

        try:
            while True:
                await self._outage.retry_until_available(step, on=BusError, retry_s=RETRY_S)
        finally:
            await self._pull.close()

    async def _group(self, deliveries: Sequence[Delivery], signals: Callable[[Delivery], Sequence[Signal]]) -> None:
        done: list[Delivery] = []
        for delivery in deliveries:
            waiting = self._held.get(delivery.sequence)
            if waiting is not None:
                # Delivered again while it waits here: it is counted already.
                waiting.delivery = delivery
                continue
            try:
                firing = [signal for signal in signals(delivery) if signal.event in self._incidents.rules.on_events]
            except ValidationError as error:
                # The sink keeps unreadable messages as dead letters: this is no alert.
                structlog.get_logger().warning("event_unreadable", subject=delivery.subject, error=error.title)
                firing = []
            # Beyond this limit a crash of this process loses a count, and no incident.
            is_held = firing and len(self._held) < MAX_GROUPED
            event = _UnrecordedEvent(delivery, len(firing)) if is_held else None
            for signal in firing:
                self._groups.add(signal, event, self._clock.monotonic())
            if event is None:
                done.append(delivery)
            else:
                self._held[delivery.sequence] = event
        await acknowledge(done)

    async def _record_due(self) -> None:
        now_s = self._clock.monotonic()
        for group in self._groups.due(now_s):
            signal = group.signal
            if may_be_explained(signal):
                is_late = now_s >= self._groups.due_s(group) + EVENTS_WAIT_S
                if not (is_late or await self._has_recorded_events(signal.key)):
                    continue
                incidents = await self._incidents.log.catch_up()  # another alerter may have recorded what explains it
                if not is_explained(signal, incidents.explaining):
                    await self._incidents.record(signal)
            else:
                await self._incidents.record(signal)
            self._groups.end(group, now_s)
            self._awaited.pop(signal.key, None)
            for event in group.sources:
                event.unrecorded_signals -= 1
                if event.unrecorded_signals == 0:
                    self._held.pop(event.delivery.sequence, None)
                    await event.delivery.ack()

    async def _has_recorded_events(self, key: str) -> bool:
        """Returns True if the events that had been stored when a group was due are recorded."""
        events = await self._lookup.backlog(Stream.EVENTS, ALERTER_EVENTS)
        if events is None:
            return False  # workers create the consumer again; what needs no explanation must not wait for that
        if not (events.waiting or events.in_progress):
            return True
        if key not in self._awaited:
            self._awaited[key] = (await self._lookup.facts(Stream.EVENTS)).last
        return events.acknowledged >= self._awaited[key]


def of_executions(alerts: Alerts, newest: Callable[[str], Alert | None]) -> Callable[[Delivery], Sequence[Signal]]:
    """Makes the function that gives the signals of a job's end."""
    ends = JobEnds(alerts, newest)

    def signals(delivery: Delivery) -> Sequence[Signal]:
        execution = read_record(delivery, Execution)
        return () if execution is None else ends.signals(execution)

    return signals


def of_dead_letters(delivery: Delivery) -> Sequence[Firing]:
    """The signals of a dead letter."""
    dead_letter = DeadLetter.model_validate_json(delivery.data)
    return of_dead_letter(dead_letter, delivery.headers.get(Header.CE_ID.value, str(delivery.sequence)))


class Sweep:
    """Changes incidents by the passing of time.

    Args:
        incidents: the incidents.
        now: a function that returns the time.
        may_continue: a function that returns True if the incident with a key may have happened again: it does not end.
    """

    def __init__(
        self, incidents: IncidentRecorder, now: Callable[[], datetime], may_continue: Callable[[str], bool]
    ) -> None:
        self._incidents = incidents
        self._may_continue = may_continue
        self._now = now
        self._outage = Outage("recording incidents")
        self._sweeps = 0

    async def run(self) -> None:
        """Sweeps every second until cancelled."""
        while True:
            await self._outage.retry_until_available(self._once, on=BusError, retry_s=SWEEP_S)
            await asyncio.sleep(background.aligned_delay(SWEEP_S))

    async def _once(self) -> None:
        now = self._now()
        log = self._incidents.log
        rules = self._incidents.rules
        incidents = await log.catch_up() if self._sweeps % CATCH_UP_EVERY == 0 else log.incidents
        self._sweeps += 1
        for alert in incidents.unresolved():
            at = due_at(alert)
            is_reminder = alert.status == "pending"
            if at is not None and at <= now and (is_reminder or not self._may_continue(alert.key)):
                await log.decide(
                    lambda incidents, id_=alert.incident_id: (
                        None if (current := incidents.get(id_)) is None else due(current, now, rules)
                    )
                )
