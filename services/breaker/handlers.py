"""From attempts to breaker transitions: load, decide, save, publish. The decision is `breaker_events.decide`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

import structlog

from breakwater.breaker_events import Seen, decide, observation_of, publish_saved
from breakwater.bus.delivery import Delivery, heartbeat
from breakwater.bus.publisher import Publisher
from breakwater.bus.records import read_record
from breakwater.config import Config
from breakwater.contracts.execution import Attempt
from breakwater.contracts.types import ms_from_time
from breakwater.metrics import BreakerMetrics
from breakwater.outage import Outages
from breakwater.policy.breaker import BreakerKey
from breakwater.policy.health import failed
from breakwater.state.breakers import Breakers
from breakwater.state.health import EndedCall, Healths
from services.breaker.gauges import labels_of


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch of attempts says of each breaker, and of each agent's health by model."""

    breakers: dict[BreakerKey, list[Seen]] = field(default_factory=dict[BreakerKey, "list[Seen]"])
    health: dict[str, dict[str, list[EndedCall]]] = field(default_factory=dict[str, "dict[str, list[EndedCall]]"])


async def _any_log(_: str | None) -> bool:
    """For attempts that the breakers are being made from."""
    return True


class BreakerHandler:
    """Keeps the breakers of the fleet. Any number of these may run: a save that comes second decides again."""

    def __init__(
        self,
        config: Config,
        breakers: Breakers,
        healths: Healths,
        publisher: Publisher,
        metrics: BreakerMetrics,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.config, self._breakers, self._healths = config, breakers, healths
        self._publisher, self._metrics, self._jitter = publisher, metrics, jitter
        self._outages = Outages()

    async def handle(self, batch: list[Delivery], is_log: Callable[[str | None], Awaitable[bool]] = _any_log) -> None:
        """Takes a batch of attempts into account, and acknowledges it; `is_log` as for `apply`."""
        async with heartbeat(batch):
            sorted_batch = self.sorted(
                (delivery.sequence, ms_from_time(delivery.published_at), attempt)
                for delivery in batch
                if (attempt := read_record(delivery, Attempt)) is not None
            )
            await self._outages.retry_while_unavailable(lambda: self.apply(sorted_batch, is_log))
        for delivery in batch:
            await delivery.ack()

    def sorted(self, attempts: Iterable[tuple[int, int, Attempt]]) -> Batch:
        """Attempts, each with its sequence and the time it was stored at (ms since the epoch), by whom they concern."""
        batch = Batch()
        for sequence, at_ms, attempt in attempts:
            agent = self.config.agents.get(attempt.agent)
            if agent is None:
                continue
            if (went_wrong := failed(attempt)) is not None:
                models = batch.health.setdefault(attempt.agent, {})
                models.setdefault(attempt.model, []).append(EndedCall(sequence, at_ms, went_wrong))
            if agent.breaker is not None:
                key = BreakerKey.of(agent.breaker.scope, attempt.agent, attempt.model, attempt.provider)
                seen = Seen(observation_of(sequence, at_ms, attempt), agent.breaker)
                batch.breakers.setdefault(key, []).append(seen)
        return batch

    async def apply(self, batch: Batch, is_log: Callable[[str | None], Awaitable[bool]] = _any_log) -> None:
        """Takes a batch into account: a round trip to Redis that reads, and one that writes.

        Args:
            batch: what the attempts say.
            is_log: given the log that the breakers are made from, whether that is the one that the batch is of. It may
                wait before it answers that it is not; then it is asked again.

        Raises:
            StateUnavailable, BusUnavailable: the batch may be repeated.
        """
        waiting: dict[BreakerKey, list[Seen]] = batch.breakers
        notes = [self._healths.note_call(agent, models) for agent, models in batch.health.items()]
        while waiting or notes:
            log, breakers = await self._breakers.load_with_log(list(waiting))
            if not await is_log(log):
                continue
            loaded = dict(zip(waiting, breakers, strict=True))
            for key, before in loaded.items():
                if before.unpublished is not None:
                    await self._publish(key, before.unpublished)
                    loaded[key] = replace(before, unpublished=None)
            decided = [decide(key, before, waiting[key], self._jitter()) for key, before in loaded.items()]
            changed = [one for one in decided if one.after != one.before.breaker]
            # Side by side, in one round trip.
            saved, _ = await asyncio.gather(self._breakers.save(changed), self._healths.note(notes))
            notes = []
            for one, stands in zip(changed, saved, strict=True):
                if stands and one.unpublished is not None:
                    await self._publish(one.key, one.unpublished)
            # Another writer saved first: decide again, on what it saved.
            again = {one.key for one, stands in zip(changed, saved, strict=True) if not stands}
            waiting = {key: seen for key, seen in waiting.items() if key in again}

    async def publish_pending(self) -> None:
        """Publishes what was saved and then not published, as the process that saved it crashed in between.

        Raises StateUnavailable, BusUnavailable; may be repeated.
        """
        for key, loaded in await self._breakers.all():
            if loaded.unpublished is not None:
                await self._publish(key, loaded.unpublished)

    async def _publish(self, key: BreakerKey, text: str) -> None:
        for event in await publish_saved(self._publisher, self._breakers, key, text):
            self._metrics.transition(*labels_of(self.config, key), event.to_state)
            structlog.get_logger().info(
                "breaker_" + event.to_state, agent=key.agent, model=key.model, reason=event.reason
            )
