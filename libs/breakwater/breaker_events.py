"""Publishing the transitions that are saved with a breaker in Redis, by any process that finds them unpublished."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter

from breakwater.bus.publisher import Publisher
from breakwater.contracts import subjects
from breakwater.contracts.events import BreakerTransition
from breakwater.policy.breaker import BreakerKey
from breakwater.state.breakers import Breakers

_TRANSITIONS = TypeAdapter(list[BreakerTransition])


def dumped(transitions: Sequence[BreakerTransition]) -> str | None:
    """Transitions as they are saved with a breaker; None where there are none."""
    return _TRANSITIONS.dump_json(list(transitions)).decode() if transitions else None


async def publish_saved(
    publisher: Publisher, breakers: Breakers, key: BreakerKey, saved: str
) -> tuple[BreakerTransition, ...]:
    """Publishes transitions that are saved, and marks them as published. May be repeated: each has its id.

    Returns:
        The transitions.

    Raises:
        BusUnavailable: they may not be published yet.
        StateUnavailable: they are published, and not marked: the next process that finds them publishes them once more.
    """
    transitions = tuple(_TRANSITIONS.validate_json(saved))
    subject = subjects.breaker(key.agent, key.model)
    for event in transitions:
        await publisher.event(subject, event, id=event.transition_id, at=event.at)
    await breakers.mark_published(key, saved)
    return transitions
