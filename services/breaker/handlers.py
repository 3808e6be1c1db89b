"""From attempts to breaker transitions: load, decide, save, publish. The decision is `breaker_events.decide`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import structlog

from breakwater.breakers.contract import BreakerState, BreakerTransition
from breakwater.breakers.metrics import BreakerMetrics
from breakwater.breakers.rules.breaker import (
    ALL,
    BreakerKey,
    awaits_call,
    rules_of_unconfigured,
    state_at,
    wait_for_call,
)
from breakwater.breakers.rules.observations import observation_of
from breakwater.breakers.rules.shadow import Shadow, ShadowedCall, follow
from breakwater.breakers.rules.transitions import transition
from breakwater.breakers.settings import BreakerProbe
from breakwater.breakers.store import Breakers
from breakwater.breakers.transitions import ObservedOutcome, decide, publish_saved, saving
from breakwater.config import Config, breaker_of, breakers_of, shadows_of, units_of
from breakwater.config.deployments import Deployment
from breakwater.health.rules import out_of_budget, speaks_against_health
from breakwater.health.store import EndedCall, Healths
from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.contract.job import Job
from breakwater.jobs.store.records import read_record
from breakwater.kernel.ids import new_id
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery, acknowledge, heartbeat
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.process.outage import Outages
from breakwater.kernel.redis.documents import Documents
from breakwater.kernel.telemetry.metrics import BREAKER_STATE, OTHER, Readings, one_of
from breakwater.kernel.types import ms_from_time

_WORST: tuple[BreakerState, ...] = ("isolated", "open", "half_open", "closed")


@dataclass(frozen=True, slots=True)
class AttemptBatch:
    """The attempts of a batch, by breaker and by shadow, and by agent and model for the agents' health."""

    breakers: dict[BreakerKey, list[ObservedOutcome]] = field(default_factory=dict[BreakerKey, "list[ObservedOutcome]"])
    shadows: dict[BreakerKey, list[ShadowedCall]] = field(default_factory=dict[BreakerKey, "list[ShadowedCall]"])
    health: dict[str, dict[str, list[EndedCall]]] = field(default_factory=dict[str, "dict[str, list[EndedCall]]"])


