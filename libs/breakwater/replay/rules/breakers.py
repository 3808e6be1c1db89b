"""The breakers of a replay: those of the plane, on the clock of the events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from breakwater.breakers.contract import BreakerRule, BreakerState, BreakerTransition
from breakwater.breakers.rules.admission import BreakerAnswer, admit, give_back
from breakwater.breakers.rules.breaker import (
    Breaker,
    BreakerChange,
    BreakerKey,
    Observation,
    consecutive_failures,
    cooldown_ms,
    errors_within,
    isolate,
    observe,
    reset,
    rules_of_unconfigured,
    wait_for_call,
)
from breakwater.breakers.rules.failure_statistics import breaker_statistics
from breakwater.breakers.rules.observations import observation_of
from breakwater.breakers.rules.transitions import breaker_after, half_opened, transition
from breakwater.breakers.settings import BreakerRules
from breakwater.jobs.contract.execution import Attempt, FailureStatistics
from breakwater.kernel.immutable import changed, immutable
from breakwater.kernel.types import ms_from_time

LOOK_EVERY_MS = 10_000
"""The interval at which breakers without a call become half-open."""

LAG_MS = 2_000
"""The most time from an event to the transition that it causes."""

ORDER_MS = 500
"""The most time from the moment at which the log has a success to that at which its breaker has it."""

LATE_MS = 1_000
"""The most time from the moment at which a call met a breaker to that which its record has."""

JITTER = 0.5
"""The random part of a cool-down that history does not show."""


@immutable()
class Success:
    """A success that a breaker has yet to count, and its place in the log.

    Attributes:
        attempt: the call.
        sequence: its place.
        at_ms: when the log stored it, in milliseconds since the epoch.
        version: the version of the breaker that admitted it.
    """

    attempt: Attempt
    sequence: int
    at_ms: int
    version: int | None

    @property
    def observation(self) -> Observation:
        """The outcome as the breaker counts it."""
        observation = observation_of(self.sequence, self.at_ms, self.attempt)
        return observation if observation.version == self.version else changed(observation, version=self.version)


class ReplayedBreakers:
    """All breakers of a replay.

    A transition that happened takes its moment and its random cool-down from the record, so that later calls find the
    breaker as they found it. Whatever a worker asked between an event and that moment, it asked the breaker before.
    """

    def __init__(
        self,
        rules: Mapping[BreakerKey, BreakerRules],
        recorded: Iterable[BreakerTransition],
        publish: Callable[[BreakerTransition], None],
        earlier: Iterable[BreakerTransition] = (),
    ) -> None:
        """Makes the breakers.

        Args:
            rules: the rules of each.
            recorded: the recorded transitions.
            publish: is called with each transition of the replay.
            earlier: the latest transition of each breaker before the replay, which they begin with.
        """
        self._rules = rules
        self._publish = publish
        self._breakers = {
            key: breaker_after(event, 0) for event in earlier if (key := BreakerKey(event.agent, event.model)) in rules
        }
        self._uncounted: dict[BreakerKey, dict[tuple[str | None, str | None], tuple[Success, BreakerRules]]] = {}
        """The latest success of each caller of a closed breaker, which matters once a call fails."""
        self._before: dict[BreakerKey, Breaker] = {}
        """The breakers as they were until their latest change."""
        self._recorded = {(BreakerKey(event.agent, event.model), event.version): event for event in recorded}
        self.edges = 0
        """The number of transitions that have their number of errors from the record."""
        self._successes: dict[BreakerKey, deque[tuple[int, Breaker]]] = {}
        """The latest successes of breakers that had failures: the time of each, and the breaker before it."""

    def admit(
        self, key: BreakerKey, attempt_id: str, now_ms: int, lease_ms: int, rules: BreakerRules, caller: str
    ) -> tuple[BreakerAnswer, Breaker]:
        """Asks for the admission of a call. Returns the answer, and the breaker that gave it."""
        breaker = self._breakers.get(key)
        if breaker is None:
            return BreakerAnswer(True, 0), _CLOSED
        if now_ms < breaker.changed_ms and (before := self._before.get(key)) is not None:
            _, admission = admit(before, attempt_id, now_ms, lease_ms, caller)
            return admission, before
        after, admission = admit(breaker, attempt_id, now_ms, lease_ms, caller)
        if admission.became_half_open:
            recorded = self._as_recorded(key, after.version, "half_open", None, now_ms)
            event = half_opened(key, after, rules, now_ms if recorded is None else ms_from_time(recorded.at))
            self._change(key, breaker, after)
            self._publish(self._with_recorded_errors(key, event, after, rules))
        elif after is not breaker:
            self._breakers[key] = after
        return admission, breaker

    def closed_version(self, key: BreakerKey, now_ms: int) -> int | None:
        """Returns the version of a breaker that is closed, and was before its latest change; None of another one."""
        breaker = self._breakers.get(key, _CLOSED)
        return breaker.version if breaker.state == "closed" and now_ms >= breaker.changed_ms else None

    def succeed(self, key: BreakerKey, success: Success, rules: BreakerRules) -> bool:
        """Notes a success of a closed breaker, to be counted before the next failure; False if it must be counted now.

        Of several successes of a caller in a row, the last one counts for all, but for a rule on the failure rate.
        """
        if rules.failure_rate is not None or self._breakers.get(key, _CLOSED).state != "closed":
            return False
        by_caller = self._uncounted.setdefault(key, {})
        caller = success.attempt.caller, success.attempt.tenant
        by_caller.pop(caller, None)  # the latest comes last
        by_caller[caller] = success, rules
        return True

    def get(self, key: BreakerKey) -> Breaker:
        """Returns a breaker, with all that it has counted."""
        self._count(key)
        return self._breakers.get(key, _CLOSED)

    def _count(self, key: BreakerKey) -> None:
        """Counts the successes that were only noted."""
        for success, rules in self._uncounted.pop(key, _NO_SUCCESSES).values():
            breaker = self._breakers.get(key, _CLOSED)
            self._breakers[key], _ = observe(breaker, success.observation, rules, success.at_ms)
            if breaker.failures:
                self._note_success(key, breaker, success.at_ms)

    def met_ms(self, key: BreakerKey, call: Attempt, now_ms: int) -> int:
        """Returns the time at which a recorded call met a breaker: now, unless it shows that it met an earlier state.

        A worker writes a refusal a moment after Redis gave it, and admitted calls have the version that admitted them.

        Args:
            key: the breaker.
            call: the call.
            now_ms: the time that the call has in the record, in milliseconds since the epoch.
        """
        is_refused = call.refused_reason == "breaker_open"
        breaker = self._breakers.get(key, _CLOSED)
        if not is_refused and call.breaker_version in {None, breaker.version}:
            return now_ms
        before = self._before.get(key)
        if before is not None and not 0 <= now_ms - breaker.changed_ms <= LATE_MS:
            before = None
        if not is_refused:
            return breaker.changed_ms - 1 if before is not None and call.breaker_version == before.version else now_ms
        # A half-open one would have had the call wait, or admitted it.
        states = (before, breaker) if breaker.state == "half_open" else (breaker, before)
        refusing = next((state for state in states if state is not None and _refuses_as_recorded(state, call)), None)
        if refusing is None:
            return now_ms
        asked_ms = now_ms if refusing is breaker else breaker.changed_ms - 1
        has_just_ended = refusing.state == "open" and 0 <= asked_ms - refusing.open_until_ms <= LATE_MS
        return refusing.open_until_ms - 1 if has_just_ended else asked_ms

    def give_back(self, key: BreakerKey, attempt_id: str) -> None:
        """Releases the probe, if this attempt holds it."""
        if (breaker := self._breakers.get(key)) is not None:
            self._breakers[key] = give_back(breaker, attempt_id)

    def changes_near(self, key: BreakerKey, now_ms: int, within_ms: int) -> bool:
        """Returns True if the state of a breaker has changed or changes within some time before or after a moment."""
        breaker = self._breakers.get(key, _CLOSED)
        moments = (breaker.changed_ms, breaker.open_until_ms, breaker.probe_until_ms)
        return any(abs(now_ms - at_ms) <= within_ms for at_ms in moments)

    def observe(
        self,
        key: BreakerKey,
        observation: Observation,
        rules: BreakerRules,
        now_ms: int,
        soon: Callable[[], Iterable[Observation]] | None = None,
    ) -> bool:
        """Applies the outcome of an attempt.

        Outcomes reach a breaker in another order than the log: a worker applies a failure at once, and a success with
        whatever it asks Redis next. Where the record has another transition than follows from the log's order, but one
        that follows if the breaker had a success earlier or later, or another failure first, that order is taken.

        Args:
            key: the breaker.
            observation: the outcome.
            rules: the rules of the calling agent.
            now_ms: the current time, in milliseconds since the epoch.
            soon: returns the outcomes that the log has within `ORDER_MS`; None to take the order of the log.

        Returns:
            True if the order is not that of the log.
        """
        breaker = self.get(key)
        after, change = observe(breaker, observation, rules, now_ms, JITTER)
        is_reordered = False
        if soon is not None and (observation.failed or observation.gave_up):
            reordered = self._in_other_order(key, breaker, observation, rules, now_ms, (after, change), soon)
            if reordered is not None:
                breaker, observation = reordered
                after, change = observe(breaker, observation, rules, now_ms, JITTER)
                is_reordered = True
            elif self._opens_by_recorded_rate(key, breaker, observation, rules, now_ms, (after, change)):
                return False
        if change is None:
            if after is not breaker or is_reordered:
                self._breakers[key] = after
                if observation.failed is False and breaker.failures:
                    self._note_success(key, breaker, now_ms)
            return is_reordered
        if (recorded := self._as_recorded(key, after.version, after.state, change.rule, now_ms)) is not None:
            now_ms = ms_from_time(recorded.at)
            jitter = _jitter_of(recorded, rules, after.openings)
            after, change = observe(breaker, observation, rules, now_ms, jitter)
        if change is not None:
            self._publish_change(key, breaker, change, rules, now_ms)
        return is_reordered

    def _opens_by_recorded_rate(
        self,
        key: BreakerKey,
        breaker: Breaker,
        observation: Observation,
        rules: BreakerRules,
        now_ms: int,
        by_log: tuple[Breaker, BreakerChange | None],
    ) -> bool:
        """Opens a breaker by the recorded rate of failures, if it is near that rate here. Returns True if it did.

        Which calls are still within the window, and which successes have been counted yet, is chance.
        """
        after, change = by_log
        recorded = self._recorded.get((key, breaker.version + 1))
        if recorded is None or recorded.rule != "failure_rate" or recorded.total_failures != after.total_failures:
            return False
        at_ms = ms_from_time(recorded.at)
        if not 0 <= at_ms - now_ms <= LAG_MS or (change is not None and _agrees(change, recorded)):
            return False
        jitter = _jitter_of(recorded, rules, breaker.openings + 1)
        for shift_ms in (0, ORDER_MS):
            _, near = observe(breaker, observation, rules, at_ms + shift_ms, jitter)
            if near is not None and near.rule == "failure_rate":
                moved = {"changed_ms": at_ms, "open_until_ms": near.after.open_until_ms - shift_ms}
                opened = changed(near.after, reason=recorded.reason, **moved)
                self.edges += 1
                figures = {"reason": recorded.reason, "consecutive_failures": recorded.consecutive_failures}
                opening = replace(near, after=opened, errors=recorded.errors, **figures)
                self._publish_change(key, breaker, opening, rules, at_ms)
                return True
        return False

    def _in_other_order(
        self,
        key: BreakerKey,
        breaker: Breaker,
        observation: Observation,
        rules: BreakerRules,
        now_ms: int,
        by_log: tuple[Breaker, BreakerChange | None],
        soon: Callable[[], Iterable[Observation]],
    ) -> tuple[Breaker, Observation] | None:
        """Returns the breaker, and the outcome that it has next, in an order that leads to what is recorded.

        None if the order of the log does, or none.
        """
        after, change = by_log
        recorded = self._recorded.get((key, breaker.version + 1))
        if recorded is not None and not 0 <= ms_from_time(recorded.at) - now_ms <= LAG_MS:
            recorded = None
        if change is None and (recorded is None or recorded.total_failures != after.total_failures):
            return None
        if change is not None and recorded is not None and _agrees(change, recorded):
            return None
        without_change: tuple[Breaker, Observation] | None = None
        outcomes = [*soon()]
        failures = [outcome for outcome in outcomes if outcome.failed]
        later = [outcome for outcome in outcomes if outcome.sequence != observation.sequence]
        breakers = [
            *self._with_other_successes(key, breaker, rules, now_ms, outcomes),
            *_ahead(breaker, rules, now_ms, later),
            *_ahead(breaker, rules, now_ms, [outcome for outcome in later if outcome.failed]),
        ]
        for first, variant in product([observation, *failures], [breaker, *breakers]):
            _, change_of_variant = observe(variant, first, rules, now_ms, JITTER)
            if change_of_variant is None and first is observation:
                without_change = without_change or (variant, first)
            elif change_of_variant is not None and recorded is not None and _agrees(change_of_variant, recorded):
                return variant, first
        return None if change is None else without_change

    def _with_other_successes(
        self, key: BreakerKey, breaker: Breaker, rules: BreakerRules, now_ms: int, soon: Sequence[Observation]
    ) -> Iterator[Breaker]:
        """Yields a breaker as if it had the next successes already, or had none of the latest ones yet."""
        ahead = breaker
        for outcome in soon:
            if outcome.failed is False:
                ahead, _ = observe(ahead, outcome, rules, now_ms)
                yield ahead
        for at_ms, before in reversed(self._successes.get(key, ())):
            if now_ms - at_ms <= ORDER_MS and before.version == breaker.version:
                yield changed(breaker, last_success=before.last_success, successes=before.successes)

    def _note_success(self, key: BreakerKey, before: Breaker, now_ms: int) -> None:
        latest = self._successes.setdefault(key, deque())
        while latest and now_ms - latest[0][0] > ORDER_MS:
            latest.popleft()
        latest.append((now_ms, before))

    def due_ms(self, now_ms: int) -> int | None:
        """Returns when a look may change a breaker next, in milliseconds since the epoch; None if none may."""
        breakers = (breaker for breaker in self._breakers.values() if breaker.state in {"open", "half_open"})
        due = (
            breaker.open_until_ms if breaker.state == "open" else now_ms for breaker in breakers if not breaker.waits
        )
        return min(due, default=None)

    def look(self, now_ms: int) -> None:
        """Makes breakers half-open whose cool-down is over without a call, or that have lost their probe."""
        for key, breaker in list(self._breakers.items()):
            if breaker.state in {"open", "half_open"}:
                rules = self._rules.get(key) or rules_of_unconfigured(key)
                _, change = wait_for_call(breaker, rules, now_ms)
                if change is not None:
                    self._publish_change(key, breaker, change, rules, now_ms)

    def act(self, event: BreakerTransition) -> None:
        """Repeats what an operator did to a breaker."""
        key = BreakerKey(event.agent, event.model)
        rules = self._rules.get(key) or rules_of_unconfigured(key)
        now_ms = ms_from_time(event.at)
        breaker = self.get(key)
        action = isolate if event.to_state == "isolated" else reset
        _, change = action(breaker, by=event.by or "", why="", rules=rules, now_ms=now_ms)
        if change is not None:
            change = replace(change, reason=event.reason, after=replace(change.after, reason=event.reason))
            self._publish_change(key, breaker, change, rules, now_ms)

    def _publish_change(
        self, key: BreakerKey, before: Breaker, change: BreakerChange, rules: BreakerRules, now_ms: int
    ) -> None:
        self._change(key, before, change.after)
        self._publish(self._with_recorded_errors(key, transition(key, change, rules, now_ms), before, rules))

    def _with_recorded_errors(
        self, key: BreakerKey, event: BreakerTransition, breaker: Breaker, rules: BreakerRules
    ) -> BreakerTransition:
        """Takes the number of errors within the window from the record, if it may be that.

        A failure counts from the moment at which the worker applied it, which the log does not have. At an edge of the
        window, that decides whether it is within.
        """
        at_ms = ms_from_time(event.at)
        recorded = self._as_recorded(key, event.version, event.to_state, event.rule, at_ms)
        if recorded is None or recorded.errors == event.errors:
            return event
        if (
            not errors_within(breaker, rules, at_ms + ORDER_MS)
            <= recorded.errors
            <= errors_within(breaker, rules, at_ms - ORDER_MS)
        ):
            return event
        self.edges += 1
        return event.model_copy(update={"errors": recorded.errors})

    def _change(self, key: BreakerKey, before: Breaker, after: Breaker) -> None:
        self._before[key] = before
        self._breakers[key] = after

    def _as_recorded(
        self, key: BreakerKey, version: int, state: BreakerState, rule: BreakerRule | None, now_ms: int
    ) -> BreakerTransition | None:
        """Returns the recorded transition that a transition of the replay repeats; None if it repeats none."""
        event = self._recorded.get((key, version))
        if event is None or (event.to_state, event.rule) != (state, rule):
            return None
        return event if 0 <= ms_from_time(event.at) - now_ms <= LAG_MS else None


_CLOSED = Breaker()
_NO_SUCCESSES: Mapping[tuple[str | None, str | None], tuple[Success, BreakerRules]] = {}


def _refuses_as_recorded(breaker: Breaker, call: Attempt) -> bool:
    """Returns True if a breaker refuses calls with what a recorded refusal says, as far as the record has it."""
    return breaker.state != "closed" and call.statistics in (None, statistics_of(breaker))


def statistics_of(breaker: Breaker) -> FailureStatistics:
    """Returns the statistics of a breaker that refuses calls."""
    return breaker_statistics(
        breaker.reason,
        consecutive_failures=consecutive_failures(breaker),
        total_failures=breaker.total_failures,
        unique_errors=len(breaker.errors_seen),
    )


def _ahead(breaker: Breaker, rules: BreakerRules, now_ms: int, soon: Sequence[Observation]) -> Iterator[Breaker]:
    """Yields a breaker as if it had the next outcomes already, one more each time, until they change its state."""
    for outcome in soon:
        breaker, change = observe(breaker, outcome, rules, now_ms)
        if change is not None:
            return
        yield breaker


def _agrees(change: BreakerChange, recorded: BreakerTransition) -> bool:
    """Returns True if a transition is the recorded one, with all that explains it."""
    figures = change.rule, change.reason, change.consecutive_failures, change.after.total_failures
    return (change.after.state, *figures) == (
        recorded.to_state,
        recorded.rule,
        recorded.reason,
        recorded.consecutive_failures,
        recorded.total_failures,
    )


def _jitter_of(recorded: BreakerTransition, rules: BreakerRules, openings: int) -> float:
    """Returns the random part of a recorded cool-down, from 0 to 1."""
    shortest_ms = cooldown_ms(rules, openings, 0.0)
    longest_ms = cooldown_ms(rules, openings, 1.0)
    if longest_ms == shortest_ms:
        return 0.0
    return min(1.0, max(0.0, (recorded.cooldown_s * 1000 - shortest_ms) / (longest_ms - shortest_ms)))
