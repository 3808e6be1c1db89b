"""A shadow: a second breaker beside the real one, which sees the same calls and refuses none.

It is told of a call when that has ended, with the moment when the call asked to be admitted. So it says what it would
have answered at that moment, and only then counts the outcome. Its clock is the log's: the events alone decide what it
does. Calls that the real breaker refuses have no outcome, and teach it nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.admission import admit
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, Observation, observe
from breakwater.breakers.rules.transitions import half_opened, transition
from breakwater.breakers.settings import MAX_KEPT, BreakerRules
from breakwater.kernel.immutable import changed, immutable

STATES_KEPT = 16
"""The number of earlier states that are kept for calls which end after later ones have changed the breaker."""


@immutable(slots=False)
class Shadow:
    """The state of a shadow.

    Attributes:
        breaker: its breaker.
        earlier: that breaker before each of its latest changes of state, without what it had counted; ordered.
        refused: the calls that it would have refused.
        reported: those of them that its transitions have reported.
        unpublished: its transitions that may not be published yet, in order.
        sequences: those of the latest calls that it was told of, ordered; one that is told again changes nothing.
    """

    breaker: Breaker = Breaker()
    earlier: tuple[Breaker, ...] = ()
    refused: int = 0
    reported: int = 0
    unpublished: tuple[BreakerTransition, ...] = ()
    sequences: tuple[int, ...] = ()


@immutable()
class ShadowedCall:
    """A call that has ended, or was refused by the real breaker.

    Attributes:
        observation: its outcome.
        rules: the shadow's rules of the agent that called.
        asked_ms: when it asked to be admitted, in milliseconds since the epoch; None if it was refused.
    """

    observation: Observation
    rules: BreakerRules
    asked_ms: int | None


def follow(key: BreakerKey, shadow: Shadow, calls: Sequence[ShadowedCall], jitter: float) -> Shadow:
    """Tells a shadow of calls, in the order in which they ended. Returns it with its transitions to be published.

    Args:
        key: its key.
        shadow: the current state.
        calls: the calls.
        jitter: a random number from 0 to 1, for the cool-down.
    """
    for call in calls:
        shadow = _after(key, shadow, call, jitter)
    return shadow


def _after(key: BreakerKey, shadow: Shadow, call: ShadowedCall, jitter: float) -> Shadow:
    observation = call.observation
    place = bisect_left(shadow.sequences, observation.sequence)
    if observation.sequence in shadow.sequences[place : place + 1] or (
        place == 0 and len(shadow.sequences) == MAX_KEPT
    ):
        return shadow  # also one that is older than all that are remembered
    sequences = (*shadow.sequences[:place], observation.sequence, *shadow.sequences[place:])[-MAX_KEPT:]
    shadow = changed(shadow, sequences=sequences)
    now_ms = max(observation.at_ms, shadow.breaker.changed_ms)
    if call.asked_ms is not None:
        breaker_then = _at(shadow, call.asked_ms)
        # The probe's lease ends with the call, of which all is known by now.
        admitted, answer = admit(breaker_then, observation.attempt_id, call.asked_ms, now_ms, observation.caller)
        if not answer.admitted:
            return changed(shadow, refused=shadow.refused + 1)
        observation = changed(observation, version=answer.version)
        if breaker_then is shadow.breaker and answer.became_half_open:
            event = half_opened(key, admitted, call.rules, call.asked_ms)
            shadow = _move_to(shadow, admitted, event)
        elif breaker_then is shadow.breaker and answer.is_probe:
            shadow = changed(shadow, breaker=admitted)
    breaker, change = observe(shadow.breaker, observation, call.rules, now_ms, jitter)
    if change is None:
        return changed(shadow, breaker=breaker)
    return _move_to(shadow, breaker, transition(key, change, call.rules, now_ms))


def _at(shadow: Shadow, asked_ms: int) -> Breaker:
    """Returns the breaker as it was at a moment; the earliest that is kept if that is later."""
    breaker = shadow.breaker
    for before in reversed(shadow.earlier):
        if breaker.changed_ms <= asked_ms:
            break
        breaker = before
    return breaker


def _move_to(shadow: Shadow, after: Breaker, event: BreakerTransition) -> Shadow:
    """Returns a shadow after a change of state, with its transition to be published."""
    marks = {
        "transition_id": f"shadow/{event.transition_id}",
        "shadow": True,
        "refused": shadow.refused - shadow.reported,
    }
    unpublished = (*shadow.unpublished, event.model_copy(update=marks))
    before = shadow.breaker
    uncounted = Breaker(
        state=before.state,
        open_until_ms=before.open_until_ms,
        probe=before.probe,
        probe_until_ms=before.probe_until_ms,
        version=before.version,
        changed_ms=before.changed_ms,
        alone=before.alone,
        probed_by=before.probed_by,
    )
    earlier = (*shadow.earlier, uncounted)[-STATES_KEPT:]
    return changed(shadow, breaker=after, earlier=earlier, reported=shadow.refused, unpublished=unpublished)
