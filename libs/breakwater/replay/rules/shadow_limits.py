"""Shadows of limits: limits on spend that see the same calls as the real ones, and refuse none.

A shadow is told of a call when that has ended, with the worst case that was reserved for it. A call that would not have
fitted is counted as refused, and not as spent: further calls find the room that it would have left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from breakwater.breakers.settings import MAX_KEPT
from breakwater.kernel.immutable import changed, immutable
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import BudgetEvent
from breakwater.limits.rules.budget import Counter, Period, budget_event, fits, reached_thresholds

REPORT_EVERY_MS = 60_000
"""The time between two events that only report further calls which would have been refused."""


@immutable()
class ShadowLimit:
    """The counts of a limit's shadow in a period.

    Attributes:
        start_ms: the start of the period, in milliseconds since the epoch; -1 if it has counted nothing yet.
        spent: the cost of the calls that it would have admitted, in nano-dollars.
        refused: the calls that it would have refused.
        reported_ms: when an event last said so.
        announced: the thresholds that were announced, each with the limit.
        pending: the event of the latest refusal, as none has said so yet; None if one has.
        unpublished: events that may not be published yet, in order.
        sequences: those of the latest calls that it was told of, ordered; one that is told again changes nothing.
    """

    start_ms: int = -1
    spent: int = 0
    refused: int = 0
    reported_ms: int = 0
    announced: tuple[str, ...] = ()
    pending: BudgetEvent | None = None
    unpublished: tuple[BudgetEvent, ...] = ()
    sequences: tuple[int, ...] = ()


@immutable()
class PaidCall:
    """A call that has ended.

    Attributes:
        sequence: the sequence of its event.
        at_ms: when the log stored that, in milliseconds since the epoch.
        agent: its agent.
        period: the period that it counts in.
        worst_case: what it could cost at most, in nano-dollars.
        cost: what it did cost; 0 if that is unknown.
    """

    sequence: int
    at_ms: int
    agent: str
    period: Period
    worst_case: int
    cost: int


def count(counter: Counter, shadow: ShadowLimit, calls: Sequence[PaidCall], totals: dict[str, int]) -> ShadowLimit:
    """Tells the shadow of a limit of calls, in the order in which they ended.

    Args:
        counter: the limit, and the scope that it is on.
        shadow: what it has counted.
        calls: the calls. Those of a period before are left out.
        totals: the spend in the same scope by period, these calls included, as far as it is counted: a shadow begins
            with what was spent before.

    Returns:
        What it has counted then, with its events to be published.
    """
    for call in calls:
        if call.period.start_ms > shadow.start_ms:
            now_told = sum(other.cost for other in calls if other.period == call.period)
            spent = max(0, totals.get(call.period.name, 0) - now_told)
            shadow = ShadowLimit(call.period.start_ms, spent, unpublished=reported(shadow).unpublished)
        if call.period.start_ms == shadow.start_ms:
            shadow = _after(counter, shadow, call)
    return shadow


def reported(shadow: ShadowLimit) -> ShadowLimit:
    """Has the shadow of a limit report the refusals that no event has said yet."""
    last = shadow.pending
    if last is None:
        return shadow
    return changed(shadow, pending=None, reported_ms=ms_from_time(last.at), unpublished=(*shadow.unpublished, last))


def _after(counter: Counter, shadow: ShadowLimit, call: PaidCall) -> ShadowLimit:
    place = bisect_left(shadow.sequences, call.sequence)
    if call.sequence in shadow.sequences[place : place + 1] or (place == 0 and len(shadow.sequences) == MAX_KEPT):
        return shadow  # also one that is older than all that are remembered
    sequences = (*shadow.sequences[:place], call.sequence, *shadow.sequences[place:])[-MAX_KEPT:]
    is_refused = not fits(call.worst_case, limit=counter.hard_limit, spent=shadow.spent)
    shadow = changed(
        shadow,
        sequences=sequences,
        spent=shadow.spent + (0 if is_refused else call.cost),
        refused=shadow.refused + is_refused,
    )
    limit = counter.effective
    reached = reached_thresholds(counter, limit, shadow.spent, refused=is_refused)
    due = {f"{percent}/{limit}": percent for percent in reached if f"{percent}/{limit}" not in shadow.announced}
    shadow = changed(shadow, announced=(*shadow.announced, *due))

    def event(name: str, percent: int) -> BudgetEvent:
        return budget_event(
            counter,
            call.period,
            f"shadow/{name}",
            call.agent,
            kind=counter.kind_at(percent),
            threshold_percent=percent,
            limit=limit,
            total=shadow.spent,
            shadow=True,
            refused=shadow.refused,
            at=time_from_ms(call.at_ms),
        )

    if due:
        events = [event(name, percent) for name, percent in due.items()]
        return changed(shadow, pending=None, reported_ms=call.at_ms, unpublished=(*shadow.unpublished, *events))
    if is_refused:
        shadow = changed(shadow, pending=event(f"100/{limit}/{shadow.refused}", 100))
    return reported(shadow) if call.at_ms - shadow.reported_ms >= REPORT_EVERY_MS else shadow
