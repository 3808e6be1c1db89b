"""From attempts to breakers in Redis, and the transitions saved with these to their events.

A worker judges its own calls as they end, and the breaker service all attempts of the log. Both decide by
`breakers.rules.observe`, and save only breakers that were not changed meanwhile. Any process that finds transitions
unpublished may publish them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, Observation, observe
from breakwater.breakers.rules.transitions import transition
from breakwater.breakers.settings import BreakerRules
from breakwater.breakers.store import Breakers, LoadedBreaker, Saving
from breakwater.kernel.immutable import immutable
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import Publisher

_TRANSITIONS = TypeAdapter(list[BreakerTransition])

AS_OF_NOW = 2**53
"""The end of an attempt that was just recorded; a time ahead of Redis' clock counts as now."""


@immutable()
class ObservedOutcome:
    """An outcome, with the rules of the agent that called."""

    observation: Observation
    rules: BreakerRules


def decide(key: BreakerKey, before: LoadedBreaker, outcomes: Sequence[ObservedOutcome], jitter: float) -> Saving:
    """A breaker after some outcomes, with its transitions behind those that `before` has yet to publish."""
    breaker = before.breaker
    transitions = list[BreakerTransition]()
    for outcome in outcomes:
        breaker, change = observe(breaker, outcome.observation, outcome.rules, before.now_ms, jitter)
        if change is not None and key.task is None:
            transitions.append(transition(key, change, outcome.rules, before.now_ms))
    return saving(key, before, breaker, transitions)


def saving(key: BreakerKey, before: LoadedBreaker, after: Breaker, transitions: Sequence[BreakerTransition]) -> Saving:
    """A breaker to be saved, with its transitions behind those that `before` has yet to publish."""
    if before.unpublished is not None and transitions:
        transitions = [*_TRANSITIONS.validate_json(before.unpublished), *transitions]
    return Saving(key, before, after, dump_transitions(transitions) or before.unpublished)


def dump_transitions(transitions: Sequence[BreakerTransition]) -> str | None:
    """Transitions as they are saved with a breaker; None where there are none."""
    return _TRANSITIONS.dump_json(list(transitions)).decode() if transitions else None


async def publish_saved(
    publisher: Publisher, breakers: Breakers, key: BreakerKey, saved: str
) -> tuple[BreakerTransition, ...]:
    """Publishes transitions that are saved, and marks them as published. May be repeated: each has its id.

    Returns:
        The transitions.

    Raises:
        BusUnavailableError: they may not be published yet.
        StateUnavailableError: published, but not marked: the next process that finds them publishes them again.
    """
    transitions = tuple(_TRANSITIONS.validate_json(saved))
    subject = subjects.breaker(key.agent, key.model)
    for event in transitions:
        await publisher.event(subject, event, id=event.transition_id, at=event.at)
    await breakers.mark_published(key, saved)
    return transitions
