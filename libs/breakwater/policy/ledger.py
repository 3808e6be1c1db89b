"""What attempts add to their budgets: the same sums in Redis, in ClickHouse and in the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from datetime import datetime
from zoneinfo import ZoneInfo

from breakwater.contracts.execution import Attempt
from breakwater.policy.budget import periods_at, scope_keys


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over attempts, all integers; money in nano-dollars.

    Attributes:
        spent: what they cost, as far as that is known.
        calls: how many called.
        unpriced: of those, whose cost is not known.
        gauged: calls that succeeded and whose worst case was held, which show how good the estimates are.
        foreseen: what was held for those.
        measured: what those cost.
        exceeded: how many of those cost more than was held.
    """

    spent: int = 0
    calls: int = 0
    unpriced: int = 0
    gauged: int = 0
    foreseen: int = 0
    measured: int = 0
    exceeded: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Figures) -> Figures:
        return Figures(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def largest(self, other: Figures) -> Figures:
        """The larger of each."""
        return Figures(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))

    def items(self) -> Iterable[tuple[str, int]]:
        """Names and values."""
        return ((name, getattr(self, name)) for name in FIGURES)


FIGURES = tuple(one.name for one in fields(Figures))

Place = tuple[str, str]
"""A period's name and a scope's key: `("2026-11", "agent:writer")`."""

Ledger = Mapping[Place, Figures]


def is_reached(limit: int, figures: Figures, reserved: int, *, refused: bool) -> bool:
    """Whether a cap is reached. A hard one hardly ever is to the cent: it refuses the call that could exceed it.

    Args:
        limit: the cap, in nano-dollars.
        figures: what is spent under it.
        reserved: what calls in flight hold of it.
        refused: it has refused a call. That alone says little: others may have held the rest, and have ended since.
    """
    no_call_fits = not figures.gauged or (limit - figures.spent) * figures.gauged < figures.foreseen
    return figures.spent + reserved >= limit or (refused and no_call_fits)


def figures_of(attempt: Attempt) -> Figures:
    """What one attempt adds. Nothing where no call was made."""
    if attempt.short_circuited:
        return Figures()
    cost, held = attempt.cost, attempt.reserved
    gauged = attempt.outcome == "success" and attempt.cost_basis == "billed" and cost is not None and held is not None
    return Figures(
        spent=cost or 0,
        calls=1,
        unpriced=int(cost is None),
        gauged=int(gauged),
        foreseen=(held or 0) if gauged else 0,
        measured=(cost or 0) if gauged else 0,
        exceeded=int(gauged and (cost or 0) > (held or 0)),
    )


def charged_at(attempt: Attempt) -> datetime:
    """The moment whose day and month an attempt's cost counts in."""
    return attempt.reserved_at or attempt.started_at


def places_of(attempt: Attempt, zone: ZoneInfo) -> tuple[Place, ...]:
    """The budgets that an attempt counts in, in their periods: the day's first."""
    periods = periods_at(charged_at(attempt), zone)
    keys = scope_keys(attempt.agent, attempt.tenant)
    return tuple((period.name, key) for period in (periods.day, periods.month) for key in keys)


def ledger(attempts: Iterable[Attempt], zone: ZoneInfo) -> dict[Place, Figures]:
    """The sums over attempts, by period and scope."""
    sums: dict[Place, Figures] = defaultdict(Figures)
    for attempt in attempts:
        if not attempt.short_circuited:
            for place in places_of(attempt, zone):
                sums[place] += figures_of(attempt)
    return dict(sums)