class BreakerHandler:
    """Maintains the fleet's breakers. Any number of these may run: one whose save comes second decides again."""

    def __init__(
        self,
        config: Config,
        breakers: Breakers,
        shadows: Documents[Shadow],
        healths: Healths,
        publisher: Publisher,
        metrics: BreakerMetrics,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.config = config
        self._breakers = breakers
        self._shadows = shadows
        self._healths = healths
        self._publisher = publisher
        self._metrics = metrics
        self._jitter = jitter
        self._outages = Outages()

    async def handle(self, batch: Sequence[Delivery[Attempt]], is_log: Callable[[str | None], Awaitable[bool]]) -> None:
        """Takes a batch of attempts into account, and acknowledges it. `is_log` is as for `apply`."""
        async with heartbeat(batch):
            sorted_batch = self.batch_of(
                (delivery.sequence, ms_from_time(delivery.published_at), attempt)
                for delivery in batch
                if (attempt := read_record(delivery, Attempt)) is not None
            )
            await self._outages.retry_while_unavailable(lambda: self.apply(sorted_batch, is_log))
            if sorted_batch.shadows:
                await self._outages.retry_while_unavailable(lambda: self._follow(sorted_batch.shadows))
        await acknowledge(batch)

    def batch_of(self, attempts: Iterable[tuple[int, int, Attempt]]) -> AttemptBatch:
        """Sorts attempts, each with its sequence and the time when it was stored (ms since the epoch)."""
        batch = AttemptBatch()
        for sequence, at_ms, attempt in attempts:
            agent = self.config.agents.get(attempt.agent)
            if agent is None:
                continue
            if out_of_budget(attempt):
                batch.health.setdefault(attempt.agent, {}).setdefault("", []).append(EndedCall(sequence, at_ms, True))
            elif (went_wrong := speaks_against_health(attempt)) is not None:
                models = batch.health.setdefault(attempt.agent, {})
                models.setdefault(attempt.unit, []).append(EndedCall(sequence, at_ms, went_wrong))
            if agent.breaker is not None:
                key = BreakerKey.of(agent.breaker.scope, attempt.agent, attempt.unit, attempt.provider)
                observed = ObservedOutcome(observation_of(sequence, at_ms, attempt), agent.breaker)
                batch.breakers.setdefault(key, []).append(observed)
            if agent.shadow is not None:
                rules = agent.shadow.breaker
                key = BreakerKey.of(rules.scope, attempt.agent, attempt.unit, attempt.provider)
                call = ShadowedCall(observation_of(sequence, at_ms, attempt), rules, _asked_ms(attempt))
                batch.shadows.setdefault(key, []).append(call)
        return batch

    async def apply(self, batch: AttemptBatch, is_log: Callable[[str | None], Awaitable[bool]]) -> None:
        """Takes a batch into account: a round trip to Redis that reads, and one that writes.

        Args:
            batch: the attempts.
            is_log: checks whether the log from which the breakers are filled is the batch's. It may wait before it
                returns False, and is then called again.

        Raises:
            StateUnavailableError, BusUnavailableError: the batch may be repeated.
        """
        waiting: dict[BreakerKey, list[ObservedOutcome]] = batch.breakers
        notes = [self._healths.note_command(agent, models) for agent, models in batch.health.items()]
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
            changed = [change for change in decided if change.after != change.before.breaker]
            # Together, in one round trip.
            saved, _ = await asyncio.gather(self._breakers.save(changed), self._healths.note(notes))
            notes = []
            for change, is_saved in zip(changed, saved, strict=True):
                if is_saved and change.unpublished is not None:
                    await self._publish(change.key, change.unpublished)
            # Another writer saved first: decide again, on its state.
            again = {change.key for change, is_saved in zip(changed, saved, strict=True) if not is_saved}
            waiting = {key: observations for key, observations in waiting.items() if key in again}

    async def _follow(self, calls_by_shadow: Mapping[BreakerKey, Sequence[ShadowedCall]]) -> None:
        """Tells shadows of calls. Raises StateUnavailableError, BusUnavailableError; may be repeated."""
        keys = {key.name: key for key in calls_by_shadow}

        def decide(name: str, shadow: Shadow) -> Shadow:
            key = keys[name]
            return follow(key, shadow, calls_by_shadow[key], self._jitter())

        def publish(event: BreakerTransition) -> Awaitable[object]:
            subject = subjects.shadow_breaker(event.agent, event.model)
            return self._publisher.event(subject, event, id=event.transition_id, at=event.at)

        await self._shadows.publish(await self._shadows.change(keys, decide), publish)

    async def forget_shadows(self) -> None:
        """Has the shadows begin anew, on another log. Raises StateUnavailableError."""
        await self._shadows.forget([key.name for key in shadows_of(self.config)])

    async def gauges(self) -> Readings:
        """The state of each breaker, for Prometheus. Raises StateUnavailableError."""
        states: dict[tuple[str, ...], float] = {}
        states_by_key: dict[BreakerKey, BreakerState] = {
            key: state_at(loaded.breaker, loaded.now_ms) for key, loaded in await self._breakers.all()
        }
        for labels, state in states_by_labels(self.config, states_by_key).items():
            states |= one_of(state, get_args(BreakerState), *labels)
        return {BREAKER_STATE: states}

    async def advance(self) -> None:
        """Makes breakers half-open, has those probed that wait for a call, and publishes what crashed processes saved.

        Raises StateUnavailableError, BusUnavailableError; may be repeated.
        """
        rules_by_key = breakers_of(self.config, of_allowed=True)
        for key, loaded in await self._breakers.all():
            if loaded.unpublished is not None:
                await self._publish(key, loaded.unpublished)
                continue
            rules = rules_by_key.get(key) or rules_of_unconfigured(key)
            if rules.probe is not None and awaits_call(loaded.breaker, loaded.now_ms):
                await self._probe(key, rules.probe)
                continue
            after, change = wait_for_call(loaded.breaker, rules, loaded.now_ms)
            if change is None:
                continue
            change_to_save = saving(key, loaded, after, [transition(key, change, rules, loaded.now_ms)])
            [is_saved] = await self._breakers.save([change_to_save])
            if is_saved and change_to_save.unpublished is not None:
                await self._publish(key, change_to_save.unpublished)

    async def _probe(self, key: BreakerKey, probe: BreakerProbe) -> None:
        """Publishes a job that tries a breaker, unless a process of the fleet has done so within the last period."""
        target = user_of(self.config, key)
        if target is None or not await self._breakers.takes_turn(key, probe.every_s):
            return
        agent, deployment = target
        model = deployment.model
        job = Job(
            agent=agent,
            model=model,
            fallback_models=[],
            prompt=probe.prompt,
            params={"max_tokens": probe.max_tokens},
            retry={"max_attempts": 1},
            skip_cache=True,
        )
        execution_id = new_id()
        headers = {
            Header.MSG_ID.value: subjects.message_id(agent, execution_id),
            Header.EXECUTION_ID.value: subjects.encode_token(execution_id),
            Header.PROBE.value: subjects.encode_token(deployment.unit),
        }
        payload = job.model_dump_json(exclude_unset=True).encode()
        await self._publisher.job(subjects.job(agent), payload, headers)
        structlog.get_logger().info("breaker_probed", agent=agent, model=model, execution_id=execution_id)

    async def _publish(self, key: BreakerKey, text: str) -> None:
        for event in await publish_saved(self._publisher, self._breakers, key, text):
            self._metrics.count_transition(*labels_of(self.config, key), event.to_state)
            structlog.get_logger().info(
                "breaker_" + event.to_state, agent=key.agent, model=key.model, reason=event.reason
            )


def _asked_ms(attempt: Attempt) -> int | None:
    """Returns when a call was admitted, in ms since the epoch: by Redis' clock if that is known. None if it was not."""
    return None if attempt.short_circuited else ms_from_time(attempt.reserved_at or attempt.started_at)


def states_by_labels(config: Config, states: Mapping[BreakerKey, BreakerState]) -> dict[tuple[str, str], BreakerState]:
    """The state of each breaker by its labels. Breakers that share labels show the worst; an unused one is closed.

    Args:
        config: breakers of other agents than its own are left out.
        states: the states in Redis, by breaker.
    """
    by_labels: dict[tuple[str, str], BreakerState] = {labels_of(config, key): "closed" for key in breakers_of(config)}
    for key, state in states.items():
        if key.agent in config.agents or key.agent == ALL:
            labels = labels_of(config, key)
            if labels not in by_labels or _WORST.index(state) < _WORST.index(by_labels[labels]):
                by_labels[labels] = state
    return by_labels


def user_of(config: Config, key: BreakerKey) -> tuple[str, Deployment] | None:
    """Returns an agent and a deployment whose calls belong to a breaker; None if the config has none."""
    if key.agent in config.agents:
        return key.agent, config.deployment_of(config.agents[key.agent], key.model)
    users = ((name, place) for name in config.agents for place in units_of(config, name).values())
    return next((user for user in users if breaker_of(config, *user) == key), None)


def labels_of(config: Config, key: BreakerKey) -> tuple[str, str]:
    """A breaker's agent and model. A model that the config does not name is `other`, as jobs may request any model."""
    provider = key.model.removesuffix(f"/{ALL}")
    named = key.model in config.known_units or (key.agent == ALL and provider in config.providers)
    return key.agent, key.model if named else OTHER
