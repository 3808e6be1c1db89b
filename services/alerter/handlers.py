"""From events to incidents: what each event says is told on ALERTS, once in the whole fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import structlog
from pydantic import ValidationError

from breakwater.bus.deadletter import dead_letter
from breakwater.bus.delivery import Delivery, heartbeat, still_held
from breakwater.bus.errors import BusError
from breakwater.bus.incidents import IncidentLog
from breakwater.bus.publisher import Publisher
from breakwater.bus.pull import Pull
from breakwater.contracts.alerts import Alert
from breakwater.contracts.events import BreakerTransition, BudgetEvent, DeadLetter, GuardEvent
from breakwater.contracts.execution import Execution
from breakwater.contracts.subjects import Header, decode_token
from breakwater.outage import Outage
from breakwater.policy.alert_rules import AnomalyRules, began_with
from breakwater.policy.incidents import IncidentRules, due, due_at
from breakwater.policy.signals import Over, Raised, Signal, key_of, of_dead_letter, of_execution, signals_of
from services.alerter.baselines import Baselines

RETRY_S = 1.0
SWEEP_S = 1.0
REPEATS_EVERY_S = 10.0
"""An incident that happens again and again is told of so often, with how often it happened."""

FIRST_AFTER_S = 2.0
BEAT_S = 6.0
FETCHED = 500
MOST_GATHERED = 2_000

_MODELS: Mapping[str, type[BreakerTransition | GuardEvent | BudgetEvent]] = {
    "breakers": BreakerTransition,
    "guards": GuardEvent,
    "budgets": BudgetEvent,
}
"""What stands on the subjects that the consumer filters, by their second token."""


class Decisions:
    """Breaker, guard and budget events, one after the other in the order of EVENTS."""

    def __init__(
        self, log: IncidentLog, rules: IncidentRules, publisher: Publisher, now: Callable[[], datetime]
    ) -> None:
        self._log, self._rules, self._publisher, self._now = log, rules, publisher, now
        self._outage = Outage("telling of incidents")

    async def handle(self, delivery: Delivery) -> None:
        """Tells what an event says. It is acknowledged once that is stored, and nothing comes before it until then."""
        async with heartbeat((delivery,)):
            # Tried again here and not given back: what comes after it waits.
            while not await self._told(delivery):  # noqa: ASYNC110  it waits for a server, not for an event
                await asyncio.sleep(RETRY_S)

    async def _told(self, delivery: Delivery) -> bool:
        try:
            try:
                event = _MODELS[delivery.subject.split(".")[1]].model_validate_json(delivery.data)
            except ValidationError as error:
                await _set_aside(self._publisher, delivery, error, self._now())
            else:
                for signal in signals_of(event):
                    await self._log.apply(signal, self._rules)
        except BusError as error:
            self._outage.failed(error)
            return False
        self._outage.worked()
        await delivery.ack_sync()
        return True


class _Heard:
    """An event, until all that it says is told."""

    __slots__ = ("delivery", "left")

    def __init__(self, delivery: Delivery, left: int) -> None:
        self.delivery = delivery
        self.left = left


class _Waiting:
    """What waits to be told of one incident."""

    __slots__ = ("events", "signal", "since")

    def __init__(self, signal: Raised, since: float) -> None:
        self.signal = signal
        self.since = since
        self.events: list[_Heard] = []


class Gathering:
    """Events that come with every job: what they say is told together, so that a thousand failures are no flood.

    What opens an incident is told after two seconds, as it may be that a breaker opens by it, which says more; what
    repeats it, every ten seconds. An event is acknowledged once all that it says is told. Where this process dies
    between the two, another one hears of it again, and counts it twice.
    """

    def __init__(self, log: IncidentLog, rules: IncidentRules, pull: Pull, clock: Callable[[], float]) -> None:
        self._log, self._rules, self._pull, self._clock = log, rules, pull, clock
        self._waiting: dict[str, _Waiting] = {}
        self._held: dict[int, _Heard] = {}
        self._told_at: dict[str, float] = {}
        self._beaten = clock()
        self._outage = Outage("telling of incidents")

    async def run(self, heard: Callable[[Delivery], Sequence[Raised]]) -> None:
        """For ever: fetches events, and tells what they say.

        Args:
            heard: what an event says. Raises ValidationError where it can't be read.
        """
        try:
            while True:
                try:
                    await self._gather(await self._pull.fetch(FETCHED, SWEEP_S), heard)
                    await self._tell()
                    await self._beat()
                    self._outage.worked()
                except BusError as error:
                    self._outage.failed(error)
                    await asyncio.sleep(RETRY_S)
        finally:
            await self._pull.close()

    async def _gather(self, deliveries: Sequence[Delivery], heard: Callable[[Delivery], Sequence[Raised]]) -> None:
        for delivery in deliveries:
            known = self._held.get(delivery.sequence)
            if known is not None:
                # Delivered again while it waits here: it is counted already.
                known.delivery = delivery
                continue
            try:
                raised = [signal for signal in heard(delivery) if signal.event in self._rules.on_events]
            except ValidationError as error:
                # The sink, or whoever keeps what can't be read, has it: it is no alert.
                structlog.get_logger().warning("event_unreadable", subject=delivery.subject, error=error.title)
                raised = []
            told = _Heard(delivery, len(raised))
            for signal in raised:
                waiting = self._waiting.get(signal.key)
                if waiting is None:
                    waiting = self._waiting[signal.key] = _Waiting(signal, self._clock())
                else:
                    waiting.signal = signal.after(waiting.signal)
                waiting.events.append(told)
            if not raised or len(self._held) >= MOST_GATHERED:
                # Beyond what memory is for, a count is lost with this process, and not the incident.
                told.left = 0
                await delivery.ack()
            else:
                self._held[delivery.sequence] = told

    async def _tell(self) -> None:
        now = self._clock()
        self._told_at = {key: at for key, at in self._told_at.items() if now - at < REPEATS_EVERY_S}
        for key, waiting in list(self._waiting.items()):
            if key in self._told_at or now - waiting.since < FIRST_AFTER_S:
                continue
            if not self._told_by_a_breaker(waiting.signal):
                await self._told(waiting.signal)
            del self._waiting[key]
            self._told_at[key] = now
            for event in waiting.events:
                event.left -= 1
                if event.left == 0:
                    self._held.pop(event.delivery.sequence, None)
                    await event.delivery.ack()

    async def _told(self, signal: Raised) -> None:
        try:
            await self._log.apply(signal, self._rules)
        except ValidationError as error:
            # What an event names may be longer than an alert's names: better one alert less than none after it.
            structlog.get_logger().error("alert_impossible", key=signal.key, error=error.title)

    def _told_by_a_breaker(self, signal: Raised) -> bool:
        """Whether it only says that jobs of an agent fail whose breaker is open: that is an incident already."""
        if signal.event not in {"retries_exhausted", "job_dead_lettered"} or not signal.model:
            return False
        provider = f"{signal.model.partition('/')[0]}/*"
        places = ((signal.agent, signal.model), ("*", signal.model), ("*", provider))
        breakers = (self._log.incidents.of(key_of("breaker_open", *place)) for place in places)
        return any(one is not None and one.status != "resolved" for one in breakers)

    async def _beat(self) -> None:
        if self._clock() - self._beaten >= BEAT_S:
            self._beaten = self._clock()
            await still_held([event.delivery for event in self._held.values()])


def of_executions(
    baselines: Baselines, rules: AnomalyRules, now: Callable[[], datetime]
) -> Callable[[Delivery], Sequence[Raised]]:
    """What the end of a job says; and it is counted for what is usual of its agent."""
    long_ms = None if rules.execution_duration_s is None else int(rules.execution_duration_s * 1000)

    def heard(delivery: Delivery) -> Sequence[Raised]:
        execution = Execution.model_validate_json(delivery.data)
        baselines.add(execution, now())
        return of_execution(execution, rules.execution_cost_usd, long_ms)

    return heard


def of_dead_letters(delivery: Delivery) -> Sequence[Raised]:
    """What a dead letter says."""
    dead_letter = DeadLetter.model_validate_json(delivery.data)
    return of_dead_letter(dead_letter, delivery.headers.get(Header.CE_ID.value, str(delivery.sequence)))


class Sweep:
    """What becomes of incidents by the passing of time, and of agents' figures by the minute."""

    def __init__(
        self, log: IncidentLog, rules: IncidentRules, baselines: Baselines, now: Callable[[], datetime]
    ) -> None:
        self._log, self._rules, self._baselines, self._now = log, rules, baselines, now
        self._outage = Outage("telling of incidents")
        self._signals: list[Signal] = []
        self._begun = False

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self._once()
                self._outage.worked()
            except BusError as error:
                self._outage.failed(error)
            await asyncio.sleep(SWEEP_S)

    async def _once(self) -> None:
        now = self._now()
        known = await self._log.catch_up()
        for alert in known.unresolved():
            at = due_at(alert)
            if at is not None and at <= now:
                await self._log.decide(
                    lambda known, id_=alert.incident_id: (
                        None if (current := known.get(id_)) is None else due(current, now, self._rules)
                    )
                )
        if not self._begun:
            self._begun = True
            self._signals += [over for alert in known.unresolved() if (over := self._unheard_end(alert, now))]
        self._signals += self._baselines.close(now)
        while self._signals:
            await self._log.apply(self._signals[0], self._rules)
            del self._signals[0]

    def _unheard_end(self, alert: Alert, now: datetime) -> Over | None:
        """The end of an anomaly that was told, and of which the figures that were saved know nothing."""
        if began_with(alert) != "agent_anomaly" or alert.ends_at is not None:
            return None
        agent, measure = alert.key.split("/")[1:3]
        if measure in self._baselines.unusual(decode_token(agent)):
            return None
        return Over(
            key=alert.key,
            event="agent_anomaly",
            title=alert.title,
            text="Nothing to do.",
            source_id=f"{alert.alert_id}/forgotten",
            at=now,
            payload=alert.payload,
            reason="the figures by which it was found were lost with an alerter; should it last, it is told again",
        )


async def _set_aside(publisher: Publisher, delivery: Delivery, error: ValidationError, now: datetime) -> None:
    """Keeps a message that can't be read as a dead letter. Raises BusError, as publishing does."""
    # Without the values that were found: they may be anything, and this text is logged.
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    words = "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems)
    await dead_letter(publisher, delivery, reason="unreadable", error=words, agent=None, at=now)
    structlog.get_logger().error(
        "unreadable_message", stream=delivery.stream, sequence=delivery.sequence, subject=delivery.subject, error=words
    )
