"""From attempts to breaker transitions: load, decide, save, publish. The decision is `policy.breaker.observe`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import structlog
from pydantic import TypeAdapter, ValidationError

from breakwater.bus.delivery import Delivery, heartbeat
from breakwater.bus.publisher import Publisher
from breakwater.config import Config
from breakwater.contracts import subjects
from breakwater.contracts.events import BreakerTransition
from breakwater.contracts.execution import Attempt
from breakwater.contracts.types import format_time, ms_from_time, time_from_ms
from breakwater.patience import Patience
from breakwater.policy.breaker import BreakerRules, Change, Observation, observe
from breakwater.state.breakers import BreakerKey, Breakers, Loaded

_TRANSITIONS = TypeAdapter(list[BreakerTransition])


class BreakerHandler:
    """Keeps the breakers of the fleet. Any number of these may run: a save that comes second decides again."""

    def __init__(self, config: Config, breakers: Breakers, publisher: Publisher) -> None:
        self._config = config
        self._breakers = breakers
        self._publisher = publisher
        self._patience = Patience()

    async def handle(self, batch: list[Delivery]) -> None:
        """Takes a batch of attempts into account, and acknowledges it."""
        async with heartbeat(batch):
            seen: defaultdict[BreakerKey, list[Observation]] = defaultdict(list)
            for delivery in batch:
                attempt = await self._parse(delivery)
                if attempt is not None and self._rules(attempt.agent) is not None:
                    seen[BreakerKey(attempt.agent, attempt.model)].append(_observation(delivery.sequence, attempt))
            await self._patience.both(lambda: self._apply(seen))
        for delivery in batch:
            await delivery.ack()

    def _rules(self, agent: str) -> BreakerRules | None:
        settings = self._config.agents.get(agent)
        return settings.breaker if settings is not None else None

    async def _parse(self, delivery: Delivery) -> Attempt | None:
        try:
            return Attempt.model_validate_json(delivery.data)
        except ValidationError as error:
            # Kept for whoever wrote it; the sink stores its own letter, so this one only says that it was skipped.
            structlog.get_logger().warning(
                "attempt_unreadable", sequence=delivery.sequence, problems=error.error_count()
            )
            return None

    async def _apply(self, seen: dict[BreakerKey, list[Observation]]) -> None:
        """Raises StateUnavailable, BusUnavailable; may be repeated."""
        keys = list(seen)
        loaded = await self._breakers.load(keys) if keys else []
        for key, before in zip(keys, loaded, strict=True):
            await self._apply_to(key, before, seen[key])
            del seen[key]

    async def _apply_to(self, key: BreakerKey, before: Loaded, observations: Sequence[Observation]) -> None:
        rules = self._rules(key.agent)
        assert rules is not None
        while True:
            if before.unpublished is not None:
                await self._publish(key, before.unpublished)
            after, changes = before.breaker, list[Change]()
            for observation in observations:
                after, change = observe(after, observation, rules, before.now_ms)
                if change is not None:
                    changes.append(change)
            if after == before.breaker:
                return
            transitions = [_transition(key, change, rules, before.now_ms) for change in changes]
            pending = _TRANSITIONS.dump_json(transitions).decode() if transitions else None
            if await self._breakers.save(key, before, after, pending):
                break
            [before] = await self._breakers.load([key])
        for transition in transitions:
            structlog.get_logger().info(
                "breaker_" + transition.to_state, agent=key.agent, model=key.model, reason=transition.reason
            )
        if pending is not None:
            await self._publish(key, pending)

    async def _publish(self, key: BreakerKey, text: str) -> None:
        """Publishes transitions that are saved. What a crash kept from being published is found with the breaker."""
        subject = subjects.breaker(key.agent, key.model)
        for transition in _TRANSITIONS.validate_json(text):
            await self._publisher.event(subject, transition, id=transition.transition_id, at=transition.at)
        await self._breakers.mark_published(key, text)


def _observation(sequence: int, attempt: Attempt) -> Observation:
    failed: bool | None = None
    if attempt.outcome == "success":
        failed = False
    elif attempt.outcome == "error" and attempt.counts_for_breaker:
        failed = True
    return Observation(sequence, attempt.attempt_id, ms_from_time(attempt.completed_at), failed)


def _transition(key: BreakerKey, change: Change, rules: BreakerRules, now_ms: int) -> BreakerTransition:
    at = time_from_ms(now_ms)
    opened = change.after.state == "open"
    return BreakerTransition(
        transition_id=f"{key.name}#{change.after.version}@{format_time(at)}",
        agent=key.agent,
        model=key.model,
        from_state=change.before.state,
        to_state=change.after.state,
        rule=change.rule,
        reason=change.reason,
        consecutive_failures=change.consecutive_failures,
        errors=change.errors,
        within_s=rules.within_s if rules.errors is not None else None,
        cooldown_s=rules.cooldown_s,
        open_until=time_from_ms(change.after.open_until_ms) if opened else None,
        version=change.after.version,
        at=at,
    )
