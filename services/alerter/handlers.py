"""From events to incidents: what each event signals is recorded on ALERTS, once in the whole fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import structlog
from pydantic import ValidationError

from breakwater import background
from breakwater.bus.delivery import Delivery, dead_letter, heartbeat, still_held
from breakwater.bus.errors import BusError, PublishRefused
from breakwater.bus.incidents import IncidentLog
from breakwater.bus.publisher import Publisher
from breakwater.bus.pull import BUSY, Pull
from breakwater.bus.records import read_record
from breakwater.contracts.alerts import Alert
from breakwater.contracts.events import BreakerTransition, BudgetEvent, DeadLetter, GuardEvent
from breakwater.contracts.execution import Execution
from breakwater.contracts.subjects import Header, decode_token
from breakwater.outage import Outage
from breakwater.policy.alert_rules import AnomalyRules, began_with
from breakwater.policy.incidents import IncidentRules, due, due_at
from breakwater.policy.signals import (
    Firing,
    Resolved,
    Signal,
    key_of,
    of_dead_letter,
    of_execution,
    of_quotas,
    signals_of,
)
from services.alerter.baselines import Baselines
from services.alerter.cut_off import CutOffAnswers

RETRY_S = 1.0
SWEEP_S = 1.0
CATCH_UP_EVERY = 5
"""Every so many sweeps, it is read what others have recorded. A decision on what is not known here yet is refused."""

IDLE_S = 2.0
GROUP_WAIT_S = 2.0
"""How long the first event of an incident waits for others."""

GROUP_INTERVAL_S = 10.0
"""How often an incident that keeps happening is updated, with how often it happened."""

BEAT_S = 6.0
GATHER_S = 0.25
BUSY_GATHER_S = 1.0
"""How long events gather at the server, and where they come all the time; an incident waits for others longer."""
FETCHED = 500
MAX_GROUPED = 2_000

_MODELS: Mapping[str, type[BreakerTransition | GuardEvent | BudgetEvent]] = {
    "breakers": BreakerTransition,
    "guards": GuardEvent,
    "budgets": BudgetEvent,
}
"""What is published on the subjects that the consumer filters, by their second token."""


class Decisions:
    """Records breaker, guard and budget events, one after the other in the order of EVENTS."""

    def __init__(
        self, log: IncidentLog, rules: IncidentRules, publisher: Publisher, now: Callable[[], datetime]
    ) -> None:
        self._log, self._rules, self._publisher, self._now = log, rules, publisher, now
        self._outage = Outage("recording incidents")

    async def handle(self, delivery: Delivery) -> None:
        """Records what an event signals, and acknowledges it once that is stored; the next event waits until then."""
        async with heartbeat((delivery,)):
            # Retried here and not given back: what comes after it waits.
            await self._outage.retry_until_available(lambda: self._record(delivery), on=BusError, retry_s=RETRY_S)
            await delivery.ack_sync()

    async def _record(self, delivery: Delivery) -> None:
        try:
            event = _MODELS[delivery.subject.split(".")[1]].model_validate_json(delivery.data)
        except ValidationError as error:
            await _dead_letter(self._publisher, delivery, error, self._now())
        else:
            for signal in signals_of(event):
                try:
                    await self._log.apply(signal, self._rules)
                except PublishRefused as error:
                    # Tried on for ever, it would be the last event that is handled.
                    structlog.get_logger().error("alert_refused", key=signal.key, error=str(error))


@dataclass(slots=True)
class _Unrecorded:
    """An event, until all of its signals are recorded."""

    delivery: Delivery
    left: int


@dataclass(slots=True)
class _Group:
    """The signals of one incident that are recorded together."""

    signal: Signal
    since: float
    events: list[_Unrecorded] = field(default_factory=list[_Unrecorded])


class Grouping:
    """Events that come with every job: those of one incident are recorded together, so that failures are no flood.

    The first of an incident waits for `GROUP_WAIT_S`, as a breaker may open by it, which says more; later ones are
    recorded every `GROUP_INTERVAL_S`. An event is acknowledged once all of its signals are recorded. Where this process
    dies between the two, the next leader gets the event again, and counts it twice.
    """

    def __init__(self, log: IncidentLog, rules: IncidentRules, pull: Pull, clock: Callable[[], float]) -> None:
        self._log, self._rules, self._pull, self._clock = log, rules, pull, clock
        self._groups: dict[str, _Group] = {}
        self._held: dict[int, _Unrecorded] = {}
        self._recorded_at: dict[str, float] = {}
        self._beaten, self._busy = clock(), False
        self._outage = Outage("recording incidents")

    async def run(self, signals: Callable[[Delivery], Sequence[Signal]]) -> None:
        """Fetches events, and records their signals, until cancelled.

        Args:
            signals: what an event signals. Raises ValidationError where it can't be read.
        """

        async def step() -> None:
            # What is due is looked at every second, while anything waits.
            wait_s = SWEEP_S if self._groups else background.aligned_delay(IDLE_S)
            found = await self._pull.fetch(FETCHED, wait_s, BUSY_GATHER_S if self._busy else GATHER_S)
            self._busy = len(found) >= BUSY
            await self._group(found, signals)
            await self._record_due()
            await self._beat()

        try:
            while True:
                await self._outage.retry_until_available(step, on=BusError, retry_s=RETRY_S)
        finally:
            await self._pull.close()

    async def _group(self, deliveries: Sequence[Delivery], signals: Callable[[Delivery], Sequence[Signal]]) -> None:
        for delivery in deliveries:
            known = self._held.get(delivery.sequence)
            if known is not None:
                # Delivered again while it waits here: it is counted already.
                known.delivery = delivery
                continue
            try:
                firing = [signal for signal in signals(delivery) if signal.event in self._rules.on_events]
            except ValidationError as error:
                # The sink keeps what can't be read as a dead letter: it is no alert.
                structlog.get_logger().warning("event_unreadable", subject=delivery.subject, error=error.title)
                firing = []
            event = _Unrecorded(delivery, len(firing))
            for signal in firing:
                group = self._groups.get(signal.key)
                if group is None:
                    group = self._groups[signal.key] = _Group(signal, self._clock())
                elif isinstance(signal, Firing) and isinstance(group.signal, Firing):
                    group.signal = signal.after(group.signal)
                else:
                    group.signal = signal  # what has come last is how it is
                group.events.append(event)
            if not firing or len(self._held) >= MAX_GROUPED:
                # Beyond what memory is for, a count is lost with this process, and not the incident.
                event.left = 0
                await delivery.ack()
            else:
                self._held[delivery.sequence] = event

    async def _record_due(self) -> None:
        now = self._clock()
        self._recorded_at = {key: at for key, at in self._recorded_at.items() if now - at < GROUP_INTERVAL_S}
        for key, group in list(self._groups.items()):
            if key in self._recorded_at or now - group.since < GROUP_WAIT_S:
                continue
            if not await self._inhibited(group.signal):
                await self._record(group.signal)
            del self._groups[key]
            self._recorded_at[key] = now
            for event in group.events:
                event.left -= 1
                if event.left == 0:
                    self._held.pop(event.delivery.sequence, None)
                    await event.delivery.ack()

    async def _record(self, signal: Signal) -> None:
        try:
            await self._log.apply(signal, self._rules)
        except (ValidationError, PublishRefused) as error:
            # What an event names may be longer than an alert's names: better one alert less than none after it.
            what = error.title if isinstance(error, ValidationError) else str(error)
            structlog.get_logger().error("alert_impossible", key=signal.key, error=what)

    async def _inhibited(self, signal: Signal) -> bool:
        """Whether it only says that jobs of an agent fail whose breaker is open: that is an incident already."""
        if (
            not isinstance(signal, Firing)
            or signal.event not in {"retries_exhausted", "job_dead_lettered"}
            or not signal.model
        ):
            return False
        provider = f"{signal.model.partition('/')[0]}/*"
        places = ((signal.agent, signal.model), ("*", signal.model), ("*", provider))
        known = await self._log.catch_up()  # another alerter may have recorded it
        breakers = (known.of(key_of("breaker_open", *place)) for place in places)
        return any(one is not None and one.status != "resolved" for one in breakers)

    async def _beat(self) -> None:
        if self._clock() - self._beaten >= BEAT_S:
            self._beaten = self._clock()
            await still_held([event.delivery for event in self._held.values()])


def of_executions(
    baselines: Baselines, rules: AnomalyRules, now: Callable[[], datetime], newest: Callable[[str], Alert | None]
) -> Callable[[Delivery], Sequence[Signal]]:
    """What the end of a job signals; it is also counted for the baseline of its agent, and among its answers."""
    long_ms = None if rules.execution_duration_s is None else int(rules.execution_duration_s * 1000)
    answers = CutOffAnswers(rules.cut_off_share)

    def signals(delivery: Delivery) -> Sequence[Signal]:
        execution = read_record(delivery, Execution)
        if execution is None:
            return ()
        baselines.add(execution, now())
        alone = of_execution(execution, rules.execution_cost_usd, long_ms)
        return (*alone, *of_quotas(execution, newest), *answers.add(execution))

    return signals


def of_dead_letters(delivery: Delivery) -> Sequence[Firing]:
    """What a dead letter signals."""
    dead_letter = DeadLetter.model_validate_json(delivery.data)
    return of_dead_letter(dead_letter, delivery.headers.get(Header.CE_ID.value, str(delivery.sequence)))


class Sweep:
    """What becomes of incidents by the passing of time, and of agents' baselines by the minute."""

    def __init__(
        self, log: IncidentLog, rules: IncidentRules, baselines: Baselines, now: Callable[[], datetime]
    ) -> None:
        self._log, self._rules, self._baselines, self._now = log, rules, baselines, now
        self._outage = Outage("recording incidents")
        self._signals: list[Signal] = []
        self._begun = False
        self._sweeps = 0

    async def run(self) -> None:
        """Sweeps every second until cancelled."""
        while True:
            await self._outage.retry_until_available(self._once, on=BusError, retry_s=SWEEP_S)
            await asyncio.sleep(background.aligned_delay(SWEEP_S))

    async def _once(self) -> None:
        now = self._now()
        known = await self._log.catch_up() if self._sweeps % CATCH_UP_EVERY == 0 else self._log.incidents
        self._sweeps += 1
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
            self._signals += [resolved for alert in known.unresolved() if (resolved := self._forgotten(alert, now))]
        self._signals += self._baselines.close(now)
        while self._signals:
            await self._log.apply(self._signals[0], self._rules)
            del self._signals[0]

    def _forgotten(self, alert: Alert, now: datetime) -> Resolved | None:
        """The end of an anomaly that was recorded, and that the saved baselines know nothing of."""
        if began_with(alert) != "agent_anomaly" or alert.ends_at is not None:
            return None
        agent, measure = alert.key.split("/")[1:3]
        if measure in self._baselines.anomalies(decode_token(agent)):
            return None
        return Resolved(
            key=alert.key,
            event="agent_anomaly",
            title=alert.title,
            text="Nothing to do.",
            source_id=f"{alert.alert_id}/forgotten",
            at=now,
            payload=alert.payload,
            reason="the figures by which it was found were lost with an alerter; should it last, it fires again",
        )


async def _dead_letter(publisher: Publisher, delivery: Delivery, error: ValidationError, now: datetime) -> None:
    """Keeps a message that can't be read as a dead letter. Raises BusError, as publishing does."""
    # Without the values that were found: they may be anything, and this text is logged.
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    words = "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}" for problem in problems)
    await dead_letter(publisher, delivery, reason="unreadable", error=words, agent=None, at=now)
    structlog.get_logger().error(
        "unreadable_message", stream=delivery.stream, sequence=delivery.sequence, subject=delivery.subject, error=words
    )
