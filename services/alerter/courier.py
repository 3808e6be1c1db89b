"""Takes alerts to one channel: each until it has arrived, was told by another one, or is in the dead letters.

What waits is not acknowledged, so that whoever takes over has it too. What was composed once is sent the same at every
try, with the same id, until it is told or given up.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog
from pydantic import ValidationError

from breakwater.bus.delivery import Delivery
from breakwater.bus.errors import BusError, PublishRefused
from breakwater.bus.publisher import Publisher
from breakwater.bus.pull import Pull
from breakwater.contracts import subjects
from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.contracts.events import DeadLetter
from breakwater.contracts.subjects import Header
from breakwater.metrics import ChannelMetrics
from breakwater.policy.outbox import ChannelRules, Held, Message, message_id, next_message
from breakwater.telemetry import Outage
from services.alerter.channel import Channel, SendError
from services.alerter.notes import Gone, Posts

IDLE_S = 2.0
"""How long one fetch waits where nothing is to be done."""

SOON_S = 0.01
HEARTBEAT_S = 6.0
RETRY_DEAD_BUS_S = 1.0
GONE_LOOK_S = 15.0
TOLD_KEPT = 5_000
LAST_WORD_S = 4.0
"""How long a message may still take when this process is told to stop."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When a failed send is repeated."""

    first_s: float = 0.5
    max_s: float = 60.0
    max_retry_after_s: float = 3600.0
    give_up_s: float = 3600.0
    """After the first failure of a message that a later try may mend."""
    tries_if_permanent: int = 3
    """More than one, as a receiver that is being deployed may say 404 for a moment."""

    def backoff_s(self, failures: int) -> float:
        """The wait after so many failures in a row (from 1): doubling, up to the ceiling."""
        return min(self.first_s * 2.0 ** min(failures - 1, 64), self.max_s)

    def pause_s(self, failure: SendError) -> float:
        """How long the receiver asked not to be called at all."""
        return min(failure.retry_after_s or 0.0, self.max_retry_after_s)


PATIENT = Schedule()
"""An hour, and then an alert is a dead letter that can be replayed."""


class _Composed:
    """A message on its way."""

    def __init__(self, message: Message, deliveries: list[Delivery], *, counts: bool, again: bool = False) -> None:
        self.message = message
        self.deliveries = deliveries
        self.counts = counts
        self.again = again
        """Whether a person has asked to try it again, after it was given up."""
        self.failures = 0
        self.first_failed_at = 0.0
        self.not_before = 0.0


