"""The comparison of three ledgers: the provider's own, Redis' counters, and ClickHouse's rows. Pure.

They must agree to the nano-dollar:

- Every call in the provider's ledger is an attempt in ClickHouse, and vice versa; Redis counts the same number.
- The plane records for each call what the provider billed.
- The spend in Redis is the sum in ClickHouse, for all agents together and for each agent.

The exception is a call whose answer never arrived: its cost is unknown, so the plane charges the worst case as
`estimated`. The provider must not have billed more for it.
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
    """A call in the provider's ledger. `attempt_id` is None if the request had none; `cost` is in nano-dollars."""

    attempt_id: str | None
    model: str
    cost: int


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure in each of the ledgers: a number, or an amount in USD as text; None if the ledger does not have it."""

    name: str
    provider: int | str | None
    redis: int | str | None
    clickhouse: int | str | None
    agree: bool


@dataclass(frozen=True, slots=True)
class LedgerComparison:
    """The figures of the ledgers side by side, and descriptions of all differences."""

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
        provider: all calls in the provider's ledger.
        counted: Redis' counters of some days.
        reserved: Redis' reservations for running calls on the same days, in nano-dollars.
        attempts: all attempts in ClickHouse on the same days.
        zone: time zone of the days.
    """
    calls = {attempt.attempt_id: attempt for attempt in attempts if not attempt.short_circuited}
    unanswered = {attempt_id for attempt_id, attempt in calls.items() if attempt.cost_basis == "estimated"}
    billed_by_provider = sum(call.cost for call in provider if call.attempt_id not in unanswered)
    billed_unanswered = sum(call.cost for call in provider if call.attempt_id in unanswered)
    estimated = sum(calls[attempt_id].cost or 0 for attempt_id in unanswered)
    billed = sum(attempt.cost or 0 for attempt in calls.values()) - estimated
    total = sum((sums for (_, scope), sums in counted.items() if scope == "global"), AttemptSums())
    reserved_amount = sum(amount for (_, scope), amount in reserved.items() if scope == "global")
    same_count = len(provider) == total.calls == len(calls)
    recorded = billed + estimated
    usd = usd_from_nano
    figures = (
        ComparedFigure("calls", len(provider), total.calls, len(calls), same_count),
        ComparedFigure("billed", usd(billed_by_provider), None, usd(billed), billed_by_provider == billed),
        ComparedFigure("estimated", usd(billed_unanswered), None, usd(estimated), billed_unanswered <= estimated),
        ComparedFigure("spend", None, usd(total.spent), usd(recorded), total.spent == recorded),
        ComparedFigure("reserved", None, usd(reserved_amount), None, reserved_amount == 0),
    )
    differences = (
        *_call_differences(provider, calls),
        *_scope_differences(counted, reserved, ledger(calls.values(), zone)),
    )
    return LedgerComparison(not differences and all(figure.agree for figure in figures), figures, differences)


def _call_differences(provider: Sequence[ProviderCall], calls: Mapping[str, Attempt]) -> Iterable[str]:
    """Compares the provider's ledger with ClickHouse, call by call."""
    counts = Counter(call.attempt_id for call in provider)
    yield from (f"{name}: {count} times at the provider" for name, count in counts.items() if name and count > 1)
    yield from (f"{attempt_id}: not at the provider" for attempt_id in sorted(calls.keys() - counts))
    yield from (f"{name}: its cost is unknown" for name, attempt in sorted(calls.items()) if attempt.cost is None)
    for provider_call in provider:
        attempt = calls.get(provider_call.attempt_id or "")
        if attempt is None:
            yield f"{provider_call.attempt_id or 'a call without an id'}: not in ClickHouse"
        elif provider_call.model != attempt.model:
            yield f"{attempt.attempt_id}: the provider called {provider_call.model}, ClickHouse says {attempt.model}"
        elif attempt.cost is not None:
            at_most = attempt.cost_basis == "estimated"
            if provider_call.cost > attempt.cost or (provider_call.cost < attempt.cost and not at_most):
                billed = exact_money(provider_call.cost)
                recorded = f"{exact_money(attempt.cost)}{' at most' if at_most else ''}"
                yield f"{attempt.attempt_id}: the provider billed {billed}, ClickHouse says {recorded}"


def _scope_differences(counted: Ledger, reserved: Mapping[BudgetPlace, int], recorded: Ledger) -> Iterable[str]:
    """Compares Redis with ClickHouse, scope by scope."""
    days = {day for day, _ in counted}
    for place in sorted({*counted, *(place for place in recorded if place[0] in days)}):
        redis = counted.get(place, AttemptSums())
        clickhouse = recorded.get(place, AttemptSums())
        if (redis.calls, redis.spent) != (clickhouse.calls, clickhouse.spent):
            yield (
                f"{place[1]}: {redis.calls} calls and {exact_money(redis.spent)} in Redis, "
                f"{clickhouse.calls} and {exact_money(clickhouse.spent)} in ClickHouse"
            )
        if reserved.get(place):
            yield f"{place[1]}: Redis still holds {exact_money(reserved[place])} for calls that have ended"
