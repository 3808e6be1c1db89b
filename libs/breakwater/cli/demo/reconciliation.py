"""Three ledgers side by side: the provider's own, Redis' counters, ClickHouse's rows. Pure.

What must agree, and to the last nano-dollar:

- Every call that the provider had is an attempt in ClickHouse, and the other way round; Redis counts as many.
- What the plane says a call was billed is what the provider billed for it.
- Redis' spend is ClickHouse's sum, for all agents together and for each one.

A call whose answer never arrived is the exception that no client of a provider can avoid. Its cost is not known, so
the plane charges its worst case and says `estimated`. The provider must not have billed more for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from breakwater.cli.formats import money

NAMED = 5
"""So many single calls are named in a difference."""


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """A call in the provider's ledger. `attempt_id` is None where the request named none."""

    attempt_id: str | None
    model: str
    cost: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """An attempt in ClickHouse that made a call. `cost` is None where it is unknown."""

    attempt_id: str
    agent: str
    model: str
    cost: int | None
    cost_basis: str


@dataclass(frozen=True, slots=True)
class RedisCounters:
    """What Redis holds for one budget key. Nano-dollars."""

    calls: int = 0
    spent: int = 0
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure in each of the ledgers; None where a ledger does not have it."""

    name: str
    provider: int | None
    redis: int | None
    clickhouse: int | None
    is_money: bool
    agree: bool

    def ledgers(self) -> tuple[tuple[str, int | None], ...]:
        """The ledgers by name."""
        return (("provider", self.provider), ("redis", self.redis), ("clickhouse", self.clickhouse))


@dataclass(frozen=True, slots=True)
class LedgerComparison:
    """The ledgers side by side, and in words where they differ."""

    figures: tuple[ComparedFigure, ...]
    differences: tuple[str, ...]

    @property
    def agree(self) -> bool:
        """Whether all of it does."""
        return not self.differences and all(figure.agree for figure in self.figures)


def compare(
    provider: Sequence[ProviderCall],
    total: RedisCounters,
    by_agent: Mapping[str, RedisCounters],
    recorded: Sequence[RecordedCall],
) -> LedgerComparison:
    """Compares the ledgers.

    Args:
        provider: all calls of the provider's ledger.
        total: Redis' counters for all agents together.
        by_agent: and for each agent.
        recorded: all attempts of ClickHouse that made a call.
    """
    estimated_ids = {call.attempt_id for call in recorded if call.cost_basis == "estimated"}
    answered = [call for call in provider if call.attempt_id not in estimated_ids]
    unanswered = [call for call in provider if call.attempt_id in estimated_ids]
    billed = _sum(call.cost for call in recorded if call.cost_basis == "billed")
    estimated = _sum(call.cost for call in recorded if call.cost_basis == "estimated")
    paid, paid_unanswered = _sum(call.cost for call in answered), _sum(call.cost for call in unanswered)
    figures = (
        ComparedFigure(
            "calls", len(provider), total.calls, len(recorded), False, len(provider) == total.calls == len(recorded)
        ),
        ComparedFigure("billed", paid, None, billed, True, paid == billed),
        ComparedFigure("estimated", paid_unanswered, None, estimated, True, paid_unanswered <= estimated),
        ComparedFigure("spend", None, total.spent, billed + estimated, True, total.spent == billed + estimated),
        ComparedFigure("reserved", None, total.reserved, None, True, total.reserved == 0),
    )
    differences = (*_between_calls(provider, recorded), *_between_agents(by_agent, recorded), *_unknown(recorded))
    return LedgerComparison(figures, differences)


def _between_calls(provider: Sequence[ProviderCall], recorded: Sequence[RecordedCall]) -> Iterable[str]:
    """Provider against ClickHouse, for each model; and which calls it is about."""
    for model in sorted({call.model for call in provider} | {call.model for call in recorded}):
        theirs = [call for call in provider if call.model == model]
        ours = {call.attempt_id: call for call in recorded if call.model == model}
        seen = {call.attempt_id for call in theirs}
        wrong: list[str] = []
        if unrecorded := sorted(call.attempt_id or "without an id" for call in theirs if call.attempt_id not in ours):
            wrong.append(f"not in ClickHouse: {_few(unrecorded)}")
        if unknown := sorted(name for name in ours if name not in seen):
            wrong.append(f"not at the provider: {_few(unknown)}")
        if len(seen) < len(theirs):
            wrong.append(f"{len(theirs) - len(seen)} more than once at the provider")
        pairs = [(call, ours[call.attempt_id]) for call in theirs if call.attempt_id in ours]
        wrong += [
            f"{own.attempt_id}: the provider billed {money(call.cost)}, ClickHouse says {money(own.cost)}"
            f"{' at most' if own.cost_basis == 'estimated' else ''}"
            for call, own in pairs
            if not _costs_agree(call, own)
        ][:NAMED]
        if wrong:
            billed = _sum(call.cost for call in ours.values() if call.cost_basis == "billed")
            yield (
                f"{model}: {len(theirs)} calls and {money(_sum(call.cost for call in theirs))} billed at the provider, "
                f"{len(ours)} and {money(billed)} billed in ClickHouse ({'; '.join(wrong)})"
            )


def _costs_agree(theirs: ProviderCall, ours: RecordedCall) -> bool:
    if ours.cost is None:
        return True  # reported as unknown
    return theirs.cost <= ours.cost if ours.cost_basis == "estimated" else theirs.cost == ours.cost


def _between_agents(by_agent: Mapping[str, RedisCounters], recorded: Sequence[RecordedCall]) -> Iterable[str]:
    """Redis against ClickHouse, for each agent."""
    for agent in sorted(by_agent.keys() | {call.agent for call in recorded}):
        counted = by_agent.get(agent, RedisCounters())
        rows = [call for call in recorded if call.agent == agent]
        spent = _sum(call.cost for call in rows)
        if (counted.calls, counted.spent) != (len(rows), spent):
            yield (
                f"{agent}: {counted.calls} calls and {money(counted.spent)} in Redis, "
                f"{len(rows)} and {money(spent)} in ClickHouse"
            )
        if counted.reserved:
            yield f"{agent}: Redis still holds {money(counted.reserved)} for calls that have ended"


def _unknown(recorded: Sequence[RecordedCall]) -> Iterable[str]:
    if unknown := sorted(call.attempt_id for call in recorded if call.cost is None):
        yield f"the cost of {len(unknown)} calls is unknown: {_few(unknown)}"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _sum(costs: Iterable[int | None]) -> int:
    return sum(cost for cost in costs if cost is not None)