class Courier:
    """One channel's messages. Runs while this process has the turn to deliver."""

    def __init__(
        self,
        channel: Channel,
        rules: ChannelRules,
        pull: Pull,
        posts: Posts,
        gone: Gone,
        publisher: Publisher,
        metrics: ChannelMetrics,
        now: Callable[[], datetime],
        *,
        most: int,
        schedule: Schedule = PATIENT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel, self._rules, self._pull = channel, rules, pull
        self._posts, self._gone, self._publisher = posts, gone, publisher
        self._metrics, self._now, self._clock = metrics, now, clock
        self._most, self._schedule = most, schedule
        self._held: dict[int, tuple[Delivery, Alert]] = {}
        self._posted: set[str] = set()
        self._on_the_way: list[_Composed] = []
        self._sent: deque[datetime] = deque()
        self._not_before = 0.0
        self._failures = 0
        self._is_gone, self._gone_known_until = False, 0.0
        self._outage = Outage(f"alert channel {channel.name}")
        self._bus = Outage(f"bus, for alert channel {channel.name}")
        self._idle_s = IDLE_S
        self._told: dict[int, None] = {}

    @property
    def held(self) -> int:
        """How many alerts wait."""
        return len(self._held) + sum(len(one.deliveries) for one in self._on_the_way)

    def take_again(self, delivery: Delivery, message: Message) -> None:
        """Takes a message that was given up, and that somebody wants to be tried once more."""
        self._on_the_way.append(_Composed(message, [delivery], counts=False, again=True))

    async def run(self) -> None:
        """For ever: fetches what is to be told, and tells it."""
        beating = asyncio.create_task(self._beat())
        try:
            wait_s = IDLE_S
            while True:
                try:
                    await self._fetch(wait_s)
                    wait_s = await self._step()
                    self._metrics.held(self.held)
                    self._bus.worked()
                except BusError as error:
                    self._bus.failed(error)
                    await asyncio.sleep(RETRY_DEAD_BUS_S)
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating
            await self._pull.close()

    async def _beat(self) -> None:
        # Who holds an alert back says so, or it would be delivered again.
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            held = [delivery for delivery, _ in self._held.values()]
            for delivery in held + [one for composed in self._on_the_way for one in composed.deliveries]:
                with suppress(BusError, OSError):
                    await delivery.in_progress()

    async def _fetch(self, wait_s: float) -> None:
        room = self._most - self.held
        if room <= 0:
            await asyncio.sleep(min(wait_s, IDLE_S))
            return
        for delivery in await self._pull.fetch(room, min(max(wait_s, SOON_S), IDLE_S)):
            await self._take(delivery)

    async def _take(self, delivery: Delivery) -> None:
        if delivery.sequence in self._told:
            # The server has not heard that it was acknowledged.
            await delivery.ack_sync()
            return
        for composed in self._on_the_way:
            for place, one in enumerate(composed.deliveries):
                if not composed.again and one.sequence == delivery.sequence:
                    composed.deliveries[place] = delivery
                    return
        try:
            alert = Alert.model_validate_json(delivery.data)
        except ValidationError as error:
            # Nothing of ours writes such a thing. It stays in ALERTS for thirty days.
            structlog.get_logger().error(
                "alert_unreadable", channel=self._channel.name, sequence=delivery.sequence, error=error.title
            )
            await delivery.ack_sync()
            return
        if self._channel.updates and alert.change != "opened" and await self._posts.get(alert.incident_id):
            self._posted.add(alert.incident_id)
        self._held[delivery.sequence] = (delivery, alert)

    async def _step(self) -> float:
        """Tells one message, if there is one to tell; and returns how long to wait before the next one."""
        if await self._nobody_wants_it():
            return await self._give_all_up()
        pause_s = self._not_before - self._clock()
        if pause_s > 0:
            return pause_s
        composed = self._due() or await self._compose()
        if composed is None:
            waits = [one.not_before - self._clock() for one in self._on_the_way]
            return max(0.0, min([self._idle_s, *waits]))
        await _to_its_end(self._send(composed))
        return max(0.0, self._not_before - self._clock())

    def _due(self) -> _Composed | None:
        due = [one for one in self._on_the_way if one.not_before <= self._clock()]
        return min(due, key=lambda one: one.not_before, default=None)

    async def _compose(self) -> _Composed | None:
        # An incident of which something is on its way waits for that: people hear of it in order.
        busy = {incident for one in self._on_the_way for incident in _incidents(one.message)}
        held = [Held(seq, alert, delivery.published_at) for seq, (delivery, alert) in sorted(self._held.items())]
        held = [one for one in held if one.alert.incident_id not in busy]
        limit = self._rules.route.rate_limit
        now = self._now()
        while limit is not None and self._sent and self._sent[0] <= now - timedelta(seconds=limit.within_s):
            self._sent.popleft()
        decided = next_message(held, self._rules, now, sent=tuple(self._sent), posted=self._posted)
        for sequence in decided.skip:
            delivery, _ = self._held.pop(sequence)
            await delivery.ack_sync()
        self._idle_s = IDLE_S if decided.at is None else max(0.0, (decided.at - now).total_seconds())
        if decided.tell is None:
            return None
        deliveries = [self._held.pop(sequence)[0] for sequence in decided.covers]
        composed = _Composed(decided.tell, deliveries, counts=decided.counts)
        self._on_the_way.append(composed)
        return composed

    async def _send(self, composed: _Composed) -> None:
        try:
            await self._channel.send(composed.message)
        except SendError as failure:
            self._metrics.failed()
            self._not_before = self._clock() + self._channel.interval_s
            await self._after_failure(composed, failure)
            return
        self._not_before = self._clock() + self._channel.interval_s
        self._failures = 0
        self._outage.worked()
        self._metrics.sent()
        if composed.counts and not composed.again:
            self._sent.append(self._now())
        if self._channel.updates and isinstance(composed.message, Alert):
            self._remember(composed.message)
        await self._done(composed)

    def _remember(self, alert: Alert) -> None:
        self._posted.add(alert.incident_id)
        if alert.status == "resolved":
            # Should it come back, the note on the bus tells.
            self._posted.discard(alert.incident_id)

    async def _after_failure(self, composed: _Composed, failure: SendError) -> None:
        clock = self._clock()
        composed.failures += 1
        composed.first_failed_at = composed.first_failed_at or clock
        composed.not_before = clock + self._schedule.backoff_s(composed.failures)
        if failure.gone:
            await self._receiver_is_gone(failure)
            return
        if failure.permanent:
            if composed.failures >= self._schedule.tries_if_permanent:
                await self._give_up(composed, str(failure))
            return
        # A refusal says something of the message; anything else of the receiver, which is left alone for a while.
        self._outage.failed(failure)
        self._failures += 1
        pause_s = max(self._schedule.pause_s(failure), min(self._schedule.backoff_s(self._failures), 30.0))
        self._not_before = max(self._not_before, clock + pause_s)
        composed.not_before = max(composed.not_before, self._not_before)
        if clock - composed.first_failed_at >= self._schedule.give_up_s:
            await self._give_up(composed, str(failure))

    async def _receiver_is_gone(self, failure: SendError) -> None:
        structlog.get_logger().error(
            "alert_channel_disabled",
            channel=self._channel.name,
            error=str(failure),
            what_to_do=f"mend it in the config, or `breakwater alerts test {self._channel.name}` when it is back",
        )
        await self._gone.note(True)
        self._is_gone, self._gone_known_until = True, self._clock() + GONE_LOOK_S

    async def _nobody_wants_it(self) -> bool:
        if self._clock() >= self._gone_known_until:
            self._is_gone = await self._gone.now()
            self._gone_known_until = self._clock() + GONE_LOOK_S
        return self._is_gone

    async def _give_all_up(self) -> float:
        """Every alert becomes a dead letter: nobody is called who said that he is gone, and nothing is lost."""
        error = "the receiver said that it is gone (410): the channel is disabled"
        while (composed := next(iter(self._on_the_way), None) or await self._compose()) is not None:
            await self._give_up(composed, error)
            if composed in self._on_the_way:
                return self._schedule.max_s  # the letter was refused
        return self._idle_s

    async def _give_up(self, composed: _Composed, error: str) -> None:
        name, identity = self._channel.name, message_id(composed.message)
        failures = max(composed.failures, 0)
        letter = DeadLetter(
            reason="undeliverable",
            agent=composed.message.agent if isinstance(composed.message, Alert) else None,
            error=f"{name}: {error} (tried {failures} time{'' if failures == 1 else 's'})",
            stream=composed.deliveries[0].stream,
            subject=composed.deliveries[0].subject,
            sequence=max(delivery.sequence for delivery in composed.deliveries),
            headers={
                Header.CHANNEL.value: name,
                Header.CE_ID.value: identity,
                Header.INCIDENT.value: composed.message.key if isinstance(composed.message, Alert) else "",
            },
            payload_base64=base64.b64encode(composed.message.json_bytes()).decode(),
            at=self._now(),
        )
        # One that was tried again and given up again is another letter.
        tried = f"/{composed.deliveries[0].sequence}" if composed.again else ""
        subject = subjects.dead_letter(letter.reason, letter.agent or "unknown")
        try:
            await self._publisher.event(subject, letter, id=f"dlq/{name}/{identity}{tried}", at=letter.at)
        except PublishRefused as refusal:
            # It is tried on: a letter that can't be kept must not be the end of an alert.
            composed.not_before = self._clock() + self._schedule.max_s
            structlog.get_logger().error("dead_letter_refused", channel=name, alert_id=identity, error=str(refusal))
            return
        self._metrics.given_up()
        structlog.get_logger().error(
            "alert_undeliverable", channel=name, alert_id=identity, failures=failures, error=error
        )
        await self._done(composed)

    async def _done(self, composed: _Composed) -> None:
        self._on_the_way.remove(composed)
        for delivery in composed.deliveries:
            if not composed.again:
                self._told[delivery.sequence] = None
            await delivery.ack_sync()
        while len(self._told) > TOLD_KEPT:
            del self._told[next(iter(self._told))]


def _incidents(message: Message) -> tuple[str, ...]:
    if isinstance(message, AlertDigest):
        return tuple(one.incident_id for one in message.alerts)
    return (message.incident_id,)


async def _to_its_end(sending: Coroutine[Any, Any, None]) -> None:
    """Lets what is being sent arrive, and be acknowledged, before this process stops: else it is sent twice."""
    task = asyncio.create_task(sending)
    deadline: float | None = None
    while not task.done():
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            task.cancel()
        try:
            await asyncio.wait([task], timeout=None if left_s is None else max(left_s, SOON_S))
        except asyncio.CancelledError:
            # Whoever stops us says so again and again; the time that is left runs from the first time.
            deadline = deadline or time.monotonic() + LAST_WORD_S
    if deadline is not None:
        raise asyncio.CancelledError
    await task
