"""Three ledgers side by side: the provider's own, Redis' counters, ClickHouse's rows. Pure.

What must agree, and to the last nano-dollar:

- Every call that the provider had is an attempt in ClickHouse, and the other way round; Redis counts as many.
- What the plane says a call was billed is what the provider billed for it.
- Redis' spend is ClickHouse's sum, for all agents together and for each one.

A call whose answer never arrived is the exception that no client of a provider can avoid. Its cost is not known, so
the plane charges its worst case and says `estimated`. The provider must not have billed more for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from zoneinfo import ZoneInfo

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.commands.formats import exact_money
from breakwater.kernel.types import usd_from_nano
from breakwater.limits.rules.ledger import AttemptSums, BudgetPlace, Ledger, ledger


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """A call in the provider's ledger. `attempt_id` is None where the request named none."""

    attempt_id: str | None
    model: str
    cost: int


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure in each of the ledgers: a number, or an amount in USD as text; None where a ledger does not have it."""

    name: str
    provider: int | str | None
    redis: int | str | None
    clickhouse: int | str | None
    agree: bool


@dataclass(frozen=True, slots=True)
class LedgerComparison:
    """The ledgers side by side, and in words where they differ."""

    agree: bool
    figures: tuple[ComparedFigure, ...]
    differences: tuple[str, ...]


def compare(
    provider: Sequence[ProviderCall],
    counted: Ledger,
    reserved: Mapping[BudgetPlace, int],
    attempts: Iterable[Attempt],
    zone: ZoneInfo,
) -> LedgerComparison:
    """Compares the ledgers.

    Args:
        provider: all calls of the provider's ledger.
        counted: Redis' counters of some days.
        reserved: what Redis holds for calls under way, on the same days.
        attempts: all of ClickHouse, of the same days.
        zone: whose days.
    """
    calls = {attempt.attempt_id: attempt for attempt in attempts if not attempt.short_circuited}
    unanswered = {name for name, call in calls.items() if call.cost_basis == "estimated"}
    paid = sum(call.cost for call in provider if call.attempt_id not in unanswered)
    paid_unanswered = sum(call.cost for call in provider if call.attempt_id in unanswered)
    estimated = sum(calls[name].cost or 0 for name in unanswered)
    billed = sum(call.cost or 0 for call in calls.values()) - estimated
    total = sum((sums for (_, scope), sums in counted.items() if scope == "global"), AttemptSums())
    held = sum(amount for (_, scope), amount in reserved.items() if scope == "global")
    same = len(provider) == total.calls == len(calls)
    usd = usd_from_nano
    figures = (
        ComparedFigure("calls", len(provider), total.calls, len(calls), same),
        ComparedFigure("billed", usd(paid), None, usd(billed), paid == billed),
        ComparedFigure("estimated", usd(paid_unanswered), None, usd(estimated), paid_unanswered <= estimated),
        ComparedFigure("spend", None, usd(total.spent), usd(billed + estimated), total.spent == billed + estimated),
        ComparedFigure("reserved", None, usd(held), None, held == 0),
    )
    differences = (*_of_calls(provider, calls), *_of_scopes(counted, reserved, ledger(calls.values(), zone)))
    return LedgerComparison(not differences and all(figure.agree for figure in figures), figures, differences)


def _of_calls(provider: Sequence[ProviderCall], calls: Mapping[str, Attempt]) -> Iterable[str]:
    """Provider against ClickHouse, call by call."""
    times = Counter(call.attempt_id for call in provider)
    yield from (f"{name}: {count} times at the provider" for name, count in times.items() if name and count > 1)
    yield from (f"{name}: not at the provider" for name in sorted(calls.keys() - times))
    yield from (f"{name}: its cost is unknown" for name, call in sorted(calls.items()) if call.cost is None)
    for theirs in provider:
        ours = calls.get(theirs.attempt_id or "")
        if ours is None:
            yield f"{theirs.attempt_id or 'a call without an id'}: not in ClickHouse"
        elif theirs.model != ours.model:
            yield f"{ours.attempt_id}: the provider called {theirs.model}, ClickHouse says {ours.model}"
        elif ours.cost is not None:
            at_most = ours.cost_basis == "estimated"
            if theirs.cost > ours.cost or (theirs.cost < ours.cost and not at_most):
                says = f"{exact_money(ours.cost)}{' at most' if at_most else ''}"
                yield f"{ours.attempt_id}: the provider billed {exact_money(theirs.cost)}, ClickHouse says {says}"


def _of_scopes(counted: Ledger, reserved: Mapping[BudgetPlace, int], recorded: Ledger) -> Iterable[str]:
    """Redis against ClickHouse, scope by scope."""
    days = {day for day, _ in counted}
    for place in sorted({*counted, *(place for place in recorded if place[0] in days)}):
        redis, clickhouse = counted.get(place, AttemptSums()), recorded.get(place, AttemptSums())
        if (redis.calls, redis.spent) != (clickhouse.calls, clickhouse.spent):
            yield (
                f"{place[1]}: {redis.calls} calls and {exact_money(redis.spent)} in Redis, "
                f"{clickhouse.calls} and {exact_money(clickhouse.spent)} in ClickHouse"
            )
        if reserved.get(place):
            yield f"{place[1]}: Redis still holds {exact_money(reserved[place])} for calls that have ended"
